"""Fits one set of efficiencies per type of GPU to published step times: few parameters, a prior, least squares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import statistics
from collections import Counter
from unittest import mock

import numpy

from benchmarks import published
from hf_parallel.planner import Job, Layout, Prediction
from hf_parallel.planner.hardware import Efficiency, find_gpu
from hf_parallel.planner.pipeline import compute_pace_of_1f1b, list_stages_of_rank, make_stages

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
    "taper": (0.3, 0.0, 3.0),
    "contention": (0.15, 0.0, 0.6),
    "hidden_gradients": (0.2, 0.0, 1.0),
    "wait_us": (100.0, 0.0, 3000.0),
    "step_ms": (10.0, 0.0, 60.0),
    "node_noise": (0.005, 0.0, 0.03),
}
_PULL = 0.004  # of the prior, for a parameter at the other end of its range
_RANKING = 0.8  # weight of the order within sweeps beside the sizes of errors
_POWER, _MOST = 1.3, 0.5  # of an error in the loss; a larger error counts as this one


def gpu_family(rows: list[published.Row], gpu: str) -> list[published.Row]:
    """Rows on GPUs with the efficiencies of `gpu`: A100 with 40 and 80 GB are one type."""
    if gpu.startswith("a100"):
        return [row for row in rows if row["gpu_type"].startswith("A100")]
    return [row for row in rows if find_gpu(row["gpu_type"]).name == gpu]


def fit(gpu: str, rows: list[published.Row], rounds: int = 6) -> dict[str, float]:
    """Return the efficiencies with the smallest loss, by Gauss and Newton's method on weighted errors.

    The loss is a sum of |error| ** 1.3: each round solves a least-squares problem in which an error counts by
    |error| ** -0.7. A step that does not lower the loss is halved. The same rows give the same efficiencies.
    """
    names, weights = list(PRIOR), _weights(rows)
    low, width = (numpy.array([PRIOR[n][1] for n in names]), numpy.array([PRIOR[n][2] - PRIOR[n][1] for n in names]))
    prior = (numpy.array([PRIOR[n][0] for n in names]) - low) / width
    at = prior.copy()
    values_of = lambda u: dict(zip(names, low + u * width, strict=True))  # noqa: E731
    residuals = lambda u: _residuals(rows, weights, values_of(u))  # noqa: E731
    now, scales = residuals(at)
    best = _loss(now, scales, at - prior)
    for _ in range(rounds):
        slopes = []
        for place in range(len(names)):
            there = at.copy()
            there[place] += -0.02 if at[place] > 0.5 else 0.02
            slopes.append((residuals(there)[0] - now) / (there[place] - at[place]))
        counts = scales * _POWER / 2 * numpy.maximum(numpy.abs(now), 0.01) ** (_POWER - 2) * (numpy.abs(now) < _MOST)
        jacobian = numpy.array(slopes).T
        left = jacobian.T * counts @ jacobian + _PULL * numpy.eye(len(names))
        move = -numpy.linalg.solve(left, jacobian.T @ (counts * now) + _PULL * (at - prior))
        for size in (1.0, 0.5, 0.25, 0.1):
            there = numpy.clip(at + size * move, 0.0, 1.0)
            found, _ = residuals(there)
            if (loss := _loss(found, scales, there - prior)) < best:
                best, at, now = loss, there, found
                break
        else:
            break
    return {name: float(value) for name, value in values_of(at).items()}


def _residuals(rows: list[published.Row], weights: list[float], values: dict[str, float]) -> tuple:
    """Return errors of rows, then each row's error beside the median of its sweep; and how much each counts."""
    errors = _log_errors(rows, values)
    by_row = dict(zip(map(id, rows), errors, strict=True))
    sweeps = [[by_row[id(row)] for row in group] for group in published.groups_of_ranking(rows)]
    beside = [error - statistics.median(sweep) for sweep in sweeps for error in sweep]
    counts = [weight / sum(weights) for weight in weights]
    counts += [_RANKING / len(sweeps) / len(sweep) for sweep in sweeps for _ in sweep]
    return numpy.array([*errors, *beside]), numpy.array(counts)


def _loss(errors: numpy.ndarray, counts: numpy.ndarray, from_prior: numpy.ndarray) -> float:
    """Return the loss: an error above `_MOST` counts no more than that."""
    sizes = numpy.minimum(numpy.abs(errors), _MOST) ** _POWER
    return float((counts * sizes).sum() + _PULL * (from_prior**2).sum())


def leave_one_out(rows: list[published.Row]) -> None:
    """Fit without each series, print the errors on it, and at the end those of all rows so predicted."""
    every: list[tuple[published.Row, float]] = []
    for gpu in TYPES:
        family = gpu_family(rows, gpu)
        for name in sorted({row["series"] for row in family}):
            others = [row for row in family if row["series"] != name]
            left = [row for row in family if row["series"] == name]
            every += _print(f"{gpu:<12}{name}", left, fit(gpu, others) if others else {})
    _summarise("all left out", every)
    for name, found in published.by_series(every).items():
        print(f"  {name:<28}{len(found):4} rows  median {statistics.median(map(abs, found)):.1%}")


def leave_out_of_mixtures(dense: list[published.Row], mixtures: list[published.Row]) -> None:
    """Each series of mixtures by efficiencies that were fitted on the dense rows of other series."""
    every: list[tuple[published.Row, float]] = []
    family = gpu_family(dense, "h100-80gb")
    fitted = functools.cache(lambda left_out: fit("h100-80gb", [row for row in family if row["series"] != left_out]))
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
    with mock.patch.object(predict, "compute_pipeline_seconds", _as_1f1b):
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
    busy = [sum(sum(stages[s]) for s in list_stages_of_rank(layout, rank)) for rank in range(layout.pp)]
    if layout.pp == 1:
        return job.micro_batches * busy[0], 0.0
    one_way = sum(busy) / layout.virtual_stages + 2 * (layout.pp - 1) * sending
    pace = compute_pace_of_1f1b(busy, sending) if layout.virtual_stages == 1 else max(busy)
    return one_way + (job.micro_batches - 1 / layout.virtual_stages) * pace, 0.0


def _weights(rows: list[published.Row]) -> list[float]:
    """A series counts by less than its number of rows, so that the longest does not decide alone."""
    sizes = Counter(row["series"] for row in rows)
    return [max(4, sizes[row["series"]]) ** -0.6 for row in rows]
