"""Writers: which rank writes which tensor, and sending it the parts. All ranks compute the same answer.

A tensor of which each rank holds long runs of rows is written by all of them, each its own rows at their place in the
file. One that is cut otherwise is written whole by one rank, to which the others send their parts. Of equal copies,
as replicas hold them, one is taken. Each time it is the turn of those that have least to write so far.

    dp_shard=4, (4096, 1024)           0 1 2 3 write 1024 rows each; nothing is sent
    tp=4, (1024, 4096) in columns      0 1 3  ──a quarter each──>  2, which writes it; the next one goes to another
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.checkpoint.hub_format import Entry, Group
from hf_parallel.checkpoint.slices import Part, cut_part, find_runs, view_rows_of, write_part
from hf_parallel.ranks import messages
from hf_parallel.ranks.groups import read_machine_id
from hf_parallel.ranks.mesh import ParallelMesh, compute_coordinates, list_axis_ranks

#: Bytes from which on a run of rows is worth a write of its own, by the rank that holds it.
LONG = 1 << 20
#: File systems on which machines may write to one file at a time. Clients of others (NFS, FUSE) write whole pages.
_COHERENT = {"lustre", "gpfs", "ceph", "beegfs", "panfs", "wekafs", "gfs2", "ocfs2", "pvfs2"}


@dataclass(frozen=True)
class Item:
    """Tensors that are written together.

    Attributes: `writer`, None if every rank writes its own rows; `holders`, of each tensor in `group.own` the ranks
    whose parts are taken, in the order of the parts.
    """

    group: Group
    writer: int | None
    holders: tuple[tuple[int, ...], ...]

    def held_by(self, rank: int) -> list[Entry]:
        """Return the tensors of which this rank's part is taken."""
        return [entry for entry, ranks in zip(self.group.own, self.holders, strict=True) if rank in ranks]


def assign_items(groups: Iterable[Group], writers: Iterable[int], config: ParallelConfig) -> list[Item]:
    """Assign all there is to write to these ranks, the largest first."""
    load = dict.fromkeys(writers, 0)
    items = []
    for group in sorted(groups, key=lambda group: -group.nbytes):
        item = _make_item_of_own_rows(group, load, config) or choose_one_writer(group, load, config)
        takers = item.holders[0] if item.writer is None else (item.writer,)
        for rank in takers:
            load[rank] += group.nbytes // len(takers)
        items.append(item)
    return items


def order_in_rounds(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Order the items that one rank writes whole so that all ranks write at once: one item per rank and round."""
    queues: dict[int, list[Item]] = {}
    for item in items:
        if item.writer is not None:
            queues.setdefault(item.writer, []).append(item)
    return ([item for item in found if item is not None] for found in zip_longest(*queues.values()))


def _make_item_of_own_rows(group: Group, load: dict[int, int], config: ParallelConfig) -> Item | None:
    """Let all who hold a tensor write their rows, if these are long and whoever holds them may write."""
    entry = group.own[0]
    if group.conversion is not None or any(dim for _, dim in entry.cuts) or (entry.order and entry.order.dim):
        return None
    if entry.cuts or entry.order is not None:
        cuts = [(0, config.size_along(axis), 0) for axis, _ in entry.cuts]
        (rows,) = cut_part(entry.shape[:1], entry.order, cuts)
        if len(rows) * (entry.nbytes // max(1, entry.shape[0])) < LONG * len(find_runs(rows)):
            return None
    able = [ranks for ranks in _list_copies(config, entry.stage, entry.cuts) if load.keys() >= set(ranks)]
    return Item(group, None, (min(able, key=lambda ranks: load[ranks[0]]),)) if able else None


def choose_one_writer(group: Group, load: dict[int, int], config: ParallelConfig) -> Item:
    """Choose a rank that holds a part, if one may write, and for each tensor the copy it has, if it has one.

    Args:
        load: the bytes that each rank which may write has to write so far.
    """
    copies = [_list_copies(config, entry.stage, entry.cuts) for entry in group.own]
    holders = [rank for ranks in copies[0] for rank in ranks if rank in load]
    writer = min(holders or load, key=lambda rank: load[rank])
    nearest = (next((ranks for ranks in own if writer in ranks), own[writer % len(own)]) for own in copies)
    return Item(group, writer, tuple(nearest))


@functools.lru_cache(maxsize=256)
def _list_copies(config: ParallelConfig, stage: int, cuts: tuple[tuple[str, int], ...]) -> list[tuple[int, ...]]:
    """Return the ranks of a stage in groups that hold a tensor once; the last axis of its cuts is innermost."""
    groups = list_axis_ranks(config, *(axis for axis, _ in cuts))
    return [tuple(ranks) for ranks in groups if compute_coordinates(config, ranks[0])["pp"] == stage]


def find_writing_ranks(mesh: ParallelMesh, directory: str) -> list[int]:
    """Return the ranks that see rank 0's folder and can write there. Collective, in the host group."""
    marker, machine = messages.send_from_one(lambda: (_put_marker(directory), read_machine_id()), mesh.host_group)
    found = messages.gather_objects(mesh.rank == 0 or _does_see_marker(directory, marker, machine), mesh.host_group)
    if mesh.rank == 0 and marker is not None:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(directory, marker))
    return [rank for rank, sees in enumerate(found) if sees]


