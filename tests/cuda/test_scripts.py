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
#: process (a look at the norm), None where nobody has counted.
SCRIPTS = {
    "trainer": ("test_trainer.py", "test_same_numbers and llama and tp2_pp2", 1),
    "accelerate": ("test_accelerate_loop.py", "even-tp2_pp2 and not uneven", 1),
    "sft": ("test_trl.py", "test_sft and tp2_pp2", None),
    "accumulation in one run": ("test_joint_steps.py", "one_run_per_step and pp2_tp2", 1),
    "two versions of the weights": ("test_delayed_updates.py", "as_its_rule and pp2", 1),
    "a version for each micro-batch": ("test_stashed_weights.py", "as_its_rule and 2-2", 1),
    "curvature in bubbles": ("test_kfac_fill.py", "as_its_rule and pp2 and not dp_replicate2 and not gpipe", 1),
    "two pipelines in opposite directions": ("test_chimera.py", "as_one_process and pp2 and not pp2_", 1),
    "noise of gradients": ("test_noise_scale.py", "test_noise_scale and tp2-4", 1),
    "new heads": ("test_new_heads.py", "size and dp_shard2_tp2-untied or size and dp_replicate2-own", None),
    "unlike shares": ("test_batch_shares.py", "test_products and llama-pp2_dp_shard2_batch_shares3", 1),
    "unlike shares of data ranks": ("test_batch_shares.py", "as_one_process and dp_shard4_batch_shares1", 1),
    "measured shares": ("test_batch_shares_auto.py", "in_the_middle", 1),
    "async save": ("test_async_save.py", "test_the_same_checkpoints", None),
}


def check(script: str, folder: Path) -> None:
    file, selected, more = SCRIPTS[script]
    ran = run_pytest(f"tests/parity/{file}", "-k", selected, waits=folder / "waits")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    if more is None:
        return
    typical: dict[bool, list[int]] = {True: [], False: []}
    for line in (folder / "waits").read_text().splitlines():
        found = json.loads(line)
        counts = sorted(_count(step) for step in found["steps"])
        typical[found["world"] == 1].append(counts[len(counts) // 2])
    print(f"{script}: {max(typical[False])} waits, one process {max(typical[True])}")
    assert max(typical[False]) <= max(typical[True]) + more, (folder / "waits").read_text()


def _count(step: dict[str, int]) -> int:
    """Count waits but those in which ranks compare batches: in calls 1 to 3, then ever more rarely."""
    return sum(count for line, count in step.items() if not line.endswith((" in compare", " in compare_batches")))


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
