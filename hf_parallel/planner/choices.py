"""What a search is asked for and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_parallel.config import ParallelConfig, not_built
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.memory import GIB
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.predict import Prediction


@dataclass(frozen=True)
class Choice:
    """A layout with its batch: `rows` of one call of the model on a data rank, `accumulation` calls per step."""

    config: ParallelConfig
    prediction: Prediction
    rows: int
    accumulation: int
    warnings: tuple[str, ...] = ()

    @property
    def not_built(self) -> list[str]:
        """Its settings that this version does not run, as `cp_size=4`."""
        return [spelled for spelled, _ in not_built(self.config)]

    @property
    def needed_gib(self) -> float:
        """What the fullest rank must have; its allocator may hold more, which it gives back before it fails."""
        return max(rank.needed for rank in self.prediction.breakdown.ranks) / GIB

    @property
    def step_time_s(self) -> float:
        """Predicted seconds per optimizer step."""
        return self.prediction.step_time_s

    @property
    def seconds_per_row(self) -> float:
        """Predicted seconds per step over all rows of it: what layouts are ranked by."""
        return self.prediction.step_time_s / (self.rows * self.accumulation * self.config.data_parallel_size)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        p = self.prediction
        return {
            "spec": self.config.to_spec(),
            "not_run_by_this_version": self.not_built,
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "step_time_s": p.step_time_s,
            "uncertainty": p.uncertainty,
            "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
            "mfu": p.mfu,
            "memory_gib": p.memory_gib,
            "needed_gib": self.needed_gib,
            "fits": p.fits,
            "bubble": p.bubble,
            "memory": p.breakdown.memory,
            "time": p.breakdown.time,
            "bytes_by_axis": p.breakdown.bytes_by_axis,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first; what else one would expect and why it is not first; how many were looked at.

    `beyond`: lines about layouts that this version does not run and that would be much better.
    """

    shape: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int | None
    choices: list[Choice]
    best: Choice | None = None  # the fastest that this version runs
    why_not: list[tuple[str, str]] = field(default_factory=list)
    looked_at: int = 0
    advice: str = ""  # if nothing fits
    beyond: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # of the plan as a whole

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "gpus_per_node": self.cluster.per_node,
            "seq": self.seq,
            "global_batch": self.global_batch,
            "layouts_looked_at": self.looked_at,
            "layouts": [choice.to_dict() for choice in self.choices],
            "why_not": dict(self.why_not),
            "advice": self.advice,
            "not_run_by_this_version": self.beyond,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Goal:
    """What every candidate has in common. Without a `global_batch` it follows from `rows` and `accumulation`."""

    shape: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int | None
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: int = 0
    rows: int | None = None  # of a call, if the script fixes it
    accumulation: int = 1  # calls per step, where the script fixes both

    def share(self, config: ParallelConfig) -> int | None:
        """Rows per step of one data rank; None: the batch does not divide."""
        ranks = config.data_parallel_size
        if self.global_batch is None:
            return (self.rows or 1) * self.accumulation
        return None if self.global_batch % ranks else self.global_batch // ranks
