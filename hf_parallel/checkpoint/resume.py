"""The optimizer's state on disk: whole tensors by parameter name, in the model's own order, whatever the layout.

    optimizer/index.json          which optimizer, its options per parameter, steps and other numbers
    optimizer/state.safetensors   `model.norm.weight/exp_avg`, … (several files above the shard size)
    optimizer.pt                  no state: stops a plain Trainer, with a message that names this package

A folder of their own, as programs take every safetensors file beside a config.json for weights.

All ranks write, as they do weights; reading takes only this rank's slices. What a plain Trainer wrote
(`optimizer.pt`, parameters by number) is read too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.ask.waiting import waiting
from hf_parallel.checkpoint.files import TensorFile, pack_states, plain_slots, write
from hf_parallel.checkpoint.gather import entries_of
from hf_parallel.checkpoint.hub_format import Group
from hf_parallel.checkpoint.lazy_tensor import lazy_tensor, values
from hf_parallel.checkpoint.manifest import named, names_in_order, of_stages
from hf_parallel.checkpoint.ranges import RangeFile
from hf_parallel.checkpoint.save import shards, taken
from hf_parallel.checkpoint.saving import Saving, current
from hf_parallel.checkpoint.slices import local_part, whole_part
from hf_parallel.checkpoint.writers import Item, assign
from hf_parallel.model.anatomy import stored_order
from hf_parallel.ranks.mesh import ParallelMesh, stored

if TYPE_CHECKING:
    from torch.optim import Optimizer


# ---- What an optimizer keeps, by parameter name: tensors of the parameter's shape, numbers, options -----------------


#: What a JSON file can say.
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


@dataclass
class OptimizerState:
    """What is known of an optimizer by parameter name: tensors of the parameter's shape, numbers, options."""

    kind: str | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # "name/slot"
    numbers: dict[str, dict[str, Json]] = field(default_factory=dict)  # name -> slot
    options: dict[str, dict[str, Json]] = field(default_factory=dict)  # name -> those of its group
    places: dict[str, int] = field(default_factory=dict)  # name -> number of its group
    groups: list[dict[str, Json]] = field(default_factory=list)  # options of every one, also of empty ones


def read_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """This rank's part of the state, by name.

    Raises:
        NotImplementedError: the optimizer keeps something that has no place in a checkpoint.
    """
    kind, names = kind_of(optimizer), {id(p): name for name, p in named(model).items()}
    state = OptimizerState(kind)
    for number, group in enumerate(optimizer.param_groups):
        state.groups.append({key: as_json(kind, key, value) for key, value in group.items() if key != "params"})
        own = [names[id(p)] for p in group["params"] if id(p) in names]
        state.options.update(dict.fromkeys(own, state.groups[-1]))
        state.places.update(dict.fromkeys(own, number))
    for parameter, slots in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise NotImplementedError(
                f"hf_parallel: {kind} keeps state of {parameter!r:.60}, no parameter of the model"
            )
        for slot, value in plain_slots(slots, parameter).items():
            if torch.is_tensor(value) and value.ndim and slot != "step":
                _check_slot(kind, name, slot, value, parameter)
                state.tensors[f"{name}/{slot}"] = value
            else:
                state.numbers.setdefault(name, {})[slot] = as_json(kind, slot, value)
    return state


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class, and the library it is from: an AdamW that is not torch's has other states."""
    library = type(optimizer).__module__.partition(".")[0]
    return type(optimizer).__name__ if library in ("torch", "__main__") else f"{library}.{type(optimizer).__name__}"


def _check_slot(kind: str, name: str, slot: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"hf_parallel: {kind} keeps {slot} of shape {tuple(value.shape)} for {name} of shape "
            f"{tuple(parameter.shape)}; checkpoints hold states of the parameter's shape and numbers "
            "(save_only_model=True leaves the optimizer out)"
        )


