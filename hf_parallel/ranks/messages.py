"""Objects of Python between ranks, which torch leaves in lists that the caller makes."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

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
