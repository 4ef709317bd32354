"""safetensors files that one rank or several fill: the place of every tensor is known before anything is written.

rank 0    creates each file, at its full length, and writes the header (format description in its README)
writers   put tensors, or rows of them, at their places, in any order, and wait until they are on disk
rank 0    gives the files their names if no rank has met an error, and keeps the checksums of all
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.gather import as_bytes, gathered, part_of
from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.lazy_tensor import DTYPES
from hf_parallel.checkpoint.manifest import Checksums
from hf_parallel.checkpoint.saving import Saving
from hf_parallel.checkpoint.slices import runs
from hf_parallel.checkpoint.writers import Item, rounds
from hf_parallel.ranks.mesh import placed_as, stored

if TYPE_CHECKING:
    from bitsandbytes.optim.optimizer import Optimizer8bit


#: Bytes that a rank writes before it asks whether others could: a save that fails, fails soon.
BATCH = 1 << 30


class TensorFile:
    """A file on its way to `path`; after an error, which the save keeps, this rank writes no more."""

    def __init__(self, path: str, entries: Iterable[Entry], saving: Saving):
        self.path, self.saving, self.sums = path, saving, Checksums()
        self.header, self.starts, self.size = _layout(entries)
        self.handle: int | None = None

    def create(self) -> None:
        """Make the file. At its full length first: later nobody takes its end for where others have not written."""
        self._open(os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with self.saving.noting(self.path):
            if self.handle is not None:
                os.ftruncate(self.handle, self.size)
                self._write(self.handle, self.header, 0)

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """The values of a tensor; or a part of them, which begins at byte `start` of it."""
        if self.handle is None:
            self._open(os.O_WRONLY)
        with self.saving.noting(self.path):
            if self.handle is not None and self.saving.error is None and tensor.numel():
                self._write(self.handle, as_bytes(tensor.cpu()).numpy().data, self.starts[name] + start)

    def close(self) -> None:
        """What this rank has written is on disk."""
        if self.handle is None:
            return
        with self.saving.noting(self.path):
            os.fsync(self.handle)
        with contextlib.suppress(OSError):  # that of the bytes that could not be flushed, again
            os.close(self.handle)
        self.handle = None

    def publish(self, sums: Iterable[Checksums]) -> None:
        """All ranks have closed it: give it its name."""
        with self.saving.noting(self.path):
            self.sums.pieces = [piece for one in sums for piece in one.pieces]
            if self.sums.facts()["bytes"] != self.size:
                raise ValueError(f"{self.path} lacks its last bytes")
            os.replace(f"{self.path}.tmp", self.path)
            self.saving.checksums[self.path] = self.sums

    def discard(self) -> None:
        """A rank has met an error: leave nothing behind."""
        with contextlib.suppress(OSError):
            os.remove(f"{self.path}.tmp")

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


def write(saving: Saving, files: list[TensorFile], items: list[Item], local: Mapping[str, torch.Tensor]) -> bool:
    """Fill the files; are they whole, as rank 0 knows? Collective, in any thread.

    Args:
        local: what this rank stores of those that `Item.held_by` names; plain tensors.
    """
    if saving.mesh.rank == 0:
        for file in files:
            file.create()
    places = {name: file for file in files for name in file.starts}
    for some in _batches(items, BATCH * saving.mesh.config.world_size):
        if not saving.all_well():  # nobody comes here before the files are there
            break
        for item in some:
            if item.writer is None and saving.mesh.rank in item.holders[0]:
                _put_rows(item, places, saving, local)
        for together in rounds(some):
            _put_whole(together, places, saving, local)
    for file in files:
        file.close()
    return _publish(saving, files)


def _batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    """Items of about `size` bytes together."""
    total, of_item = 0, []
    for item in items:
        of_item.append(total // size)
        total += item.group.nbytes
    for _, some in itertools.groupby(zip(of_item, items, strict=True), key=lambda pair: pair[0]):
        yield [item for _, item in some]


def _put_rows(item: Item, places: dict[str, TensorFile], saving: Saving, local: Mapping[str, torch.Tensor]) -> None:
    """This rank's rows, in as many pieces as they have in the file."""
    (entry,), (saved,), (holders,) = item.group.own, item.group.entries, item.holders
    part = part_of(entry, holders.index(saving.mesh.rank), saving.mesh.config)
    values = local[entry.name].cpu()
    if not part:
        places[saved.name].put(saved.name, values)
        return
    width, first = entry.nbytes // max(1, entry.shape[0]), 0
    for run in runs(part[0]):
        rows = values[first : first + run.stop - run.start]
        places[saved.name].put(saved.name, rows, run.start * width)
        first += len(rows)


