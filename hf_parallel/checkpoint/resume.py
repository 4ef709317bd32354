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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.ask.waiting import waiting
from hf_parallel.axes.data.reach import find_reaches, reads_whole_tensors
from hf_parallel.checkpoint.codes import decode_slots, holds_codes, keep_precision_of_states, pack_states
from hf_parallel.checkpoint.hub_format import (
    Group,
    gather_entries_of,
    gather_from_stages,
    list_names_in_order,
    list_saved_parameters,
)
from hf_parallel.checkpoint.lazy_tensor import RangeFile, make_lazy_tensor, read_values
from hf_parallel.checkpoint.saving import Saving, TensorFile, join_current_save, write_files
from hf_parallel.checkpoint.slices import find_local_part, make_whole_part
from hf_parallel.checkpoint.weights import split_into_files, stream_tensors, taken
from hf_parallel.checkpoint.writers import Item, assign_items
from hf_parallel.model.anatomy import get_stored_order
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

if TYPE_CHECKING:
    from torch.optim import Optimizer

# ---- The state of an optimizer, by parameter name: tensors of the parameter's shape, numbers, options ---------------

#: A value that a JSON file can hold.
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


@dataclass
class OptimizerState:
    """The state of an optimizer by parameter name: tensors, numbers, options.

    A tensor has the parameter's shape and is cut as that is; the means of rows and columns of Adafactor are whole.
    """

    kind: str | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # "name/slot"
    numbers: dict[str, dict[str, Json]] = field(default_factory=dict)  # name -> slot
    options: dict[str, dict[str, Json]] = field(default_factory=dict)  # name -> those of its group
    places: dict[str, int] = field(default_factory=dict)  # name -> number of its group
    groups: list[dict[str, Json]] = field(default_factory=list)  # options of every one, also of empty ones


def read_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return this rank's part of the state, by name.

    Raises:
        NotImplementedError: the optimizer keeps something that has no place in a checkpoint.
    """
    joined = list_joined_optimizers(optimizer)
    if joined:
        whole = OptimizerState(_describe_kind(optimizer))
        for part in (read_state(model, one) for one in joined):
            whole.tensors.update(part.tensors)
            whole.numbers.update(part.numbers)
            whole.options.update(part.options)
            whole.places.update({name: place + len(whole.groups) for name, place in part.places.items()})
            whole.groups += part.groups
        return whole
    kind, names = name_kind_of(optimizer), {id(p): name for name, p in list_saved_parameters(model).items()}
    state = OptimizerState(kind)
    for number, group in enumerate(optimizer.param_groups):
        state.groups.append({key: encode_as_json(kind, key, value) for key, value in group.items() if key != "params"})
        own = [names[id(p)] for p in group["params"] if id(p) in names]
        state.options.update(dict.fromkeys(own, state.groups[-1]))
        state.places.update(dict.fromkeys(own, number))
    for parameter, slots in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise NotImplementedError(
                f"hf_parallel: {kind} keeps state of {parameter!r:.60}, no parameter of the model"
            )
        for slot, value in decode_slots(slots, parameter).items():
            if torch.is_tensor(value) and value.ndim and slot != "step":
                is_whole = value.shape != parameter.shape and not isinstance(value, DTensor)  # on every rank
                alike = value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor)
                if not (alike or is_whole and reads_whole_tensors(optimizer)):
                    raise NotImplementedError(
                        f"hf_parallel: {kind} keeps {slot} of shape {tuple(value.shape)} for {name} of shape "
                        f"{tuple(parameter.shape)}; checkpoints hold states of the parameter's shape and numbers "
                        "(save_only_model=True leaves the optimizer out)"
                    )
                state.tensors[f"{name}/{slot}"] = value
            else:
                state.numbers.setdefault(name, {})[slot] = encode_as_json(kind, slot, value)
    return state


def list_joined_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a script has joined to one, such as Muon for matrices and AdamW for the rest.

    The class has a `state_dict` of its own, because it keeps no states itself, and each parameter is of one of them.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return []
    held: list[torch.optim.Optimizer] = []
    for value in vars(optimizer).values():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        held += [one for one in several if isinstance(one, torch.optim.Optimizer)]
    theirs = Counter(id(p) for one in held for group in one.param_groups for p in group["params"])
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return held if set(theirs) == own and max(theirs.values(), default=1) == 1 else []


def refuse_unsavable_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the steps so far have left in an optimizer of another package, if no checkpoint can hold it.

    Raises:
        NotImplementedError: such as an object, or a tensor of another shape than the parameter's.
    """
    if type(optimizer).__module__.partition(".")[0] not in ("torch", "transformers", "bitsandbytes", "torchao"):
        read_state(model, optimizer)


