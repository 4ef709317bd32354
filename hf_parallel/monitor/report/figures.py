"""The figures of a page: which numbers of a training are drawn, and what is said below them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from hf_parallel.config import ParallelConfig
from hf_parallel.mesh import coordinates, data_rank
from hf_parallel.monitor.expected import BUBBLE, COMMUNICATION, COMPUTE, OTHER, term_of
from hf_parallel.monitor.report.advice import PARTS, shares
from hf_parallel.monitor.report.facts import Facts, mapping, numbers
from hf_parallel.monitor.report.plots import Bar, Curve, bars, curves

_COPIES, _RANKS = 8, 16  # shown one by one
_GIB = 2**30
_SEEN = 0.002  # of a step: less is no part of a legend
#: Colours of what a step's time goes to.
_PART_COLOURS = {"compute": 0, "tp": 1, "dp": 2, "cp": 3, "ep": 4, "all": 6, "pp": 5, "data": 7, "rest": 8}
#: What torch's allocator never sees, and on a CPU nobody holds.
_OUTSIDE = ("context", "communication buffers")
_DEVICE_ONLY = (*_OUTSIDE, "held by the allocator")


def _figure(name: str, title: str, content: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure id="figure-{name}"><h3>{escape(title)}</h3>{content}{below}</figure>'


# ---- the layout -----------------------------------------------------------------------------------------------------


def layout(facts: Facts) -> str:
    """Which rank holds which part of which copy of the model."""
    config = facts.config
    if config is None:
        return ""
    copies: dict[int, dict[int, list[int]]] = {}
    for rank in range(config.world_size):
        stage = coordinates(config, rank)["pp"]
        copies.setdefault(data_rank(config, rank), {}).setdefault(stage, []).append(rank)
    shown = "".join(_copy(config, number, copies[number]) for number in sorted(copies)[:_COPIES])
    more = f'<p class="quiet">and {len(copies) - _COPIES} more like these</p>' if len(copies) > _COPIES else ""
    told = mapping(mapping(facts.layout.get("plan")).get("facts"))
    caption = " · ".join(f"{name} {value}" for name, value in told.items())
    title = ", ".join(f"{axis}={size}" for axis, size in config.sizes.items() if size > 1) or "one process"
    return _figure("layout", title, f'<div class="copies">{shown}</div>{more}', caption)


def _copy(config: ParallelConfig, number: int, stages: dict[int, list[int]]) -> str:
    rows = []
    for stage in sorted(stages):
        name = f"stage {stage}" if config.pp_size > 1 else "ranks"
        ranks = "".join(f"<i>{rank}</i>" for rank in stages[stage])
        rows.append(f'<div class="stage"><span>{name}</span>{ranks}</div>')
    return f'<div class="copy"><b>data rank {number}</b>{"".join(rows)}</div>'


# ---- curves ---------------------------------------------------------------------------------------------------------


def curve_figures(facts: Facts) -> Iterator[str]:
    """Loss, gradient norm, throughput, step time, shares: each where it was logged."""
    wanted = [
        ("loss", "Loss", "", [("training", "loss", 0), ("evaluation", "eval_loss", 1)]),
        ("grad-norm", "Gradient norm", "", [("gradient norm", "grad_norm", 5)]),
        ("throughput", "Throughput", "tokens per second", [("tokens per second", "perf/tokens_per_second", 3)]),
        ("step-time", "Time of a step", "seconds", [("step time", "perf/step_time_s", 0)]),
    ]
    for name, title, unit, lines in wanted:
        drawn = [Curve(label, *facts.series(key), colour) for label, key, colour in lines]
        drawn = [line for line in drawn if any(map(math.isfinite, line.values))]
        if drawn:
            yield _figure(name, title, curves(name, drawn, unit), _gaps(drawn))


def _gaps(lines: list[Curve]) -> str:
    """Steps at which a number is none."""
    bad = [
        step for line in lines for step, value in zip(line.steps, line.values, strict=True) if not math.isfinite(value)
    ]
    return f"not finite at {len(bad)} logs, first at step {bad[0]:.0f}" if bad else ""


# ---- time and memory ------------------------------------------------------------------------------------------------


def time(facts: Facts) -> Iterator[str]:
    """Seconds of a step by kind: each rank, and the plan where there is one for this hardware."""
    ranks = facts.ranks
    if not any(sum(rank.get(part, 0.0) for part in PARTS) for rank in ranks):
        return
    used = [part for part, share in shares(facts).items() if share > _SEEN]
    rows = [
        Bar(f"rank {rank}", [(PARTS[part], own.get(part, 0.0), _PART_COLOURS[part]) for part in used])
        for rank, own in enumerate(ranks[:_RANKS])
    ]
    planned = numbers(facts.plan.get("time")) if facts.is_predicted else {}
    caption = "measured, a mean of all logs but the first"
    if planned:
        rows.insert(0, Bar("planned", _planned_parts(planned)))
        caption += "; planned: what the planner predicts for this layout"
    yield _figure(
        "time", "Where a step's time goes", bars("time", [rows], "seconds per step"), caption + _more(len(ranks))
    )


def _planned_parts(planned: dict[str, float]) -> list[tuple[str, float, int]]:
    """The planner's kinds under the names of what is measured."""
    found = dict.fromkeys(PARTS, 0.0)
    parts = {COMPUTE: "compute", BUBBLE: "pp", OTHER: "rest"}
    for kind, seconds in planned.items():
        term, axis = term_of(kind), kind.partition(" ")[0]
        part = (axis if axis in ("tp", "cp", "ep") else "dp") if term == COMMUNICATION else parts[term]
        found[part] += seconds
    return [(PARTS[part], seconds, _PART_COLOURS[part]) for part, seconds in found.items() if seconds > 0]


def memory(facts: Facts) -> Iterator[str]:
    """What the planner counts by kind, beside what each rank has measured."""
    on_cpu = facts.run.get("device") == "cpu"
    kinds = numbers(facts.plan.get("memory"))
    left_out = _DEVICE_ONLY if on_cpu else _OUTSIDE
    kept = [(kind, size) for kind, size in kinds.items() if size > 0 and kind not in left_out]
    planned = [Bar("planned", [(kind, size, place) for place, (kind, size) in enumerate(kept)])] if kept else []
    measured = [_held(rank, own, on_cpu) for rank, own in enumerate(facts.ranks[:_RANKS]) if own.get("memory_peak")]
    groups = [rows for rows in ([planned, measured] if on_cpu else [[*planned, *measured]]) if rows]
    if not groups:
        return
    caption = (
        "planned: tensors of the fullest rank by kind; measured on a CPU: the whole process, libraries included"
        if on_cpu
        else "the fullest moment; planned: of the fullest rank, without what torch's allocator does not see"
    )
    yield _figure("memory", "Memory", bars("memory", groups, "GiB"), caption + _more(len(facts.ranks)))


def _held(rank: int, own: dict[str, float], on_cpu: bool) -> Bar:
    peak, reserved = own.get("memory_peak", 0.0) / _GIB, own.get("memory_reserved", 0.0) / _GIB
    if on_cpu:
        return Bar(f"rank {rank}", [("process, measured", peak, 6)])
    return Bar(f"rank {rank}", [("tensors, measured", peak, 6), ("reserved", max(0.0, reserved - peak), 8)])


def _more(ranks: int) -> str:
    return f"; ranks 0 to {_RANKS - 1} of {ranks}" if ranks > _RANKS else ""
