"""The process groups of one attention: rings, and groups of Ulysses inside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_parallel.axes.context.attention import Exchanged
from hf_parallel.axes.context.layout import Shape
from hf_parallel.ranks.groups import connect_group
from hf_parallel.ranks.mesh import ParallelMesh, list_axis_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

    from hf_parallel.ask.config import ParallelConfig


def build_ways(
    mesh: ParallelMesh, config: ParallelConfig, variants: Iterable[str]
) -> dict[str, tuple[Shape, Exchanged]]:
    """By variant: who holds which tokens, and how ranks attend. Collective over all ranks."""
    found = {}
    for variant in variants:
        one = replace(config, context_parallel=variant)
        found[variant] = Shape(one.cp_size // one.ulysses_size, one.ulysses_size), build_exchange(mesh, one)
    return found


def build_exchange(mesh: ParallelMesh, config: ParallelConfig) -> Exchanged:
    """Return how cp ranks attend. Neighbours share heads; ranks with the same place in their groups form a ring.

    Collective over all ranks.
    """
    size, inner = config.cp_size, config.ulysses_size
    how = config.context_parallel == "allgather", config.attention
    if inner == 1:
        return Exchanged(_ring(mesh, mesh.attention_group), None, *how)
    if inner == size:
        return Exchanged(None, mesh.attention_group, *how)
    all_ranks = list_axis_ranks(config, "cp")
    rings = [ranks[place::inner] for ranks in all_ranks for place in range(inner)]
    groups = [ranks[start : start + inner] for ranks in all_ranks for start in range(0, size, inner)]
    return Exchanged(_ring(mesh, mesh.groups.along(rings)), mesh.groups.along(groups), *how)


def _ring(mesh: ParallelMesh, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Whose ranks send what others see: under windows, and in packs, not each of them sends."""
    connect_group(group, mesh.device)
    return group
