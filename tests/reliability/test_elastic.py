"""`torchrun --nnodes=1:2`: a node is lost, the other goes on with half of the processes; a new one joins, and both do.

Each agent of torchrun stands for a node. Nothing in the script knows: its batch is for two processes a node.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import run_alone
from tests.refusals import find_line
from tests.reliability.launching import environment, write_script
from tests.training import none

pytestmark = pytest.mark.clock

LOST_IN, JOINED_IN, LIMIT_S = 5, 8, 120

NOTES = """
stops = [int(step) for step in sys.argv[4:]]

def on_train_begin(self, args, state, control, **kwargs):
    self.note(state, f"begin {state.global_step}")

def on_step_end(self, args, state, control, **kwargs):
    self.note(state, f"step {state.global_step}")
    while state.global_step in self.stops and not (folder / f"go-{state.global_step}").exists():
        time.sleep(0.05)

def note(self, state, text):
    if state.is_world_process_zero:
        with open(folder / "notes", "a") as file:
            print(text, file=file)
"""


class Nodes:
    """Agents of torchrun that meet at a port of this machine; all of their processes are gone in the end.

    Args:
        size: the least and largest number of nodes, and the processes of each.
    """

    def __init__(self, spec: str, joins: bool, *script: str, size: tuple[str, str] = ("1:2", "2")):
        # Where torch's agents share one store for all rounds, a node that joins is never told its address.
        self.environment = environment() | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if joins else {})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = f"localhost:{probe.getsockname()[1]}"
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        # Seconds: a node may start so much later than the first, and one that is silent for so long is lost.
        quick = ["--rdzv-conf", "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=5"]
        count = ["--nnodes", size[0], "--nproc-per-node", size[1], "--max-restarts", "3"]
        runner = ["-m", "hf_parallel", "--parallel", spec, *script]
        self.command = [sys.executable, "-m", "torch.distributed.run", *count, *meet, *quick, *runner]
        self.agents: list[subprocess.Popen] = []

    def join(self, errors: Path) -> subprocess.Popen:
        with open(errors, "w") as file:
            pipes = {"stdout": subprocess.DEVNULL, "stderr": file}
            self.agents.append(subprocess.Popen(self.command, env=self.environment, start_new_session=True, **pipes))
        return self.agents[-1]

    @staticmethod
    def lose(agent: subprocess.Popen) -> None:
        """As when the power fails: workers are in sessions of their own."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


@contextlib.contextmanager
def nodes(spec: str, joins: bool, *script: str, size: tuple[str, str] = ("1:2", "2")):
    made = Nodes(spec, joins, *script, size=size)
    try:
        yield made
    finally:
        for agent in made.agents:
            if agent.poll() is None:
                made.lose(agent)


def until(seen, agent: subprocess.Popen, errors: Path) -> None:
    """Wait for something that the run does."""
    end = time.monotonic() + LIMIT_S
    while not seen():
        assert agent.poll() is None, errors.read_text()[-3000:]
        assert time.monotonic() < end, errors.read_text()[-3000:]
        time.sleep(0.05)


def in_one_process(script: Path, out: Path, batch: int = 8) -> dict:
    sys.argv = [str(script), str(out), "run", str(batch)]
    out.mkdir()
    runpy.run_path(str(script), run_name="__main__")
    return json.loads((out / "run.json").read_text())[1]