def as_json(kind: str, key: str, value: object) -> Json:
    """For the index: a number, text, or a list of them; a tensor of one number keeps its dtype."""
    if torch.is_tensor(value) and value.numel() == 1:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, (list, tuple)):
        return [as_json(kind, key, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotImplementedError(
        f"hf_parallel: {kind} keeps {key} as {type(value).__name__}, which has no place in a checkpoint "
        "(save_only_model=True leaves the optimizer out)"
    )


def from_json(value: object, like: object = None) -> object:
    """The inverse of `as_json`; a list becomes a tuple where `like` is one."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, list):
        found = [from_json(item) for item in value]
        return tuple(found) if isinstance(like, tuple) else found
    return value


FOLDER = "optimizer"
INDEX = "index.json"
PLAIN = "optimizer.pt"
_FORMAT = 1
#: How a step is computed, not what: this run's own choice stays.
_KERNELS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class ResumeUnderHfParallel:
    """Alone in `optimizer.pt`: plain Trainer's refusal to load it names this class."""


# ---- writing -----------------------------------------------------------------------------------------------------


def save_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    mesh: ParallelMesh,
    directory: str,
    folder: str = FOLDER,
    max_shard_size: int | str = "50GB",
) -> None:
    """Write the optimizer's state into a folder in `directory`. Collective: every process calls it.

    Raises:
        NotImplementedError: a state that is neither of its parameter's shape nor a number.
        CheckpointError: a rank could not write.
    """
    state = read_state(model, optimizer)
    entries = entries_of(model, mesh, state.tensors)
    state = _of_all_stages(of_stages(dataclasses.replace(state, tensors={}, options={}), mesh), state.tensors)
    order = names_in_order(model, mesh) if mesh.size("pp") > 1 else list(state.places)
    groups = {entry.name: Group((entry,), (entry,)) for entry in entries}
    plan = shards({name: group.nbytes for name, group in groups.items()}, "state", max_shard_size)
    where = os.path.join(directory, folder)
    with current(mesh) as saving:
        with saving.noting():
            _settle(optimizer)
        if mesh.rank == 0:
            with saving.noting():
                os.makedirs(where, exist_ok=True)
                _write_index(state, order, sorted(plan.filename_to_tensors), where)
        items = assign(groups.values(), saving.writers(where), mesh.config)
        files = {os.path.join(where, file): names for file, names in plan.filename_to_tensors.items()}
        write_all = functools.partial(_write_tensors, saving, files, groups, items)
        saving.stream(taken(state.tensors, items, mesh), write_all)


def _of_all_stages(stages: list[OptimizerState], tensors: dict[str, torch.Tensor]) -> OptimizerState:
    """One state of what each stage knows. A script makes groups of what it finds, so stages may have unlike ones.

    The n-th group of a stage with some options is one with the n-th group of another stage with the same options.
    """
    whole = OptimizerState(stages[0].kind, tensors)
    numbers: dict[tuple[str, int], int] = {}
    for stage in reversed(stages):  # what is on several stages, such as a tied weight, is as the first one has it
        whole.numbers.update(stage.numbers)
    for stage in stages:
        seen: Counter[str] = Counter()
        place_of: list[int] = []
        for options in stage.groups:
            described = json.dumps(options, sort_keys=True)
            key = described, seen[described]
            seen[described] += 1
            if key not in numbers:
                numbers[key] = len(whole.groups)
                whole.groups.append(options)
            place_of.append(numbers[key])
        for name, number in stage.places.items():
            whole.places.setdefault(name, place_of[number])
    return whole


def _settle(optimizer: Optimizer) -> None:
    """As its `state_dict` would: states may lie in files, and what could not be written there is not to be saved."""
    for hook in getattr(optimizer, "_optimizer_state_dict_pre_hooks", {}).values():
        hook(optimizer)


def _write_tensors(
    saving: Saving,
    files: dict[str, list[str]],
    groups: dict[str, Group],
    items: list[Item],
    local: dict[str, torch.Tensor],
) -> None:
    described = {path: [entry for name in names for entry in groups[name].entries] for path, names in files.items()}
    write(saving, [TensorFile(path, entries, saving) for path, entries in described.items()], items, local)


def write_refusal(path: str) -> None:
    """In the place of a plain optimizer's state."""
    torch.save(ResumeUnderHfParallel(), path)


def _write_index(state: OptimizerState, order: list[str], files: list[str], folder: str) -> None:
    groups = [
        {"options": options, "parameters": [name for name in order if state.places.get(name) == number]}
        for number, options in enumerate(state.groups)
    ]
    index = {"format": _FORMAT, "optimizer": state.kind, "files": files, "groups": groups, "numbers": state.numbers}
    with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out:
        json.dump(index, out, indent=1)


# ---- reading -----------------------------------------------------------------------------------------------------


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str,
    plain_groups: Sequence[list[list[str]]] = (),
    folder: str = FOLDER,
    plain: str = PLAIN,
) -> None:
    """Give the optimizer the state in `directory`, of which this rank reads its slices. No communication.

    Args:
        plain_groups: for `optimizer.pt` of a plain Trainer, the names of each group, in the ways it may have them.

    Raises:
        ValueError: the state is of another optimizer or another model.
    """
    with waiting("reading the optimizer's states"), contextlib.ExitStack() as stack:
        if os.path.isfile(os.path.join(directory, folder, INDEX)):
            saved = _saved(os.path.join(directory, folder), stack)
        else:
            saved = _saved_by_plain_trainer(os.path.join(directory, plain), plain_groups)
        if saved.kind not in (None, kind_of(optimizer)):
            raise ValueError(f"{directory} has the state of {saved.kind}, this run has {kind_of(optimizer)}")
        _set_state(model, optimizer, saved)


