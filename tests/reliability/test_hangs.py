"""A training in which nothing goes on: which rank holds the others up, and where, is told, and the run ends."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainerCallback

from tests import rows as tokens
from tests.distributed import RankFailure, run
from tests.resuming import train
from tests.training import activate, axes

pytestmark = pytest.mark.clock

LIMIT_S, SOON_S = 120, 60  # seconds; on a free machine 2 to 8
SHORT = {"max_steps": 4, "save_strategy": "no", "gradient_accumulation_steps": 1}


def quick(desync_s: float = 60.0) -> None:
    """Less patience than a cluster needs."""
    from hf_parallel.monitor import watchdog
    from hf_parallel.ranks import desync

    watchdog.LOOK_S, watchdog.BEAT_S, watchdog.ANSWER_S, watchdog.ERROR_S = 0.2, 0.3, 1.0, 3.0
    desync.LOOK_S, desync.STILL_S, desync.DEADLOCK_S = 0.2, 0.5, desync_s


class Fault(TrainerCallback):
    """Something that a rank does alone, in the second step."""

    def __init__(self, rank, act, trainer):
        self.act, self.here = act, dist.get_rank() in (rank if isinstance(rank, tuple) else (rank,))
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1 and self.here:
            self.act(model)


def sleeps(model):
    time.sleep(600)


def dies(model):
    time.sleep(0.6)  # longer than between two signs of life
    os.kill(os.getpid(), signal.SIGKILL)


def stops(model):
    os.kill(os.getpid(), signal.SIGSTOP)


def fails(model):
    raise ValueError("a callback of one rank")


def leaves_one_out(model):
    """A row-parallel layer of this rank does not sum over ranks, once."""
    from hf_parallel.axes.tensor import region

    reduce, calls = region.reduce_from_group, []

    def once_not(tensor, group):
        calls.append(1)
        return tensor.clone() if len(calls) == 2 else reduce(tensor, group)  # the first layer's second one: its MLP's

    region.reduce_from_group = once_not


def other_shapes(model):
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def two_groups(model):
    """Each pair waits for a rank that is in another one."""
    mesh, rank = model._hf_parallel.mesh, dist.get_rank()
    if rank in (0, 3):
        dist.all_reduce(torch.ones(3), group=mesh.group("tp"))
    else:
        dist.all_reduce(torch.ones(3), group=mesh.group("dp_shard"))


class Rows(torch.utils.data.Dataset):
    """One of which cannot be read on one rank."""

    def __init__(self, rows, rank):
        self.rows, self.rank, self.read = rows, rank, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.read += 1
        if self.read > 14 and dist.get_rank() == self.rank:
            time.sleep(600)  # a disk that does not answer
        return self.rows[i]


def loads_slowly(trainer):
    trainer.train_dataset = Rows(trainer.train_dataset, 1)


def here(words: str) -> str:
    """The line of this file that holds these words, as a report names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"`test_hangs.py:{1 + next(i for i, line in enumerate(lines) if words in line and 'here(' not in line)}`"


def training(spec, folder, out, change, desync_s):

    quick(desync_s)
    activate(spec)
    train(folder, out, axes(spec)["data_ranks"], change=change, **SHORT)


def told(runs, capfd, tmp_path, spec, change, desync_s=60.0):
    """The line that one rank says, with what runs over white space; the run has ended, soon."""
    out, model, start = str(tmp_path / "out"), runs.initial("llama"), time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(training, axes(spec)["world"], spec, model, out, change, desync_s, init=False, timeout=LIMIT_S)
    assert time.monotonic() - start < SOON_S
    assert "Hung" not in caught.value.kinds.values(), caught.value
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("hf_parallel: ") and "Stacks and last" in line]
    assert len(lines) == 1, err[-6000:]
    return lines[0], err


ONE = "dp_shard=2,hang_timeout_s=2"
FAULTS = {
    "sleeping": (
        ONE,
        partial(Fault, 1, sleeps),
        [f"; rank 1 is in a callback ({here('time.sleep(600)')}, on_step_begin)"],
    ),
    "loader": (ONE, loads_slowly, [f"; rank 1 is in the data loader ({here('time.sleep(600)  # a disk')})"]),
    "left out": (
        "tp=2,sequence_parallel=false,hang_timeout_s=2",
        partial(Fault, 1, leaves_one_out),
        ["rank 1 left out all_reduce of [", "(tp, model.layers.0.mlp", "which is number", "on rank 0"],
    ),
    "shapes": (
        "tp=2,hang_timeout_s=2",
        partial(Fault, (0, 1), other_shapes),
        ["differs: all_reduce of [4] float32 (", ") on rank 0 and all_reduce of [5] float32 (", ") on rank 1"],
    ),
    "two groups": (
        "tp=2,dp_shard=2,hang_timeout_s=2",
        partial(Fault, (0, 1, 2, 3), two_groups),
        ["ranks wait for each other in a circle: rank 0 for rank 1 in all_reduce number ", " (tp, test_hangs.py:"],
    ),
    "killed": (
        ONE,
        partial(Fault, 1, dies),
        ["rank 1 is gone: its process ended without a word", "last seen in a callback (`test_hangs.py:"],
    ),
    "stopped": (ONE, partial(Fault, 1, stops), ["rank 1 is stopped (SIGSTOP) (pid"]),
    "full disk": (ONE, partial(Fault, 1, sleeps), ["rank 1 is in a callback"]),
    "deadlock": (  # noticed before the time is up, as all ranks stand still
        "tp=2,dp_shard=2",
        partial(Fault, (0, 1, 2, 3), two_groups),
        ["all ranks stand still: ranks wait for each other in a circle: rank 0 for rank 1 in all_reduce number"],
    ),
    "deadlock, reported": (
        "tp=2,dp_shard=2,hang_action=report",
        partial(Fault, (0, 1, 2, 3), two_groups),
        ["all ranks stand still: ranks wait for each other in a circle", "Nobody can go on: the run ends"],
    ),
    "callback": (
        "pp=2,hang_timeout_s=20",
        partial(Fault, 1, fails),
        ["rank 1 has left the training by ValueError: a callback of one rank (in a callback (`test_hangs.py:"],
    ),
}


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, (spec, *_) in FAULTS.items()])
def test_who_holds_the_others_up(runs, capfd, tmp_path, name, spec):
    _, change, expected = FAULTS[name]
    if name == "full disk":
        (tmp_path / "out" / "hangs").mkdir(parents=True)
        for file in ("rank_0.json", "rank_1.json", "report.json"):
            (tmp_path / "out" / "hangs" / file).symlink_to("/dev/full")
    line, err = told(runs, capfd, tmp_path, spec, change, 1.0 if name.startswith("deadlock") else 60.0)
    for words in expected:
        assert words in line, line
    if name == "full disk":
        assert "cannot write" in err
        assert "/hangs/rank_1.json: No space left on device" in err
        return
    written = sorted(path.name for path in (tmp_path / "out" / "hangs").iterdir())
    assert {"report.json", "rank_0.json"} <= set(written)
    facts = json.loads((tmp_path / "out" / "hangs" / "rank_0.json").read_text())
    assert any("MainThread" in thread for thread in facts["stacks"])


