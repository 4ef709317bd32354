"""SIGTERM, a rank that raises or dies in mid-step, two runs in one folder, restarts with fewer processes."""

import contextlib
import json
import os
import signal
import time
from functools import partial

import pytest
from transformers import TrainerCallback

from tests.distributed import RankFailure, run
from tests.reliability.faults import LIMIT_S, SHORT, SPEC, STEPS, disturbed, failure, kill, whole
from tests.resuming import ONE, Ended, log_differences, train, trained
from tests.training import activate, axes, none

pytestmark = pytest.mark.clock

STOPS = 2  # the step in which it happens


class Accident(TrainerCallback):
    """Does something on some ranks when a step is half done."""

    def __init__(self, ranks, act, event, trainer):
        self.here, self.act, self.event = int(os.environ["RANK"]) in ranks, act, event
        trainer.add_callback(self)

    def happen(self, state):
        if self.here and state.global_step == STOPS - 1:
            self.act()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.event == "begin":
            self.happen(state)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.event == "optimizer":
            self.happen(state)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def complain() -> None:
    raise ValueError("the script's own mistake")


def told_to_stop(spec: str, folder: str, out: str, ranks, event) -> tuple[int, dict]:
    """How the process ends, and what it leaves of the signal's handler."""
    try:
        disturbed(spec, folder, out, partial(Accident, ranks, terminate, event), save_steps=100)
    except SystemExit as stop:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return stop.code
    return None


@pytest.mark.parametrize(
    ("ranks", "event", "key"),
    [
        ([0], "begin", ""),
        ([1], "begin", ""),
        ([0, 1], "begin", ""),
        ([1], "optimizer", ""),  # between the backward pass and the step
        ([1], "begin", ",async_save=true"),
    ],
)
def test_sigterm_saves_and_ends(runs, tmp_path, ranks, event, key):
    """All ranks after the same step, with the exit code that says so; what is saved goes on bit for bit."""
    initial = runs.initial("llama")
    codes = run(told_to_stop, 2, SPEC + key, initial, str(tmp_path / "out"), ranks, event, init=False, timeout=LIMIT_S)
    assert codes == [128 + signal.SIGTERM] * 2
    assert sorted(p.name for p in (tmp_path / "out").glob("*checkpoint*")) == [f"checkpoint-{STOPS}"]
    if (ranks, event, key) == ([1], "begin", ""):
        through, on = whole(SPEC, (initial, str(tmp_path / "through"), None), (initial, str(tmp_path / "out"), True))
        none(log_differences(on, through, range(STOPS + 1, STEPS + 1), 0))


@pytest.mark.parametrize(("act", "kind"), [(complain, "ValueError"), (kill, "Killed")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_or_dies_in_a_step(runs, tmp_path, act, kind, rank):
    """The other one ends soon, for it has lost a peer; the last checkpoint is whole."""
    from hf_parallel.checkpoint import list_whole_checkpoints

    start = time.monotonic()
    ended = failure(SPEC, runs.initial("llama"), str(tmp_path), partial(Accident, [rank], act, "begin"))
    assert time.monotonic() - start < LIMIT_S / 3
    assert ended.kinds == {rank: kind, 1 - rank: "RuntimeError"}
    assert "lost a peer" in str(ended)
    assert list_whole_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-1")]


@contextlib.contextmanager
def another_run(folder: str):
    """Another process that trains into the same folder."""
    from hf_parallel.checkpoint import Lock

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock = Lock(folder)  # for as long as the process lives
        lock.write({"run": "another", "launch": "another"})
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def second_run(spec: str, folder: str, out: str) -> Ended:
    from hf_parallel.checkpoint import Lock

    Lock.__init__.__defaults__ = (0.2,)  # seconds of patience
    activate(spec)
    return train(folder, out, axes(spec)["data_ranks"], **SHORT)[0]


def test_two_runs_in_one_folder(runs, tmp_path):
    """The second one is refused on all ranks, by the owner's name; once that is gone, however it went, it trains."""
    out = str(tmp_path / "out")
    with another_run(out) as pid, pytest.raises(RankFailure) as caught:
        run(second_run, 2, SPEC, runs.initial("llama"), out, init=False, timeout=LIMIT_S)
    assert caught.value.kinds == {0: "CheckpointError", 1: "CheckpointError"}
    assert f"{out} belongs to another run (process {pid} on " in caught.value.message
    run(second_run, 2, SPEC, runs.initial("llama"), out, init=False, timeout=LIMIT_S)
    assert (tmp_path / "out" / f"checkpoint-{STEPS}").exists()


def attempt(folder: str, out: str, fault=None) -> Ended:
    """The script as it is, under a launcher whose environment says how often it was started again."""
    activate("dp_shard=-1")
    return train(folder, out, int(os.environ["WORLD_SIZE"]), change=fault, **SHORT)[0]


def test_a_restart_goes_on_by_itself_with_fewer_processes(runs, tmp_path):
    """Of its own checkpoints: what another run has left in the folder is not taken."""
    initial, out = runs.initial("llama"), str(tmp_path / "out")
    through = trained(ONE, {"folder": initial, "out": str(tmp_path / "one"), **SHORT})[0]
    whole("dp_shard=2", (initial, out, None))  # another run, of which checkpoints are left
    launch = {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "0"}
    lost = partial(Accident, [3], kill, "begin")
    with pytest.raises(RankFailure, match="ended without a result"):
        run(attempt, 4, initial, out, lost, env=launch, init=False, timeout=LIMIT_S)
    # The count stays 0, as it does when a node has joined; test_restarts has the other case.
    on = run(attempt, 2, initial, out, env=launch, init=False, timeout=LIMIT_S)[0]
    none(log_differences(on, through, range(STOPS, STEPS + 1), 2e-5))
    assert json.loads((tmp_path / "out" / "_hf_parallel.lock").read_text())["launch"] == "job-7"


def same_script(folder: str, out: str, dies_in: int | None) -> Ended:
    """Its batch is for two processes, however many there are; the last one dies in a step."""

    def change(trainer):
        if dies_in is not None:
            accident = Accident([int(os.environ["WORLD_SIZE"]) - 1], kill, "begin", trainer)
            accident.happen = lambda state: accident.here and state.global_step == dies_in - 1 and kill()

    activate("dp_shard=-1")
    return train(folder, out, 2, change=change, **SHORT)[0]


def test_one_process_is_left_and_is_joined_again(runs, tmp_path):
    """It goes on as plain Trainer, whose checkpoint is the run's own too; a step has its rows all the time."""
    initial, out = runs.initial("llama"), str(tmp_path / "out")
    through = trained(ONE, {"folder": initial, "out": str(tmp_path / "one"), **SHORT})[0]
    launch = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    for processes, dies_in in ((2, 2), (1, 3)):
        with pytest.raises(RankFailure, match="ended without a result"):
            run(same_script, processes, initial, out, dies_in, env=launch, init=False, timeout=LIMIT_S)
    assert not (tmp_path / "out" / "checkpoint-2" / "manifest.json").exists()
    on = run(same_script, 2, initial, out, None, env=launch, init=False, timeout=LIMIT_S)[0]
    none(log_differences(on, through, range(3, STEPS + 1), 2e-5))