def _put_whole(
    together: list[Item], places: dict[str, TensorFile], saving: Saving, local: Mapping[str, torch.Tensor]
) -> None:
    found = gathered(saving.mesh, together, local)
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
            file.discard()
        else:
            file.publish(sums)
    return not failed and saving.error is None


def _layout(entries: Iterable[Entry]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header with its length, where each tensor begins in the file, and the size of the file."""
    described: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        described[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the format asks
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: facts["data_offsets"][0] for name, facts in described.items() if "data_offsets" in facts}
    return header, {name: len(header) + start for name, start in offsets.items()}, len(header) + end


# ---- Optimizer states of 8 bits (bitsandbytes): in checkpoints the values themselves, which know no layout ----------
#     state1 [numbers of the part], uint8    codes
#     qmap1 [256]                            code -> value from -1 to 1
#     absmax1 [blocks]                       what that is times, per block of the part's values in their order
#
# (Dettmers et al., arXiv 2110.02861, section 2). Blocks begin anew on each rank: they are made again when they are
# read.


Slots = dict[str, Any]  # of one parameter: tensors, numbers

_BLOCK = 256
#: What states are nested in where bitsandbytes writes them itself.
_NESTED = "__bnb_optimizer_quant_state__"


def plain_slots(slots: Slots, parameter: torch.Tensor | None = None) -> dict[str, object]:
    """The slots of one parameter without codes; tensors of local values as parts of `parameter`."""
    slots = {**slots, **slots.get(_NESTED, {})}
    slots.pop(_NESTED, None)
    for name, number in (("state1", 1), ("state2", 2)):
        largest = slots.get(f"absmax{number}")
        if name in slots and (largest is None or largest.ndim == 1):  # AdEMAMix keeps two in one: no checkpoints
            values = slots[name] if largest is None else _values(slots[name], slots[f"qmap{number}"], largest)
            slots[name] = _as_part_of(parameter, values)
            slots = {key: value for key, value in slots.items() if key not in (f"absmax{number}", f"qmap{number}")}
    return slots


def _values(codes: torch.Tensor, table: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    factors = largest.repeat_interleave(_BLOCK)[: codes.numel()]
    return (table[codes.flatten().long()] * factors).view(codes.shape)


def _as_part_of(parameter: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor) or local.shape != stored(parameter).shape:
        return local
    return placed_as(parameter, local)


def pack_states(optimizer: Any) -> None:
    """After loading: values become codes again where the optimizer keeps codes. For others nothing."""
    if not hasattr(optimizer, "name2qmap"):
        return
    for number, index, parameter in _parameters(optimizer):
        slots = optimizer.state.get(parameter)
        if not slots:
            continue
        part = stored(parameter.detach())
        optimizer.init_state(optimizer.param_groups[number], part, number, index)
        optimizer.state[parameter] = _filled(optimizer.state.pop(part), slots)


def _parameters(optimizer: Optimizer8bit) -> Iterator[tuple[int, int, torch.Tensor]]:
    if not optimizer.initialized:
        optimizer.check_overrides()  # of embeddings, whose states stay in 32 bits
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield number, index, parameter


def _filled(fresh: Slots, loaded: Slots) -> Slots:
    for name, value in loaded.items():
        if name not in ("state1", "state2"):
            fresh[name] = value
            continue
        local = stored(value).to(fresh[name].device)
        if fresh[name].dtype == torch.uint8:
            codes, fresh[f"absmax{name[-1]}"] = _codes(local, fresh[f"qmap{name[-1]}"])
            fresh[name].copy_(codes)
        else:
            fresh[name].copy_(local)
    return fresh


def _codes(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes, and the largest magnitude of each block.

    A block whose extreme is negative ends at the table's lowest value, which is not -1: so codes that are read back
    are those that were written.
    """
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    highest, lowest = blocks.amax(1).clamp(min=0), blocks.amin(1).clamp(max=0)
    largest = highest / table[-1] if table[0] >= 0 else torch.maximum(highest / table[-1], lowest / table[0])
    scaled = (blocks / largest.clamp(min=torch.finfo(largest.dtype).tiny)[:, None]).flatten()[: flat.numel()]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).view(values.shape), largest