def told_once(capfd, words):
    """The one line about this hold-up; a busy machine may hold a rank up elsewhere too, and be told of."""
    told = [line for line in capfd.readouterr().err.splitlines() if "Stacks and last" in line]
    assert len([line for line in told if words in line]) == 1, told
    return next(line for line in told if words in line)


class Slow(TrainerCallback):
    """What may take long, on all ranks, and what may not, on one."""

    def __init__(self, trainer):
        trainer.add_callback(self)
        trainer.compute_metrics = self.computes

    def computes(self, prediction):
        time.sleep(2.5)
        return {}

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and dist.get_rank() == 1:
            time.sleep(4.0)


def goes_on(spec, folder, out):

    quick()
    activate(spec)
    return train(folder, out, 2, change=Slow, **SHORT, eval_strategy="steps", eval_steps=2)[0].logs


def test_a_run_that_goes_on(runs, capfd, tmp_path):
    """As asked: it is told, once, and nothing is told of metrics that take as long."""
    out = str(tmp_path / "out")
    logs = run(goes_on, 2, "dp_shard=2,hang_timeout_s=2,hang_action=report", runs.initial("llama"), out, init=False)
    assert sorted(logs[0]) == [1, 2, 3, 4]
    assert "The run goes on" in told_once(capfd, "rank 1 is in a callback")


def loop(spec, initial, held_up, places):
    """On one rank: an Accelerate loop in whose second epoch a rank sleeps; what is marked, and then its end."""
    from hf_parallel.ask.session import of_session
    from hf_parallel.hooks import hangs

    quick()
    activate(spec)
    accelerator = Accelerator(cpu=True, project_dir=places)
    model = AutoModelForCausalLM.from_pretrained(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(OfLoop(8, held_up), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if held_up == "after a step" and dist.get_rank() == 1 and not os.path.exists(f"{places}/slept"):
                Path(places, "slept").touch()
                time.sleep(3)  # an upload
            if held_up == "exits" and dist.get_rank() == 1:
                hangs.end_loop()  # as at the exit of its process
                time.sleep(600)
    accelerator.end_training()
    return of_session(hangs._Now).watched is None


class OfLoop(torch.utils.data.Dataset):
    """Rows, the seventh of which one rank cannot read at the second time."""

    def __init__(self, rows, held_up):
        self.rows, self.held_up, self.read = tokens.Rows(rows, seed=11), held_up, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.read += 1
        if self.held_up == "loader" and self.read > 6 and dist.get_rank() == 1:
            time.sleep(600)  # of a loop
        return self.rows[i]


def test_a_loop_that_hangs(runs, capfd, tmp_path):
    """Where batches are read the run ends, as under Trainer; what was written is in `project_dir`."""
    with pytest.raises(RankFailure):
        run(loop, 2, ONE, runs.initial("llama"), "loader", str(tmp_path), init=False, timeout=LIMIT_S)
    line = told_once(capfd, f"rank 1 is in the data loader ({here('time.sleep(600)  # of a loop')})")
    assert "The run ends" in line
    assert {"report.json", "rank_0.json"} <= {path.name for path in (tmp_path / "hangs").iterdir()}


def test_a_loop_that_one_rank_leaves(runs, capfd, tmp_path):
    """`sys.exit(0)` is no kill."""
    with pytest.raises(RankFailure):
        run(loop, 2, ONE, runs.initial("llama"), "exits", str(tmp_path), init=False, timeout=LIMIT_S)
    told_once(capfd, "rank 1 has left: it has ended by itself")


def test_a_loop_that_takes_its_time_between_steps(runs, capfd, tmp_path):
    """The others say whom they wait for, and go on."""
    ended = run(loop, 2, ONE, runs.initial("llama"), "after a step", str(tmp_path), init=False, timeout=LIMIT_S)
    assert ended == [True, True]
    line = told_once(capfd, f"rank 1 is in what follows a step ({here('time.sleep(3)  # an upload')})")
    assert "Rank 1 may take long: the run goes on" in line
