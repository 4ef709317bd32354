"""One save over all ranks: what a rank could not write is told on every rank, and big tensors may be written later.

A rank whose disk is full cannot just raise: the others would wait for it in the next transfer. So errors of writing
are noted, everybody goes on with what is communicated, and at the end all ranks raise the same `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import Told
from hf_parallel.ask.waiting import waiting
from hf_parallel.checkpoint.manifest import Checksums
from hf_parallel.checkpoint.writers import writing_ranks
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import ParallelMesh, stored


class CheckpointError(RuntimeError, Told):
    """A checkpoint could not be written, or is not whole. One text for all ranks."""


class DamagedCheckpoint(CheckpointError, SpecError):
    """One that is asked for is not whole."""


def lost_peer(error: RuntimeError, what: str) -> CheckpointError:
    """What to raise when a transfer of a save has failed, as all do when a rank has ended."""
    return CheckpointError(f"{what} (a rank was lost: {' '.join(str(error).split())[:200]})")


class Saving:
    """What is written in one save.

    Attributes:
        error: what went wrong first on this rank.
        checksums: of what this rank has written through `files.py`, by path.
    """

    def __init__(self, mesh: ParallelMesh, in_background: bool = False):
        self.mesh, self.in_background = mesh, in_background
        self.error: str | None = None
        self.checksums: dict[str, Checksums] = {}
        self._streams: list[Callable[[], None]] = []
        self._writers: list[int] = []

    @contextlib.contextmanager
    def noting(self, path: str = "") -> Iterator[None]:
        """An error of what this rank writes, by itself, is kept for `agree`. Refusals and lost ranks pass."""
        try:
            yield
        except (NotImplementedError, SpecError, CheckpointError):
            raise
        except Exception as error:
            where = f" ({path})" if path and path not in str(error) else ""
            self.error = self.error or f"rank {self.mesh.rank}: {type(error).__name__}: {error}{where}"

    def writers(self, directory: str) -> list[int]:
        """The ranks that may write, by a folder of it that exists. Collective at the first call."""
        try:
            self._writers = self._writers or writing_ranks(self.mesh, directory)
        except RuntimeError as error:
            raise self.lost_peer(error) from error
        return self._writers

    def lost_peer(self, error: RuntimeError) -> CheckpointError:
        """What to raise when a transfer has failed."""
        return lost_peer(error, "not everything was written")

    def stream(self, local: Mapping[str, torch.Tensor], write: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Call `write` with this rank's tensors when all else is written; in the background, with copies of them."""
        parts = {name: stored(tensor).detach() for name, tensor in local.items()}
        if self.in_background:
            parts = {name: _copy(part) for name, part in parts.items()}
            if self.mesh.device.type != "cpu":
                torch.accelerator.synchronize()
        self._streams.append(lambda: write(parts))

    def finish_streams(self) -> None:
        """Write the tensors. Collective."""
        if self.in_background:
            self._write_streams()
            return
        with waiting("saving"):
            self._write_streams()

    def _write_streams(self) -> None:
        while self._streams:
            self._streams.pop(0)()

    def all_well(self) -> bool:
        """Has no rank noted an error so far? Collective; nobody leaves before all have come."""
        wrong = torch.tensor([self.error is not None], dtype=torch.uint8)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self.mesh.host_group)
        return not wrong.item()

    def agree(self) -> None:
        """Wait for all ranks. Collective.

        Raises:
            CheckpointError: one of them has noted an error; the same text on all of them.
        """
        found = [error for error in messages.gather(self.error, self.mesh.host_group) if error]
        if found:
            raise CheckpointError("; ".join(found))


_current: Saving | None = None
_writer: threading.Thread | None = None


def start_writer(thread: threading.Thread) -> None:
    """Let a thread use the group that saves communicate in, until it ends."""
    global _writer
    _writer = thread
    thread.start()


def wait_for_writer() -> None:
    """Whoever saves or gathers next waits: two threads would take each other's tensors."""
    if _writer is not None and _writer is not threading.current_thread():
        _writer.join()


@contextlib.contextmanager
def current(mesh: ParallelMesh) -> Iterator[Saving]:
    """The save that is going on; else one for what is done inside, on which all ranks agree at the end."""
    if _current is not None:
        yield _current
        return
    wait_for_writer()
    with going_on(Saving(mesh)) as saving:
        yield saving
        try:
            saving.finish_streams()
            saving.agree()
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise saving.lost_peer(error) from error


@contextlib.contextmanager
def going_on(saving: Saving) -> Iterator[Saving]:
    """What is saved inside belongs to this save."""
    global _current
    former, _current = _current, saving
    try:
        yield saving
    finally:
        _current = former


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory; from a device without waiting."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
