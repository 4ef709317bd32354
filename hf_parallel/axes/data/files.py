"""A file, mapped into memory, of what training keeps: read ahead of its use, written back behind it.

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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hf_parallel.ask.keys.data import offload_folder
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.units import iterate_parameter_groups

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

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
            free = _format_gib(shutil.disk_usage(self.folder).free)
            why = f"{self.what} of this rank need {_format_gib(size)}, {free} are free"
            refuse(f"offload={self.offload}", why, "a folder with more room, or offload=optimizer,")
        self._reserved += size

    @staticmethod
    def room_of(size: int) -> int:
        """Return the bytes that a part of `size` bytes takes, in whole pages."""
        return math.ceil(size / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    def part(self, size: int) -> StatePart:
        """Return the next part of the file, which starts at a page."""
        start = self._used
        self._used += self.room_of(size)
        if self._used > self._reserved:
            self.reserve(self._used - self._reserved)
        return StatePart(mmap.mmap(self._file.fileno(), size, offset=start), start)

    def fetch(self, part: StatePart) -> None:
        """Begin to read a part, on another thread."""
        given = self._file.fileno(), part.start, part.size, os.POSIX_FADV_WILLNEED
        self._unfinished.append(self._thread.submit(os.posix_fadvise, *given))

    def release(self, part: StatePart) -> None:
        """Begin to write a part back, and to let go of its memory, on another thread."""
        self._unfinished.append(self._thread.submit(part.write_back, self._file.fileno()))

    def free(self) -> None:
        """Give the system back what the allocator keeps of states that were made in memory."""
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    def settle(self) -> None:
        """Wait for what was begun; what is then in the file can be read.

        Raises:
            OSError: it could not be written, or the file was cut: what is read would not be what was kept.
        """
        lost, advice = f"offload={self.offload}: {self.what}", "training can go on from the last checkpoint"
        unfinished, self._unfinished = self._unfinished, []
        for future in unfinished:
            try:
                future.result()
            except OSError as error:
                free = _format_gib(shutil.disk_usage(self.folder).free)
                why = f"could not be written ({os.strerror(error.errno or 0)}, {free} are free)"
                raise OSError(error.errno, f"{lost} {why}; {advice}") from error
        size = os.fstat(self._file.fileno()).st_size
        if size < self._reserved:
            why = f"were cut from {_format_gib(self._reserved)} to {_format_gib(size)}"
            raise OSError(errno.EIO, f"{lost} {why}; {advice}")


class StatePart:
    """Memory that is a part of the file, handed out piece by piece."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self.start, self.size = memory, start, len(memory)
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._used = 0

    @staticmethod
    def room_for(sizes: Iterable[int]) -> int:
        """Return the bytes that a part for tensors of so many bytes takes."""
        return sum(math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same values whose memory is here."""
        kept = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += self.room_for([tensor.nbytes])
        return kept.view(tensor.shape).copy_(tensor)

    def write_back(self, fd: int) -> None:
        """To the disk, and out of memory, the page cache's too; whoever reads it gets it from the file again."""
        address, size = ctypes.c_void_p(self._address), ctypes.c_size_t(self.size)
        if _libc.msync(address, size, _SYNC):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        _libc.madvise(address, size, _FORGET)
        os.posix_fadvise(fd, self.start, self.size, os.POSIX_FADV_DONTNEED)


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


# ---- Parameters at rest in a file: a layer's are read ahead of its gather, and let go of after it (ZeRO-Infinity)
#     gathers        layer 1      layer 2      layer 3           backward     layer 3      layer 2      layer 1
#     reads             layer 2      layer 3                                     layer 2      layer 1
#     lets go              layer 1      layer 2      layer 3                        layer 3      layer 2
#
# What FSDP2 stores of each parameter is exchanged for memory that is mapped from the file; the parameter is the same
# object as before. An optimizer's step on the host writes there in place. torch has no call for the exchange: a unit's
# parameter group is its internal, looked at in torch 2.13.


def keep_parameters_in_file(root: nn.Module, offload: str) -> None:
    """From its first forward pass on the parameters of units below `root` lie in a file; its room is taken now.

    Raises:
        SpecError: the disk has less.
    """
    groups = list(iterate_parameter_groups(root))
    file = StateFile(offload, "parameters")
    stored = ([held._sharded_param_data.nbytes for held in group.fsdp_params] for group in groups)
    file.reserve(sum(file.room_of(StatePart.room_for(sizes)) for sizes in stored))
    units = [Unit(group, file) for group in groups]
    for unit, before, after in zip(units, [None, *units], [*units[1:], None], strict=False):
        unit.before, unit.after = before, after

    def move(*_: object) -> None:
        file.settle()
        for unit in units:
            unit.move()

    root.register_forward_pre_hook(move, prepend=True)  # weights are loaded by now; adapters may have come
    root.register_state_dict_pre_hook(lambda *_: file.settle())


class Unit:
    """The parameters that are gathered together, and the units whose turn is before and after theirs."""

    def __init__(self, group: Any, file: StateFile) -> None:
        self.group, self.file = group, file
        self.parts: list[StatePart] = []
        self.before: Unit | None = None
        self.after: Unit | None = None
        self._kept: dict[FSDPParam, int] = {}  # of a parameter: where it lies
        self._gather = group.unshard
        group.unshard = self.unshard

    def unshard(self, async_op: bool = False) -> None:
        """In the place of the group's own; the neighbour's parameters are on their way meanwhile."""
        at_rest = self.group.is_sharded and self.group._all_gather_result is None
        ahead = self.before if self.group._training_state == TrainingState.PRE_BACKWARD else self.after
        for part in ahead.parts if at_rest and ahead is not None else ():
            self.file.fetch(part)
        self._gather(async_op)
        for part in self.parts if at_rest else ():
            self.file.release(part)

    def move(self) -> None:
        """Into the file goes what does not lie there: at first all, then what was added, or loaded by assignment."""
        new = []
        for held in self.group.fsdp_params:
            if self._kept.get(held) != held._sharded_param_data.untyped_storage().data_ptr():
                new.append(held)
        if not new or self.group.is_unsharded:
            return
        for held in new:
            held.reset_sharded_param()  # as the group will do: it may know only the meta tensor from before loading
        part = self.file.part(StatePart.room_for(held._sharded_param_data.nbytes for held in new))
        for held in new:  # a parameter may be a part of what is stored for it
            stored, local = held._sharded_param_data, held.sharded_param._local_tensor
            memory = part.keep(stored)
            place = memory.storage_offset() + local.storage_offset() - stored.storage_offset()
            held._sharded_param_data = memory  # other objects: a view would keep the memory that it was made of
            held.sharded_param._local_tensor = memory.detach().as_strided(local.size(), local.stride(), place)
            self._kept[held] = memory.untyped_storage().data_ptr()
        self.parts.append(part)
        self.file.release(part)
        self.file.free()
