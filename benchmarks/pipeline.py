"""How much of a pipeline step is waiting: predicted, simulated and measured, for every schedule.

    python benchmarks/pipeline.py [--ranks 4] [--micro-batches 4 8] [--milliseconds 100] [--pictures FOLDER]
    python benchmarks/pipeline.py --steps-of 1 2 4           # busy share of whole steps of so many batches
    python benchmarks/pipeline.py --fill                     # step time and busy share with curvature in the bubbles

Every layer of a model sleeps for a known time in its forward, for the gradient of its input and for that of its
weights, so the result does not depend on how many cores there are (but a machine with other work to do wakes sleepers
late: give it more milliseconds). Fails if a measured bubble is more than 10 % off its formula:
(p - 1) / (m + p - 1) of the duration for GPipe and 1F1B, (p - 1) / (v m + p - 1) for v stages on each rank,
(p - 2) / (3 m / 2 + p - 2) for chimera; the zero-bubble schedules must stay below that of two stages on each rank.
pipedream_2bw and pipedream do not drain between steps: of two steps among many, each of which ends with an all-reduce,
1 / (3 m + 1) is bubble.

With --steps-of it is the busy share of optimizer steps: of n batches under 1F1B run one after the other, of n batches
as one run, and of the schedules without a flush. Each ends with an all-reduce, as for the norm.

With --fill units of curvature sleep too: a third of a forward per factor and micro-batch, two thirds per inverse. They
run in the bubbles, or all of them at the ends of steps. Fails if in the bubbles they make steps more than 3 % longer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel import parallelize
from hf_parallel.ask.keys.pipeline import DELAYED_SCHEDULES, LOOPED_SCHEDULES, MIRRORED_SCHEDULES
from hf_parallel.ask.spec import SpecError
from hf_parallel.axes.pipeline.engine import run_calls
from hf_parallel.axes.pipeline.joint import JointStep, ScheduledCall
from hf_parallel.axes.pipeline.timeline import (
    SIMPLEST_FIRST,
    Timeline,
    compute_layer_costs,
    count_virtual_stages,
    order,
    simulate,
    simulate_without_flush,
    write_timeline_picture,
)
from tests.distributed import run

BY_FORMULA = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", *MIRRORED_SCHEDULES)
TOLERANCE = 0.10
FILL = "pipeline_fill=kfac"


@dataclass(frozen=True)
class Setting:
    """What is measured: the seconds are those of the forward of one stage."""

    ranks: int
    micro_batches: int
    seconds: float
    steps: int

    def costs(self, stages: int) -> list[list[float]]:
        """Seconds of forward, input gradient and weight gradient per stage."""
        return [
            [self.seconds * cost for cost in costs] for costs in zip(*compute_layer_costs([1] * stages), strict=True)
        ]

    def formula(self, name: str) -> float:
        """The bubble as a part of the duration, where every backward is whole."""
        if name in DELAYED_SCHEDULES:  # stage 0 waits for a forward, once per step, until stage 1 has caught up
            return 1 / (3 * self.micro_batches + 1)
        if name in MIRRORED_SCHEDULES:
            return (self.ranks - 2) / (1.5 * self.micro_batches + self.ranks - 2)
        virtual = count_virtual_stages(name)
        return (self.ranks - 1) / (virtual * self.micro_batches + self.ranks - 1)


# ---- stages that sleep -------------------------------------------------------------------------------------------


class Sleeper(nn.Module):
    """The identity, as a stage that takes known times: seconds of forward, input gradient and weight gradient."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    def forward(self, arriving: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sleep, and hand on what arrived."""
        forward, by_input, by_weight = self.seconds
        time.sleep(forward)
        # Two nodes of the graph that meet in a sum: torch can run each without the other.
        return SleepInBackward.apply(arriving, by_input) + SleepInBackward.apply(self.weight, by_weight)


class SleepInBackward(torch.autograd.Function):
    """The identity, with a backward that takes time."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Note how long."""
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Sleep."""
        time.sleep(ctx.seconds)
        return gradient, None


@contextlib.contextmanager
def awake(stages: Collection[Sleeper]) -> Iterator[None]:
    """Let stages take no time."""
    before = [stage.seconds for stage in stages]
    for stage in stages:
        stage.seconds = [0.0, 0.0, 0.0]
    yield
    for stage, seconds in zip(stages, before, strict=True):
        stage.seconds = seconds


# ---- running a schedule ------------------------------------------------------------------------------------------


def sleeping_model(
    name: str, setting: Setting, layer: Callable[[list[float]], nn.Module] | None = None, more: str = ""
) -> Any:
    """A Llama whose layers sleep, one for each stage, made parallel as a user's model is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    stages = setting.ranks * count_virtual_stages(name)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=stages, **small)).train()
    for stage, costs in enumerate(setting.costs(stages)):
        model.model.layers[stage] = (layer or Sleeper)(list(costs))
    several = f",pipeline_virtual_stages={count_virtual_stages(name)}" if name in LOOPED_SCHEDULES else ""
    ones = ",".join("1" * stages)
    return parallelize(
        model,
        f"pp={setting.ranks},pipeline_schedule={name},pipeline_microbatches={setting.micro_batches}{several},"
        f"pipeline_split=[{ones}]{more}",
    )


