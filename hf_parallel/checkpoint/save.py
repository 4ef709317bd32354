"""Write an ordinary Hub folder from any layout, by all ranks that see it (`writers.py`).

A rank holds no more than one whole tensor at a time, or one group of those that transformers converts together
(`hub_format.py`), and what it sends of as many bytes. Of a tied weight only one name is written.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from hf_parallel.checkpoint.files import TensorFile, write
from hf_parallel.checkpoint.gather import entries_of
from hf_parallel.checkpoint.hub_format import Entry, Group, hub_groups
from hf_parallel.checkpoint.load import streamed
from hf_parallel.checkpoint.manifest import tied_names
from hf_parallel.checkpoint.saving import Saving, current
from hf_parallel.checkpoint.writers import Item, assign
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit
    from transformers import PreTrainedModel


def save_pretrained(
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
    groups = hub_groups(model, entries, convert=kwargs.get("save_original_format", True))
    with current(mesh) as saving:  # at its end no rank goes on before the folder is whole
        if mesh.rank == 0:
            with saving.noting():
                os.makedirs(directory, exist_ok=True)
                _write_configs(model, directory)
        stem = f"model.{variant}" if variant else "model"
        plan = shards({group.entries[0].name: group.nbytes for group in groups}, stem, max_shard_size)
        items = assign(groups, saving.writers(directory), mesh.config)
        write_all = functools.partial(_write_weights, saving, directory, groups, items, plan, stem)
        saving.stream(taken(model.state_dict(), items, mesh), write_all)


def taken(tensors: Mapping[str, torch.Tensor], items: Iterable[Item], mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Of these the ones of which this rank's part is written or sent."""
    return {entry.name: tensors[entry.name] for item in items for entry in item.held_by(mesh.rank)}


def full_state_dict(
    model: nn.Module, mesh: ParallelMesh, wanted: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """All weights on rank 0's CPU, an empty dict elsewhere. For scripts that ask for it: it needs the memory.

    Args:
        wanted: by name, the same answer on all ranks; default: all.
    """
    entries = [entry for entry in list_entries(model, mesh) if wanted is None or wanted(entry.name)]
    return dict(streamed([Group((entry,), (entry,)) for entry in entries], model.state_dict(), mesh, limit=0))


def list_entries(model: nn.Module, mesh: ParallelMesh) -> list[Entry]:
    """Every tensor of the whole model, in its order, without tied and ignored names. Collective over stages."""
    skip = tied_names(model) | set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict()
    return entries_of(model, mesh, {k: t for k, t in state.items() if k not in skip and torch.is_tensor(t)})


def _write_configs(model: PreTrainedModel, directory: str) -> None:
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


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
    if write(saving, files, items, local):
        with saving.noting():
            _remove_stale_files(directory, stem, keep=set(entries))
            if plan.is_sharded:
                weight_map = {entry.name: file for file, found in entries.items() for entry in found}
                write_index(directory, stem, {"metadata": plan.metadata, "weight_map": weight_map})


def write_index(directory: str, stem: str, index: Mapping[str, object]) -> None:
    """Which tensor is in which file, as on the Hub."""
    with open(os.path.join(directory, f"{stem}.safetensors.index.json"), "w", encoding="utf-8") as out:
        json.dump(index, out, indent=2, sort_keys=True)


def shards(sizes: dict[str, int], stem: str, max_shard_size: int | str) -> StateDictSplit:
    """Which names go into which file, as on the Hub, from their sizes in bytes."""
    return split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )


def _remove_stale_files(directory: str, stem: str, keep: set[str]) -> None:
    """Shards of an earlier save with another count would be read along with the new ones."""
    pattern = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for file in os.listdir(directory):
        if pattern.fullmatch(file) and file not in keep:
            os.remove(os.path.join(directory, file))