def differences(ours: dict, theirs: dict) -> list[str]:
    """Losses that are not within 2e-5: every step is there, with the rows of its own."""
    found = [] if ours.keys() == theirs.keys() else [f"steps {list(ours)}, not {list(theirs)}"]
    for step in ours.keys() & theirs.keys():
        if not abs(ours[step] - theirs[step]) <= 2e-5 * theirs[step]:
            found.append(f"loss in step {step}: {ours[step]!r}, undisturbed {theirs[step]!r}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "batch", "joins"),
    [("dp_shard=-1", "2", False), ("tp=2,dp_shard=-1", "4", False), ("dp_shard=-1", "2", True)],
    ids=["lost", "lost_tp2", "joined"],
)
def test_as_undisturbed(tmp_path, spec, batch, joins):
    """Two nodes with eight rows a step; then one, which takes as many in twice as many goes; then two again."""
    script = write_script(tmp_path / "train.py", NOTES, steps=10)  # the last batch of six is ragged
    out, errors = tmp_path / "out", tmp_path / "errors"
    out.mkdir()
    expected = run_alone(in_one_process, script, tmp_path / "one")
    with nodes(spec, joins, str(script), str(out), "run", batch, str(LOST_IN), *[str(JOINED_IN)] * joins) as made:
        stays = made.join(errors)
        time.sleep(1.0)  # the first to come keeps the list of who is there, and must not be the one that is lost
        lost = made.join(tmp_path / "of-the-lost")
        notes = out / "notes"
        until(lambda: notes.exists() and f"step {LOST_IN}" in notes.read_text(), stays, errors)
        made.lose(lost)
        (out / f"go-{LOST_IN}").touch()
        if joins:
            until(lambda: f"step {JOINED_IN}" in notes.read_text(), stays, errors)
            joined = made.join(tmp_path / "of-the-joined")
            until(lambda: "SIGTERM, saving after this step" in errors.read_text(), stays, errors)
            (out / f"go-{JOINED_IN}").touch()
            assert joined.wait(LIMIT_S) == 0, (tmp_path / "of-the-joined").read_text()[-3000:]
        assert stays.wait(LIMIT_S) == 0, errors.read_text()[-3000:]
    begun = [line for line in notes.read_text().split("\n") if line.startswith("begin")]
    # The signal comes when step 8 is over for all but this callback: they agree on it in the next one.
    assert begun == ["begin 0", f"begin {LOST_IN - 1}", *[f"begin {JOINED_IN + 1}"] * joins]
    assert "8 rows per step are kept" in errors.read_text()
    none(differences(json.loads((out / "run.json").read_text())[1], expected))


#: The last rank takes twice as long for an example, whoever it is, by what it says of itself.
SLOW_LAST = """
def __init__(self):
    import dataclasses
    from hf_parallel.hooks import runtime
    from hf_parallel.hooks.trainer import auto_shares
    from hf_parallel.monitor import meter, session
    if runtime.current() is None:
        return
    auto_shares.measure_product_rate = lambda device: 1.0
    def gather_rows(own, device):
        rows = meter.gather_rows(own, device)
        slow = {row: 1 + (row == len(rows) - 1) for row in range(len(rows))}
        return [dataclasses.replace(row, compute=row.rows * slow[at]) for at, row in enumerate(rows)]
    session.gather_rows = gather_rows
"""


@pytest.mark.slow
def test_measured_shares_are_dealt_anew(tmp_path):
    """Four nodes of a rank each, of which one is lost: its examples go to the three that are left.

    24 rows a step are 6 on each of four ranks, 7 7 7 3 by speed. Three ranks take as many: 12 twice, as 4 4 4, then
    5 5 2. Rows come in their order, so that losses are those of one process that was never disturbed.
    """
    script = write_script(tmp_path / "train.py", NOTES + SLOW_LAST, steps=12, rows=140)
    out, errors, lost_in = tmp_path / "out", tmp_path / "errors", 6
    out.mkdir()
    expected = run_alone(in_one_process, script, tmp_path / "one", 24)
    argv = [str(script), str(out), "run", "6", str(lost_in)]
    with nodes("dp_shard=-1,batch_shares=auto", False, *argv, size=("3:4", "1")) as made:
        stays = made.join(errors)
        time.sleep(1.0)
        lost, *others = [made.join(tmp_path / f"of-{name}") for name in ("the-lost", "another", "a-third")]
        notes = out / "notes"
        until(lambda: notes.exists() and f"step {lost_in}" in notes.read_text(), stays, errors)
        made.lose(lost)
        (out / f"go-{lost_in}").touch()
        ends = [agent.wait(LIMIT_S) for agent in (stays, *others)]
    said = "".join(path.read_text() for path in (errors, tmp_path / "of-another", tmp_path / "of-a-third"))
    assert ends == [0, 0, 0], said[-3000:]
    assert find_line(said, "24 rows per step", "3 data ranks")
    assert find_line(said, "7 7 7 3", "6 6 6 6")
    assert find_line(said, "5 5 2", "4 4 4")
    none(differences(json.loads((out / "run.json").read_text())[1], expected))
