"""Weights in a Hub folder: written from any layout by all ranks that see it, read by each rank in slices.

While saving, a rank holds no more than one whole tensor at a time, or one group of tensors that transformers converts
together (`hub_format.py`), and as many bytes to send. A tied weight is written under one name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.hub_format import (
    Entry,
    Group,
    find_tied_parameters,
    gather_entries_of,
    gather_from_stages,
    list_tied_names,
    make_hub_groups,
)
from hf_parallel.checkpoint.lazy_tensor import LazyTensor, RangeFile, make_lazy_tensor, read_values
from hf_parallel.checkpoint.saving import (
    Saving,
    TensorFile,
    join_current_save,
    make_lost_peer_error,
    wait_for_writer,
    write_files,
)
from hf_parallel.checkpoint.slices import find_local_part
from hf_parallel.checkpoint.writers import Item, assign_items, choose_one_writer, gather_item
from hf_parallel.model.anatomy import find_later_names, get_stored_order
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


def save_pretrained_model(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    **kwargs: Any,
) -> None:
    """`PreTrainedModel.save_pretrained` for a parallel model. Collective, but for `state_dict`: all processes call it.

    The folder holds config, generation config, safetensors and index, and loads in plain transformers.

    Raises:
        NotImplementedError: `push_to_hub=True`, or a weight conversion that cannot be reverted.
        CheckpointError: a rank could not write.
    """
    if push_to_hub:
        raise NotImplementedError("hf_parallel: save first, then upload the folder (or use Trainer's push_to_hub)")
    if state_dict is not None:  # gathered by the script (accelerator.get_state_dict): whole on rank 0, else empty
        if mesh.rank == 0:
            type(model).save_pretrained(model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size)
        return
    directory = os.fspath(save_directory)
    entries = list_entries(model, mesh)
    groups = make_hub_groups(model, entries, convert=kwargs.get("save_original_format", True))
    with join_current_save(mesh) as saving:  # at its end no rank goes on before the folder is whole
        if mesh.rank == 0:
            with saving.noting():
                os.makedirs(directory, exist_ok=True)
                model.config.dtype = str(model.dtype).removeprefix("torch.")
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(directory)
                if model.can_generate():
                    model.generation_config.save_pretrained(directory)
        stem = f"model.{variant}" if variant else "model"
        plan = split_into_files({group.entries[0].name: group.nbytes for group in groups}, stem, max_shard_size)
        items = assign_items(groups, saving.writers(directory), mesh.config)
        write_all = functools.partial(_write_weights, saving, directory, groups, items, plan, stem)
        saving.stream(taken(model.state_dict(), items, mesh), write_all)


def taken(tensors: Mapping[str, torch.Tensor], items: Iterable[Item], mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Select the tensors of which this rank writes or sends its part."""
    return {entry.name: tensors[entry.name] for item in items for entry in item.held_by(mesh.rank)}


