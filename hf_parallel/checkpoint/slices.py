"""Which part of a whole tensor this rank stores, and reading just that part.

A part is described by one list of indices per dimension, of the tensor as the model and the Hub know it:

    stored (4, 3), rows cut by tp=2 in the order 0 2 | 1 3          rank 1: [1, 3] x [0, 1, 2]
"""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Protocol, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.model.packed import StoredOrder


class Readable(Protocol):
    """A tensor of a safetensors file, of which is read what it is indexed with."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, wanted: Wanted) -> torch.Tensor: ...


Wanted: TypeAlias = "EllipsisType | slice | tuple[slice, ...]"
#: Per dimension, the indices that are wanted.
Part = tuple[torch.Tensor, ...]


def local_part(tensor: torch.Tensor, order: StoredOrder | None = None) -> Part:
    """What this rank stores of a tensor, which is everything if it is not a DTensor."""
    mesh = getattr(tensor, "device_mesh", None)
    cuts = [(dim, mesh.size(axis), mesh.get_local_rank(axis)) for axis, dim in axes_and_dims(tensor)] if mesh else []
    return cut_part(tensor.shape, order, cuts)


def cut_part(shape: tuple[int, ...], order: StoredOrder | None, cuts: Iterable[tuple[int, int, int]]) -> Part:
    """What is left of a tensor after cuts of (dim, count, index), one after the other."""
    part = list(whole_part(shape))
    if order is not None:
        part[order.dim] = order.rows
    for dim, count, index in cuts:
        part[dim] = _chunk(part[dim], count, index)
    return tuple(part)


def whole_part(shape: tuple[int, ...]) -> Part:
    """Every index of every dimension."""
    return tuple(torch.arange(size) for size in shape)


def read(source: torch.Tensor | Readable, part: Part, _ranges: tuple[slice, ...] = ()) -> torch.Tensor:
    """The part of a tensor or of a safetensors slice. Of a file only these ranges are read."""
    dim = len(_ranges)
    if dim == len(part):
        return source[_ranges] if _ranges else source[...]
    pieces = [read(source, part, (*_ranges, run)) for run in runs(part[dim])]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def place(target: torch.Tensor, part: Part, source: torch.Tensor, _ranges: tuple[slice, ...] = ()) -> None:
    """Put a part's values into the whole tensor: the inverse of `read`."""
    dim, start = len(_ranges), 0
    if dim == len(part):
        target[_ranges or ...].copy_(source)
        return
    for run in runs(part[dim]):
        count = run.stop - run.start
        place(target, part, source.narrow(dim, start, count), (*_ranges, run))
        start += count


def rows_of(target: torch.Tensor, part: Part) -> torch.Tensor | None:
    """The part as a view of contiguous memory, or None if it is not a range of rows."""
    if not part or any(len(indices) != size for indices, size in zip(part[1:], target.shape[1:], strict=True)):
        return None
    ranges = [runs(indices) for indices in part]
    return target[ranges[0][0]] if all(len(found) == 1 for found in ranges) else None


def axes_and_dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of all that is cut, in the order of cutting: FSDP2 (strided) cuts what tp has left."""
    if not isinstance(tensor, DTensor):
        return []
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    ordered = [cut for cut in cuts if cut not in strided] + strided[::-1]
    return [(axis, placement.dim) for axis, placement in ordered]


def _chunk(indices: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """As torch.chunk, with empty chunks at the end where it would give fewer."""
    size = -(-len(indices) // count)
    return indices[index * size : (index + 1) * size]


def runs(indices: torch.Tensor) -> list[slice]:
    """Maximal ranges of consecutive indices; one empty range if there are none."""
    if not len(indices):
        return [slice(0, 0)]
    ends = (indices.diff() != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    stops = [*ends, len(indices) - 1]
    return [slice(int(indices[a]), int(indices[b]) + 1) for a, b in zip(starts, stops, strict=True)]
