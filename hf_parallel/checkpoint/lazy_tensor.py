"""Tensors that are not read yet, so that a checkpoint's conversion need not be done whole.

transformers stacks experts, joins gate and up, splits fused projections, … while it loads. Handed a `LazyTensor` in
the place of values, these operations only note what is asked for; reading the part of the result that a rank stores
then reads the parts of the sources that go into it. An operation that is not followed here reads its sources whole,
when a part of its result is read: one target at a time.

    file: experts.0.w1, …, experts.7.w1   stack   LazyTensor (8, 64, 32)   part: experts 4-7 -> four tensors are read
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from hf_parallel.checkpoint.slices import Part, Readable, read_part, whole_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.utils._pytree import TreeSpec


#: safetensors' names of dtypes (format description in its README).
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}

Reader = Callable[[Part], torch.Tensor]


class LazyTensor(torch.Tensor):
    """A tensor whose values come from `part`, a function from a part's indices to its values.

    Attributes: `origins`, the names of what goes into it, for those who gave names.
    """

    @staticmethod
    def __new__(
        cls,
        part: Reader,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        origins: frozenset[str] = frozenset(),
    ) -> LazyTensor:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device(device))

    def __init__(
        self,
        part: Reader,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self.part, self.origins = part, origins

    def whole(self) -> torch.Tensor:
        """All values."""
        return self.part(whole_part(self.shape))

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[override]
        return _FOLLOWED[func](*args, **(kwargs or {})) if func in _FOLLOWED else _deferred(func, args, kwargs or {})


def lazy_tensor(
    source: torch.Tensor | Readable,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    origins: frozenset[str] = frozenset(),
) -> LazyTensor:
    """A tensor, or a slice of a safetensors file, to be read as `dtype` onto `device`."""
    if isinstance(source, torch.Tensor):
        shape, dtype, device = source.shape, dtype or source.dtype, device or source.device
    else:
        shape, dtype, device = torch.Size(source.get_shape()), dtype or _dtype_in_file(source), device or "cpu"
    return LazyTensor(
        lambda part: read_part(source, part).to(device=device, dtype=dtype), shape, dtype, device, origins
    )


def values(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a tensor that may be unread, in memory of its own: a view would keep the whole alive."""
    found = tensor.part(part) if isinstance(tensor, LazyTensor) else read_part(tensor, part)
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


def _dtype_in_file(source: Readable) -> torch.dtype:
    """From the header: reading nothing of a slice reads all of it."""
    name = source.get_dtype()
    return (
        _OF_NAME[name]
        if name in _OF_NAME
        else read_part(source, tuple(torch.arange(0) for _ in source.get_shape())).dtype
    )


# ---- operations --------------------------------------------------------------------------------------------------


def _results(func: Callable, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], TreeSpec, frozenset[str]]:
    """What `func` gives, without data (its arguments are checked), flat and with its tree; and what goes into it."""
    origins = [t.origins for t in tree_iter((args, kwargs)) if isinstance(t, LazyTensor)]
    args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
    flat, tree = tree_flatten(func(*args, **kwargs))
    return flat, tree, frozenset().union(*origins)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _deferred(func: Callable, args: tuple, kwargs: dict) -> object:
    """Any operation: done on whole tensors, when its result is read."""
    flat, tree, origins = _results(func, args, kwargs)
    device = next(t.device for t in tree_iter((args, kwargs)) if isinstance(t, LazyTensor))

    def reader(place: int) -> Reader:
        def part(wanted: Part) -> torch.Tensor:
            whole_args, whole_kwargs = tree_map_only(LazyTensor, LazyTensor.whole, (args, kwargs))
            return read_part(tree_flatten(func(*whole_args, **whole_kwargs))[0][place].contiguous(), wanted)

        return part

    made = [LazyTensor(reader(i), result.shape, result.dtype, device, origins) for i, result in enumerate(flat)]
    return tree_unflatten(made, tree)