def has_optimizer(directory: str) -> bool:
    """Is there an optimizer's state, ours or a plain Trainer's?"""
    return any(os.path.isfile(os.path.join(directory, file)) for file in (os.path.join(FOLDER, INDEX), PLAIN))


def _saved(folder: str, stack: contextlib.ExitStack) -> OptimizerState:
    with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
        index = json.load(file)
    if index["format"] != _FORMAT:
        raise ValueError(f"{folder}/{INDEX} has format {index['format']}, this version reads {_FORMAT}")
    state = OptimizerState(index["optimizer"], numbers=index["numbers"])
    for name in index["files"]:
        opened = stack.enter_context(RangeFile(os.path.join(folder, name)))
        state.tensors.update({key: lazy_tensor(opened.get_slice(key)) for key in opened.keys()})  # noqa: SIM118
    for number, group in enumerate(index["groups"]):
        state.groups.append(group["options"])
        state.options.update(dict.fromkeys(group["parameters"], group["options"]))
        state.places.update(dict.fromkeys(group["parameters"], number))
    return state


def _saved_by_plain_trainer(path: str, ways: Sequence[list[list[str]]]) -> OptimizerState:
    """Parameters are numbered through the groups; which name has which number follows from the groups' sizes."""
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    sizes = [len(group["params"]) for group in loaded["param_groups"]]
    names = next((way for way in ways if [len(group) for group in way] == sizes), None)
    if names is None:
        raise ValueError(f"{path} has groups of {sizes} parameters, this run {[len(group) for group in ways[0]]}")
    state = OptimizerState()
    numbered: dict[int, str] = {}
    for group, own in zip(loaded["param_groups"], names, strict=True):
        options = {key: as_json("optimizer.pt", key, value) for key, value in group.items() if key != "params"}
        state.options.update(dict.fromkeys(own, options))
        numbered.update(zip(group["params"], own, strict=True))
    for number, slots in loaded["state"].items():
        for slot, value in plain_slots(slots).items():
            if torch.is_tensor(value) and value.ndim and slot != "step":
                state.tensors[f"{numbered[number]}/{slot}"] = value
            else:
                state.numbers.setdefault(numbered[number], {})[slot] = as_json("optimizer.pt", slot, value)
    return state


