"""Sizes of the mesh: the number of processes along each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

Value = TypeVar("Value")

#: All axes over which FSDP2 shards, as one dim of a parameter's mesh.
SHARDS = "shards"


def key(default: Value, doc: str, choices: tuple[object, ...] = (), shown: str | None = None) -> Value:
    """Declare a spec key: a dataclass field that the parser, the table of docs/keys.md and the planner read.

    Args:
        doc: its line in the table of docs/keys.md.
        choices: all values, where they can be listed.
        shown: how the table names the default.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "shown": shown})


@dataclass(frozen=True)
class MeshAxis:
    """A named axis of the mesh.

    Attributes:
        data: its ranks see different batches.
        cuts: its ranks hold slices of one parameter, whose norm is summed over them.
        layers: its ranks hold different parameters.
        shards: FSDP2 shards over it what all its ranks hold.
    """

    name: str
    data: bool = False
    cuts: bool = False
    layers: bool = False
    shards: bool = False


#: From slow links to fast links: replicas across nodes, tensor parallelism inside one.
MESH_AXES = (
    MeshAxis("dp_replicate", data=True),
    MeshAxis("pp", layers=True),
    MeshAxis("dp_shard", data=True, cuts=True, shards=True),
    MeshAxis("cp", cuts=True, shards=True),
    MeshAxis("tp", cuts=True),
)


class Keys:
    """Base of the dataclasses that hold spec keys; `ParallelConfig` inherits from all of them.

    A class that inherits from another one reads its keys in its own checks.

    Attributes:
        holds_alone: do the keys that the class itself declares have a meaning in one process, too?
    """

    mesh_axes: ClassVar[tuple[MeshAxis, ...]] = MESH_AXES
    holds_alone: ClassVar[bool] = False

    def check_keys(self) -> None:
        """Raise SpecError for values that cannot work with any model."""


@dataclass(frozen=True)
class Sizes(Keys):
    """The size of each mesh axis. 1 switches an axis off; the one axis of size -1 takes the remaining processes."""

    dp_replicate_size: int = key(1, "copies of the model that see different batches")
    dp_shard_size: int = key(-1, "ranks that share parameters, gradients and optimizer (FSDP2)")
    pp_size: int = key(1, "pipeline stages: consecutive layers on different ranks")
    cp_size: int = key(1, "ranks that share every sequence; weights are sharded over `dp_shard` x `cp`")
    tp_size: int = key(1, "ranks that split every layer, the embedding and the head")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each mesh axis, slow links first."""
        return {axis.name: getattr(self, f"{axis.name}_size") for axis in self.mesh_axes}

    @property
    def world_size(self) -> int:
        """Return the number of processes of a resolved config."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Return the number of data ranks: different batches in one step. Needs a resolved config."""
        return math.prod(self.sizes[axis.name] for axis in self.mesh_axes if axis.data)

    @property
    def sharing_size(self) -> int:
        """Return the number of ranks whose gradients FSDP2 averages: data ranks, and holders of other tokens."""
        return math.prod(self.sizes[axis.name] for axis in self.mesh_axes if axis.data or axis.shards)

    def axes_along(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that make up a dim of a parameter's mesh: the axis itself, or all that shard."""
        return tuple(axis.name for axis in self.mesh_axes if axis.shards) if name == SHARDS else (name,)

    def size_along(self, name: str) -> int:
        """Return the number of ranks along a dim of a parameter's mesh."""
        return math.prod(getattr(self, f"{axis}_size") for axis in self.axes_along(name))
