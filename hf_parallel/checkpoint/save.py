"""Write an ordinary Hub folder from any layout, one tensor at a time.

Rank 0 writes the header of a safetensors file first (all sizes are known beforehand) and then appends tensor after
tensor as they are gathered, so it never holds more than one whole tensor, or one group of those that transformers
converts together (`hub_format.py`). Of a tied weight only one name is written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.hub_format import Entry, Group, hub_groups
from hf_parallel.mesh import ParallelMesh
from hf_parallel.packed import stored_order

#: safetensors' names of dtypes (format description in its README).
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_pretrained(
    model: Any,
    mesh: ParallelMesh,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    **kwargs: Any,
) -> None:
    """`PreTrainedModel.save_pretrained` for a parallel model. Collective: every process calls it.

    The folder holds config, generation config, safetensors and index, and loads in plain transformers.

    Raises:
        NotImplementedError: `push_to_hub=True`, or a weight conversion that cannot be reverted.
    """
    if push_to_hub:
        raise NotImplementedError("hf_parallel: save first, then upload the folder (or use Trainer's push_to_hub)")
    if state_dict is not None:  # gathered by the script (accelerator.get_state_dict): whole on rank 0, else empty
        if mesh.rank == 0:
            type(model).save_pretrained(model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size)
        dist.barrier()
        return
    directory = os.fspath(save_directory)
    groups = hub_groups(model, list_entries(model, mesh), convert=kwargs.get("save_original_format", True))
    if mesh.rank == 0:
        os.makedirs(directory, exist_ok=True)
        _write_configs(model, directory)
    _write_weights(model, mesh, directory, groups, max_shard_size, variant)
    dist.barrier()  # no rank reads or goes on before the folder is whole


def full_state_dict(
    model: nn.Module, mesh: ParallelMesh, wanted: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """All weights on rank 0's CPU, an empty dict elsewhere. For scripts that ask for it: it needs the memory.

    Args:
        wanted: by name, the same answer on all ranks; default: all.
    """
    tensors = {}
    entries = [entry for entry in list_entries(model, mesh) if wanted is None or wanted(entry.name)]
    for entry, tensor in gathered(model, mesh, entries, model.state_dict()):
        if tensor is not None:
            tensors[entry.name] = tensor.cpu()
    return tensors


def list_entries(model: Any, mesh: ParallelMesh) -> list[Entry]:
    """Every tensor of the whole model, in its order, without tied and ignored names. Collective over stages."""
    skip = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    skip |= set(getattr(model, "_hf_parallel_tied_keys", None) or getattr(model, "all_tied_weights_keys", None) or ())
    own = [(k, tuple(t.shape), t.dtype) for k, t in model.state_dict().items() if k not in skip and torch.is_tensor(t)]
    stages: list[Any] = [own]
    if mesh.size("pp") > 1:
        stages = [None] * mesh.size("pp")
        dist.all_gather_object(stages, own, group=mesh.group("pp"))
    entries: dict[str, Entry] = {}
    for stage, described in enumerate(stages):
        for key, shape, dtype in described:
            # The first stage's copy of a tied embedding is the one that is written.
            entries.setdefault(key, Entry(key, shape, dtype, stage))
    return list(entries.values())


def _write_configs(model: Any, directory: str) -> None:
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def _write_weights(
    model: nn.Module,
    mesh: ParallelMesh,
    directory: str,
    groups: list[Group],
    max_shard_size: int | str,
    variant: str | None,
) -> None:
    stem, state = f"model.{variant}" if variant else "model", model.state_dict()
    by_name = {next(iter(group.saved)): group for group in groups}
    plan = shards({name: group.nbytes for name, group in by_name.items()}, stem, max_shard_size)
    weight_map: dict[str, str] = {}
    for file, names in plan.filename_to_tensors.items():
        chosen = [by_name[name] for name in names]
        saved = [entry for group in chosen for entry in group.entries]
        weight_map.update({entry.name: file for entry in saved})
        with open_for_writing(os.path.join(directory, file), saved, mesh.rank == 0) as out:
            tensors = gathered(model, mesh, [entry for group in chosen for entry in group.own], state)
            for group in chosen:
                _write_group(group, itertools.islice(tensors, len(group.own)), out)
    if mesh.rank == 0:
        _remove_stale_files(directory, stem, keep=set(plan.filename_to_tensors))
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": weight_map}
            with open(os.path.join(directory, f"{stem}.safetensors.index.json"), "w", encoding="utf-8") as out:
                json.dump(index, out, indent=2, sort_keys=True)


def shards(sizes: dict[str, int], stem: str, max_shard_size: int | str) -> Any:
    """Which names go into which file, as on the Hub, from their sizes in bytes."""
    return split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda size: None,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )


def _write_group(group: Group, found: Iterable, out: BinaryIO | None) -> None:
    tensors = {entry.name: tensor.cpu() for entry, tensor in found if tensor is not None}
    if out is not None:
        for value in group.convert(tensors):
            write_values(value, out)


def write_values(tensor: torch.Tensor, out: BinaryIO) -> None:
    """Append a tensor's values to a file made by `open_for_writing`."""
    out.write(_as_bytes(tensor.cpu()).numpy().data)


@contextlib.contextmanager
def open_for_writing(path: str, entries: list[Entry], writer: bool) -> Iterator[BinaryIO | None]:
    """A safetensors file whose header is written; it takes its final name only once it is whole and flushed."""
    if not writer:
        yield None
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.nbytes
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the format asks
    with open(path + ".tmp", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        yield out
        out.flush()
        os.fsync(out.fileno())
    os.replace(path + ".tmp", path)


def gathered(
    model: nn.Module, mesh: ParallelMesh, entries: Iterable[Entry], state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Entry, torch.Tensor | None]]:
    """Whole tensors in the model's own order, one after the other, on rank 0; None elsewhere. Collective.

    Args:
        state: this rank's parts, which lie as the tensors of the model of that name, or of what is before a "/", do.
    """
    stage, leader = mesh.index("pp"), mesh.index("dp_replicate") == mesh.data_rank == mesh.index("tp") == 0
    for entry in entries:
        tensor = None
        if entry.stage == stage:
            tensor = _whole(state[entry.name].detach())
            order = stored_order(model, entry.name.partition("/")[0])
            tensor = order.to_own(tensor) if order else tensor
        if entry.stage != 0 and leader:  # the ranks that differ from rank 0 in the stage alone
            tensor = _to_first_stage(tensor, entry, mesh)
        yield entry, tensor if mesh.rank == 0 else None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that dim 0 cut by dp_shard and tp takes two gathers, for every tensor
    try:
        return tensor.full_tensor()
    finally:
        logger.setLevel(level)


def _to_first_stage(tensor: torch.Tensor | None, entry: Entry, mesh: ParallelMesh) -> torch.Tensor | None:
    group = mesh.group("pp")
    if mesh.index("pp") == entry.stage:
        assert tensor is not None
        dist.send(_as_bytes(tensor).to(mesh.device), group=group, group_dst=0)
    elif mesh.index("pp") == 0:
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8, device=mesh.device)
        dist.recv(buffer, group=group, group_src=entry.stage)
        return buffer.view(entry.dtype).view(entry.shape)
    return None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _remove_stale_files(directory: str, stem: str, keep: set[str]) -> None:
    """Shards of an earlier save with another count would be read along with the new ones."""
    pattern = re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for file in os.listdir(directory):
        if pattern.fullmatch(file) and file not in keep:
            os.remove(os.path.join(directory, file))
