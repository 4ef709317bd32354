"""A safetensors file written in order: header first, because all sizes are known, then tensor after tensor."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from hf_parallel.checkpoint.gather import as_bytes
from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.manifest import Checksums
from hf_parallel.checkpoint.saving import Saving

#: safetensors' names of dtypes (format description in its README).
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """What is being written; after an error, which the save keeps, it takes no more."""

    def __init__(self, path: str, saving: Saving):
        self.path, self.saving, self.sums, self.out = path, saving, Checksums(), None
        with saving.noting():
            self.out = open(f"{path}.tmp", "wb")  # noqa: SIM115 - open for as long as tensors come

    def append(self, tensor: torch.Tensor) -> None:
        """The values of the next tensor of the header."""
        self.write(as_bytes(tensor.cpu()).numpy().data)

    def write(self, data: Any) -> None:
        """The next bytes."""
        if self.out is not None and self.saving.error is None:
            with self.saving.noting():
                self.out.write(data)
                self.sums.update(data)

    def close(self) -> None:
        """The file takes its final name only when it is whole and on disk."""
        if self.out is None:
            return
        with self.saving.noting():
            self.out.flush()
            os.fsync(self.out.fileno())
        with contextlib.suppress(OSError):  # that of the bytes that could not be flushed, again
            self.out.close()
        if self.saving.error is not None:
            with contextlib.suppress(OSError):
                os.remove(f"{self.path}.tmp")
            return
        with self.saving.noting():
            os.replace(f"{self.path}.tmp", self.path)
            self.saving.checksums[self.path] = self.sums


@contextlib.contextmanager
def open_for_writing(path: str, entries: list[Entry], saving: Saving) -> Iterator[TensorFile | None]:
    """A file for these tensors on rank 0, which writes; None on the others."""
    if saving.mesh.rank != 0:
        yield None
        return
    file = TensorFile(path, saving)
    file.write(header(entries))
    yield file
    file.close()


def header(entries: list[Entry]) -> bytes:
    """Length and text of a safetensors header."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.nbytes
        described[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the format asks
    return len(text).to_bytes(8, "little") + text
