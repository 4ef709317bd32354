"""`hf-parallel export`: any checkpoint to a Hub folder, in one process without a GPU, one tensor at a time.

checkpoint-20/  ──what belongs to the model, in another dtype if wanted──>  OUT/
checkpoint-20/  ──that, optimizer, schedule and random states as plain Trainer writes them──>  OUT/
adapter + base  ──W + (alpha / r) B A, weight by weight (Hu et al., 2021, section 4.1)──>  OUT/
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hf_parallel.checkpoint.folder import LAYOUT
from hf_parallel.checkpoint.hub_format import Entry, Group, make_hub_groups
from hf_parallel.checkpoint.lazy_tensor import LazyTensor, make_lazy_tensor
from hf_parallel.checkpoint.manifest import find_damages, has_manifest
from hf_parallel.checkpoint.resume import refuse_unplain_state, write_plain
from hf_parallel.checkpoint.saving import CheckpointError, Saving, TensorFile
from hf_parallel.checkpoint.slices import Part, read_part
from hf_parallel.checkpoint.weights import convert_tensors, open_folder, split_into_files, write_index

if TYPE_CHECKING:
    from torch import nn

ADAPTER = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Files that a training run keeps beside its model.
_OF_THE_RUN = re.compile(
    r"(optimizer|scheduler|rng_state|random_states|scaler|sampler|custom_checkpoint|dl_state_dict|data_order)[\w.]*"
    r"|trainer_state\.json|training_args\.bin|_?hf_parallel\.(json|lock)|manifest\.json"
    r"|.*\.safetensors(\.index\.json)?"
)
#: Files of these that plain Trainer reads as they are.
_FOR_TRAINER = ("scheduler.pt", "scaler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin")


def export_checkpoint(
    checkpoint: str,
    out: str,
    dtype: torch.dtype | None = None,
    merge_adapter: bool = False,
    base: str | None = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """Write the model of a checkpoint as a Hub folder.

    Args:
        dtype: of all floating-point tensors; default: as they are.
        base: where the weights under an adapter are; default: where its config says.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ValueError: there is nothing to merge, or it cannot be merged.
    """
    if has_manifest(checkpoint) and (found := find_damages(checkpoint)):
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(found)}")
    adapter = os.path.isfile(os.path.join(checkpoint, ADAPTER))
    if base is not None and not adapter:
        raise ValueError(f"--base: {checkpoint} has no {ADAPTER}; leave it out")
    if merge_adapter and not adapter:
        raise ValueError(f"--merge-adapter: {checkpoint} has no {ADAPTER}; leave it out")
    os.makedirs(out, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if merge_adapter:
            source, stem = base or _find_base_of(checkpoint), "model"
            tensors, groups = _merge_adapter_into(checkpoint, source, stack)
            _copy_files(source, out)
        else:
            stem = "adapter_model" if adapter else "model"
            tensors = open_folder(checkpoint, stack, stem)
            entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
            groups = [Group((entry,), (entry,)) for entry in entries]
        if dtype is not None:
            for place, group in enumerate(groups):
                cast = (replace(e, dtype=dtype) if e.dtype.is_floating_point else e for e in group.entries)
                groups[place] = replace(group, entries=tuple(cast))
        _write_groups(groups, tensors, out, stem, max_shard_size)
    _copy_files(checkpoint, out, leave=(ADAPTER,) if merge_adapter else ())
    if dtype is not None and stem == "model" and os.path.isfile(os.path.join(out, "config.json")):
        path = os.path.join(out, "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, sort_keys=True)


def find_data_ranks(checkpoint: str) -> list[int]:
    """Return the data rank of each rank that wrote a checkpoint from which `export_run` can write one.

    Raises:
        ValueError: no layout has written the checkpoint, or its optimizer's state is not known to others.
    """
    try:
        with open(os.path.join(checkpoint, LAYOUT), encoding="utf-8") as file:
            shares: list[int] = json.load(file)["data_ranks"]
    except FileNotFoundError:
        raise ValueError(f"--trainer: {checkpoint} is plain Trainer's already") from None
    refuse_unplain_state(checkpoint)
    return shares


def export_run(checkpoint: str, out: str, shares: list[int]) -> None:
    """Write what plain Trainer resumes from beside the model, as it does itself. Needs the memory of the moments.

    Args:
        shares: what `find_data_ranks` gives of the checkpoint.
    """
    write_plain(checkpoint, out)
    # Processes of plain Trainer are data ranks.
    names = {f"rng_state_{share}.pth": f"rng_state_{shares.index(share)}.pth" for share in set(shares)}
    names.update({name: name for name in _FOR_TRAINER})
    for name, source in names.items():
        if os.path.isfile(os.path.join(checkpoint, source)):
            shutil.copyfile(os.path.join(checkpoint, source), os.path.join(out, name))


def _write_groups(
    groups: list[Group], tensors: dict[str, LazyTensor], out: str, stem: str, max_shard_size: int | str
) -> None:
    by_name = {group.entries[0].name: group for group in groups}
    plan = split_into_files({name: group.nbytes for name, group in by_name.items()}, stem, max_shard_size)
    weight_map: dict[str, str] = {}
    for file, names in plan.filename_to_tensors.items():
        entries = [entry for name in names for entry in by_name[name].entries]
        weight_map.update({entry.name: file for entry in entries})
        target = TensorFile(os.path.join(out, file), entries, _Alone())
        target.create()
        for name in names:
            _write_group(by_name[name], tensors, target)
        target.close()
        target.publish([target.sums])
    if plan.is_sharded:
        write_index(out, stem, {"metadata": plan.metadata, "weight_map": weight_map})


def _write_group(group: Group, tensors: dict[str, LazyTensor], target: TensorFile) -> None:
    """Read, merge, convert and write one group; a function of its own keeps no tensor while the next one is read."""
    own = {entry.name: tensors[entry.name].whole() for entry in group.own}
    for entry, value in zip(group.entries, group.convert(own), strict=True):
        target.put(entry.name, value.to(entry.dtype))


class _Alone(Saving):
    """A save in one process, where an error is raised where it happens."""

    def __init__(self) -> None:
        self.error, self.checksums = None, {}

    @contextlib.contextmanager
    def noting(self, path: str = "") -> Iterator[None]:
        yield


def _copy_files(source: str, out: str, leave: tuple[str, ...] = ()) -> None:
    for name in sorted(os.listdir(source)):
        path = os.path.join(source, name)
        if os.path.isfile(path) and not _OF_THE_RUN.fullmatch(name) and name not in leave:
            shutil.copyfile(path, os.path.join(out, name))


# ---- adapters ----------------------------------------------------------------------------------------------------


def _find_base_of(checkpoint: str) -> str:
    with open(os.path.join(checkpoint, ADAPTER), encoding="utf-8") as file:
        name = json.load(file).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{checkpoint}/{ADAPTER} does not say what its base is; --base FOLDER works")
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])


def _merge_adapter_into(
    checkpoint: str, base: str, stack: contextlib.ExitStack
) -> tuple[dict[str, LazyTensor], list[Group]]:
    """Return the base's tensors with the adapter in them, and how its conversion groups them for the Hub."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(base)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        raise ValueError(f"{base}/config.json names no architecture that transformers has ({config.architectures})")
    with torch.device("meta"):
        model = architecture(config)
    state = model.state_dict()
    tensors = {
        name: tensor if isinstance(tensor, LazyTensor) else make_lazy_tensor(tensor)
        for name, tensor in convert_tensors(model, state, open_folder(base, stack))
    }
    _merge(model, tensors, checkpoint, stack)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    entries = [Entry(n, tuple(t.shape), t.dtype) for n, t in tensors.items() if n not in tied]
    return tensors, make_hub_groups(model, entries)


