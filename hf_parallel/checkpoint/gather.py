"""Whole tensors on the ranks that write them: every part is sent once, by one of those that hold it.

Through host memory, in a group of its own: training may go on meanwhile, from copies (`saving.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.manifest import of_stages
from hf_parallel.checkpoint.slices import Part, axes_and_dims, cut_part, rows_of, write_part
from hf_parallel.checkpoint.writers import Item
from hf_parallel.model.anatomy import stored_order
from hf_parallel.ranks.mesh import ParallelMesh


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


def part_of(entry: Entry, number: int, config: ParallelConfig) -> Part:
    """What the holder with this number has of a tensor."""
    cuts = []
    for axis, dim in reversed(entry.cuts):
        size = config.size_along(axis)
        number, index = divmod(number, size)
        cuts.append((dim, size, index))
    return cut_part(entry.shape, entry.order, reversed(cuts))


def gathered(mesh: ParallelMesh, items: list[Item], local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors, in the model's own order of rows, of the one item that this rank writes. Collective.

    All ranks send before any waits, and none writes for two: so none waits for one that waits for it.

    Args:
        items: one round, in which each has another writer.
        local: what this rank stores of those that it sends, by name; plain tensors.
    """
    group = mesh.host_group  # all ranks make it at its first use, also those that have nothing to send
    under_way = [sent for item in items if item.writer != mesh.rank for sent in _send(item, mesh.rank, group, local)]
    whole: dict[str, torch.Tensor] = {}
    for item in items:
        if item.writer == mesh.rank:
            entries = enumerate(zip(item.group.own, item.holders, strict=True))
            whole = {entry.name: _put_together(tag, entry, ranks, mesh, local) for tag, (entry, ranks) in entries}
    for work, _ in under_way:
        work.wait()
    return whole


def _send(
    item: Item, own: int, group: dist.ProcessGroup, local: Mapping[str, torch.Tensor]
) -> Iterator[tuple[dist.Work, torch.Tensor]]:
    """What is under way, with the memory that it is sent from."""
    for tag, (entry, ranks) in enumerate(zip(item.group.own, item.holders, strict=True)):
        if own in ranks and local[entry.name].numel():
            data = as_bytes(local[entry.name].cpu())
            work = dist.isend(data, group=group, group_dst=item.writer, tag=tag)
            assert work is not None  # all ranks are in the group
            yield work, data


def _put_together(
    tag: int, entry: Entry, holders: tuple[int, ...], mesh: ParallelMesh, local: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if holders == (mesh.rank,) and entry.order is None:
        return local[entry.name].detach().cpu()
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for number, rank in enumerate(holders):
        part = part_of(entry, number, mesh.config)
        if rank == mesh.rank:
            write_part(whole, part, local[entry.name].detach())
        else:
            _receive(whole, part, rank, tag, mesh.host_group)
    return whole


def _receive(whole: torch.Tensor, part: Part, rank: int, tag: int, group: dist.ProcessGroup) -> None:
    if not all(map(len, part)):
        return  # nothing is sent
    rows = rows_of(whole, part)
    buffer = whole.new_empty([len(indices) for indices in part]) if rows is None else rows
    dist.recv(as_bytes(buffer), group=group, group_src=rank, tag=tag)
    if rows is None:
        write_part(whole, part, buffer)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as one dimension of bytes, in place where they are contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
