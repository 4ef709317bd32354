"""What an optimizer keeps, by parameter name: tensors of the parameter's shape, numbers, options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.eight_bit import plain_slots
from hf_parallel.checkpoint.names import named

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
