"""Tensors that are not read yet, so that a checkpoint's conversion need not be done whole, and the files they lie in.

transformers stacks experts, joins gate and up, splits fused projections, … while it loads. Handed a `LazyTensor` in
the place of values, these operations only note what is asked for; reading the part of the result that a rank stores
then reads the parts of the sources that go into it. An operation that is not followed here reads its sources whole,
when a part of its result is read: one target at a time.

    file: experts.0.w1, …, experts.7.w1   stack   LazyTensor (8, 64, 32)   part: experts 4-7 -> four tensors are read
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from hf_parallel.checkpoint.slices import Part, Readable, Wanted, make_whole_part, read_part

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

    part: Reader
    origins: frozenset[str]

    @staticmethod
    def __new__(
        cls,
        part: Reader,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        origins: frozenset[str] = frozenset(),
    ) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device(device))
        self.part, self.origins = part, origins
        return self

    def whole(self) -> torch.Tensor:
        """Read all values."""
        return self.part(make_whole_part(self.shape))

    @classmethod
    def __torch_dispatch__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _FOLLOWED:
            return _FOLLOWED[func](*args, **kwargs)
        # Any other operation is put off: it runs on whole tensors when its result is read
        flat, tree, origins = _compute_results_without_data(func, args, kwargs)
        device = next(t.device for t in tree_iter((args, kwargs)) if isinstance(t, LazyTensor))

        def part(place: int, wanted: Part) -> torch.Tensor:
            whole_args, whole_kwargs = tree_map_only(LazyTensor, LazyTensor.whole, (args, kwargs))
            return read_part(tree_flatten(func(*whole_args, **whole_kwargs))[0][place].contiguous(), wanted)

        readers = [functools.partial(part, place) for place in range(len(flat))]
        made = [LazyTensor(read, t.shape, t.dtype, device, origins) for read, t in zip(readers, flat, strict=True)]
        return tree_unflatten(made, tree)


def make_lazy_tensor(
    source: torch.Tensor | Readable,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    origins: frozenset[str] = frozenset(),
) -> LazyTensor:
    """Make a tensor or a slice of a safetensors file a tensor that is read later, as `dtype` onto `device`."""
    if isinstance(source, torch.Tensor):
        shape, dtype, device = source.shape, dtype or source.dtype, device or source.device
    else:
        shape, device = torch.Size(source.get_shape()), device or "cpu"
        if dtype is None:  # the header states it: reading an empty slice to learn it would read the whole tensor
            empty = tuple(torch.arange(0) for _ in shape)
            dtype = _OF_NAME.get(source.get_dtype()) or read_part(source, empty).dtype
    return LazyTensor(
        lambda part: read_part(source, part).to(device=device, dtype=dtype), shape, dtype, device, origins
    )


def read_values(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Read a part of a tensor into memory of its own: a view would keep the whole tensor alive."""
    found = tensor.part(part) if isinstance(tensor, LazyTensor) else read_part(tensor, part)
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


# ---- operations --------------------------------------------------------------------------------------------------


def _compute_results_without_data(
    func: Callable, args: tuple, kwargs: dict
) -> tuple[list[torch.Tensor], TreeSpec, frozenset[str]]:
    """Return the results of `func` without data, flat, their tree, and the names of its inputs. Checks arguments."""
    origins = [t.origins for t in tree_iter((args, kwargs)) if isinstance(t, LazyTensor)]
    args, kwargs = tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
    )
    flat, tree = tree_flatten(func(*args, **kwargs))
    return flat, tree, frozenset().union(*origins)


def _follow_operation(func: Callable, args: tuple, part: Reader, device: torch.device) -> LazyTensor:
    """Return the one result of an operation whose parts `part` can read."""
    (result,), _, origins = _compute_results_without_data(func, args, {})
    return LazyTensor(part, result.shape, result.dtype, device, origins)


def _replace_indices(part: Part, dim: int, indices: torch.Tensor) -> Part:
    return (*part[:dim], indices, *part[dim + 1 :])


