"""A save over all ranks: its files, its errors (raised on every rank alike), tensors written in the background.

A rank whose disk is full cannot just raise: the others would wait for it in the next transfer. So errors of writing
are noted, everybody goes on with what is communicated, and at the end all ranks raise the same `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.session import of_process
from hf_parallel.ask.spec import Told
from hf_parallel.ask.waiting import waiting
from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.lazy_tensor import DTYPES
from hf_parallel.checkpoint.manifest import Checksums
from hf_parallel.checkpoint.slices import find_runs
from hf_parallel.checkpoint.writers import (
    Item,
    compute_part_of,
    find_writing_ranks,
    gather_item,
    order_in_rounds,
    view_as_bytes,
)
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import ParallelMesh, get_stored


class CheckpointError(RuntimeError, Told):
    """A checkpoint could not be written, or is not whole. One text for all ranks."""


class DamagedCheckpoint(CheckpointError, SpecError):
    """A checkpoint that was asked for is not whole."""


def make_lost_peer_error(error: RuntimeError, what: str) -> CheckpointError:
    """Return the error to raise when a transfer of a save has failed, as all do once a rank has ended."""
    return CheckpointError(f"{what} (a rank was lost: {' '.join(str(error).split())[:200]})")


@dataclass(eq=False)
class Saving:
    """A save in progress.

    Attributes:
        error: what went wrong first on this rank.
        checksums: of the bytes this rank has written, by path.
    """

    mesh: ParallelMesh
    in_background: bool = False
    error: str | None = None
    checksums: dict[str, Checksums] = field(default_factory=dict)
    _streams: list[Callable[[], None]] = field(default_factory=list)
    _writers: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def noting(self, path: str = "") -> Iterator[None]:
        """Keep an error of this rank's own writing for `agree`. Refusals and lost ranks are raised."""
        try:
            yield
        except (NotImplementedError, SpecError, CheckpointError):
            raise
        except Exception as error:
            where = f" ({path})" if path and path not in str(error) else ""
            self.error = self.error or f"rank {self.mesh.rank}: {type(error).__name__}: {error}{where}"

    def writers(self, directory: str) -> list[int]:
        """Return the ranks that may write, found with a folder that exists. Collective at the first call."""
        try:
            self._writers = self._writers or find_writing_ranks(self.mesh, directory)
        except RuntimeError as error:
            raise self.lost_peer(error) from error
        return self._writers

    def lost_peer(self, error: RuntimeError) -> CheckpointError:
        """Return the error to raise when a transfer has failed."""
        return make_lost_peer_error(error, "not everything was written")

    def stream(self, local: Mapping[str, torch.Tensor], write: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Call `write_files` with this rank's tensors after all else is written; in the background, with copies."""
        parts = {name: get_stored(tensor).detach() for name, tensor in local.items()}
        if self.in_background:
            parts = {
                name: part.clone()
                if part.device.type == "cpu"
                else torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True).copy_(
                    part, non_blocking=True
                )
                for name, part in parts.items()
            }
            if self.mesh.device.type != "cpu":
                torch.accelerator.synchronize()
        self._streams.append(lambda: write(parts))

    def finish_streams(self) -> None:
        """Write the tensors. Collective."""
        with contextlib.nullcontext() if self.in_background else waiting("saving"):
            while self._streams:
                self._streams.pop(0)()

    def agree(self) -> None:
        """Wait for all ranks. Collective.

        Raises:
            CheckpointError: one of them has noted an error; the same text on all of them.
        """
        found = [error for error in messages.gather_objects(self.error, self.mesh.host_group) if error]
        if found:
            raise CheckpointError("; ".join(found))


class _Now:
    """The save that is going on, and the thread that writes, which may outlast the layout that it saves."""

    saving: Saving | None = None
    writer: threading.Thread | None = None


def start_writer(thread: threading.Thread) -> None:
    """Let a thread use the group that saves communicate in, until it ends."""
    of_process(_Now).writer = thread
    thread.start()


def wait_for_writer() -> None:
    """Wait for the thread that writes, because two threads would take each other's tensors."""
    writer = of_process(_Now).writer
    if writer is not None and writer is not threading.current_thread():
        writer.join()


@contextlib.contextmanager
def join_current_save(mesh: ParallelMesh) -> Iterator[Saving]:
    """Yield the save that is going on; else a new one, on which all ranks agree at the end."""
    going = of_process(_Now).saving
    if going is not None:
        yield going
        return
    wait_for_writer()
    with make_save_current(Saving(mesh)) as saving:
        yield saving
        try:
            saving.finish_streams()
            saving.agree()
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise saving.lost_peer(error) from error


@contextlib.contextmanager
def make_save_current(saving: Saving) -> Iterator[Saving]:
    """Make everything that is saved inside part of this save."""
    now = of_process(_Now)
    former, now.saving = now.saving, saving
    try:
        yield saving
    finally:
        now.saving = former


#: Bytes that a rank writes before it asks whether others could: a save that fails, fails soon.
BATCH = 1 << 30


