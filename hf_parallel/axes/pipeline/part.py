"""The facts that a pipeline needs of a model, and what it will do to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.keys.pipeline import SPLIT_BACKWARD
from hf_parallel.axes.pipeline.balance import Costs
from hf_parallel.model.families import Backbone

if TYPE_CHECKING:
    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.ranks.devices import Device


@dataclass(frozen=True)
class StageFacts:
    """`refusal`: why the model cannot be cut; then nothing else is known. Names are full ones."""

    refusal: str | None = None
    backbone: str = ""
    plan: Backbone = Backbone((), "", ())
    costs: Costs | None = None
    tied_embedding: str | None = None  # the embedding's name, if the head has its weight
    devices: tuple[Device, ...] | None = None  # of each pipeline rank, where they are measured

    @property
    def layers(self) -> str:
        """The name of the list of layers."""
        return f"{self.backbone}.{self.plan.layers}"


@dataclass(frozen=True)
class PipelinePart:
    """The part of pp in a plan. `config`: with the schedule chosen; `layers_per_stage`: in order of the stages."""

    config: ParallelConfig
    layers_per_stage: tuple[int, ...]
    tied: bool  # embedding and head share their weight
    sums_over_tokens: bool  # micro-batch losses add up to the loss of the batch
    facts: StageFacts
    line: str  # how the layers are shared out, for people


def does_recompute_in_parts(config: ParallelConfig, schedule: str) -> bool:
    """Return whether each part of the backward pass recomputes checkpointed layers, which costs more than a bubble."""
    return config.recompute_way != "none" and schedule in SPLIT_BACKWARD


def list_layer_ranges(part: PipelinePart) -> list[tuple[int, int]]:
    """Return the first layer and the last layer + 1 of each stage."""
    ends = list(itertools.accumulate(part.layers_per_stage))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def find_holding_stages(part: PipelinePart, name: str) -> set[int]:
    """Return the stages that hold the module or parameter of this full name."""
    facts, last = part.facts, part.config.pipeline_stages - 1
    if name.startswith(f"{facts.layers}."):
        layer = int(name.removeprefix(f"{facts.layers}.").partition(".")[0])
        return {next(i for i, (_, end) in enumerate(list_layer_ranges(part)) if layer < end)}
    if facts.tied_embedding is not None and f"{name}.".startswith(f"{facts.tied_embedding}."):
        return {0, last}  # a tied head keeps the embedding beside it: the shared parameter's home
    before = tuple(f"{facts.backbone}.{child}." for child in facts.plan.before)
    return {0} if f"{name}.".startswith(before) else {last}
