"""Objects of Python between ranks, which torch leaves in lists that the caller makes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import time
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from hf_parallel.ask.spec import refuse
from hf_parallel.ranks.mesh import ParallelMesh
from hf_parallel.ranks.nested_batches import open_batches

T = TypeVar("T")
#: Shape, dtype and the sum itself of a tensor.
Checksum: TypeAlias = tuple[tuple[int, ...], str, int]


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank of a group has, in the order of its ranks; of all ranks without a group. Collective."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


class Failed(NamedTuple):
    """An error that a rank sends in the place of an object that it could not make."""

    error: Exception
    where: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Wrap the error itself, if others can read it, with the way to it."""
        where = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # made of what only this rank has
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error.with_traceback(None), f"on rank {dist.get_rank()}:\n{where}")

    def stop(self) -> NoReturn:
        """Fail as that rank has."""
        raise self.error from RuntimeError(self.where)


def send_from_one(make: Callable[[], T], group: dist.ProcessGroup | None = None, source: int = 0) -> T:
    """Return on all ranks of a group what `make` returns on its rank `source`, the only one that calls it. Collective.

    What it raises all of them raise: nobody waits for a rank that has failed.
    """
    if dist.get_rank(group) != source:
        told: list = [None]
        dist.broadcast_object_list(told, group=group, group_src=source)
        if isinstance(told[0], Failed):
            told[0].stop()
        return pickle.loads(told[0])
    with tell_error(group, source):
        made = make()
        packed = pickle.dumps(made)  # here, where others are told if it cannot be
    dist.broadcast_object_list([packed], group=group, group_src=source)
    return made