class TensorFile:
    """A safetensors file that several ranks fill, until it is renamed to `path`.

    rank 0    creates the file at its full length and writes the header (format description in its README)
    writers   put tensors, or rows of them, at their places, in any order, and wait until they are on disk
    rank 0    renames the file if no rank has met an error, and keeps the checksums of all

    After an error, which the save keeps, this rank writes no more.
    """

    def __init__(self, path: str, entries: Iterable[Entry], saving: Saving):
        self.path, self.saving, self.sums = path, saving, Checksums()
        described: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            start, end = end, end + entry.nbytes
            described[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned, as the format asks
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: facts["data_offsets"][0] for name, facts in described.items() if "data_offsets" in facts}
        self.header, self.size = header, len(header) + end
        self.starts = {name: len(header) + start for name, start in offsets.items()}
        self.handle: int | None = None

    def create(self) -> None:
        """Create the file at its full length, so that a byte that was not written is not taken for its end."""
        self._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with self.saving.noting(self.path):
            if self.handle is not None:
                os.ftruncate(self.handle, self.size)
                self._write(self.handle, self.header, 0)

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write the values of a tensor, or a part of them that begins at byte `start` of the tensor."""
        if self.handle is None:
            self._open(os.O_WRONLY)
        with self.saving.noting(self.path):
            if self.handle is not None and self.saving.error is None and tensor.numel():
                self._write(self.handle, view_as_bytes(tensor.cpu()).numpy().data, self.starts[name] + start)

    def close(self) -> None:
        """Flush this rank's bytes to disk."""
        if self.handle is None:
            return
        with self.saving.noting(self.path):
            os.fsync(self.handle)
        with contextlib.suppress(OSError):  # that of the bytes that could not be flushed, again
            os.close(self.handle)
        self.handle = None

    def publish(self, sums: Iterable[Checksums]) -> None:
        """Rename the file to its path, once all ranks have closed it."""
        with self.saving.noting(self.path):
            self.sums.pieces = [piece for one in sums for piece in one.pieces]
            if self.sums.facts()["bytes"] != self.size:
                raise ValueError(f"{self.path} lacks its last bytes")
            os.replace(f"{self.path}.tmp", self.path)
            self.saving.checksums[self.path] = self.sums

    def _open(self, flags: int) -> None:
        if self.saving.error is None:
            with self.saving.noting(self.path):
                self.handle = os.open(f"{self.path}.tmp", flags, 0o666)

    def _write(self, handle: int, data: bytes | memoryview, start: int) -> None:
        rest = memoryview(data).cast("B")
        self.sums.update(rest, start)
        while len(rest):
            count = os.pwrite(handle, rest[: 1 << 30], start)
            rest, start = rest[count:], start + count


def write_files(saving: Saving, files: list[TensorFile], items: list[Item], local: Mapping[str, torch.Tensor]) -> bool:
    """Fill the files. On rank 0, return whether they are whole; elsewhere False. Collective, in any thread.

    Args:
        local: this rank's parts of the tensors that `Item.held_by` names; plain tensors.
    """
    if saving.mesh.rank == 0:
        for file in files:
            file.create()
    places = {name: file for file in files for name in file.starts}
    size = BATCH * saving.mesh.config.world_size
    starts = itertools.accumulate((item.group.nbytes for item in items), initial=0)
    batched = itertools.groupby(zip(starts, items, strict=False), lambda pair: pair[0] // size)
    for some in [[item for _, item in pairs] for _, pairs in batched]:
        wrong = torch.tensor([saving.error is not None], dtype=torch.uint8)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=saving.mesh.host_group)
        if wrong.item():  # nobody comes here before the files are there
            break
        for item in some:
            if item.writer is None and saving.mesh.rank in item.holders[0]:
                _put_rows(item, places, saving, local)
        for together in order_in_rounds(some):
            _put_whole(together, places, saving, local)
    for file in files:
        file.close()
    return _publish(saving, files)


def _put_rows(item: Item, places: dict[str, TensorFile], saving: Saving, local: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's rows, in as many pieces as they have in the file."""
    (entry,), (saved,), (holders,) = item.group.own, item.group.entries, item.holders
    part = compute_part_of(entry, holders.index(saving.mesh.rank), saving.mesh.config)
    values = local[entry.name].cpu()
    if not part:
        places[saved.name].put(saved.name, values)
        return
    width, first = entry.nbytes // max(1, entry.shape[0]), 0
    for run in find_runs(part[0]):
        rows = values[first : first + run.stop - run.start]
        places[saved.name].put(saved.name, rows, run.start * width)
        first += len(rows)


def _put_whole(
    together: list[Item], places: dict[str, TensorFile], saving: Saving, local: Mapping[str, torch.Tensor]
) -> None:
    found = gather_item(saving.mesh, together, local)
    for item in together:
        if item.writer == saving.mesh.rank:
            with saving.noting():
                for saved, values in zip(item.group.entries, item.group.convert(found), strict=True):
                    places[saved.name].put(saved.name, values)


def _publish(saving: Saving, files: list[TensorFile]) -> bool:
    mesh = saving.mesh
    own = saving.error, [file.sums for file in files]
    found = [own] * mesh.config.world_size if mesh.rank == 0 else None
    dist.gather_object(own, found, group=mesh.host_group, group_dst=0)
    if found is None:
        return False
    failed = any(error for error, _ in found)
    for file, sums in zip(files, zip(*(sums for _, sums in found), strict=True), strict=True):
        if failed or saving.error:
            with contextlib.suppress(OSError):
                os.remove(f"{file.path}.tmp")
        else:
            file.publish(sums)
    return not failed and saving.error is None