def _put_marker(directory: str) -> str | None:
    """Write a file whose name no other folder has; None if that fails, which the save itself will report."""
    name = f"_hf_parallel-{secrets.token_hex(8)}"
    try:
        with open(os.path.join(directory, name), "x"):
            return name
    except OSError:
        return None


def _does_see_marker(directory: str, marker: str | None, machine: str) -> bool:
    if marker is None or not os.access(os.path.join(directory, marker), os.W_OK):
        return False
    return machine == read_machine_id() or _read_file_system(directory) in _COHERENT


def _read_file_system(directory: str) -> str:
    """Return the type of the file system, as the kernel names it; empty where the kernel does not tell."""
    path, longest, found = os.path.join(os.path.realpath(directory), ""), 0, ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:  # of two that are mounted at one place the later one is in use
            escaped, kind = line.split()[1:3]
            place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), escaped)  # such as \040, a space
            if path.startswith(os.path.join(place, "")) and len(place) >= longest:
                longest, found = len(place), kind
    return found


def compute_part_of(entry: Entry, number: int, config: ParallelConfig) -> Part:
    """Return the part of a tensor that the holder with this number has."""
    cuts = []
    for axis, dim in reversed(entry.cuts):
        size = config.size_along(axis)
        number, index = divmod(number, size)
        cuts.append((dim, size, index))
    return cut_part(entry.shape, entry.order, reversed(cuts))


def gather_item(mesh: ParallelMesh, items: list[Item], local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the one item that this rank writes, rows in the model's order. Collective.

    All ranks send before any rank receives, and no rank writes two items, so no two wait for each other. Transfers go
    through host memory, in a group of their own: training may go on meanwhile, from copies (`saving.py`).

    Args:
        items: one round, in which each has another writer.
        local: this rank's parts of the tensors that it sends, by name; plain tensors.
    """
    group = mesh.host_group  # all ranks make it at its first use, also those that have nothing to send
    under_way: list[tuple[dist.Work, torch.Tensor]] = []  # with the memory that each is sent from
    for item in items:
        if item.writer == mesh.rank:
            continue
        for tag, (entry, ranks) in enumerate(zip(item.group.own, item.holders, strict=True)):
            if mesh.rank in ranks and local[entry.name].numel():
                data = view_as_bytes(local[entry.name].cpu())
                work = dist.isend(data, group=group, group_dst=item.writer, tag=tag)
                assert work is not None  # all ranks are in the group
                under_way.append((work, data))
    whole: dict[str, torch.Tensor] = {}
    for item in items:
        if item.writer == mesh.rank:
            entries = enumerate(zip(item.group.own, item.holders, strict=True))
            whole = {entry.name: _put_together(tag, entry, ranks, mesh, local) for tag, (entry, ranks) in entries}
    for work, _ in under_way:
        work.wait()
    return whole


def _put_together(
    tag: int, entry: Entry, holders: tuple[int, ...], mesh: ParallelMesh, local: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if holders == (mesh.rank,) and entry.order is None:
        return local[entry.name].detach().cpu()
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for number, rank in enumerate(holders):
        part = compute_part_of(entry, number, mesh.config)
        if rank == mesh.rank:
            write_part(whole, part, local[entry.name].detach())
        elif all(map(len, part)):  # else nothing is sent
            rows = view_rows_of(whole, part)
            buffer = whole.new_empty([len(indices) for indices in part]) if rows is None else rows
            dist.recv(view_as_bytes(buffer), group=mesh.host_group, group_src=rank, tag=tag)
            if rows is None:
                write_part(whole, part, buffer)
    return whole


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the values as one dimension of bytes; copies only what is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