def _alias_lazily(tensor: LazyTensor) -> LazyTensor:
    return LazyTensor(tensor.part, tensor.shape, tensor.dtype, tensor.device, tensor.origins)


def _stack_lazily(tensors: Iterable[torch.Tensor], dim: int = 0) -> LazyTensor:
    sources = [t if isinstance(t, LazyTensor) else make_lazy_tensor(t) for t in tensors]
    dim, dtype, device = dim % (sources[0].ndim + 1), sources[0].dtype, sources[0].device

    def part(wanted: Part) -> torch.Tensor:
        result = torch.empty([len(indices) for indices in wanted], dtype=dtype, device=device)
        for place, index in enumerate(wanted[dim].tolist()):
            result.select(dim, place).copy_(sources[index].part(wanted[:dim] + wanted[dim + 1 :]))
        return result

    return _follow_operation(torch.ops.aten.stack.default, (sources, dim), part, device)


def _cat_lazily(tensors: Iterable[torch.Tensor], dim: int = 0) -> LazyTensor:
    sources = [t if isinstance(t, LazyTensor) else make_lazy_tensor(t) for t in tensors]
    dim, dtype, device = dim % sources[0].ndim, sources[0].dtype, sources[0].device
    starts = [sum(source.shape[dim] for source in sources[:i]) for i in range(len(sources))]

    def part(wanted: Part) -> torch.Tensor:
        result = torch.empty([len(indices) for indices in wanted], dtype=dtype, device=device)
        for source, start in zip(sources, starts, strict=True):
            places = ((wanted[dim] >= start) & (wanted[dim] < start + source.shape[dim])).nonzero().flatten()
            if len(places):
                piece = source.part(_replace_indices(wanted, dim, wanted[dim][places] - start))
                result.index_copy_(dim, places.to(result.device), piece)
        return result

    return _follow_operation(torch.ops.aten.cat.default, (sources, dim), part, device)


