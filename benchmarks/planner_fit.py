"""Fits one set of efficiencies per type of GPU to published step times: few parameters, a prior, a random search."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import random
import statistics
import time
from collections import Counter
from unittest import mock

from benchmarks import published
from hf_parallel.planner import Job, Layout, Prediction
from hf_parallel.planner.hardware import Efficiency, find_gpu
from hf_parallel.planner.pipeline import make_stages, pace_of_1f1b, stages_of_rank

#: The module: its package has a function of that name.
predict = importlib.import_module("hf_parallel.planner.predict")

TYPES = ("a100-80gb", "h100-80gb")  # each with efficiencies of its own
#: Where a fit starts and what it is drawn to, and the range of each parameter. What is not here is not fitted.
PRIOR = {
    "gemm": (0.78, 0.4, 1.0),
    "eight_bit": (0.8, 0.5, 1.0),
    "waves": (0.5, 0.0, 8.0),
    "depth": (100.0, 0.0, 600.0),
    "misaligned": (0.7, 0.4, 1.0),
    "attention": (0.4, 0.1, 0.9),
    "passes": (1.6, 1.0, 4.0),
    "link": (0.75, 0.3, 0.95),
    "network": (0.7, 0.2, 0.95),
    "contention": (0.15, 0.0, 0.6),
    "hidden_gradients": (0.2, 0.0, 1.0),
    "wait_us": (100.0, 0.0, 3000.0),
    "step_ms": (10.0, 0.0, 60.0),
    "node_noise": (0.005, 0.0, 0.03),
}
_PULL = 0.004  # of the prior, for a parameter at the other end of its range
_RANKING = 0.8  # weight of the order within BLOOM's groups beside the sizes of errors


def gpu_family(rows: list[published.Row], gpu: str) -> list[published.Row]:
    """Rows on GPUs with the efficiencies of `gpu`: A100 with 40 and 80 GB are one type."""
    if gpu.startswith("a100"):
        return [row for row in rows if row["gpu_type"].startswith("A100")]
    return [row for row in rows if find_gpu(row["gpu_type"]).name == gpu]


def fit(gpu: str, rows: list[published.Row], seconds: float, seed: int = 0) -> dict[str, float]:
    """The efficiencies with the smallest loss that a random search finds."""
    rng, found = random.Random(seed), {name: values[0] for name, values in PRIOR.items()}
    weights = _weights(rows)
    best, end, spread = _loss(rows, weights, found), time.monotonic() + seconds, dict.fromkeys(PRIOR, 0.25)
    while time.monotonic() < end:
        name = rng.choice(list(PRIOR))
        _, low, high = PRIOR[name]
        value = min(high, max(low, found[name] + rng.gauss(0, spread[name]) * (high - low)))
        loss = _loss(rows, weights, {**found, name: value})
        if loss < best:
            best, found[name] = loss, value
        spread[name] = min(0.4, spread[name] * 1.5) if loss == best else max(0.02, spread[name] * 0.85)
    return found


def leave_one_out(rows: list[published.Row], seconds: float) -> None:
    """Fit without each series, print the errors on it, and at the end those of all rows so predicted."""
    every: list[tuple[published.Row, float]] = []
    for gpu in TYPES:
        family = gpu_family(rows, gpu)
        for name in sorted({row["series"] for row in family}):
            others = [row for row in family if row["series"] != name]
            left = [row for row in family if row["series"] == name]
            every += _print(f"{gpu:<12}{name}", left, fit(gpu, others, seconds) if others else {})
    _summarise("all left out", every)
    for name, found in published.by_series(every).items():
        print(f"  {name:<28}{len(found):4} rows  median {statistics.median(map(abs, found)):.1%}")


def leave_out_of_mixtures(dense: list[published.Row], mixtures: list[published.Row], seconds: float) -> None:
    """Each series of mixtures by efficiencies that were fitted on the dense rows of other series."""
    every: list[tuple[published.Row, float]] = []
    family = gpu_family(dense, "h100-80gb")
    fitted = functools.cache(
        lambda left_out: fit("h100-80gb", [row for row in family if row["series"] != left_out], seconds)
    )
    dense_too = {row["series"] for row in family}
    for name in sorted({row["series"] for row in mixtures}):
        values = fitted(name if name in dense_too else None)
        every += _print(f"mixtures    {name}", [row for row in mixtures if row["series"] == name], values)
    _summarise("mixtures    all left out", every)


def transfer(rows: list[published.Row]) -> None:
    """The other type's efficiencies: what to expect of a GPU that nobody published runs on."""
    for gpu, other in (TYPES, TYPES[::-1]):
        values = dataclasses.asdict(find_gpu(other).efficiency)
        _print(f"{gpu} with the efficiencies of {other}", gpu_family(rows, gpu), values)


