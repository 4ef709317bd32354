"""What watching costs, and whether it sees what torch.profiler sees.

    python benchmarks/monitor.py [--spec tp=2,pp=2 dp_shard=4] [--steps 40] [--hidden 256] [--length 128]

A Llama trains in a plain loop on forked ranks. Steps that are watched and steps that are not take turns, in pairs
whose order changes; the first line of a spec is the median over pairs of watched / unwatched, of wall time and of CPU
time of the thread that trains, on rank 0. The second is what the same marks cost by themselves, counted and timed
alone, which no noise of the machine reaches. Then as many steps run under torch.profiler and the monitor together:
shares of the same steps

    communication   the monitor's; the profiler's time in which a gloo collective runs and no operation computes, up to
                    the next operation, as a thread on a busy machine wakes up later than gloo ends
    bubble          the same of messages between stages and what the last stage tells the others

as means over ranks, and their difference in points.
"""

from __future__ import annotations

import argparse
import bisect
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

import hf_parallel.hooks.patches  # noqa: F401 - once, before the ranks are forked
from hf_parallel import hooks
from hf_parallel.hooks import monitoring
from hf_parallel.monitor.intervals import Interval, common, length, union
from hf_parallel.monitor.meter import COMPUTE
from tests.distributed import run
from tests.training import axes

ROWS, LAYERS, VOCABULARY = 8, 4, 4096
LOGGING = 10  # steps between two readings; Trainer's default is 500
#: Of the pipeline: what stages send each other, and the loss.
_BUBBLE = ("gloo:recv", "gloo:send", "gloo:broadcast")


def trained(spec: str, folder: str, data_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """On one rank: both parts."""
    hooks.activate(spec, source="benchmark")
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(0, VOCABULARY, (ROWS // data_ranks, args.length))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return {**turns(model, step, args.steps), **beside_the_profiler(model, step, args.steps)}


def turns(model: Any, step: Any, pairs: int) -> dict[str, float]:
    """Medians of watched / unwatched; and what the marks of a step cost alone, over an unwatched step."""
    wall, cpu, plain, marks, reading = [], [], [], 0, []  # cpu: of the thread that trains, which pays for the marks
    for pair in range(pairs):
        seconds: dict[bool, tuple[float, float]] = {}
        for on in (True, False) if pair % 2 else (False, True):
            if on:
                watched = monitoring.watched(model)
                assert watched is not None
            else:
                monitoring.stop()
            began = time.perf_counter(), time.thread_time()
            if on:
                watched.meter.begin("benchmark")
                with watched.meter.phase(COMPUTE):
                    step()
                marks = len(watched.meter._step.spans)
                watched.meter.end("benchmark")
            else:
                step()
            seconds[on] = time.perf_counter() - began[0], time.thread_time() - began[1]
        wall.append(seconds[True][0] / seconds[False][0])
        cpu.append(seconds[True][1] / seconds[False][1])
        plain.append(seconds[False][0])
        watched = monitoring.watched(model)
        assert watched is not None
        began_reading = time.thread_time()
        watched.read()
        reading.append(time.thread_time() - began_reading)
    each, usual = one_mark(), statistics.median(plain)
    return {
        "wall": statistics.median(wall),
        "cpu": statistics.median(cpu),
        "marks": marks,
        "mark_us": each * 1e6,
        "reading_ms": statistics.median(reading) * 1e3,
        "step_ms": usual * 1e3,
        "alone": (marks * each + statistics.median(reading) / LOGGING) / usual,
    }


def one_mark(count: int = 20_000) -> float:
    """Seconds that a watched wait takes longer than one that is not."""
    watched = monitoring._watched
    assert watched is not None
    waits, meter = watched.meter.waits, watched.meter

    class Group:
        group_name = next(iter(waits.axes))

    def nothing(*args: Any) -> Any:
        return group

    group, call, wait = Group(), waits._collective(nothing), waits._wait(nothing)
    meter.begin("benchmark")
    times = []
    for first, second in ((call, wait), (nothing, nothing)):
        began = time.perf_counter()
        for _ in range(count):
            first(group)
            second(group)
        times.append(time.perf_counter() - began)
    spans = len(meter._step.spans)
    began = time.perf_counter()
    meter.end("benchmark")  # which adds them up
    times.append(time.perf_counter() - began)
    return (times[0] - times[1] + times[2]) / spans


def beside_the_profiler(model: Any, step: Any, steps: int) -> dict[str, float]:
    """Shares of the same steps by both."""
    watched = monitoring.watched(model)
    assert watched is not None
    watched.read()
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
    computing = union((e.time_range.start, e.time_range.end) for e in busy)
    for name, part in (("communication", others), ("bubble", bubble)):
        spans = union((e.time_range.start, until_next(e.time_range.end, computing)) for e in part)
        exposed = length(spans) - length(common(spans, computing))
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
    print(f"{spec}: {first['step_ms']:.0f} ms per step, {first['marks']} waits watched")
    print(f"  watched / unwatched   wall {first['wall']:.4f}, CPU time {first['cpu']:.4f}")
    cost = f"{first['mark_us']:.2f} us per wait, {first['reading_ms']:.1f} ms of CPU per reading"
    print(f"  marks alone           {first['alone']:.2%} of a step ({cost}, one in {LOGGING} steps)")
    for name in ("communication", "bubble"):
        own, theirs = (statistics.mean(rank[key] for rank in ranks) for key in (name, f"{name} by the profiler"))
        difference = abs(own - theirs) * 100
        print(f"  {name:<21} {own:.1%}, by the profiler {theirs:.1%}: {difference:.1f} points apart", flush=True)


if __name__ == "__main__":
    main()