def gather_state_dict(
    model: nn.Module, mesh: ParallelMesh, wanted: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Gather all weights on rank 0's CPU; an empty dict elsewhere. For scripts that ask for it: it needs the memory.

    A tied weight has all its names, as in a model's `state_dict()`.

    Args:
        wanted: by name, the same answer on all ranks; default: all.
    """
    entries = [entry for entry in list_entries(model, mesh) if wanted is None or wanted(entry.name)]
    whole = dict(stream_tensors([Group((entry,), (entry,)) for entry in entries], model.state_dict(), mesh, limit=0))
    for ties in gather_from_stages(_find_ties_on_stage(model), mesh):
        whole |= {name: whole[first] for name, first in ties.items() if first in whole}
    named = {name.replace(".base_layer.", "."): name for name in whole}
    for pair in _list_ties_inside(model):  # one memory, of which files take one name
        one, other = map(named.get, pair)
        if one is not None and other is not None:
            whole[one] = whole[other]
    for name, first in find_tied_parameters(model).items():
        if first in whole and name not in whole and (wanted is None or wanted(name)):
            whole[name] = whole[first]
    return whole


def list_entries(model: nn.Module, mesh: ParallelMesh) -> list[Entry]:
    """List every tensor of the whole model, in its order, without tied and ignored names. Collective over stages."""
    skip = list_tied_names(model) | set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    skip |= {name for name, first in _find_ties_on_stage(model).items() if first not in skip}
    state = model.state_dict()
    return gather_entries_of(model, mesh, {k: t for k, t in state.items() if k not in skip and torch.is_tensor(t)})


def _list_ties_inside(model: nn.Module) -> list[tuple[str, str]]:
    """Return the pairs of names that configs tie in a model and those inside it; without PEFT's `base_layer`."""
    inside = {path: inner for path, inner in model.named_modules() if "_hf_parallel_tied_keys" in vars(inner)}
    pairs = [(path, pair) for path, inner in inside.items() for pair in find_tied_parameters(inner).items()]
    return [(f"{path}.{key}", f"{path}.{source}") if path else (key, source) for path, (key, source) in pairs]


def _find_ties_on_stage(model: nn.Module) -> dict[str, str]:
    """Return the later names of parameters with their first ones; without those that a config ties on a stage."""
    # A stage may have another one's parameter under the name that it reads.
    of_config = {name for pair in _list_ties_inside(model) for name in pair}
    return {
        name: other
        for name, other in find_later_names(model).items()
        if name.replace(".base_layer.", ".") not in of_config
    }


def _write_weights(
    saving: Saving,
    directory: str,
    groups: list[Group],
    items: list[Item],
    plan: StateDictSplit,
    stem: str,
    local: dict[str, torch.Tensor],
) -> None:
    by_name = {group.entries[0].name: group for group in groups}
    entries = {
        file: [entry for name in names for entry in by_name[name].entries]
        for file, names in plan.filename_to_tensors.items()
    }
    files = [TensorFile(os.path.join(directory, file), found, saving) for file, found in entries.items()]
    if write_files(saving, files, items, local):
        with saving.noting():
            # Remove shards of an earlier save with another count, which would be read along with the new ones
            keep = set(entries)
            shards = re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors"
            pattern = re.compile(f"{shards}|{re.escape(name_index(stem))}")
            for file in os.listdir(directory):
                if pattern.fullmatch(file) and file not in keep:
                    os.remove(os.path.join(directory, file))
            if plan.is_sharded:
                weight_map = {entry.name: file for file, found in entries.items() for entry in found}
                write_index(directory, stem, {"metadata": plan.metadata, "weight_map": weight_map})


def name_index(stem: str) -> str:
    """Return the name of the index of "model", or of "model.variant", which transformers puts at the end."""
    kind, _, variant = stem.partition(".")
    return f"{kind}.safetensors.index.{variant}.json" if variant else f"{kind}.safetensors.index.json"


def write_index(directory: str, stem: str, index: Mapping[str, object]) -> None:
    """Write the index that says which tensor is in which file, as on the Hub."""
    with open(os.path.join(directory, name_index(stem)), "w", encoding="utf-8") as out:
        json.dump(index, out, indent=2, sort_keys=True)


def split_into_files(sizes: dict[str, int], stem: str, max_shard_size: int | str) -> StateDictSplit:
    """Distribute tensors over files as the Hub does, from their sizes in bytes."""
    return split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )


# ---- Whole weights for somebody outside, a bucket at a time, on rank 0: no rank ever holds the whole model ----------
# Names and conversions are those of the Hub, which an inference engine reads.


Held = TypeVar("Held", Group, Entry, torch.Tensor)


def make_parameter_groups(
    model: PreTrainedModel, mesh: ParallelMesh, own_name: Callable[[str], str | None]
) -> list[Group]:
    """Return the parameters of all stages in the format of the Hub, tied ones once. Collective over stages.

    Args:
        own_name: returns a parameter's name in the model without wrappers around its layers; None: leave it out.
    """
    tied = list_tied_names(model)
    entries = gather_entries_of(
        model, mesh, {name: t for name, t in list_local_parameters(model).items() if name not in tied}
    )
    named = [(own_name(entry.name), entry) for entry in entries]
    return make_hub_groups(model, [dataclasses.replace(entry, name=own) for own, entry in named if own is not None])


