"""Read a Hub folder into a parallel model: each rank reads only its slices."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.gather import entries_of, gathered
from hf_parallel.checkpoint.hub_format import Group, hub_groups
from hf_parallel.checkpoint.lazy_tensor import LazyTensor, lazy_tensor, values
from hf_parallel.checkpoint.manifest import tied_names
from hf_parallel.checkpoint.ranges import RangeFile
from hf_parallel.checkpoint.saving import lost_peer, wait_for_writer
from hf_parallel.checkpoint.slices import local_part
from hf_parallel.checkpoint.writers import all_to
from hf_parallel.model.anatomy import stored_order
from hf_parallel.ranks.mesh import ParallelMesh, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming


# ---- Whole weights for somebody outside, a bucket at a time, on rank 0: no rank ever holds the whole model ----------
# Names and conversions are those of the Hub, which an inference engine reads.


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


def load_weights(model: nn.Module, directory: str) -> set[str]:
    """Copy the weights of `directory` into `model`, which has the same architecture. No communication.

    Returns the names in the folder that this rank has no use for: those of other stages, or of no model at all.

    Raises:
        FileNotFoundError: no safetensors in the folder.
        KeyError: a weight of the model is not in the folder.
        ValueError: a weight of the folder has another shape.
    """
    tied = tied_names(model)
    own = {key: tensor for key, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    found, useless = set(), set[str]()
    with contextlib.ExitStack() as stack:
        for key, tensor in converted(model, own, in_folder(directory, stack), useless):
            copy_part(model, key, own[key], tensor)
            found.add(key)
    missing = [key for key in own if key not in found and key not in tied]
    if missing:
        raise KeyError(f"{directory} has no {missing[0]}")
    return useless


def in_folder(directory: str, stack: contextlib.ExitStack, stem: str = "model") -> dict[str, LazyTensor]:
    """All tensors of the folder, not read; open until the stack is closed.

    Raises:
        FileNotFoundError: there are none.
    """
    tensors: dict[str, LazyTensor] = {}
    for file in _files(directory, stem):
        opened = stack.enter_context(RangeFile(os.path.join(directory, file)))
        tensors.update({key: lazy_tensor(opened.get_slice(key)) for key in opened.keys()})  # noqa: SIM118 - no mapping
    return tensors


def _files(directory: str, stem: str) -> list[str]:
    index = os.path.join(directory, f"{stem}.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    if not os.path.isfile(os.path.join(directory, f"{stem}.safetensors")):
        raise FileNotFoundError(f"{directory} holds no {stem}.safetensors")
    return [f"{stem}.safetensors"]


def converted(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    useless: set[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the model's own names, joined and split as transformers does while loading.

    Args:
        useless: gets the names that the model does not have.
    """
    useless = set() if useless is None else useless
    if not hasattr(model, "base_model_prefix"):  # not a transformers model
        useless.update(set(tensors) - set(own))
        yield from ((key, tensor) for key, tensor in tensors.items() if key in own)
        return
    from transformers import core_model_loading as loading

    renamings, converters = _conversions(model)
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    together: dict[str, WeightConverter] = {}
    for key in sorted(tensors, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if pattern is not None and name in own:
            converter = together.setdefault(name, copy.deepcopy(of_pattern[pattern]))
            converter.add_tensor(name, key, pattern, tensors[key])
        elif name in own or key in own:
            yield name if name in own else key, tensors[key]
        else:
            useless.add(key)
    for name, converter in together.items():
        for target, tensor in converter.convert(name, model=model, config=model.config).items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def _conversions(model: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """The renamings and the conversions that the model was loaded with, or those of its class."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    steps = getattr(model, "_weight_conversions", None)
    steps = get_model_conversion_mapping(model, add_legacy=False) if steps is None else steps
    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = ([step for step in steps if isinstance(step, kind)] for kind in kinds)
    return renamings, converters


def copy_part(model: nn.Module, key: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into that of `model`; from another parallel model the part it has.

    Raises:
        ValueError: they have not the same shape.
    """
    if source.shape != target.shape:
        raise ValueError(f"{key} is {tuple(target.shape)}, in the folder {tuple(source.shape)}")
    with torch.no_grad():
        if isinstance(source, DTensor):
            target.copy_(source)
        else:
            stored(target).copy_(values(source, local_part(target, stored_order(model, key))))