def measure(name: str, setting: Setting) -> Timeline:
    """The fastest step of one schedule: whatever disturbs a step makes it longer."""
    if name in DELAYED_SCHEDULES:
        return fastest_steps(name, setting, 1)
    model = sleeping_model(name, setting)
    recorder, tokens = model._hf_parallel.pipeline.recorder, torch.zeros(setting.micro_batches, 4, dtype=torch.long)
    with awake([layer for layer in model.modules() if isinstance(layer, Sleeper)]):
        model(input_ids=tokens, labels=tokens)  # opens the connections
    timelines = []
    for _ in range(setting.steps):
        recorder.start(dist.group.WORLD)
        model(input_ids=tokens, labels=tokens)
        timelines.append(recorder.gather(dist.group.WORLD))
    return min(timelines, key=lambda timeline: timeline.duration)


def compare(name: str, setting: Setting, pictures: Path | None) -> bool:
    """Print one row of the table; is the measured bubble what it should be?"""
    ranks, count, virtual = setting.ranks, setting.micro_batches, count_virtual_stages(name)
    costs = list(zip(*setting.costs(ranks * virtual), strict=True))
    try:
        if name in DELAYED_SCHEDULES:
            simulated = simulate_without_flush(ranks, count, *costs).bubble
        else:
            simulated = simulate(order(name, ranks, virtual, count), *costs).bubble
    except SpecError:
        print(f"{name:24}{virtual:3}{count:4}  takes more micro-batches", flush=True)
        return True
    timeline = run(measure, ranks, name, setting)[0]
    formula, measured = setting.formula(name), timeline.bubble
    exact = name in BY_FORMULA
    good = abs(measured / formula - 1) <= TOLERANCE if exact else measured < formula
    if name in DELAYED_SCHEDULES:  # so little is bubble that the all-reduce is some of it
        good = measured <= formula + TOLERANCE
    predicted = f"{'' if exact else '<'}{formula:.1%}"
    print(
        f"{name:24}{virtual:3}{count:4}{predicted:>11}{simulated:11.1%}{measured:10.1%}{1 - measured:8.2f}"
        f"{timeline.duration * 1e3:9.0f} ms  {'ok' if good else 'OFF'}",
        flush=True,
    )
    if pictures:
        write_timeline_picture(
            pictures / f"{name}_{count}.svg", timeline, name, predicted=simulated, measured=measured
        )
    return good


# ---- whole steps -------------------------------------------------------------------------------------------------


WAYS = ("apart", "together", *DELAYED_SCHEDULES)


def fastest_steps(way: str, setting: Setting, batches: int) -> Timeline:
    """Two optimizer steps among many of so many batches: the fastest of all."""
    delays = way in DELAYED_SCHEDULES
    model = sleeping_model(way if delays else "1f1b", setting)
    pipeline, tokens = model._hf_parallel.pipeline, torch.zeros(setting.micro_batches, 4, dtype=torch.long)
    calls, one_step = functools.partial(announced, model, tokens, batches), torch.zeros(())
    if delays:
        pipeline.delayed.reads_ahead = True

    def step() -> None:
        if way == "together":
            pipeline.joint = JointStep(calls(), functools.partial(run_calls, pipeline, held=None))
        while delays and not pipeline.delayed.knows_enough():
            pipeline.delayed.add(None, calls())
        if delays:
            pipeline.joint = JointStep(list(pipeline.delayed.updates[0].calls), pipeline.delayed.run)
        for _ in range(batches):
            model(input_ids=tokens, labels=tokens).loss.backward()
        dist.all_reduce(one_step)

    with awake([layer for layer in model.modules() if isinstance(layer, Sleeper)]):
        step()  # opens the connections
    step()
    timelines = []
    for _ in range(setting.steps):
        pipeline.recorder.start(dist.group.WORLD)
        step()
        step()
        timelines.append(pipeline.recorder.gather(dist.group.WORLD))
    return min(timelines, key=lambda timeline: timeline.bubble)


def announced(model: Any, tokens: torch.Tensor, batches: int) -> list[ScheduledCall]:
    """The calls of a step that is to come."""
    with model._hf_parallel.pipeline.announcing() as calls:
        for _ in range(batches):
            model(input_ids=tokens, labels=tokens)
    return list(calls)