def list_local_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter, by name."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def stream_tensors(
    groups: Iterable[Group], local: Mapping[str, torch.Tensor], mesh: ParallelMesh, limit: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each tensor on rank 0; nothing on the others, which send. Collective: all ranks iterate.

    Args:
        local: this rank's parts, by the names of `groups`.
        limit: bytes that are gathered at once, unless one tensor, or what is converted together, is larger.

    Raises:
        CheckpointError: a rank was lost.
    """
    wait_for_writer()
    joined: list[Group] = []
    for converted, alike in itertools.groupby(groups, lambda group: group.conversion is not None):
        if converted:
            joined += alike
            continue
        for bucket in make_buckets(alike, limit):  # tensors that need no conversion, up to `limit` bytes together
            own = tuple(entry for group in bucket for entry in group.own)
            joined.append(Group(own, tuple(entry for group in bucket for entry in group.entries)))
    for item in [choose_one_writer(group, {0: 0}, mesh.config) for group in joined]:
        parts = {entry.name: get_stored(local[entry.name]) for entry in item.held_by(mesh.rank)}
        try:
            whole = gather_item(mesh, [item], parts)
        except RuntimeError as error:
            raise make_lost_peer_error(error, "the weights could not be gathered") from error
        if mesh.rank == 0:
            values = item.group.convert(whole)
            yield from ((entry.name, value) for entry, value in zip(item.group.entries, values, strict=True))


def make_buckets(tensors: Iterable[Held], limit: int) -> Iterator[list[Held]]:
    """Yield lists of consecutive tensors of at most `limit` bytes together; a larger tensor comes alone."""
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


def load_weights(model: nn.Module, directory: str) -> set[str]:
    """Copy the weights of `directory` into `model`, which has the same architecture. No communication.

    Returns the names in the folder that this rank has no use for: those of other stages, or of no model at all.

    Raises:
        FileNotFoundError: no safetensors in the folder.
        KeyError: a weight of the model is not in the folder.
        ValueError: a weight of the folder has another shape.
    """
    tied, first = list_tied_names(model), _find_ties_on_stage(model)
    own = {key: tensor for key, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    found, useless = set(), set[str]()
    with contextlib.ExitStack() as stack:
        for key, tensor in convert_tensors(model, own, open_folder(directory, stack), useless):
            copy_part(model, key, own[key], tensor)
            found.add(first.get(key, key))
    missing = [key for key in own if first.get(key, key) not in found and key not in tied]
    if missing:
        raise KeyError(f"{directory} has no {missing[0]}")
    return useless


def open_folder(directory: str, stack: contextlib.ExitStack, stem: str = "model") -> dict[str, LazyTensor]:
    """Return all tensors of the folder, not read; its files are open until the stack is closed.

    Raises:
        FileNotFoundError: there are none.
    """
    tensors: dict[str, LazyTensor] = {}
    index = os.path.join(directory, f"{stem}.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    elif os.path.isfile(os.path.join(directory, f"{stem}.safetensors")):
        files = [f"{stem}.safetensors"]
    else:
        raise FileNotFoundError(f"{directory} holds no {stem}.safetensors")
    for file in files:
        opened = stack.enter_context(RangeFile(os.path.join(directory, file)))
        tensors.update({key: make_lazy_tensor(opened.get_slice(key)) for key in opened.keys()})  # noqa: SIM118 - no mapping
    return tensors


def convert_tensors(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    useless: set[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors under the model's own names, joined and split as transformers does while loading.

    Args:
        useless: gets the names that the model does not have.
    """
    useless = set() if useless is None else useless
    if not hasattr(model, "base_model_prefix"):  # not a transformers model
        useless.update(set(tensors) - set(own))
        yield from ((key, tensor) for key, tensor in tensors.items() if key in own)
        return
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    # The renamings and conversions that the model was loaded with, or those of its class
    steps = getattr(model, "_weight_conversions", None)
    steps = get_model_conversion_mapping(model, add_legacy=False) if steps is None else steps
    renamings = [step for step in steps if isinstance(step, loading.WeightRenaming)]
    converters = [step for step in steps if isinstance(step, loading.WeightConverter)]
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


def copy_part(model: nn.Module, key: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into `target`; from another parallel model the part it has.

    Raises:
        ValueError: their shapes differ.
    """
    if source.shape != target.shape:
        raise ValueError(f"{key} is {tuple(target.shape)}, in the folder {tuple(source.shape)}")
    with torch.no_grad():
        if isinstance(source, DTensor):
            target.copy_(source)
        else:
            get_stored(target).copy_(read_values(source, find_local_part(target, get_stored_order(model, key))))