@contextlib.contextmanager
def tell_error(
    group: dist.ProcessGroup | None, source: int, is_heard: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Send an error inside the `with` in the place of the object that the other ranks wait for from this one.

    Args:
        is_heard: whether the others wait for an object now; else sending an error would wait for them.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # where a collective has failed, this one may as well
            if is_heard():
                dist.broadcast_object_list([Failed.of(error)], group=group, group_src=source)
        raise


# ---- Do the ranks of one model read one batch? Compared by checksum in the first steps, and then ever more rarely
# A loader that a script shards by `dist.get_rank()` gives ranks that split one model different rows. Of equal lengths
# they train a wrong model without a word; of unequal ones they end in a collective. What is compared is the data:
# whole numbers, and floats that nothing was computed of.

#: Steps that are compared from the first on; later ones if their number is a power of two.
FIRST = 3
#: Arguments that models compute of others, each stage or rank for itself.
_COMPUTED = {"inputs_embeds", "encoder_outputs"}


class OneBatch:
    """Compares the batches of one model's ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.steps = mesh, Counter[str]()
        self.axes = [axis for axis in ("tp", "cp", "pp") if mesh.size(axis) > 1]
        if dist.get_backend() == "fake":
            self.axes = []
        #: Of the last batch that was compared: a Trainer's batch and its model's arguments are the same tensors.
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], int, Checksum]] = {}

    def begin(self) -> None:
        """Compare the first batches of another loader as well. On all ranks of the model."""
        self.steps.clear()

    def check(self, batch: object, kind: str) -> None:
        """Compare this step's batch, if it is its turn. Collective over the ranks of the model.

        Args:
            kind: steps are counted for each kind, such as training and evaluation.

        Raises:
            SpecError: they are not the same.
        """
        self.steps[kind] += 1
        step = self.steps[kind]
        batch, _ = open_batches(batch)
        if not self.axes or not isinstance(batch, Mapping) or (step > FIRST and step & (step - 1)):
            return
        own = self._compute_checksums(batch)
        # One number says whether all ranks have equal names and checksums: a GPU waits for it once.
        digest = int.from_bytes(hashlib.sha256(repr(sorted(own.items())).encode()).digest()[:7], "big")
        ends = torch.tensor([digest, -digest]).to(self.mesh.device, non_blocking=True)
        for axis in self.axes:
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.group(axis))
        highest, lowest = ends.tolist()
        if highest == -lowest:
            return
        found = [(self.mesh.rank, own)]
        for axis in self.axes:
            found = [entry for part in gather_objects(found, self.mesh.group(axis)) for entry in part]
        first, expected = min(found, key=lambda entry: entry[0])
        for rank, checksums in sorted(found, key=lambda entry: entry[0]):
            for name in sorted(checksums.keys() & expected.keys()):
                if checksums[name] != expected[name]:
                    shapes = f"{expected[name][0]} on rank {first} and {checksums[name][0]} on rank {rank}"
                    refuse(
                        f"ranks {first} and {rank} hold one model but read different batches ({name} is {shapes})",
                        (
                            "accelerator.prepare(loader) works, and so does sharding by data rank, "
                            f"num_replicas={self.mesh.data_size} and rank={self.mesh.data_rank} here "
                            "(accelerator.num_processes and process_index), in the place of dist.get_rank(); where a "
                            "collator goes through a set, PYTHONHASHSEED=0 for all processes"
                        ),
                    )

    def is_equal_on_data_ranks(self, batch: object) -> bool:
        """Return whether all data ranks have read the same tensors. Collective over the data ranks."""
        batch, _ = open_batches(batch)
        own = self._compute_checksums(batch) if isinstance(batch, Mapping) else {}
        return all(found == own for found in gather_objects(own, self.mesh.data_group)) and bool(own)

    def _compute_checksums(self, batch: Mapping[str, object]) -> dict[str, Checksum]:
        """Return a checksum by name of data; a tensor of the last batch is not copied from the device again."""
        former, self.known = self.known, {}
        found: dict[str, Checksum] = {}
        for name, tensor in batch.items():
            if not isinstance(tensor, torch.Tensor) or type(tensor) is not torch.Tensor or name in _COMPUTED:
                continue
            if tensor.layout != torch.strided or tensor.is_meta or tensor.requires_grad:
                continue
            version = -1 if tensor.is_inference() else tensor._version
            seen = former.get(id(tensor))
            if seen is not None and seen[0]() is tensor and seen[1] == version >= 0:
                found[name] = seen[2]
            else:
                values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found[name] = tuple(tensor.shape), str(tensor.dtype), zlib.crc32(values.numpy().tobytes())
            self.known[id(tensor)] = weakref.ref(tensor), version, found[name]
        return found


# ---- Requests of rank 0 alone: the others do them where they next wait for it, or at the end of their script
# rank 0   saves or generates under `if is_main_process:` with what is in parts on all ranks: asks, then takes part
# rank 1   goes past it, and comes to a barrier, or to its end: sees what is asked, does it, goes on

#: Requests by a number that is the same on all ranks: a function that finds the object, if it is still there, and one
#: that is called with it.
on_request: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []


def take_requests(held: object, do: Callable[[Any], object]) -> int | None:
    """Let rank 0 ask the others for `do(held)`. All ranks call this for the same objects in the same order.

    Returns:
        The number of the request; None in a dry run, which may be one rank's own.
    """
    if dist.get_backend() == "fake":
        return None
    on_request.append((weakref.ref(held), do))
    return len(on_request) - 1


#: Seconds between two looks of a rank that waits for rank 0 alone: the first, the longest at a barrier and at the end.
_FIRST_PAUSE_S, _BARRIER_S, _PAUSE_S = 0.0005, 0.02, 0.25
_NO_MORE, _GO_ON = "no more", "go on"


@dataclass(eq=False)
class Requests:
    """Requests of rank 0, in the store in which ranks sign in.

    Args:
        sign_in: returns when all ranks have signed in a room of the store: given the room, what it is for, advice.

    Attributes:
        waits_at: where this rank waits for rank 0 and does what it asks.
    """

    store: dist.Store
    rank: int
    sign_in: Callable[[dist.Store, str, str | None], object]
    count: int = 0
    waits_at: str = ""
    meetings: int = 0
    _go_on: str = ""

    def ask(self, call: str, number: int, advice: str) -> None:
        """Rank 0: return when the others are about to do `on_request[number]`, as this one is then to do itself."""
        room = self._next_room()
        room.set("what", json.dumps([call, number]))
        self.sign_in(room, call, advice)

    def serve(self) -> bool:
        """Another rank: do what is asked for, if anything is."""
        call, number = self._read_next() if self.rank > 0 else ("", 0)
        if call in ("", _GO_ON):
            return False
        room = self._next_room()
        find, do = on_request[number]
        if (found := find()) is not None:  # else rank 0 is told that this rank has ended
            waits_at, self.waits_at = self.waits_at, ""
            self._count_waiting(-bool(waits_at))
            self.sign_in(room, call, None)
            do(found)
            self.waits_at = waits_at
            self._count_waiting(bool(waits_at))
        return True

    def wait_for_rank_0(self, place: str, limit_s: float) -> None:
        """Return when rank 0 is in this call, too; until then the others do what it asks. All ranks call it.

        Args:
            limit_s: seconds without a request after which a rank goes on: what it waits for has a time-out of its own.
        """
        if self.rank == 0:
            if self._go_on:  # all have seen it
                self.store.delete_key(self._go_on)
            self._go_on = f"request/{self.count}/what"
            self._next_room().set("what", json.dumps([_GO_ON, 0]))
            return

        longest = max(_BARRIER_S, _PAUSE_S * dist.get_world_size() / 1024)
        self._wait(place, lambda: self._read_next()[0] == _GO_ON, longest, limit_s)
        self._next_room()  # rank 0 comes to this number, also after the limit

    def come_together(self, work: dist.Work, place: str) -> None:
        """Return when a collective of all ranks is over; until rank 0 is in it, the others do what it asks."""
        if self.rank > 0:
            end = time.monotonic() + _BARRIER_S
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(_FIRST_PAUSE_S)
            if not work.is_completed():
                self._wait(place, work.is_completed, _BARRIER_S)
        work.wait()
        self.meetings += 1

    def attend(self, place: str) -> None:
        """Another rank at its end: stay until rank 0 is at its own."""
        if self.rank > 0:
            with contextlib.suppress(RuntimeError):  # the store may go first
                self._wait(place, lambda: not dist.is_initialized() or self.store.check([_NO_MORE]), _PAUSE_S)

    def are_all_others_waiting(self) -> bool:
        """Rank 0: return whether each other rank waits for this one at a barrier or at its end."""
        key = self._waiting
        return self.rank == 0 and self.store.check([key]) and self.store.add(key, 0) == dist.get_world_size() - 1

    def end(self) -> None:
        """Tell the others that rank 0 asks no more."""
        if self.rank == 0:
            self.store.set(_NO_MORE, "")

    def _wait(self, place: str, is_over: Callable[[], bool], longest: float, limit_s: float = math.inf) -> None:
        self.waits_at, pause, start = place, _FIRST_PAUSE_S, time.monotonic()
        self._count_waiting(1)
        while not is_over() and time.monotonic() - start < limit_s:
            if self.serve():
                pause, start = _FIRST_PAUSE_S, time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if self.store.add(self._waiting, -1) == 0:  # nobody waits any more
            self.store.delete_key(self._waiting)
        self.waits_at = ""

    @property
    def _waiting(self) -> str:
        """The key of the number of ranks that wait for rank 0; those of an earlier meeting are on their way."""
        return f"waiting/{self.meetings}"

    def _count_waiting(self, more: int) -> None:
        if more:
            self.store.add(self._waiting, more)

    def _read_next(self) -> tuple[str, int]:
        """Return what rank 0 asks next, and the number of the request; an empty name if it has not asked yet."""
        name = f"request/{self.count}/what"
        return tuple(json.loads(self.store.get(name))) if self.store.check([name]) else ("", 0)

    def _next_room(self) -> dist.Store:
        self.count += 1
        return dist.PrefixStore(f"request/{self.count - 1}", self.store)