def compare_steps(batches: int, setting: Setting) -> bool:
    """Print one row of the table of steps; are shares what they should be?"""
    ranks, count = setting.ranks, setting.micro_batches
    shares = [1 - run(fastest_steps, ranks, way, setting, batches)[0].bubble for way in WAYS]
    formula = [count / (count + ranks - 1), batches * count / (batches * count + ranks - 1)]
    slots = 3 * batches * count
    formula += [slots / (slots + 1)] * len(DELAYED_SCHEDULES)
    good = all(share >= wanted - TOLERANCE * wanted for share, wanted in zip(shares, formula, strict=True))
    row = f"{batches:7}" + "".join(f"{a:15.2f}{b:9.2f}" for a, b in zip(shares, formula, strict=True))
    print(f"{row}  {'ok' if good else 'OFF'}", flush=True)
    return good


# ---- work in the bubbles -----------------------------------------------------------------------------------------


class SleepingLinear(Sleeper):
    """A sleeper with a linear layer, whose curvature can be taken."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__(seconds)
        self.linear = nn.Linear(8, 8)

    def forward(self, arriving: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sleep, and hand on what arrived, changed a little."""
        return super().forward(arriving) + 0.01 * self.linear(arriving)


def sleeping(work: Any, seconds: float) -> Any:
    """Make a unit of curvature take time."""

    def slow(*args: Any) -> None:
        time.sleep(seconds)
        work(*args)

    return slow


def filled_steps(way: str, setting: Setting, interval: int) -> tuple[float, float]:
    """Return seconds per step and the busy share, over the steps of an interval; the fastest of all."""
    model = sleeping_model(
        "1f1b", setting, SleepingLinear, "" if way == "none" else f",{FILL},kfac_interval={interval}"
    )
    pipeline, tokens = model._hf_parallel.pipeline, torch.zeros(setting.micro_batches, 4, dtype=torch.long)
    fill, one_step = pipeline.fill, torch.zeros(())
    if fill is not None:
        fill._add_inputs = sleeping(fill._add_inputs, setting.seconds / 3)
        fill._add_gradients = sleeping(fill._add_gradients, setting.seconds / 3)
        fill._invert = sleeping(fill._invert, setting.seconds * 2 / 3)

    def step() -> None:
        if fill is not None:
            fill.begin_step()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if fill is not None:
            fill.end_step()
            if way == "at the ends":
                fill._placements = {setting.micro_batches: {}}
        dist.all_reduce(one_step)

    for _ in range(interval):
        step()  # opens the connections, and times what is to be placed
    found = []
    for _ in range(setting.steps):
        pipeline.recorder.start(dist.group.WORLD)
        for _ in range(interval):
            step()
        timeline = pipeline.recorder.gather(dist.group.WORLD)
        found.append((timeline.duration / interval, 1 - timeline.bubble))
    return min(found)


def compare_filled(setting: Setting, interval: int) -> bool:
    """Print the table of fills; do steps take as long with curvature as without?"""
    ways = {"none": "none", "in bubbles": "in the bubbles", "at the ends": "at the ends of steps"}
    print(f"curvature of every {interval} steps       step      busy")
    found = {way: run(filled_steps, setting.ranks, way, setting, interval)[0] for way in ways}
    for way, (seconds, busy) in found.items():
        print(f"{ways[way]:28}{seconds * 1e3:9.0f} ms{busy:9.1%}", flush=True)
    good = found["in bubbles"][0] <= 1.03 * found["none"][0]
    print("ok" if good else "OFF", flush=True)
    return good


def main() -> int:
    """Run all schedules and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8])
    parser.add_argument("--milliseconds", type=float, default=100, help="forward of one stage")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pictures", type=Path, default=None, help="folder for a picture of each measured step")
    every = [*SIMPLEST_FIRST, *MIRRORED_SCHEDULES, *DELAYED_SCHEDULES]
    parser.add_argument("--schedules", nargs="+", default=every, choices=every)
    parser.add_argument(
        "--steps-of", type=int, nargs="+", default=(), help="batches of a step; then nothing else is run"
    )
    parser.add_argument("--fill", action="store_true", help="curvature in the bubbles; then nothing else is run")
    parser.add_argument("--interval", type=int, default=2, help="steps from one curvature to the next")
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    settings = [Setting(args.ranks, count, args.milliseconds / 1e3, args.steps) for count in args.micro_batches]
    if args.fill:
        return 0 if all(compare_filled(setting, args.interval) for setting in settings) else 1
    if args.steps_of:
        print("batches" + "".join(f"{way:>15}  formula" for way in WAYS))
        rows = [compare_steps(batches, setting) for setting in settings for batches in args.steps_of]
        return 0 if all(rows) else 1
    print(f"{'':26}v   m  predicted  simulated  measured    busy         step")
    good = [compare(name, setting, args.pictures) for setting in settings for name in args.schedules]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
