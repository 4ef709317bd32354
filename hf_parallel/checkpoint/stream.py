"""Whole weights for somebody outside, a bucket at a time, on rank 0: no rank ever holds the whole model.

Names and conversions are those of the Hub, which an inference engine reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from hf_parallel.checkpoint.gather import entries_of, gathered
from hf_parallel.checkpoint.hub_format import Group, hub_groups
from hf_parallel.checkpoint.names import tied_names
from hf_parallel.checkpoint.saving import lost_peer, wait_for_writer
from hf_parallel.checkpoint.writers import all_to
from hf_parallel.mesh import ParallelMesh, stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=HasBytes)


def parameter_groups(model: PreTrainedModel, mesh: ParallelMesh, own_name: Callable[[str], str | None]) -> list[Group]:
    """The parameters of all stages in the format of the Hub, tied ones once. Collective over stages.

    Args:
        own_name: a parameter's, as the model without wrappers around its layers has it; None: leave it out.
    """
    tied = tied_names(model)
    entries = entries_of(model, mesh, {name: t for name, t in parameters(model).items() if name not in tied})
    named = [(own_name(entry.name), entry) for entry in entries]
    return hub_groups(model, [dataclasses.replace(entry, name=own) for own, entry in named if own is not None])


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What this rank stores of them, by name."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def streamed(
    groups: Iterable[Group], local: Mapping[str, torch.Tensor], mesh: ParallelMesh, limit: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor on rank 0; nothing on the others, which send. Collective: all ranks iterate.

    Args:
        local: what this rank stores, by the names of `groups`.
        limit: bytes that are gathered at once, unless one tensor, or what is converted together, is larger.

    Raises:
        CheckpointError: a rank was lost.
    """
    wait_for_writer()
    for item in all_to(0, joined(groups, limit), mesh.config):
        parts = {entry.name: stored(local[entry.name]) for entry in item.held_by(mesh.rank)}
        try:
            whole = gathered(mesh, [item], parts)
        except RuntimeError as error:
            raise lost_peer(error, "the weights could not be gathered") from error
        if mesh.rank == 0:
            values = item.group.convert(whole)
            yield from ((entry.name, value) for entry, value in zip(item.group.entries, values, strict=True))


def joined(groups: Iterable[Group], limit: int) -> Iterator[Group]:
    """Consecutive tensors that need no conversion as one group, up to `limit` bytes."""
    for converted, alike in itertools.groupby(groups, lambda group: group.conversion is not None):
        if converted:
            yield from alike
        else:
            yield from map(_one, in_buckets(alike, limit))


def in_buckets(tensors: Iterable[Held], limit: int) -> Iterator[list[Held]]:
    """Consecutive ones, or what stands for them, of together at most `limit` bytes, or one that alone has more."""
    bucket: list[Held] = []
    held = 0
    for tensor in tensors:
        if bucket and held + tensor.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


def _one(bucket: list[Group]) -> Group:
    own = tuple(entry for group in bucket for entry in group.own)
    return Group(own, tuple(entry for group in bucket for entry in group.entries))
