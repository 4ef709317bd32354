"""What training keeps, in a file that is mapped into memory: read ahead of its use, written back behind it.

The file never has a name, so a process that ends in any way leaves nothing behind, and nobody can cut it. Its room
is reserved before it is used: a full disk is an error at once, not a signal at some later write. Pages of a shared
mapping are the page cache's: they are none of the process's private memory.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import math
import mmap
import os
import shutil
import tempfile

import torch

from hf_parallel.ask.keys.data import offload_folder
from hf_parallel.spec import refuse

_SYNC = 4  # MS_SYNC
_FORGET = 4  # MADV_DONTNEED
_ALIGNED = 64
_libc = ctypes.CDLL(None, use_errno=True)  # lets other threads of Python run meanwhile, as mmap's own methods do not


class StateFile:
    """Parts of one file, each for what is used together. `what` is in it under which `offload`, for messages."""

    def __init__(self, offload: str, what: str) -> None:
        self.offload, self.folder, self.what = offload, offload_folder(offload), what
        os.makedirs(self.folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - for as long as its owner lives
        self._reserved = self._used = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "files of offload=nvme")
        self._unfinished: list[concurrent.futures.Future] = []

    def reserve(self, size: int) -> None:
        """Make room for `size` more bytes.

        Raises:
            SpecError: the disk has less.
        """
        if not size:
            return
        try:
            os.posix_fallocate(self._file.fileno(), self._reserved, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            why = f"{self.what} of this rank need {_gib(size)}, {self._free()}"
            refuse(f"offload={self.offload}", why, "a folder with more room, or offload=optimizer,")
        self._reserved += size

    @staticmethod
    def room_of(size: int) -> int:
        """What a part of so many bytes takes, in whole pages."""
        return math.ceil(size / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    def part(self, size: int) -> StatePart:
        """The next part of the file, which starts at a page."""
        start = self._used
        self._used += self.room_of(size)
        if self._used > self._reserved:
            self.reserve(self._used - self._reserved)
        return StatePart(mmap.mmap(self._file.fileno(), size, offset=start), start)

    def fetch(self, part: StatePart) -> None:
        """Begin to read a part, on another thread."""
        fd = self._file.fileno()
        self._submit(lambda: os.posix_fadvise(fd, part.start, part.size, os.POSIX_FADV_WILLNEED))

    def release(self, part: StatePart) -> None:
        """Begin to write a part back, and to let go of its memory, on another thread."""
        fd = self._file.fileno()

        def write() -> None:
            part.write_back()
            os.posix_fadvise(fd, part.start, part.size, os.POSIX_FADV_DONTNEED)

        self._submit(write)

    def free(self) -> None:
        """Give the system back what the allocator keeps of states that were made in memory."""
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    def settle(self) -> None:
        """Wait for what was begun; what is then in the file can be read.

        Raises:
            OSError: it could not be written, or the file was cut: what is read would not be what was kept.
        """
        unfinished, self._unfinished = self._unfinished, []
        for future in unfinished:
            try:
                future.result()
            except OSError as error:
                why = f"could not be written ({os.strerror(error.errno or 0)}, {self._free()})"
                raise OSError(error.errno, self._lost(why)) from error
        size = os.fstat(self._file.fileno()).st_size
        if size < self._reserved:
            raise OSError(errno.EIO, self._lost(f"were cut from {_gib(self._reserved)} to {_gib(size)}"))

    def _lost(self, why: str) -> str:
        return f"offload={self.offload}: {self.what} {why}; training can go on from the last checkpoint"

    def _free(self) -> str:
        return f"{_gib(shutil.disk_usage(self.folder).free)} are free"

    def _submit(self, work: object) -> None:
        self._unfinished.append(self._thread.submit(work))  # type: ignore[arg-type]


class StatePart:
    """Memory that is a part of the file, handed out piece by piece."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self.start, self.size = memory, start, len(memory)
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._used = 0

    @staticmethod
    def size_of(tensors: list[torch.Tensor]) -> int:
        """What a part for these tensors takes."""
        return StatePart.room_for([tensor.nbytes for tensor in tensors])

    @staticmethod
    def room_for(sizes: list[int]) -> int:
        """The same of tensors of so many bytes."""
        return sum(map(_padded, sizes))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values whose memory is here."""
        kept = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _padded(tensor.nbytes)
        return kept.view(tensor.shape).copy_(tensor)

    def write_back(self) -> None:
        """To the disk, and out of this process's memory; whoever reads it gets it from the file again."""
        address, size = ctypes.c_void_p(self._address), ctypes.c_size_t(self.size)
        if _libc.msync(address, size, _SYNC):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        _libc.madvise(address, size, _FORGET)


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