def _followed(func: Callable, args: tuple, part: Reader, device: torch.device) -> LazyTensor:
    """The one result of an operation whose parts `part` knows how to read."""
    (result,), _, origins = _results(func, args, {})
    return LazyTensor(part, result.shape, result.dtype, device, origins)


def _as_lazy(tensors: Iterable[torch.Tensor]) -> list[LazyTensor]:
    return [tensor if isinstance(tensor, LazyTensor) else lazy_tensor(tensor) for tensor in tensors]


def _replaced(part: Part, dim: int, indices: torch.Tensor) -> Part:
    return (*part[:dim], indices, *part[dim + 1 :])


def _empty(part: Part, like: torch.Tensor) -> torch.Tensor:
    return torch.empty([len(indices) for indices in part], dtype=like.dtype, device=like.device)


def _alias(tensor: LazyTensor) -> LazyTensor:
    return LazyTensor(tensor.part, tensor.shape, tensor.dtype, tensor.device, tensor.origins)


def _stack(tensors: Iterable[torch.Tensor], dim: int = 0) -> LazyTensor:
    sources = _as_lazy(tensors)
    dim %= sources[0].ndim + 1

    def part(wanted: Part) -> torch.Tensor:
        result = _empty(wanted, sources[0])
        for place, index in enumerate(wanted[dim].tolist()):
            result.select(dim, place).copy_(sources[index].part(wanted[:dim] + wanted[dim + 1 :]))
        return result

    return _followed(torch.ops.aten.stack.default, (sources, dim), part, sources[0].device)


def _cat(tensors: Iterable[torch.Tensor], dim: int = 0) -> LazyTensor:
    sources = _as_lazy(tensors)
    dim %= sources[0].ndim
    starts = [sum(source.shape[dim] for source in sources[:i]) for i in range(len(sources))]

    def part(wanted: Part) -> torch.Tensor:
        result = _empty(wanted, sources[0])
        for source, start in zip(sources, starts, strict=True):
            places = ((wanted[dim] >= start) & (wanted[dim] < start + source.shape[dim])).nonzero().flatten()
            if len(places):
                piece = source.part(_replaced(wanted, dim, wanted[dim][places] - start))
                result.index_copy_(dim, places.to(result.device), piece)
        return result

    return _followed(torch.ops.aten.cat.default, (sources, dim), part, sources[0].device)


def _slice(
    tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    dim %= tensor.ndim
    indices = torch.arange(tensor.shape[dim])[slice(start, end, step)]

    def part(wanted: Part) -> torch.Tensor:
        return tensor.part(_replaced(wanted, dim, indices[wanted[dim]]))

    return _followed(torch.ops.aten.slice.Tensor, (tensor, dim, start, end, step), part, tensor.device)


def _split_with_sizes(tensor: LazyTensor, sizes: list[int], dim: int = 0) -> list[LazyTensor]:
    if sum(sizes) != tensor.shape[dim]:
        raise RuntimeError(f"split sizes {sizes} do not add up to dimension {dim} of {tuple(tensor.shape)}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(tensor, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _split(tensor: LazyTensor, size: int, dim: int = 0) -> list[LazyTensor]:
    length = tensor.shape[dim]
    return [_slice(tensor, dim, start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    dim0, dim1 = dim0 % tensor.ndim, dim1 % tensor.ndim

    def part(wanted: Part) -> torch.Tensor:
        swapped = _replaced(_replaced(wanted, dim0, wanted[dim1]), dim1, wanted[dim0])
        return tensor.part(swapped).transpose(dim0, dim1).contiguous()

    return _followed(torch.ops.aten.transpose.int, (tensor, dim0, dim1), part, tensor.device)


_FOLLOWED: dict[Callable, Callable[..., object]] = {
    torch.ops.aten.alias.default: _alias,
    torch.ops.aten.detach.default: _alias,
    torch.ops.aten.stack.default: _stack,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split_with_sizes,
    torch.ops.aten.transpose.int: _transpose,
}
