"""What the planner expects of the layout in force, and by how much the run differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hf_parallel.axes.pipeline.schedules import micro_batch_count
from hf_parallel.config import ParallelConfig
from hf_parallel.monitor.figures import RankRow, significant
from hf_parallel.planner.candidates import Goal
from hf_parallel.planner.choices import predicted
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.memory import GIB, fullest
from hf_parallel.planner.predict import Prediction
from hf_parallel.planner.shape import ModelShape

#: How far step time or memory may be from the plan before a line says so.
TOLERATED = 0.15
TERMS = COMPUTE, COMMUNICATION, BUBBLE, OTHER = ("compute", "communication", "bubble", "other")
_COMMUNICATION = ("gradients' reduction", "gathering updated weights")
_OTHER = ("optimizer", "host, per step", "stragglers", "gradients to the host")


@dataclass(frozen=True)
class Batch:
    """What a data rank trains on in one step: `calls` of the model with `rows` of `seq` tokens, and how."""

    rows: int
    calls: int
    seq: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: int = 0


def expect(shape: ModelShape, config: ParallelConfig, cluster: Cluster, batch: Batch) -> Prediction:
    """The planner's prediction of a step.

    Raises:
        SpecError: a batch that the layout's pipeline cannot cut.
    """
    pieces = micro_batch_count(batch.rows, config) if config.pp_size > 1 else 1
    goal = Goal(shape, cluster, batch.seq, None, batch.precision, batch.optimizer, batch.lora, batch.rows, batch.calls)
    return predicted(goal, config, batch.rows // pieces).prediction


def terms(kinds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a prediction's kinds, by what the monitor measures."""
    found = dict.fromkeys(TERMS, 0.0)
    for kind, seconds in kinds.items():
        found[term_of(kind)] += seconds
    return found


def term_of(kind: str) -> str:
    """Which of them a kind of a prediction's seconds belongs to."""
    if kind == BUBBLE:
        return kind
    if "communication" in kind or kind in _COMMUNICATION:
        return COMMUNICATION
    return OTHER if kind in _OTHER else COMPUTE


def measured_terms(rows: list[RankRow]) -> dict[str, float]:
    """The same of what was measured, data among the rest: of the mean rank, in seconds of a step."""
    parts = {"compute": "compute", "communication": "communication", "bubble": "pp", "other": "rest", "data": "data"}
    return {name: sum(getattr(row, part) for row in rows) / len(rows) for name, part in parts.items()}


def described(prediction: Prediction, config: ParallelConfig, batch: Batch) -> dict[str, object]:
    """JSON-ready: what the record carries, and what calibration starts from."""
    parts = prediction.breakdown
    rates = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "bubble")
    return {
        "spec": config.to_spec(),
        "batch": dataclasses.asdict(batch),
        **{name: significant(getattr(prediction, name)) for name in rates},
        "tensors_gib": significant(_tensors(prediction)),
        "terms": {name: significant(seconds) for name, seconds in terms(parts.time).items()},
        "time": {name: significant(seconds) for name, seconds in parts.time.items()},
        "memory": {name: significant(size) for name, size in parts.memory.items()},
        "bytes_by_axis": parts.bytes_by_axis,
        "cluster": dataclasses.asdict(prediction.cluster),
    }


def _tensors(prediction: Prediction) -> float:
    return fullest(list(prediction.breakdown.ranks)).tensors / GIB


def deviations(prediction: Prediction, rows: list[RankRow]) -> list[str]:
    """Lines about step time and memory that are further from the plan than tolerated, with the term that is off."""
    lines = []
    step, planned = max(row.step for row in rows), prediction.step_time_s
    if _is_off(step, planned):
        term, own, expected = _furthest(terms(prediction.breakdown.time), measured_terms(rows))
        lines.append(
            f"a step takes {step:.3g} s, planned {planned:.3g} s ({step / planned - 1:+.0%}); most of the "
            f"difference is {term}: {own:.3g} s, planned {expected:.3g} s"
        )
    peak, tensors = max(row.memory_peak for row in rows) / GIB, _tensors(prediction)
    if _is_off(peak, tensors):
        lines.append(f"tensors take {peak:.3g} GiB, planned {tensors:.3g} GiB ({peak / tensors - 1:+.0%})")
    return lines


def _is_off(measured: float, planned: float) -> bool:
    return planned > 0 and abs(measured / planned - 1) > TOLERATED


def _furthest(planned: Mapping[str, float], measured: Mapping[str, float]) -> tuple[str, float, float]:
    term = max(measured, key=lambda name: abs(measured[name] - planned.get(name, 0.0)))
    return term, measured[term], planned.get(term, 0.0)