def write_plain(directory: str, out: str) -> None:
    """Write the optimizer's state in `directory` as plain Trainer does: parameters by number, in one file.

    Raises:
        ValueError: an optimizer whose state is not kept as that optimizer keeps it.
    """
    with contextlib.ExitStack() as stack:
        saved = _saved(os.path.join(directory, FOLDER), stack)
        if saved.kind is not None and saved.kind.startswith("bitsandbytes."):
            raise ValueError(f"--trainer: {saved.kind} keeps codes, of which checkpoints have the values; AdamW works")
        numbered = {name: number for number, name in enumerate(saved.places)}  # group by group, as the index has them
        state: dict[int, dict[str, object]] = {}
        for name, numbers in saved.numbers.items():
            state[numbered[name]] = {slot: from_json(value) for slot, value in numbers.items()}
        for key, tensor in saved.tensors.items():
            name, _, slot = key.partition("/")
            state.setdefault(numbered[name], {})[slot] = values(tensor, whole_part(tensor.shape))
    groups: list[dict[str, object]] = [
        {key: from_json(value, ()) for key, value in options.items() if key != "param_names"}
        for options in saved.groups
    ]
    for place, group in enumerate(groups):
        group["params"] = [numbered[name] for name in saved.places if saved.places[name] == place]
    torch.save({"state": dict(sorted(state.items())), "param_groups": groups}, os.path.join(out, PLAIN))


def _set_state(model: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
    """Through the optimizer's own `load_state_dict`, which puts each value where the optimizer wants it."""
    of_parameter = {id(p): name for name, p in named(model).items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [of_parameter[id(p)] for p in parameters]
    packed, slots = optimizer.state_dict(), _slots(saved)
    _check_shapes(dict(zip(names, parameters, strict=True)), slots, saved)
    packed["state"] = {}
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        found = {slot: from_json(value) for slot, value in saved.numbers.get(name, {}).items()}
        former = optimizer.state.get(parameter, {})
        for slot in slots.get(name, ()):
            found[slot] = _local(model, name, parameter, saved.tensors[f"{name}/{slot}"], former.get(slot))
        if found:
            packed["state"][number] = found
    alike = len(packed["param_groups"]) == len(saved.groups)
    for place, group in enumerate(packed["param_groups"]):
        unknown = saved.groups[place] if alike else next(iter(saved.options.values()), {})
        group.update(_options(group, [names[number] for number in group["params"]], saved, unknown))
    optimizer.load_state_dict(packed)
    pack_states(optimizer)


def _slots(saved: OptimizerState) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in saved.tensors:
        name, _, slot = key.partition("/")
        found.setdefault(name, []).append(slot)
    return found


def _check_shapes(parameters: dict[str, torch.Tensor], slots: dict[str, list[str]], saved: OptimizerState) -> None:
    """Before anything is overwritten."""
    for name, parameter in parameters.items():
        for shape in {tuple(saved.tensors[f"{name}/{slot}"].shape) for slot in slots.get(name, ())}:
            if shape != tuple(parameter.shape):
                raise ValueError(f"{name} is {tuple(parameter.shape)}, its optimizer state {shape}")


def _local(model: nn.Module, name: str, parameter: torch.Tensor, source: torch.Tensor, former: object) -> torch.Tensor:
    """This rank's part, which lies as the parameter does; in the memory of the former state, if there is one."""
    kind = DTensor if isinstance(parameter, DTensor) else torch.Tensor
    if not isinstance(former, kind) or (former.shape, former.dtype) != (parameter.shape, source.dtype):
        former = torch.zeros_like(parameter, dtype=source.dtype, requires_grad=False)
    part = values(source, local_part(parameter, stored_order(model, name)))
    stored(former).copy_(part)
    return former


def _options(
    group: dict[str, object], names: list[str], saved: OptimizerState, unknown: dict[str, Json]
) -> dict[str, object]:
    """What the checkpoint says of the parameters of one group; the rates of `unknown` if it knows none of them."""
    known = (saved.options[name] for name in names if name in saved.options)
    first = next(known, None)
    if first is None:
        return {key: from_json(unknown[key]) for key in ("lr", "initial_lr") if key in unknown}
    if any(options != first for options in known):
        raise ValueError(f"{names[0]} and others of its group had different options when the checkpoint was written")
    return {key: from_json(value, group.get(key)) for key, value in first.items() if key not in _KERNELS}
