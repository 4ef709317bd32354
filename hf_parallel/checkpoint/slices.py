"""Which part of a whole tensor this rank stores, and reading just that part.

A part is described by one list of indices per dimension, of the tensor as the model and the Hub know it:

    stored (4, 3), rows cut by tp=2 in the order 0 2 | 1 3          rank 1: [1, 3] x [0, 1, 2]
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.packed import StoredOrder

#: Per dimension, the indices that are wanted.
Part = tuple[torch.Tensor, ...]


def local_part(tensor: torch.Tensor, order: StoredOrder | None = None) -> Part:
    """What this rank stores of a tensor, which is everything if it is not a DTensor."""
    part = list(whole_part(tensor.shape))
    if order is not None:
        part[order.dim] = order.rows
    if isinstance(tensor, DTensor):
        for axis, placement in _cuts(tensor):
            count, index = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
            dim = placement.dim
            part[dim] = _chunk(part[dim], count, index)
    return tuple(part)


def whole_part(shape: tuple[int, ...]) -> Part:
    """Every index of every dimension."""
    return tuple(torch.arange(size) for size in shape)


def read(source: Any, part: Part, _ranges: tuple[slice, ...] = ()) -> torch.Tensor:
    """The part of a tensor or of a safetensors slice. Of a file only these ranges are read."""
    dim = len(_ranges)
    if dim == len(part):
        return source[_ranges] if _ranges else source[...]
    pieces = [read(source, part, (*_ranges, run)) for run in _runs(part[dim])]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _cuts(tensor: DTensor) -> list[tuple[int, Any]]:
    """(mesh axis, placement) of all that is cut, in the order of cutting: FSDP2 (strided) cuts what tp has left."""
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    return [cut for cut in cuts if cut not in strided] + strided[::-1]


def _chunk(indices: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """As torch.chunk, with empty chunks at the end where it would give fewer."""
    size = -(-len(indices) // count)
    return indices[index * size : (index + 1) * size]


def _runs(indices: torch.Tensor) -> list[slice]:
    """Maximal ranges of consecutive indices; one empty range if there are none."""
    if not len(indices):
        return [slice(0, 0)]
    ends = (indices.diff() != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    stops = [*ends, len(indices) - 1]
    return [slice(int(indices[a]), int(indices[b]) + 1) for a, b in zip(starts, stops, strict=True)]
