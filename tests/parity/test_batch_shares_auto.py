"""`batch_shares=auto`: cuts follow a rank that is slow, and change no number."""

import dataclasses
import json
import os
import time

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks import uneven
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer import auto_shares
from hf_parallel.monitor import meter, session
from tests.distributed import RankFailure, run
from tests.parity.test_batch_shares import MeanOfExamples
from tests.refusals import find_line
from tests.rows import Rows, Stream, pad
from tests.training import Outcome, Tolerance, activate, axes, fit, trainer_of

EXAMPLES, EACH_S, SLEEP_S = 32, 0.02, 0.0005
NEVER = 10**6
#: What a step takes besides computing: reading, what is around the model, and waits for other ranks.
OTHERS = ("data", "rest", "tp", "dp", "cp", "ep", "pp", "all")


class Slowly(torch.autograd.Function):
    """Takes time by the number of examples, in both directions."""

    @staticmethod
    def forward(ctx, hidden, seconds):
        ctx.seconds = seconds * len(hidden)
        time.sleep(ctx.seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Cuts(TrainerCallback):
    """Which shares each step was trained with."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, **kwargs):
        measured = runtime.current() and runtime.current().measured
        self.found.append(None if measured is None else tuple(map(float, measured.of_pass.in_hand)))


class Clock:
    """Seconds that ranks say they took: what rank 3 takes for an example is twice as long from a step on.

    What they measure says how busy this machine is; it is only checked not to be less than they slept.

    Args:
        slow_from: the first slow step, from 0.
        trainer: who knows the step.
    """

    def __init__(self, slow_from, trainer):
        self.slow_from, self.trainer = slow_from, trainer
        self.lines = []

    def of_an_example(self, rank, steps):
        return EACH_S * (2 if rank == 3 and steps >= self.slow_from else 1)

    def gather_rows(self, own, device):
        """Gather what ranks measured of a step, which has just ended, and say what they took instead."""
        found = []
        for rank, row in enumerate(meter.gather_rows(own, device)):
            assert device.type != "cpu" or row.compute >= 2 * SLEEP_S * row.rows
            compute = row.rows * self.of_an_example(rank, self.trainer.state.global_step - 1)
            found.append(dataclasses.replace(row, compute=compute, **dict.fromkeys(OTHERS, 0.0)))
        return found


def script(spec: str | None, out: str, folder: str, slow_from: int, settings: tuple) -> Outcome:
    """The last rank takes twice as long for an example from this step on; at -1 its matrix products are slow, too.

    Where it is never slow it has little memory: its first steps take more than all of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        rank = int(os.environ.get("RANK", "0"))
        patch.setattr(auto_shares, "measure_product_rate", lambda device: 0.7 if rank == 3 and slow_from < 0 else 0.95)
        if slow_from == NEVER:
            peak = meter.measure_memory(torch.device("cpu"))[0]
            patch.setattr(
                auto_shares, "measure_memory_of_rank", lambda device: (0.0, peak * (0.7 if rank == 3 else 100))
            )
        ranks = activate(spec)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        cuts = Cuts()
        changes = {"per_device_train_batch_size": EXAMPLES // ranks, "max_grad_norm": 0.0, **dict(settings)}
        changes["per_device_eval_batch_size"] = 8 // ranks
        sets = {"train_dataset": Rows(150, 11, uneven_lengths=True), "eval_dataset": Rows(13, 12)}
        others = {"kind": MeanOfExamples, "callbacks": [cuts], "data_collator": pad}
        made = trainer_of(model, out, settings=changes, **others, **sets)
        if spec is not None:
            clock = Clock(slow_from, made[0])
            patch.setattr(session, "gather_rows", clock.gather_rows)
            patch.setattr(report, "say", clock.lines.append)
            model.model.layers[0].register_forward_hook(lambda module, given, hidden: Slowly.apply(hidden, SLEEP_S))
        outcome = fit(*made, f"{out}/saved")
    outcome.more = cuts.found, [] if spec is None else clock.lines
    return outcome


LOGGED = Tolerance(loss=1e-6, grad_norm=1e-6, eval_loss=1e-6, weights=1e-7)
AHEAD = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1, "num_train_epochs": 3}
SLOW = (1.0, 1.0, 1.0, 0.5)
EVEN = (1.0,) * 4


@pytest.mark.parametrize(
    ("slow_from", "settings", "cuts"),
    [
        # Three readings have a median, and the next agrees; by then the last batch of the epoch has been drawn.
        (-1, {"num_train_epochs": 2}, [(1.0, 1.0, 1.0, 0.74)] * 5 + [SLOW] * 5),
        # A worker has drawn the second epoch's five batches, two to a step.
        (0, AHEAD, [EVEN] * 6 + [SLOW] * 3),
        # Three readings of slow steps; by then one more batch has been drawn.
        (5, {"num_train_epochs": 3}, [EVEN] * 9 + [SLOW] * 6),
    ],
    ids=["from_the_start", "drawn_ahead", "in_the_middle"],
)
def test_a_slow_rank_gets_fewer_examples(runs, slow_from, settings, cuts):
    """From the start, with examples drawn ahead by workers, and within three logs in the middle of the training."""
    given = script, "dp_shard=4,batch_shares=auto", runs.initial("llama"), slow_from, tuple(settings.items())
    ranks = runs.compare(*given, tolerance=LOGGED)
    assert [rank.more[0] for rank in ranks] == [cuts] * 4
    assert any("10 9 9 4" in line for line in ranks[0].more[1])


def test_without_auto_a_line_names_the_rank_and_what_helps(runs):
    """A rank that is slow from the sixth step on is named once."""
    folder = runs.initial("llama")
    ranks = runs.compare(script, "dp_shard=4", folder, 5, (("num_train_epochs", 2),), tolerance=LOGGED)
    (line,) = [line for line in ranks[0].more[1] if "is slow at" in line]
    assert line.startswith("rank 3 (")
    assert find_line(line, "computing", "0.32 s", "0.16 s")
    assert line.endswith("; batch_shares=auto, or a smaller share, gives it fewer examples")


def test_a_rank_without_room_gets_fewer_examples(runs):
    given = script, "dp_shard=4,batch_shares=auto", runs.initial("llama"), NEVER, (("num_train_epochs", 2),)
    ranks = runs.compare(*given, tolerance=LOGGED)
    first, *_, last = ranks[0].more[0]
    assert first == EVEN
    assert last[3] < 0.7 * min(last[:3])
    assert all(rank.more[0] == ranks[0].more[0] for rank in ranks)


def start(spec: str, out: str, folder: str, kind: str) -> None:
    ranks = activate(spec)
    if kind == "loop":
        Accelerator(cpu=True).prepare(DataLoader(Rows(8, 1), batch_size=4))
    rows = Stream(8, 1) if kind == "stream" else Rows(8, 1)
    changes = {"max_steps": 1}
    trainer_of(AutoModelForCausalLM.from_pretrained(folder), out, ranks, changes, train_dataset=rows)[0].train()


REFUSED = [
    ("", "loop", "a loop without a Trainer says nothing of its steps; batch_shares=2:1 works"),
    ("", "stream", "streams are not cut anew; batch_shares=2:1 works"),
    (",monitor=off", "trainer", "monitor=off measures no step; monitor=basic works"),
    (",pp=2,ep=2", "trainer", "micro-batches meet at experts .*; batch_shares=even works"),
]


@pytest.mark.parametrize(("more", "kind", "words"), REFUSED)
def test_refused(runs, tmp_path, more, kind, words):
    spec = f"dp_shard=2,batch_shares=auto{more}"
    model = runs.initial("qwen3_moe" if "ep=2" in more else "llama")
    with pytest.raises(RankFailure, match=f"batch_shares=auto: {words}"):
        run(start, axes(spec)["world"], spec, str(tmp_path), model, kind, init=False)


def test_gain_beside_a_slow_rank(tmp_path):
    """The benchmark on little sleep: its own figures need a machine without other work."""
    run(uneven.train_all, 4, str(tmp_path), 0.004, 3, init=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["shared"]["losses"] == pytest.approx(found["even"]["losses"], rel=1e-6)
    assert min(found["shared"]["seconds"]) < min(found["even"]["seconds"])
