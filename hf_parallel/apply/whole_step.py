"""Steps of optimizers that read whole matrices: Adafactor has means of rows and columns, Muon an orthogonal factor.

Each rank gathers one parameter at a time, steps on it as one process does, and keeps its own part:

    parameter, gradient    gathered -> the optimizer's own step, on this one alone -> this rank's part
    states of its shape    gathered, and kept in parts again
    other states           whole on each rank that has a part, as all compute the same

What a rank stores whole is stepped on afterwards, as in one process.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.apply.weights import gather_in_own_order, order_of
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.local_step import reads_whole_tensors
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.ranks.mesh import get_stored, place_as

if TYPE_CHECKING:
    from torch.optim import Optimizer

_HELD = "_hf_parallel_on_wholes"  # the parameters of an optimizer's groups while it steps
_PLACES = "_hf_parallel_places"  # where each of its parameters lies: the stored order, this rank's part


@functools.cache
def step_on_whole_tensors() -> None:
    """From here on optimizers that read whole tensors step on them. A second call changes nothing."""
    register_optimizer_step_pre_hook(_begin_whole_step)
    register_optimizer_step_post_hook(_end_whole_step)


@torch.no_grad()
def _begin_whole_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Step on all DTensors, one by one; the step that follows finds the others."""
    _end_whole_step(optimizer)  # of a step that has failed
    groups = optimizer.param_groups
    if not reads_whole_tensors(optimizer) or not any(isinstance(p, DTensor) for g in groups for p in g["params"]):
        return None
    closure, loss = args[1] if len(args) > 1 else kwargs.get("closure"), None
    if closure is not None:  # once for all parameters
        with torch.enable_grad():
            loss = closure()
    former = vars(optimizer)[_HELD] = [group["params"] for group in groups]
    for group in groups:
        group["params"] = []
    for group, parameters in zip(groups, former, strict=True):
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                _step_on_whole(optimizer, group, parameter)
        group["params"] = []
    for group, parameters in zip(groups, former, strict=True):
        group["params"] = [p for p in parameters if not isinstance(p, DTensor)]
    return None if closure is None else ((args[0], lambda: loss), {})


def _end_whole_step(optimizer: Optimizer, *_: object) -> None:
    for group, parameters in zip(optimizer.param_groups, vars(optimizer).pop(_HELD, ()), strict=False):
        group["params"] = parameters


def _step_on_whole(optimizer: Any, group: dict[str, Any], parameter: DTensor) -> None:
    own, device = get_stored(parameter), parameter.device_mesh.device_type
    if own.device.type != device:
        why = f"{type(optimizer).__name__} needs whole tensors, which ranks gather on {device}, not on {own.device}"
        refuse("offload=cpu", why, "AdamW")
    places = vars(optimizer).setdefault(_PLACES, WeakIdKeyDictionary())
    if parameter not in places:
        order = order_of(parameter)
        places[parameter] = order, find_local_part(parameter, order)
    order, part = places[parameter]
    gradient: Any = parameter.grad
    whole = nn.Parameter(gather_in_own_order(parameter, order))
    whole.grad = gather_in_own_order(gradient.redistribute(placements=parameter.placements), order)
    slots = optimizer.state.pop(parameter, {})
    optimizer.state[whole] = {
        k: gather_in_own_order(v, order) if isinstance(v, DTensor) else v for k, v in slots.items()
    }
    group["params"] = [whole]
    type(optimizer).step.__wrapped__(optimizer)  # without hooks, which are those of the step around it
    own.copy_(read_part(whole, part))
    slots = optimizer.state.pop(whole)
    for name, value in slots.items():
        if torch.is_tensor(value) and value.ndim and value.shape == whole.shape:
            slots[name] = place_as(parameter, read_part(value, part).clone(memory_format=torch.contiguous_format))
    optimizer.state[parameter] = slots
