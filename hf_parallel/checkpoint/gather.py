"""Whole tensors on rank 0, one after the other: every part is sent once, by one of those that hold it.

Through host memory, in a group of its own: training may go on meanwhile, from copies (`saving.py`).

    pp=2,dp_shard=2,tp=2, a weight of the second stage cut into columns and rows:  4 5 6 7  ──a quarter each──>  0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.names import of_stages
from hf_parallel.checkpoint.slices import Part, axes_and_dims, cut_part, place, rows_of
from hf_parallel.config import AXES, ParallelConfig
from hf_parallel.mesh import ParallelMesh, rank_at
from hf_parallel.packed import stored_order


def describe(model: nn.Module, name: str, tensor: Any, stage: int) -> Entry:
    """Where a tensor lies; that of an optimizer, `parameter/slot`, lies as its parameter does."""
    axes = axes_and_dims(tensor)
    names = tensor.device_mesh.mesh_dim_names if axes else ()
    cuts = tuple((names[axis], dim) for axis, dim in axes)
    order = stored_order(model, name.partition("/")[0])
    return Entry(name, tuple(tensor.shape), tensor.dtype, stage, cuts, order)


def entries_of(model: nn.Module, mesh: ParallelMesh, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The tensors of all stages; of one that two stages hold, the first stage's. Collective over stages."""
    own = [describe(model, name, tensor, mesh.index("pp")) for name, tensor in tensors.items()]
    entries: dict[str, Entry] = {}
    for theirs in of_stages(own, mesh):
        for entry in theirs:
            entries.setdefault(entry.name, entry)
    return list(entries.values())


def sends(entry: Entry, mesh: ParallelMesh) -> bool:
    """Is it this rank that hands its part over? Of equal ones the first."""
    cut = {axis for axis, _ in entry.cuts}
    rest = [axis for axis in AXES if axis != "pp" and axis not in cut]
    return entry.stage == mesh.index("pp") and all(mesh.index(axis) == 0 for axis in rest)


def gathered(
    mesh: ParallelMesh, entries: Iterable[Entry], local: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Entry, torch.Tensor | None]]:
    """Whole tensors in the model's own order of rows on rank 0; None elsewhere. Collective.

    Args:
        local: what this rank stores of those that it sends, by name; plain tensors.
    """
    for entry in entries:
        if mesh.rank == 0:
            yield entry, _put_together(entry, mesh, local)
            continue
        if sends(entry, mesh) and local[entry.name].numel():
            dist.send(as_bytes(local[entry.name].cpu()), group=mesh.host_group, group_dst=0)
        yield entry, None


def _put_together(entry: Entry, mesh: ParallelMesh, local: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if not entry.cuts and entry.order is None and entry.stage == 0:
        return local[entry.name].detach().cpu()
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for rank, part in _holders(entry, mesh.config):
        if rank == 0:
            place(whole, part, local[entry.name].detach())
        elif all(map(len, part)):
            _receive(whole, part, rank, mesh.host_group)
    return whole


def _holders(entry: Entry, config: ParallelConfig) -> Iterator[tuple[int, Part]]:
    """The ranks that send, each with its part."""
    sizes = [getattr(config, f"{axis}_size") for axis, _ in entry.cuts]
    for indices in itertools.product(*map(range, sizes)):
        where = {axis: index for (axis, _), index in zip(entry.cuts, indices, strict=True)}
        cuts = [(dim, size, index) for (_, dim), size, index in zip(entry.cuts, sizes, indices, strict=True)]
        yield rank_at(config, {**where, "pp": entry.stage}), cut_part(entry.shape, entry.order, cuts)


def _receive(whole: torch.Tensor, part: Part, rank: int, group: dist.ProcessGroup) -> None:
    rows = rows_of(whole, part)
    buffer = whole.new_empty([len(indices) for indices in part]) if rows is None else rows
    dist.recv(as_bytes(buffer), group=group, group_src=rank)
    if rows is None:
        place(whole, part, buffer)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as one dimension of bytes, in place where they are contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
