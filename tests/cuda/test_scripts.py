"""Scripts of other tests on pretended CUDA devices and NCCL: Trainer, Accelerate, TRL, saving, resuming.

Each case is a run of pytest on some of the parity tests, whose own comparisons with one process decide; a fault of
streams fails them too.
"""

from __future__ import annotations

import json

import pytest

from tests.cuda.worker import run_command, run_pytest
from tests.prove.test_faults import ARGUMENTS, SCRIPT

pytestmark = pytest.mark.timeout(900)

#: File of tests/parity, and what `-k` selects there.
SCRIPTS = {
    "trainer": ("test_trainer.py", "test_same_numbers and llama and tp2_pp2"),
    "accelerate": ("test_accelerate_loop.py", "tp2_dp_shard2"),
    "sft": ("test_trl.py", "test_sft and tp2_pp2"),
    "accumulation in one run": ("test_joint_steps.py", "one_run_per_step and pp2_tp2"),
    "two versions of the weights": ("test_delayed_updates.py", "as_its_rule and pp2"),
    "async save": ("test_async_save.py", "test_the_same_checkpoints"),
}


def check(script: str) -> None:
    file, selected = SCRIPTS[script]
    ran = run_pytest(f"tests/parity/{file}", "-k", selected)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_a_trainer_script():
    check("trainer")


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "trainer"])
def test_longer_scripts(script, request):
    if not request.config.getoption("--all"):
        pytest.skip("takes minutes: --all runs it")
    check(script)


def test_prove_on_gpus(tmp_path):
    """`--device cuda` compares two GPUs with one."""
    ran = run_command(tmp_path, "prove", "--device", "cuda", "--parallel", "tp=2", str(SCRIPT), *ARGUMENTS)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    (proof,) = json.loads((tmp_path / "prove.json").read_text())["proofs"]
    assert (proof["proved"], proof["model"]["device"]) == (True, "cuda")