def _print(name: str, rows: list[published.Row], values: dict[str, float]) -> list[tuple[published.Row, float]]:
    errors = _log_errors(rows, values)
    found = [(row, math.expm1(error)) for row, error in zip(rows, errors, strict=True)]
    _summarise(name, found)
    return found


def _summarise(name: str, found: list[tuple[published.Row, float]]) -> None:
    s, bias = published.summary(found), statistics.median(error for _, error in found)
    order = _order(found)
    said = "" if order is None else f", median Spearman {order:.2f}"
    line = f"median {s['median']:.1%}, 90th percentile {s['p90']:.1%}, bias {bias:+.1%}{said}"
    print(f"{name:<48}{len(found):4} rows: {line}", flush=True)


def _order(found: list[tuple[published.Row, float]]) -> float | None:
    """Rank correlation in the median group of BLOOM's prequel, if it is among the rows."""
    seconds = {id(row): row["step_time_s"] * (1 + error) for row, error in found}
    groups = published.groups_of_ranking([row for row, _ in found])
    each = [published.ranking(group, lambda row: seconds[id(row)])[0] for group in groups]
    return statistics.median(each) if each else None


def _log_errors(rows: list[published.Row], values: dict[str, float]) -> list[float]:
    efficiency = dataclasses.replace(Efficiency(), **values)
    with mock.patch.object(predict, "pipeline_seconds", _as_1f1b):
        return [math.log(_seconds(_asked(i, rows), efficiency) / rows[i]["step_time_s"]) for i in range(len(rows))]


def _asked(index: int, rows: list[published.Row]) -> Prediction:
    """What a row asks for, read once."""
    row = rows[index]
    if id(row) not in _READ:
        _READ[id(row)] = published.call(row)
    return _READ[id(row)]


_READ: dict[int, Prediction] = {}


def predicted_seconds(row: published.Row, efficiency: Efficiency) -> float:
    """Return the seconds of a row's step with other efficiencies of its GPU."""
    return _seconds(_asked(0, [row]), efficiency)


def _seconds(asked: Prediction, efficiency: Efficiency) -> float:
    gpu = dataclasses.replace(asked.cluster.gpu, efficiency=efficiency)
    cluster = dataclasses.replace(asked.cluster, gpu=gpu)
    stages = make_stages(asked.shape, asked.layout, asked.job)
    return predict.step_time(stages, asked.layout, asked.job, cluster).seconds


def _as_1f1b(layout: Layout, job: Job, stages: list[tuple[float, float]], sending: float) -> tuple[float, float]:
    """The simulation in closed form, for a search of hundreds of steps; near where the slowest stage sets the pace."""
    busy = [sum(sum(stages[s]) for s in stages_of_rank(layout, rank)) for rank in range(layout.pp)]
    if layout.pp == 1:
        return job.micro_batches * busy[0], 0.0
    one_way = sum(busy) / layout.virtual_stages + 2 * (layout.pp - 1) * sending
    pace = pace_of_1f1b(busy, sending) if layout.virtual_stages == 1 else max(busy)
    return one_way + (job.micro_batches - 1 / layout.virtual_stages) * pace, 0.0


def _weights(rows: list[published.Row]) -> list[float]:
    """A series counts by less than its number of rows, so that the longest does not decide alone."""
    sizes = Counter(row["series"] for row in rows)
    return [max(4, sizes[row["series"]]) ** -0.6 for row in rows]


def _loss(rows: list[published.Row], weights: list[float], values: dict[str, float]) -> float:
    errors = dict(zip(map(id, rows), _log_errors(rows, values), strict=True))
    total = sum(w * min(abs(errors[id(row)]), 0.5) ** 1.3 for w, row in zip(weights, rows, strict=True)) / sum(weights)
    spread = [[errors[id(row)] for row in group] for group in published.groups_of_ranking(rows)]
    if spread:
        order = (statistics.mean(abs(e - statistics.median(group)) for e in group) for group in spread)
        total += _RANKING * sum(order) / len(spread)
    return total + _PULL * sum(((values[name] - at) / (high - low)) ** 2 for name, (at, low, high) in PRIOR.items())
