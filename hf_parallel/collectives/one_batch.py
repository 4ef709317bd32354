"""Do the ranks of one model read one batch? Compared by checksum in the first steps, and then ever more rarely.

A loader that a script shards by `dist.get_rank()` gives ranks that split one model different rows. Of equal lengths
they train a wrong model without a word; of unequal ones they end in a collective. What is compared is the data: whole
numbers, and floats that nothing was computed of.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hf_parallel.collectives import objects
from hf_parallel.mesh import ParallelMesh
from hf_parallel.spec import refuse

#: Steps that are compared from the first on; later ones if their number is a power of two.
FIRST = 3
#: Arguments that models compute of others, each stage or rank for itself.
_COMPUTED = {"inputs_embeds", "encoder_outputs", "past_key_values"}


class OneBatch:
    """Compares the batches of one model's ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh, self.steps = mesh, Counter[str]()
        self.axes = [axis for axis in ("tp", "cp", "pp") if mesh.size(axis) > 1]
        if dist.get_backend() == "fake":
            self.axes = []

    def begin(self) -> None:
        """Another loader: its first batches are compared as well. On all ranks of the model."""
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
        if not self.axes or not isinstance(batch, Mapping) or (step > FIRST and step & (step - 1)):
            return
        own = {name: _checksum(value) for name, value in batch.items() if _is_data(name, value)}
        found = [(self.mesh.rank, own)]
        for axis in self.axes:
            found = [entry for part in objects.gather(found, self.mesh.group(axis)) for entry in part]
        self._compare(found)

    def _compare(self, found: list[tuple[int, dict]]) -> None:
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
                            "(accelerator.num_processes and process_index), in the place of dist.get_rank()"
                        ),
                    )


def _is_data(name: str, value: object) -> bool:
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor or name in _COMPUTED:
        return False
    return value.layout == torch.strided and not value.is_meta and not value.requires_grad


def _checksum(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, int]:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(values.numpy().tobytes())