def name_kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class and library: an AdamW that is not torch's has other states."""
    library = type(optimizer).__module__.partition(".")[0]
    return type(optimizer).__name__ if library in ("torch", "__main__") else f"{library}.{type(optimizer).__name__}"


def _describe_kind(optimizer: torch.optim.Optimizer) -> str:
    parts = [name_kind_of(part) for part in list_joined_optimizers(optimizer)]
    return f"{name_kind_of(optimizer)} of {', '.join(parts)}" if parts else name_kind_of(optimizer)


def encode_as_json(kind: str, key: str, value: object) -> Json:
    """Return a value for the index: a number, text, or a list of them; a tensor of one number keeps its dtype."""
    if torch.is_tensor(value) and value.numel() == 1:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if isinstance(value, (list, tuple)):
        return [encode_as_json(kind, key, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotImplementedError(
        f"hf_parallel: {kind} keeps {key} as {type(value).__name__}, which has no place in a checkpoint "
        "(save_only_model=True leaves the optimizer out)"
    )


def decode_from_json(value: object, like: object = None) -> object:
    """Return the value `encode_as_json` was given; a list becomes a tuple where `like` is one."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, list):
        found = [decode_from_json(item) for item in value]
        return tuple(found) if isinstance(like, tuple) else found
    return value


FOLDER = "optimizer"
INDEX = "index.json"
PLAIN = "optimizer.pt"
_FORMAT = 1
#: Options for how a step is computed; they stay this run's own choice.
_KERNELS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class ResumeUnderHfParallel:
    """Alone in `optimizer.pt`: plain Trainer's refusal to load it names this class."""


# ---- writing -----------------------------------------------------------------------------------------------------


def save_optimizer_state(
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
    entries = gather_entries_of(model, mesh, state.tensors)
    state = _join_states_of_stages(
        gather_from_stages(dataclasses.replace(state, tensors={}, options={}), mesh), state.tensors
    )
    order = list_names_in_order(model, mesh) if mesh.size("pp") > 1 else list(state.places)
    groups = {entry.name: Group((entry,), (entry,)) for entry in entries}
    plan = split_into_files({name: group.nbytes for name, group in groups.items()}, "state", max_shard_size)
    where = os.path.join(directory, folder)
    with join_current_save(mesh) as saving:
        with saving.noting():
            for hook in getattr(optimizer, "_optimizer_state_dict_pre_hooks", {}).values():
                hook(optimizer)  # states that lie in files are settled, as the optimizer's `state_dict` does
        if mesh.rank == 0:
            with saving.noting():
                os.makedirs(where, exist_ok=True)
                names = [[name for name in order if state.places.get(name) == n] for n in range(len(state.groups))]
                index: dict[str, object] = {
                    "format": _FORMAT,
                    "optimizer": state.kind,
                    "files": sorted(plan.filename_to_tensors),
                    "groups": [{"options": o, "parameters": own} for o, own in zip(state.groups, names, strict=True)],
                    "numbers": state.numbers,
                }
                with open(os.path.join(where, INDEX), "w", encoding="utf-8") as out:
                    json.dump(index, out, indent=1)
        items = assign_items(groups.values(), saving.writers(where), mesh.config)
        files = {os.path.join(where, file): names for file, names in plan.filename_to_tensors.items()}
        write_all = functools.partial(_write_tensors, saving, files, groups, items)
        saving.stream(taken(state.tensors, items, mesh), write_all)


def _join_states_of_stages(stages: list[OptimizerState], tensors: dict[str, torch.Tensor]) -> OptimizerState:
    """Join the states of all stages. A script makes groups of the parameters it finds, so stages may differ.

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


def _write_tensors(
    saving: Saving,
    files: dict[str, list[str]],
    groups: dict[str, Group],
    items: list[Item],
    local: dict[str, torch.Tensor],
) -> None:
    described = {path: [entry for name in names for entry in groups[name].entries] for path, names in files.items()}
    write_files(saving, [TensorFile(path, entries, saving) for path, entries in described.items()], items, local)


def write_refusal(path: str) -> None:
    """Write a file in the place of a plain optimizer's state, which plain Trainer refuses to load."""
    torch.save(ResumeUnderHfParallel(), path)


# ---- reading -----------------------------------------------------------------------------------------------------


def load_optimizer_state(
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
    find_reaches(optimizer)  # of an optimizer as it was made
    with waiting("reading the optimizer's states"), contextlib.ExitStack() as stack:
        if os.path.isfile(os.path.join(directory, folder, INDEX)):
            saved = _read_saved_state(os.path.join(directory, folder), stack)
        else:
            path = os.path.join(directory, plain)
            numbered = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # parameters have numbers
            saved = _name_states(path, numbered, plain_groups)
        kind = _describe_kind(optimizer)
        if saved.kind not in (None, kind):
            raise ValueError(f"{directory} has the state of {saved.kind}, this run has {kind}")
        for part in list_joined_optimizers(optimizer) or [optimizer]:
            _set_optimizer_state(model, part, saved)


def has_optimizer(directory: str) -> bool:
    """Return whether there is an optimizer's state, ours or a plain Trainer's."""
    return any(os.path.isfile(os.path.join(directory, file)) for file in (os.path.join(FOLDER, INDEX), PLAIN))


def _read_saved_state(folder: str, stack: contextlib.ExitStack) -> OptimizerState:
    with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
        index = json.load(file)
    if index["format"] != _FORMAT:
        raise ValueError(f"{folder}/{INDEX} has format {index['format']}, this version reads {_FORMAT}")
    state = OptimizerState(index["optimizer"], numbers=index["numbers"])
    for name in index["files"]:
        opened = stack.enter_context(RangeFile(os.path.join(folder, name)))
        state.tensors.update({key: make_lazy_tensor(opened.get_slice(key)) for key in opened.keys()})  # noqa: SIM118
    for number, group in enumerate(index["groups"]):
        state.groups.append(group["options"])
        state.options.update(dict.fromkeys(group["parameters"], group["options"]))
        state.places.update(dict.fromkeys(group["parameters"], number))
    return state


def _name_states(origin: str, loaded: Mapping[str, Any], ways: Sequence[list[list[str]]]) -> OptimizerState:
    """Name the parameters of a plain state, which have numbers there; names follow from the groups' sizes."""
    sizes = [len(group["params"]) for group in loaded["param_groups"]]
    names = next((way for way in ways if [len(group) for group in way] == sizes), None)
    if names is None:
        raise ValueError(f"{origin} has groups of {sizes} parameters, this run {[len(group) for group in ways[0]]}")
    state = OptimizerState()
    numbered: dict[int, str] = {}
    for group, own in zip(loaded["param_groups"], names, strict=True):
        options = {key: encode_as_json(origin, key, value) for key, value in group.items() if key != "params"}
        state.groups.append(options)
        state.options.update(dict.fromkeys(own, options))
        numbered.update(zip(group["params"], own, strict=True))
    for number, slots in loaded["state"].items():
        for slot, value in decode_slots(slots).items():
            if torch.is_tensor(value) and value.ndim and slot != "step":
                state.tensors[f"{numbered[number]}/{slot}"] = value
            else:
                state.numbers.setdefault(numbered[number], {})[slot] = encode_as_json(origin, slot, value)
    return state


def _number_states(saved: OptimizerState) -> dict[str, Any]:
    """Return whole states as `Optimizer.state_dict()` of one process does: parameters by number, group by group."""
    numbered = {name: number for number, name in enumerate(saved.places)}
    state: dict[int, dict[str, object]] = {}
    for name, numbers in saved.numbers.items():
        state[numbered[name]] = {slot: decode_from_json(value) for slot, value in numbers.items()}
    for key, tensor in saved.tensors.items():
        name, _, slot = key.partition("/")
        state.setdefault(numbered[name], {})[slot] = read_values(tensor, make_whole_part(tensor.shape))
    groups: list[dict[str, object]] = [
        {key: decode_from_json(value, ()) for key, value in options.items() if key != "param_names"}
        for options in saved.groups
    ]
    for place, group in enumerate(groups):
        group["params"] = [numbered[name] for name in saved.places if saved.places[name] == place]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _find_unplain_kind(kind: str | None) -> str | None:
    """Return why the state of an optimizer cannot be given as the optimizer itself keeps it in one process."""
    if kind is not None and kind.startswith(("bitsandbytes.", "torchao.")):
        return f"{kind} keeps codes, of which checkpoints have the values; AdamW works"
    if kind is not None and " of " in kind:
        return f"{kind} has a state_dict of its own; one optimizer, such as AdamW, works"
    return None


def refuse_unplain_state(directory: str) -> None:
    """Refuse what `write_plain` cannot write of a checkpoint.

    Raises:
        ValueError: no state, or one of an optimizer that does not keep it so.
    """
    if not has_optimizer(directory):
        raise ValueError(f"--trainer: {directory} has no optimizer's state; without --trainer the model is written")
    with contextlib.ExitStack() as stack:
        kind = _read_saved_state(os.path.join(directory, FOLDER), stack).kind
    if (reason := _find_unplain_kind(kind)) is not None:
        raise ValueError(f"--trainer: {reason}")


def write_plain(directory: str, out: str) -> None:
    """Write the optimizer's state in `directory` as plain Trainer does: parameters by number, in one file."""
    with contextlib.ExitStack() as stack:
        plain = _number_states(_read_saved_state(os.path.join(directory, FOLDER), stack))
    torch.save(plain, os.path.join(out, PLAIN))


def gather_plain_state(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: ParallelMesh) -> dict[str, Any]:
    """Return what `optimizer.state_dict()` of one process is, on rank 0's CPU; empty on other ranks. Collective.

    Raises:
        NotImplementedError: an optimizer whose state is not kept as that optimizer keeps it.
    """
    if (reason := _find_unplain_kind(name_kind_of(optimizer))) is not None:
        raise NotImplementedError(f"hf_parallel: {reason}, and accelerator.save_state works")
    for hook in getattr(optimizer, "_optimizer_state_dict_pre_hooks", {}).values():
        hook(optimizer)
    own = read_state(model, optimizer)
    entries = gather_entries_of(model, mesh, own.tensors)
    without_tensors = dataclasses.replace(own, tensors={}, options={})
    saved = _join_states_of_stages(gather_from_stages(without_tensors, mesh), {})
    if mesh.size("pp") > 1:
        order = [name for name in list_names_in_order(model, mesh) if name in saved.places]
        saved.places = {name: saved.places[name] for name in sorted(order, key=saved.places.__getitem__)}
    groups = [Group((entry,), (entry,)) for entry in entries]
    saved.tensors.update(stream_tensors(groups, own.tensors, mesh, limit=0))
    return _number_states(saved) if mesh.rank == 0 else {}


def set_plain_state(model: nn.Module, optimizer: Optimizer, loaded: Mapping[str, Any], mesh: ParallelMesh) -> None:
    """Give the optimizer what `state_dict()` of one process was; this rank keeps its part. Collective over stages.

    Raises:
        ValueError: the state is of another model, or of other groups.
    """
    find_reaches(optimizer)  # of an optimizer as it was made
    ways = [list_names_of_groups(model, optimizer, mesh)]
    _set_optimizer_state(model, optimizer, _name_states("the state", loaded, ways))


def list_names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: ParallelMesh) -> list[list[str]]:
    """Return the names in each group of a script's optimizer, of all stages, in the order that one process has."""
    of_parameter = {id(p): name for name, p in list_saved_parameters(model).items()}
    own = [[of_parameter[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if mesh.size("pp") == 1:
        return own
    merged = [set().union(*group) for group in zip(*gather_from_stages(own, mesh), strict=True)]
    order = list_names_in_order(model, mesh)
    return [[name for name in order if name in group] for group in merged]


def _set_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
    """Set the state through the optimizer's own `load_state_dict`, which puts each value where it wants it."""
    of_parameter = {id(p): name for name, p in list_saved_parameters(model).items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [of_parameter[id(p)] for p in parameters]
    slots: dict[str, list[str]] = {}
    for key in saved.tensors:
        name, _, slot = key.partition("/")
        slots.setdefault(name, []).append(slot)
    for name, parameter in zip(names, parameters, strict=True):  # before anything is overwritten
        for shape in {tuple(saved.tensors[f"{name}/{slot}"].shape) for slot in slots.get(name, ())}:
            if shape != tuple(parameter.shape) and not reads_whole_tensors(optimizer):
                raise ValueError(f"{name} is {tuple(parameter.shape)}, its optimizer state {shape}")
    packed = optimizer.state_dict()
    packed["state"] = {}
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        found = {slot: decode_from_json(value) for slot, value in saved.numbers.get(name, {}).items()}
        former = optimizer.state.get(parameter, {})
        for slot in slots.get(name, ()):
            # This rank's part, which lies as the parameter does; in the former state's memory, if there is one
            source, target = saved.tensors[f"{name}/{slot}"], former.get(slot)
            if source.shape != parameter.shape:
                found[slot] = read_values(source, make_whole_part(source.shape))
                continue
            kind = DTensor if isinstance(parameter, DTensor) else torch.Tensor
            fits = isinstance(target, kind) and (target.shape, target.dtype) == (parameter.shape, source.dtype)
            if not fits or holds_codes(target):
                target = torch.zeros_like(parameter, dtype=source.dtype, requires_grad=False)
            part = find_local_part(parameter, get_stored_order(model, name))
            get_stored(target).copy_(read_values(source, part))
            found[slot] = target
        if found:
            packed["state"][number] = found
    alike = len(packed["param_groups"]) == len(saved.groups)
    for place, group in enumerate(packed["param_groups"]):
        own = [names[number] for number in group["params"]]
        known = [saved.options[name] for name in own if name in saved.options]
        if any(options != known[0] for options in known):
            raise ValueError(f"{own[0]} and others of its group had different options when the checkpoint was written")
        if known:
            kept = ((key, value) for key, value in known[0].items() if key not in _KERNELS)
            group.update({key: decode_from_json(value, group.get(key)) for key, value in kept})
        else:  # no parameter of the group was saved: only learning rates are taken
            unknown = saved.groups[place] if alike else next(iter(saved.options.values()), {})
            group.update({key: decode_from_json(unknown[key]) for key in ("lr", "initial_lr") if key in unknown})
    keep_precision_of_states(optimizer)
    optimizer.load_state_dict(packed)
    pack_states(optimizer)
