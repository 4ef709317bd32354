"""What watching costs, and whether it sees what torch.profiler sees.

    python benchmarks/monitor.py [--spec tp=2,pp=2 dp_shard=4] [--steps 40] [--hidden 256] [--length 128]
                                 [--watch monitor hangs] [--no-profiler]

A Llama trains in a plain loop on forked ranks. Steps that are watched, by the monitor (`basic`), the watchdog of hangs
or both, and steps that are not take turns, in pairs whose order changes. The first line of a spec is watched /
unwatched: the median over pairs of wall times, and the sums of CPU time of the thread that trains, on rank 0. The
second is what listening costs that thread: clocks of its CPU time inside and outside of what is put around collectives
and waits, less what the clocks themselves cost, so that no noise of the steps reaches it. Then as many steps run under
torch.profiler and the monitor together: shares of the same steps

    communication   the monitor's; the profiler's time in which a gloo collective runs and no operation computes, up to
                    the next operation, as a thread on a busy machine wakes up later than gloo ends
    bubble          the same of messages between stages and what the last stage tells the others

as means over ranks, and their difference in points.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

import hf_parallel.hooks.patches  # noqa: F401 - once, before the ranks are forked
from hf_parallel.ask.session import of_session
from hf_parallel.hooks import activation, hangs, monitoring
from hf_parallel.monitor.meter import COMPUTE, EVERY, Interval, intersect_intervals, sum_lengths, unite_intervals
from hf_parallel.ranks.observed import KINDS
from tests.distributed import run
from tests.training import axes

ROWS, LAYERS, VOCABULARY = 8, 4, 4096
LOGGING = 10  # steps between two readings; Trainer's default is 500
#: Of the pipeline: what stages send each other, and the loss.
_BUBBLE = ("gloo:recv", "gloo:send", "gloo:broadcast")


def trained(spec: str, folder: str, data_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """On one rank: both parts."""
    activation.activate(spec, source="benchmark")
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(0, VOCABULARY, (ROWS // data_ranks, args.length))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    found = turns(model, step, args)
    return found if args.no_profiler else {**found, **beside_the_profiler(model, step, args.steps)}


def turns(model: Any, step: Any, args: argparse.Namespace) -> dict[str, float]:
    """Watched / unwatched; and what listening costs alone, over an unwatched step."""
    wall, cpu, plain = [], [], []  # cpu: of the thread that trains, which pays for the marks
    for pair in range(args.steps):
        seconds: dict[bool, tuple[float, float]] = {}
        for on in (True, False) if pair % 2 else (False, True):
            with watching(model, args.watch, pair) if on else contextlib.nullcontext(step) as around:
                seconds[on] = timed(lambda: around(step) if on else step())  # noqa: B023 - called at once
        wall.append(seconds[True][0] / seconds[False][0])
        cpu.append(seconds[True][1])
        plain.append(seconds[False])
    usual, usual_cpu = (statistics.median(one) for one in zip(*plain, strict=True))
    found = {"wall": statistics.median(wall), "cpu": sum(cpu) / sum(one for _, one in plain)}
    found |= {"step_ms": usual * 1e3, "cpu_ms": usual_cpu * 1e3}
    calls, listening, reading = alone(model, step, args)
    costs = {"calls": calls, "call_us": listening / calls * 1e6, "reading_ms": reading * 1e3}
    share = listening + reading / LOGGING
    return {**found, **costs, "alone": share / usual, "alone_cpu": share / usual_cpu}


def timed(act: Any) -> tuple[float, float]:
    """Wall and CPU seconds of this thread."""
    began = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - began[0], time.thread_time() - began[1]


@contextlib.contextmanager
def watching(model: Any, what: list[str], number: int = 0) -> Iterator[Any]:
    """In here both listen, or one; gives what to run steps in, of which the first one has this number."""
    dog = hangs.Watched(lambda: model, tempfile.gettempdir())
    if "hangs" in what:
        of_session(hangs._Now).watched = dog
        dog.begin()
    watched = monitoring.watch_model(model) if "monitor" in what else None
    if watched is not None:
        watched.meter._count = number // 2  # of two pairs, whose orders differ: one of four is looked into

    def around(step: Any) -> None:
        hangs.mark_step(1)
        if watched is None:
            return step()
        watched.meter.begin("benchmark")
        with watched.meter.phase(COMPUTE):
            step()
        watched.meter.end("benchmark")

    yield around
    monitoring.stop_watching()
    of_session(hangs._Now).watched = None
    dog.stack.close()


def alone(model: Any, step: Any, args: argparse.Namespace) -> tuple[float, float, float]:
    """Calls that are listened to in a step, the seconds that this takes in all, and those of a reading."""
    calls, empty, _ = listened(model, step, args.steps, [])
    _, seconds, reading = listened(model, step, args.steps, args.watch)
    return calls, seconds - empty, reading


def listened(model: Any, step: Any, steps: int, watch: list[str]) -> tuple[float, float, float]:
    """Calls, seconds between the clocks, and of a reading."""
    within, outside, found, reading = Clocks(), Clocks(), [], [0.0]
    with within.running(), watching(model, watch) as around, outside.running():
        for _ in range(-(-steps // EVERY) * EVERY):  # in whole turns of what is looked into
            within.seconds = outside.seconds = within.calls = 0
            around(step)
            found.append((within.calls, outside.seconds - within.seconds))
        if "monitor" in watch:
            reading = [timed(of_session(monitoring._Now).watched.read)[1]]  # type: ignore[union-attr]
    calls, seconds = (statistics.mean(one) for one in zip(*found, strict=True))
    return calls, seconds, reading[0]


class Clocks:
    """Adds up the time in collectives and in waits for them."""

    calls, seconds = 0, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around what is there now."""
        methods = [(dist.ProcessGroup, name) for name in KINDS if hasattr(dist.ProcessGroup, name)]
        former = [(owner, name, vars(owner)[name]) for owner, name in [*methods, (dist.Work, "wait")]]
        for owner, name, _ in former:
            setattr(owner, name, self._timed(getattr(owner, name)))
        yield
        for owner, name, original in former:
            setattr(owner, name, original)

    def _timed(self, original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            found = original(*args, **kwargs)
            self.seconds += time.thread_time() - began
            self.calls += 1
            return found

        return method


def beside_the_profiler(model: Any, step: Any, steps: int) -> dict[str, float]:
    """Shares of the same steps by both."""
    watched = monitoring.watch_model(model)
    assert watched is not None
    watched.read()
    watched.meter._every = 1
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            watched.meter.begin("benchmark")
            with watched.meter.phase(COMPUTE):
                step()
            watched.meter.end("benchmark")
        seconds = time.perf_counter() - began
    own = watched.session.read()
    assert own is not None
    rank = torch.distributed.get_rank()
    row = own.rows[rank]
    found = {"communication": row.communication / row.looked, "bubble": row.pp / row.looked}
    events = [e for e in profiler.events() if e.time_range.end > e.time_range.start]
    busy = [e for e in events if e.name.startswith(("aten::", "fsdp::", "Optimizer"))]
    sent = [e for e in events if e.name.startswith("gloo:")]
    bubble = [e for e in sent if e.name in _BUBBLE]
    others = [e for e in sent if e.name not in _BUBBLE]
    computing = unite_intervals((e.time_range.start, e.time_range.end) for e in busy)
    for name, part in (("communication", others), ("bubble", bubble)):
        spans = unite_intervals((e.time_range.start, until_next(e.time_range.end, computing)) for e in part)
        exposed = sum_lengths(spans) - sum_lengths(intersect_intervals(spans, computing))
        found[f"{name} by the profiler"] = exposed / 1e6 / seconds
    return found


def until_next(moment: float, computing: list[Interval]) -> float:
    """When the next operation begins, unless one runs: a thread that has waited wakes up later than gloo ends."""
    place = bisect.bisect(computing, (moment, float("inf")))
    if place == len(computing) or (place and computing[place - 1][1] > moment):
        return moment
    return computing[place][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", nargs="+", default=["tp=2,pp=2", "dp_shard=4"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--watch", nargs="+", choices=("monitor", "hangs"), default=["monitor", "hangs"])
    parser.add_argument("--no-profiler", action="store_true")
    args = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for spec in args.spec:
            size = axes(spec)
            ranks = run(trained, size["world"], spec, folder, size["data_ranks"], args, init=False, timeout=540)
            show(spec, ranks)


def show(spec: str, ranks: list[dict[str, Any]]) -> None:
    """The figures of one layout."""
    first = ranks[0]
    print(f"{spec}: {first['step_ms']:.0f} ms per step, {first['cpu_ms']:.0f} ms of CPU; {first['calls']:.0f} calls")
    print(f"  watched / unwatched   wall {first['wall']:.4f}, CPU time {first['cpu']:.4f}")
    cost = f"{first['call_us']:.2f} us per call, {first['reading_ms']:.1f} ms per reading, one in {LOGGING} steps"
    print(f"  listening alone       {first['alone']:.2%} of a step, {first['alone_cpu']:.2%} of its CPU time ({cost})")
    for name in ("communication", "bubble"):
        if name in first:
            own, theirs = (statistics.mean(rank[key] for rank in ranks) for key in (name, f"{name} by the profiler"))
            difference = abs(own - theirs) * 100
            print(f"  {name:<21} {own:.1%}, by the profiler {theirs:.1%}: {difference:.1f} points apart", flush=True)


if __name__ == "__main__":
    main()