def _merge(model: nn.Module, tensors: dict[str, LazyTensor], checkpoint: str, stack: contextlib.ExitStack) -> None:
    """Replace each weight that an adapter changes by its sum with the adapter, computed when it is read."""
    with open(os.path.join(checkpoint, ADAPTER), encoding="utf-8") as file:
        config = json.load(file)
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("lora_bias"):
        raise ValueError(
            f"--merge-adapter: {config.get('peft_type')} with these options is not known; plain LoRA works"
        )
    parts: dict[tuple[str, int], dict[str, LazyTensor]] = {}
    for key, tensor in open_folder(checkpoint, stack, "adapter_model").items():
        name = key.removeprefix("base_model.model.")
        found = re.fullmatch(r"(.+?)((?:\.base_layer)*)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name)
        if found:
            parts.setdefault((found[1], found[2].count("base_layer")), {})[found[3]] = tensor
        elif (own := name.replace(".base_layer.", ".")) in tensors:
            tensors[own] = tensor  # a module that was trained whole
        else:
            raise ValueError(f"--merge-adapter: {key} is no part of {type(model).__name__}")
    for (path, depth), pair in parts.items():
        targets = config.get("target_parameters") or ()
        names = [name for name, _ in model.get_submodule(path).named_parameters(recurse=False)]
        targeted = [name for name in names if any(f".{path}.{name}".endswith(f".{target}") for target in targets)]
        module = model.get_submodule(path)
        weight = f"{path}.{targeted[-1 - depth] if targeted else 'weight'}"
        if weight not in tensors:
            raise ValueError(f"--merge-adapter: {type(model).__name__} has no {weight}")
        shape = tensors[weight].shape
        by_input = not targeted and type(module).__name__ in ("Conv1D", "Embedding")
        if len(shape) == 3:
            by_input = getattr(module, "is_transposed", False)
        patterns, place = config.get("alpha_pattern") or {}, weight if targeted else path
        own_alpha = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", place))
        alpha = next(own_alpha, config["lora_alpha"])
        rank = int(pair["A"].shape[0]) // (shape[0] if len(shape) == 3 else 1)  # A and B of all experts: side by side
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        tensors[weight] = _add_adapter(tensors[weight], pair["A"], pair["B"], by_input, scaling)


def _add_adapter(weight: LazyTensor, a: LazyTensor, b: LazyTensor, by_input: bool, scaling: float) -> LazyTensor:
    """Return W + scaling B A, computed in fp32: of matrices, or of stacks with a matrix per expert.

    Args:
        by_input: the weight is stored as (in, out), as in embeddings and Conv1D.
    """

    def part(wanted: Part) -> torch.Tensor:
        whole = weight.whole().float()
        first, second = b.whole().float(), a.whole().float()
        if whole.dim() == 3:
            experts = len(whole)
            first = first.reshape(len(first), -1, experts).permute(2, 0, 1)  # (experts, out, r)
            second = second.reshape(experts, -1, second.shape[1])  # (experts, r, in)
        factors = (second.mT, first.mT) if by_input else (first, second)
        add = whole.baddbmm_ if whole.dim() == 3 else whole.addmm_
        return read_part(add(*factors, alpha=scaling).to(weight.dtype), wanted)

    return LazyTensor(part, weight.shape, weight.dtype)
