"""A rank that is killed in the middle of training takes the whole run down, quickly and by name."""

import os
import re

import pytest

from tests.reliability.launching import hf_parallel_launch, launch, torchrun, write_script

pytestmark = pytest.mark.clock

LIMIT_S = 60  # seconds; on a free machine 4

ACCIDENT = """
def on_train_begin(self, args, state, control, **kwargs):
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

def on_step_begin(self, args, state, control, **kwargs):
    if state.global_step == 1 and rank == "1":
        (folder / "killed-at").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, hf_parallel_launch])
def test_all_ranks_end_and_the_killed_one_is_named(launcher, tmp_path):
    script = write_script(tmp_path / "train.py", ACCIDENT, steps=10)
    ended = launch(launcher(2, "tp=2"), str(script), str(tmp_path), "run", "4")
    assert (tmp_path / "killed-at").exists(), f"no second step:\n{ended.err[-3000:]}"
    took = ended.when - float((tmp_path / "killed-at").read_text())
    assert took <= LIMIT_S, f"the launcher ended {took:.0f} s after the kill"
    assert ended.code != 0
    assert not (tmp_path / "run.json").exists()
    assert re.search(r"\brank\b\W*1\b", ended.out + ended.err), f"rank 1 is not named:\n{ended.err[-3000:]}"
    assert [rank for rank in (0, 1) if alive(int((tmp_path / f"pid-{rank}").read_text()))] == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
