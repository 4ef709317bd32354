"""Real trainings on four ranks, watched: where time goes, who lets the others wait, and what `off` leaves out."""

import os
import time

import pytest
import torch
from accelerate import Accelerator
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import hf_parallel
import hf_parallel.hooks.patches
from hf_parallel.hooks import activation
from hf_parallel.monitor import session
from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import activate, axes, trainer_of

pytestmark = pytest.mark.clock

ROWS = 8
#: By which a rank is late in each step: seen only above a fifth of a step, which takes 3 s on a busy machine.
LATE_S = 1.2
SHARES = ("compute", "communication", "bubble", "data_wait", "other")


class Watch(TrainerCallback):
    """The logs, and when steps end as a user's own callbacks see it."""

    def __init__(self):
        self.logs, self.ends = [], []

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append(dict(logs))


class Timed(Trainer):
    """A user's subclass that looks at the clock when a step begins to read."""

    def get_batch_samples(self, *args, **kwargs):
        vars(self).setdefault("begins", []).append(time.perf_counter())
        return super().get_batch_samples(*args, **kwargs)


class SlowRows(Rows):
    """A data set that one rank reads late."""

    def __getitem__(self, index):
        time.sleep(LATE_S / 2)  # a step of four data ranks has two rows of each
        return super().__getitem__(index)


def training(initial, out, data_ranks, steps, logging, slow=None):
    """Train; `slow` is what this rank is late at. The logs, and seconds of each step."""
    model = AutoModelForCausalLM.from_pretrained(initial)
    if slow == "compute":
        model.register_forward_pre_hook(lambda *_: time.sleep(LATE_S))
    settings = {"max_steps": steps, "logging_steps": logging}
    rows = (SlowRows if slow == "data" else Rows)(ROWS * steps, seed=11)
    trainer, watch = trainer_of(model, out, data_ranks, settings, Timed, Watch(), train_dataset=rows)
    trainer.train()
    return watch.logs, [end - begin for begin, end in zip(trainer.begins, watch.ends, strict=False)]


def watched(spec, initial, out, data_ranks):
    """On one rank: a training as it is, one with a slow rank, one with a slow loader; then one that is not watched."""
    rank = int(os.environ["RANK"])
    activate(f"{spec},monitor=full")
    logs, steps = training(initial, f"{out}/plain", data_ranks, 6, 2)
    training(initial, f"{out}/compute", data_ranks, 4, 1, "compute" if rank == 1 else None)
    if data_ranks == 4:
        training(initial, f"{out}/data", data_ranks, 4, 1, "data" if rank == 2 else None)
    activation.deactivate()
    own = ProcessGroup.allreduce, Work.wait
    activate(f"{spec},monitor=off")
    off, _ = training(initial, f"{out}/off", data_ranks, 1, 1)
    unchanged = own == (ProcessGroup.allreduce, Work.wait) and not hasattr(own[0], "__wrapped__")
    return {"logs": logs, "steps": steps, "off": off, "unchanged": unchanged}


@pytest.mark.parametrize("spec", ["tp=2,pp=2", "dp_shard=4"])
def test_where_time_goes(runs, spec, tmp_path):
    ranks = run(watched, 4, spec, runs.initial("llama"), str(tmp_path), axes(spec)["data_ranks"], init=False)
    logs = ranks[0]["logs"]
    assert len(logs) == 3
    gaps = []
    for place, log in enumerate(logs):
        share = {name: log[f"perf/{name}_share"] for name in SHARES}
        assert all(0 <= value <= 1 for value in share.values()), share
        assert (share["bubble"] > 0) == ("pp" in spec)
        assert share["communication"] > 0.02  # every step sends, among processes that share two cores
        axis = {key.rpartition("_")[2]: value for key, value in log.items() if "communication_share_" in key}
        assert axis.keys() == ({"tp", "pp"} if "pp" in spec else {"dp"})
        seconds = sum(share.values()) * log["perf/step_time_s"]
        seen = max(sum(rank["steps"][2 * place : 2 * place + 2]) / 2 for rank in ranks)
        gaps.append(abs(seconds / seen - 1))
    assert min(gaps) < 0.05, gaps  # a busy machine may stop a rank between its look at the clock and the monitor's
    assert logs[0].keys() == ranks[3]["logs"][0].keys()  # one log on all ranks
    named(f"{tmp_path}/compute", "rank 1 (", "is slow at computing")
    if "dp_shard" in spec:
        named(f"{tmp_path}/data", "rank 2 (", "is slow at reading its data")
    assert all(rank["unchanged"] for rank in ranks)
    assert not [key for rank in ranks for log in rank["off"] for key in log if key.startswith("perf/")]
    with pytest.raises(hf_parallel.SpecError):
        session.read_records(f"{tmp_path}/off")


def named(folder, *words):
    """A line of the run's record says these words; on a busy machine another rank may be late as well."""
    lines = [line["text"] for line in session.read_records(folder) if line["kind"] == "note"]
    assert any(all(word in line for word in words) for line in lines), lines


def loop(initial, data_ranks):
    """An Accelerate loop of two micro-batches a step that asks for its metrics."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = AutoModelForCausalLM.from_pretrained(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Rows(48, seed=11), batch_size=ROWS // data_ranks)
    held_out = DataLoader(Rows(16, seed=12), batch_size=ROWS // data_ranks)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    found = [hf_parallel.metrics()]
    for place, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if place == 3:
            found.append(hf_parallel.metrics())
            for other in held_out:  # an evaluation is no step
                with torch.no_grad():
                    model(**other)
            between = max(0.5, 8 * found[-1].get("perf/step_time_s", 0))  # longer than a step of a busy machine
            time.sleep(between)
    return [*found, hf_parallel.metrics(), between]


def loop_rank(spec, *args):
    activate(spec)
    return loop(*args)


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2"])
def test_a_loop_asks(runs, spec):
    first, two, one, between = run(loop_rank, 2, spec, runs.initial("llama"), axes(spec)["data_ranks"], init=False)[0]
    assert first == {}
    assert two["perf/compute_share"] > 0.05
    assert two["perf/samples_per_second"] == pytest.approx(2 * ROWS / two["perf/step_time_s"], rel=0.01)
    assert one["perf/step_time_s"] < between  # what is between steps is not part of them
    assert one["perf/samples_per_second"] == pytest.approx(2 * ROWS / one["perf/step_time_s"], rel=0.01)


def test_without_a_layout_nothing_is_measured(runs):
    assert run_alone(loop, runs.initial("llama"), 1)[:3] == [{}, {}, {}]
