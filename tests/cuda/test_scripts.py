"""Scripts of other tests on pretended CUDA devices and NCCL: Trainer, Accelerate, TRL, saving, resuming.

Each case is a run of pytest on some of the parity tests, whose own comparisons with one process decide; a fault of
streams fails them too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cuda.worker import run_command, run_pytest
from tests.prove.test_faults import ARGUMENTS, SCRIPT

pytestmark = pytest.mark.timeout(900)

#: File of tests/parity; what `-k` selects there; in how many waits a typical step of a Trainer may exceed that of one
#: process (a look at the norm), or of the layout that runs first where no process runs alone; None: there is no step.
#: TRL asks for five values per call of its loss, which a pipeline calls for each of eight micro-batches.
SCRIPTS = {
    "trainer": ("test_trainer.py", "test_same_numbers and llama and tp2_pp2", 1),
    "accelerate": ("test_accelerate_loop.py", "even-tp2_pp2 and not uneven", 1),
    "sft": ("test_trl.py", "test_sft and tp2_pp2", 35),
    "accumulation in one run": ("test_joint_steps.py", "one_run_per_step and pp2_tp2", 1),
    "two versions of the weights": ("test_delayed_updates.py", "as_its_rule and pp2", 1),
    "a version for each micro-batch": ("test_stashed_weights.py", "as_its_rule and 2-2", 1),
    "curvature in bubbles": ("test_kfac_fill.py", "as_its_rule and pp2 and not dp_replicate2 and not gpipe", 1),
    "two pipelines in opposite directions": ("test_chimera.py", "as_one_process and pp2 and not pp2_", 1),
    "noise of gradients": ("test_noise_scale.py", "test_noise_scale and (tp2-4 or dp_shard1-4)", 1),
    "optimizers": ("test_optimizers.py", "tp2_dp_shard2 and not True", None),
    "new heads": ("test_new_heads.py", "size and dp_shard2_tp2-untied or size and dp_replicate2-own", None),
    "unlike shares": ("test_batch_shares.py", "test_products and llama-pp2_dp_shard2_batch_shares3", 1),
    "unlike shares of data ranks": ("test_batch_shares.py", "as_one_process and dp_shard4_batch_shares1", 1),
    "measured shares": ("test_batch_shares_auto.py", "in_the_middle", 1),
    "losses that gather on the host": ("test_unseen_gradients.py", "unlike_steps and dp_replicate2", None),
    "calls of rank 0": ("test_calls_of_rank_0.py", "main_process_alone and (dp_shard or tp or pp)", None),
    "callbacks of rank 0": ("test_callbacks_of_one_rank.py", "rank_0_shows and (dp_shard or pp)", None),
    "adapters of add_adapter": ("test_added_adapters.py", "one_process and (dp_shard2 or tp2_pp2)", None),
    "async save": ("test_async_save.py", "test_the_same_checkpoints", 0),
}


def check(script: str, folder: Path) -> None:
    file, selected, more = SCRIPTS[script]
    ran = run_pytest(f"tests/parity/{file}", "-k", selected, waits=folder / "waits")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    if more is None:
        return
    ours, alone = read_typical_waits(folder / "waits")
    print(f"{script}: {ours} waits, one process {alone}")
    assert ours <= alone + more, (folder / "waits").read_text()


def read_typical_waits(file: Path) -> tuple[int, int]:
    """Return the waits of a typical step of the process that has most, and of what it is compared with."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    typical = [sorted(map(_count, one["steps"]))[(len(one["steps"]) - 1) // 2] for one in found]
    worlds = [one["world"] for one in found]
    is_first = [world == 1 for world in worlds] if 1 in worlds else [i < world for i, world in enumerate(worlds)]
    ours, alone = (
        max(count for count, first in zip(typical, is_first, strict=True) if first == wanted)
        for wanted in (False, True)
    )
    return ours, alone


def _count(step: dict[str, int]) -> int:
    """Count waits but those in which ranks compare batches: in calls 1 to 3, then ever more rarely."""
    compares = (" in _compare_batches", " in compare_batches")
    return sum(count for line, count in step.items() if not line.endswith(compares))


#: Those that a plain run has.
SHORT = ("trainer", "new heads")


@pytest.mark.parametrize("script", SHORT)
def test_short_scripts(script, tmp_path):
    check(script, tmp_path)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in SHORT])
def test_longer_scripts(script, request, tmp_path):
    if not request.config.getoption("--all"):
        pytest.skip("takes minutes: --all runs it")
    check(script, tmp_path)


def test_prove_on_gpus(tmp_path):
    """`--device cuda` compares two GPUs with one."""
    ran = run_command(tmp_path, "prove", "--device", "cuda", "--parallel", "tp=2", str(SCRIPT), *ARGUMENTS)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    (proof,) = json.loads((tmp_path / "prove.json").read_text())["proofs"]
    assert (proof["proved"], proof["model"]["device"]) == (True, "cuda")
