"""`torchrun --max-restarts`: an unchanged script that loses a rank twice ends where one that lost none does."""

import json
import runpy
import sys

import pytest

from tests.distributed import run
from tests.refusals import find_line
from tests.reliability.launching import launch, torchrun, write_script

ACCIDENT = """
def on_step_begin(self, args, state, control, **kwargs):
    if name == "killed" and rank == "1" and (attempt, state.global_step) in ((0, 2), (1, 5)):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def undisturbed(script: str, folder: str) -> None:
    """The same script on ranks of the harness, which start in a moment."""
    from hf_parallel.hooks import activation

    activation.activate("dp_shard=-1", source="test")
    sys.argv = [script, folder, "through", "2"]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
def test_two_lost_ranks_change_nothing(tmp_path):
    """Every loss is equal bit for bit: those before the last restart were written down by the former attempts."""
    script = write_script(tmp_path / "train.py", ACCIDENT, steps=8, rows=24)
    command = torchrun(2, "dp_shard=-1", "--max-restarts", "2")
    ended = launch(command, str(script), str(tmp_path), "killed", "2", timeout=280)
    assert ended.code == 0, ended.err[-3000:]
    for step in (2, 4):
        assert find_line(ended.err, "again", f"{tmp_path}/killed/checkpoint-{step}")
    run(undisturbed, 2, str(script), str(tmp_path), env={"TORCHELASTIC_RESTART_COUNT": "0"}, init=False)
    killed, through = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "through"))
    assert [killed[0], through[0]] == [2, 0]
    assert killed[1] == through[1]
    assert set(killed[1]) == {str(step) for step in range(1, 9)}
