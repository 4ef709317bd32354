"""What an axis says about itself, so that nobody else has to name it.

An axis is one module with the same parts: its spec keys, what it refuses, what it reads of a model, what it will do
to it (its part of the plan), and the doing. A setting of every layer, such as the attention kernel, is an axis
without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from hf_parallel.axes.services import PipelinedModel, PipelineServices

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.config import ParallelConfig
    from hf_parallel.mesh import ParallelMesh
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.model.batches import Batch

Facts = TypeVar("Facts")  # what an axis reads of a model
Part = TypeVar("Part")  # what an axis will do: its part of the plan


class Axis(Generic[Facts, Part]):
    """One axis. Each method has a neutral default; none but `apply` and `finish` changes anything.

    `read` and `resolve` raise SpecError; `apply` and `finish` never do.
    """

    name: ClassVar[str]
    inside: ClassVar[bool] = False  # does it cut a model inside, so that it must be one of transformers?

    def is_on(self, config: ParallelConfig) -> bool:
        """Does this config make the axis do anything?"""
        return getattr(config, f"{self.name}_size", 1) != 1

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> Facts | None:
        """What it needs to know of a model, which is not changed."""
        return None

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: Facts) -> Part | None:
        """What it will do to a model with these facts."""
        return None

    def settle(self, config: ParallelConfig, part: Part | None) -> ParallelConfig:
        """The config with what was left open decided."""
        return config

    def notes(self, part: Part) -> list[str]:
        """Lines for the start-up report."""
        return []

    def apply(self, model: nn.Module, part: Part, building: Building) -> None:
        """Do it."""

    def finish(self, model: nn.Module, part: Part, building: Building) -> None:
        """What has to come after every axis has been applied."""


@dataclass(frozen=True)
class Plan:
    """What will be done to a model. `config`: sizes without -1, the schedule chosen.

    `axes`: all axes, in the order in which they are applied. `parts`: what each axis that is on will do, by its name.
    `problems`: what stops it; a plan that `resolve` returned has none.
    """

    config: ParallelConfig
    anatomy: Anatomy
    axes: tuple[Axis, ...]
    parts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def part(self, axis: Axis[Any, Part]) -> Part | None:
        """What this axis will do, or None if it is off."""
        return self.parts.get(axis.name)


@dataclass(eq=False)
class SequenceParallelFlag:
    """Is sequence parallelism on? All of a model shares it, and turns it off while it generates.

    `padding`: in the latest forward pass, the tokens of each sequence, and how many more only fill it up.
    """

    on: bool
    padding: tuple[int, int] = (0, 0)


class Packing(Protocol):
    """Gives a model weights of another kind, between splitting and sharding."""

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse, with a SpecError, what cannot be packed; the model is not changed."""

    def __call__(self, model: PreTrainedModel) -> None:
        """Pack what is split."""


@dataclass
class Building:
    """A model while axes are applied to it: what one leaves for the next."""

    mesh: ParallelMesh
    on_meta: bool  # the weights come later
    roots: list[tuple[nn.Module, list[nn.Module]]]  # what runs layers, and the layers: the model, or each stage
    pack: Packing | None = None
    sequence_flag: SequenceParallelFlag | None = None
    local_length: Callable[[int], int] | None = None  # tokens of a row -> those of it that a cp rank holds
    #: Router logits [rows, own tokens, experts] of a batch -> those of all its tokens, one axis after another.
    whole_tokens: list[Callable[[torch.Tensor, Batch], torch.Tensor]] = field(default_factory=list)
    services: PipelineServices = field(default_factory=PipelineServices)  # what a pipeline engine is given
    pipeline: PipelinedModel | None = None