def _slice_lazily(
    tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor:
    dim %= tensor.ndim
    indices = torch.arange(tensor.shape[dim])[slice(start, end, step)]
    return _follow_operation(
        torch.ops.aten.slice.Tensor,
        (tensor, dim, start, end, step),
        lambda wanted: tensor.part(_replace_indices(wanted, dim, indices[wanted[dim]])),
        tensor.device,
    )


def _split_lazily(tensor: LazyTensor, size: int | list[int], dim: int = 0) -> list[LazyTensor]:
    length = tensor.shape[dim]
    if isinstance(size, int):
        size = [min(size, length - start) for start in range(0, max(length, 1), size)]
    if sum(size) != length:
        raise RuntimeError(f"split sizes {size} do not add up to dimension {dim} of {tuple(tensor.shape)}")
    stops = itertools.accumulate(size)
    return [_slice_lazily(tensor, dim, stop - own, stop) for own, stop in zip(size, stops, strict=True)]


def _transpose_lazily(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    dim0, dim1 = dim0 % tensor.ndim, dim1 % tensor.ndim

    def part(wanted: Part) -> torch.Tensor:
        swapped = _replace_indices(_replace_indices(wanted, dim0, wanted[dim1]), dim1, wanted[dim0])
        return tensor.part(swapped).transpose(dim0, dim1).contiguous()

    return _follow_operation(torch.ops.aten.transpose.int, (tensor, dim0, dim1), part, tensor.device)


_FOLLOWED: dict[Callable, Callable[..., object]] = {
    torch.ops.aten.alias.default: _alias_lazily,
    torch.ops.aten.detach.default: _alias_lazily,
    torch.ops.aten.stack.default: _stack_lazily,
    torch.ops.aten.cat.default: _cat_lazily,
    torch.ops.aten.slice.Tensor: _slice_lazily,
    torch.ops.aten.split.Tensor: _split_lazily,
    torch.ops.aten.split_with_sizes.default: _split_lazily,
    torch.ops.aten.transpose.int: _transpose_lazily,
}

# ---- Ranges of the tensors of a safetensors file, and nothing else of it --------------------------------------------
# safetensors' own slices read the whole tensor first when the file is not mapped to memory, and mapped files keep
# whole tensors in memory. The format is simple: the length of a header, the header as JSON with type, shape and
# offsets of each tensor, and then the values in rows.
#
#     rows 0 to 63 of (128, 64)       one read of 64 x 64 values, into place
#     columns 0 to 31 of (128, 64)    blocks of whole rows are read, and their columns kept

#: Bytes that are read at once where only a part of each row is kept.
BLOCK = 16 << 20


class TensorFacts(TypedDict):
    """An entry of a safetensors header, which describes one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class RangeFile:
    """An open safetensors file, with the methods of safetensors' own class.

    Raises:
        ValueError: the file is no safetensors file, or cut off.
        KeyError: the file holds a dtype that is not known here.
    """

    def __init__(self, path: str):
        self.path = path
        self.handle = os.open(path, os.O_RDONLY)
        size = os.fstat(self.handle).st_size
        length = int.from_bytes(os.pread(self.handle, 8, 0), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"{path} is no safetensors file, or cut off")
        self.start = 8 + length
        self.tensors = json.loads(os.pread(self.handle, length, 8))
        self.notes = self.tensors.pop("__metadata__", {})
        self.dtypes = {key: _OF_NAME[facts["dtype"]] for key, facts in self.tensors.items()}
        if any(self.start + facts["data_offsets"][1] > size for facts in self.tensors.values()):
            raise ValueError(f"{path} is cut off")

    def __enter__(self) -> RangeFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.handle)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self.tensors)

    def get_slice(self, key: str) -> TensorInFile:
        """Return a tensor that is read when it is indexed."""
        return TensorInFile(self, self.tensors[key], self.dtypes[key])

    def get_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self.get_slice(key)[...]

    def metadata(self) -> dict[str, str]:
        """Return the file's `__metadata__`."""
        return self.notes

    def read_into(self, target: torch.Tensor, offset: int) -> None:
        """Fill contiguous memory from this place of the file on."""
        view = target.reshape(-1).view(torch.uint8).numpy().data
        while len(view):
            count = os.preadv(self.handle, [view[: 1 << 30]], offset)
            if not count:
                raise ValueError(f"{self.path} is cut off")
            view, offset = view[count:], offset + count


class TensorInFile:
    """A tensor of an open file, which is read when it is indexed by a range for each of its dimensions."""

    def __init__(self, file: RangeFile, facts: TensorFacts, dtype: torch.dtype):
        self.file, self.shape, self.name, self.dtype = file, tuple(facts["shape"]), facts["dtype"], dtype
        self.offset = file.start + facts["data_offsets"][0]

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return self.name

    def __getitem__(self, wanted: Wanted) -> torch.Tensor:
        given = () if wanted is ... else wanted if isinstance(wanted, tuple) else (wanted,)
        padded = (*given, *(slice(None) for _ in self.shape[len(given) :]))
        ranges = [range(size)[part] for size, part in zip(self.shape, padded, strict=True)]
        result = torch.empty([len(part) for part in ranges], dtype=self.dtype)
        if result.numel():
            self._fill(result, self.offset, self.shape, ranges)
        return result

    def _fill(self, target: torch.Tensor, offset: int, shape: tuple[int, ...], ranges: list[range]) -> None:
        width = torch.Size(shape[1:]).numel() * self.dtype.itemsize  # bytes of one index of the first dimension
        if all(len(part) == size for part, size in zip(ranges[1:], shape[1:], strict=True)):
            self.file.read_into(target, offset + (ranges[0].start * width if ranges else 0))
        elif len(shape) == 2:
            rows, columns = ranges
            step = max(1, BLOCK // width)
            for first in range(0, len(rows), step):
                count = min(step, len(rows) - first)
                block = torch.empty(count, width // self.dtype.itemsize, dtype=self.dtype)
                self.file.read_into(block, offset + (rows.start + first) * width)
                target[first : first + count] = block[:, columns.start : columns.stop]
        else:
            for place, index in enumerate(ranges[0]):
                self._fill(target[place], offset + index * width, shape[1:], ranges[1:])
