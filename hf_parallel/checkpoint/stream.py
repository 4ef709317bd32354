"""Whole weights for somebody outside, a bucket at a time, on rank 0: no rank ever holds the whole model.

Names and conversions are those of the Hub, which an inference engine reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hf_parallel.checkpoint.gather import describe, gathered
from hf_parallel.checkpoint.hub_format import Group, hub_groups
from hf_parallel.checkpoint.names import of_stages
from hf_parallel.checkpoint.saving import wait_for_writer
from hf_parallel.checkpoint.writers import all_to
from hf_parallel.mesh import ParallelMesh, stored


def parameter_groups(model: Any, mesh: ParallelMesh, own_name: Callable[[str], str | None]) -> list[Group]:
    """The parameters of all stages in the format of the Hub, tied ones once. Collective over stages.

    Args:
        own_name: a parameter's, as the model without wrappers around its layers has it; None: leave it out.
    """
    entries: dict[str, Any] = {}
    for theirs in of_stages(_described(model, mesh, own_name), mesh):
        for entry in theirs:
            entries.setdefault(entry.name, entry)
    return hub_groups(model, entries.values())


def _described(model: Any, mesh: ParallelMesh, own_name: Callable[[str], str | None]) -> list[Any]:
    tied = set(getattr(model, "_hf_parallel_tied_keys", None) or getattr(model, "all_tied_weights_keys", None) or ())
    found = []
    for name, tensor in parameters(model).items():
        own = None if name in tied else own_name(name)
        if own is not None:
            found.append(dataclasses.replace(describe(model, name, tensor, mesh.index("pp")), name=own))
    return found


def parameters(model: Any) -> dict[str, torch.Tensor]:
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
    """
    wait_for_writer()
    for item in all_to(0, joined(groups, limit), mesh.config):
        parts = {entry.name: stored(local[entry.name]) for entry in item.held_by(mesh.rank)}
        whole = gathered(mesh, [item], parts)
        if mesh.rank == 0:
            values = item.group.convert(whole)
            yield from ((entry.name, value) for entry, value in zip(item.group.entries, values, strict=True))


def joined(groups: Iterable[Group], limit: int) -> Iterator[Group]:
    """Consecutive tensors that need no conversion as one group, up to `limit` bytes."""
    bucket: list[Group] = []
    for group in groups:
        full = bucket and sum(one.nbytes for one in bucket) + group.nbytes > limit
        if bucket and (full or group.conversion is not None or bucket[-1].conversion is not None):
            yield _one(bucket)
            bucket = []
        bucket.append(group)
    if bucket:
        yield _one(bucket)


def _one(bucket: list[Group]) -> Group:
    if len(bucket) == 1:
        return bucket[0]
    own = tuple(entry for group in bucket for entry in group.own)
    return Group(own, tuple(entry for group in bucket for entry in group.entries))
