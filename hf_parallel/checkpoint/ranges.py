"""Ranges of the tensors of a safetensors file, and nothing else of it.

safetensors' own slices read the whole tensor first when the file is not mapped to memory, and mapped files keep whole
tensors in memory. The format (description in its README) is simple: the length of a header, the header as JSON with
type, shape and offsets of each tensor, and then the values in rows.

    rows 0 to 63 of (128, 64)       one read of 64 x 64 values, into place
    columns 0 to 31 of (128, 64)    blocks of whole rows are read, and their columns kept
"""

from __future__ import annotations

import json
import os
from typing import TypedDict

import torch

from hf_parallel.checkpoint.lazy_tensor import DTYPES
from hf_parallel.checkpoint.slices import Wanted

#: Bytes that are read at once where only a part of each row is kept.
BLOCK = 16 << 20
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class TensorFacts(TypedDict):
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class RangeFile:
    """An open file, with the methods that safetensors' own has.

    Raises:
        ValueError: it is no safetensors file, or cut off.
        KeyError: it holds a dtype that is not known here.
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
        """Names of the tensors."""
        return list(self.tensors)

    def get_slice(self, key: str) -> TensorInFile:
        """A tensor, to be indexed."""
        return TensorInFile(self, self.tensors[key], self.dtypes[key])

    def get_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        return self.get_slice(key)[...]

    def metadata(self) -> dict[str, str]:
        """What the file says of itself."""
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
    """A tensor of an open file. Indexed by a range for each of its dimensions, it is read."""

    def __init__(self, file: RangeFile, facts: TensorFacts, dtype: torch.dtype):
        self.file, self.shape, self.name, self.dtype = file, tuple(facts["shape"]), facts["dtype"], dtype
        self.offset = file.start + facts["data_offsets"][0]

    def get_shape(self) -> list[int]:
        """Size of each dimension."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """safetensors' name of its dtype."""
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
            self._fill_columns(target, offset, width, ranges)
        else:
            for place, index in enumerate(ranges[0]):
                self._fill(target[place], offset + index * width, shape[1:], ranges[1:])

    def _fill_columns(self, target: torch.Tensor, offset: int, width: int, ranges: list[range]) -> None:
        rows, columns = ranges
        step = max(1, BLOCK // width)
        for first in range(0, len(rows), step):
            count = min(step, len(rows) - first)
            block = torch.empty(count, width // self.dtype.itemsize, dtype=self.dtype)
            self.file.read_into(block, offset + (rows.start + first) * width)
            target[first : first + count] = block[:, columns.start : columns.stop]
