"""What an axis says about itself, so that nobody else has to name it.

An axis is one module with the same parts: its spec keys, what it refuses, what it reads of a model, what it will do
to it (its part of the plan), and the doing. A setting of every layer, such as the attention kernel, is an axis
without ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.axes.pipeline.engine import PipelineEngine
    from hf_parallel.axes.tensor.region import SequenceParallelFlag
    from hf_parallel.config import ParallelConfig
    from hf_parallel.mesh import ParallelMesh
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.resolve import Plan

Batch = dict[str, Any]  # what a model is called with, by name
Value = TypeVar("Value")
Facts = TypeVar("Facts")  # what an axis reads of a model
Part = TypeVar("Part")  # what an axis will do: its part of the plan


def key(default: Value, doc: str, choices: tuple[object, ...] = (), shown: str | None = None) -> Value:
    """A spec key: a dataclass field with what the parser, the README's table and the planner need to know of it.

    Args:
        doc: the line of the README's table.
        choices: all values, where they can be listed.
        shown: how the table names the default.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "shown": shown})


@dataclass(frozen=True)
class MeshAxis:
    """A named axis of the mesh.

    `distance`: how far apart its ranks may sit; 0 is inside a node, the largest crosses the slowest links.
    `data`: its ranks see different batches. `cuts`: its ranks hold slices of one parameter, whose norm is summed over
    them. `layers`: its ranks hold different parameters. `shards`: FSDP2 shards what its ranks hold alike over them.
    """

    name: str
    distance: int
    data: bool = False
    cuts: bool = False
    layers: bool = False
    shards: bool = False


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
    pipeline: PipelineEngine | None = None


class Axis(Generic[Facts, Part]):
    """One axis. Each method has a neutral default; none but `apply` and `finish` changes anything.

    `check`, `read` and `resolve` raise SpecError; `apply` and `finish` never do.
    """

    name: ClassVar[str]
    mesh_axes: ClassVar[tuple[MeshAxis, ...]] = ()
    inside: ClassVar[bool] = False  # does it cut a model inside, so that it must be one of transformers?
    alone: ClassVar[bool] = False  # do its keys hold in one process too?

    def check(self, config: ParallelConfig) -> None:
        """Refuse values of its keys that hold for no model."""

    def sized(self, config: ParallelConfig) -> ParallelConfig:
        """The config once all sizes are known, with sizes that follow from settings."""
        return config

    def is_on(self, config: ParallelConfig) -> bool:
        """Does this config make the axis do anything?"""
        return any(getattr(config, f"{axis.name}_size") != 1 for axis in self.mesh_axes)

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


class Keys:
    """Base of the dataclasses that hold an axis's spec keys; `ParallelConfig` inherits from all of them."""

    axis: ClassVar[Axis]
