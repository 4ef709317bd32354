"""Steps of optimizers that read whole tensors: Adafactor has means of rows, Muon an orthogonal factor, LAMB norms.

Each rank gathers one parameter at a time, steps on it as one process does, and keeps its own part:

    parameter, gradient    gathered -> the optimizer's own step, on this one alone -> this rank's part
    states of its shape    gathered, and kept in parts again
    other states           whole on each rank that has a part, as all compute the same
    counts of the step     set back after each, so that all parameters see the same

The call that the script has made steps on the smallest parameter of each group and on what ranks store whole. It
counts. What reads several tensors together, such as Prodigy, steps on all of them in that call, if they are few.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.apply.weights import gather_alike, list_parallel_models, order_of
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.reach import (
    Reach,
    find_reaches,
    numbers_parameters,
    read_settings,
    set_settings,
)
from hf_parallel.checkpoint.resume import name_kind_of
from hf_parallel.checkpoint.slices import Part, find_local_part, read_part
from hf_parallel.ranks.mesh import get_stored, place_as
from hf_parallel.ranks.steps import call_after_steps, call_before_steps, step_without_hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Numbers of all parameters that are whole at the same time: 0.5 GiB in fp32, with gradients and moments about 3.
_MOST = 2**27
_HELD = "_hf_parallel_on_wholes"  # the step that an optimizer is in
_PLACES = "_hf_parallel_places"  # where each of its parameters lies: the stored order, this rank's part


def step_on_whole_tensors() -> None:
    """Let optimizers that read whole tensors step on whole tensors. A second call changes nothing."""
    # Else each rank would warn that a tensor which is cut along two axes takes two gathers.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    call_before_steps(_begin_whole_step)
    call_after_steps(_end_whole_step)


@torch.no_grad()
def _begin_whole_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    failed = vars(optimizer).pop(_HELD, None)
    if failed is not None:
        failed.take_back()
    if _PLACES not in vars(optimizer):  # its first step
        _refuse_in_stages(optimizer)
        vars(optimizer)[_PLACES] = {}  # keys as in `optimizer.state`: torch moves none with a weak reference
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return None
    one_by_one, together = (
        [g for g, found in zip(optimizer.param_groups, find_reaches(optimizer), strict=True) if found is reach]
        for reach in (Reach.TENSORS, Reach.ALL)
    )
    if sum(p.numel() for group in together for p in group["params"]) > _MOST:
        together = []  # they keep their DTensors, of which torch knows the sums or says that it does not
    if not one_by_one and not together:
        return None
    closure, loss = args[1] if len(args) > 1 else kwargs.get("closure"), None
    if closure is not None:  # once for all parameters
        with torch.enable_grad():
            loss = closure()
    vars(optimizer)[_HELD] = WholeStep(optimizer, one_by_one, together).begin()
    return None if closure is None else ((args[0], lambda: loss), {})


@torch.no_grad()
def _end_whole_step(optimizer: Optimizer, *_: object) -> None:
    held = vars(optimizer).pop(_HELD, None)
    if held is not None:
        held.end()


def _refuse_in_stages(optimizer: Optimizer) -> None:
    """Refuse under `pp` an optimizer that reads several parameters, of which other stages have some.

    One that cannot be tried may be written for stages (a SAM with `hf_parallel.clip_grad_norm`): print a line.
    """
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in list_parallel_models():
        state: Any = vars(model).get("_hf_parallel")
        if state is None or state.pipeline is None or mine.isdisjoint(map(id, model.parameters())):
            continue
        several = Reach.ALL, Reach.APART, Reach.RANDOM
        reads = [reach.value for reach in find_reaches(optimizer) if reach in several]
        if isinstance(optimizer, torch.optim.LBFGS):
            reads.append("the directions of all parameters")
        if numbers_parameters(optimizer):
            reads.append("the place of a parameter among all")
        if reads:
            why = f"what a step reads is {reads[0]}, and each stage would go by its own parameters"
            refuse(f"{name_kind_of(optimizer)} under pp={state.config.pp_size}", why, "adamw_torch")


class WholeStep:
    """A step of an optimizer on whole tensors: of some groups `one_by_one`, of others all `together`."""

    def __init__(self, optimizer: Optimizer, one_by_one: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
        self._optimizer, self._groups = optimizer, [*one_by_one, *together]
        self._alone = len(one_by_one)  # so many of the groups come first
        self._former = [group["params"] for group in optimizer.param_groups]
        self._wholes: list[_Whole] = []  # what the optimizer has in the place of parts

    def begin(self) -> WholeStep:
        """Step on all parameters that ranks hold parts of, but for those on which the script's call steps."""
        optimizer, settings = self._optimizer, read_settings(self._optimizer)
        cut = [[p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None] for group in self._groups]
        for parameters in cut:
            parameters.sort(key=torch.Tensor.numel)
        try:
            for group in optimizer.param_groups:
                group["params"] = []
            for group, parameters in zip(self._groups[: self._alone], cut, strict=False):
                while len(parameters) > 1:
                    group["params"] = [self._gather(parameters.pop())]
                    step_without_hooks(optimizer)
                    self._keep_parts()
                    group["params"] = []
                    set_settings(optimizer, settings)
            for group, parameters in zip(optimizer.param_groups, self._former, strict=True):
                group["params"] = parameters
            for group, parameters in zip(self._groups, cut, strict=True):
                wholes = {id(parameter): self._gather(parameter) for parameter in parameters}
                whole_or_plain = (wholes.get(id(p), p) for p in group["params"])
                group["params"] = [p for p in whole_or_plain if not isinstance(p, DTensor)]
        except BaseException:
            self.take_back()
            # Lists of groups that step in another way were empty.
            for group, parameters in zip(optimizer.param_groups, self._former, strict=True):
                group["params"] = parameters
            raise
        return self

    def end(self) -> None:
        """Keep this rank's parts of what the script's own call has stepped on."""
        self._keep_parts()
        self._restore_groups()

    def take_back(self) -> None:
        """Restore parameters and states as they were before a step that has failed."""
        for whole in self._wholes:
            self._optimizer.state.pop(whole.tensor, None)
            if whole.slots is not None:
                self._optimizer.state[whole.parameter] = whole.slots
        self._wholes = []
        self._restore_groups()

    def _restore_groups(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._former, strict=False):
            if any(group is own for own in self._groups):  # others may have parts of their own just now
                group["params"] = parameters

    def _gather(self, parameter: DTensor) -> torch.Tensor:
        """Return the whole of a parameter, with its gradient; the optimizer has its states. Collective."""
        optimizer, own, device = self._optimizer, get_stored(parameter), parameter.device_mesh.device_type
        if own.device.type != device:
            kind = type(optimizer).__name__
            why = f"{kind} needs whole tensors, which ranks gather on {device}, not on {own.device}"
            refuse("offload=cpu", why, "AdamW")
        places = vars(optimizer)[_PLACES]
        if parameter not in places:
            order = order_of(parameter)
            places[parameter] = order, find_local_part(parameter, order)
        order, part = places[parameter]
        gradient: Any = parameter.grad
        slots = optimizer.state.pop(parameter, None)
        cut = {name: value for name, value in (slots or {}).items() if isinstance(value, DTensor)}
        parts = [parameter, gradient.redistribute(placements=parameter.placements), *cut.values()]
        tensor, tensor.grad, *states = gather_alike(parts, order)
        tensor.requires_grad_(parameter.requires_grad)
        self._wholes.append(_Whole(parameter, tensor, slots, part))
        if slots is not None:
            optimizer.state[tensor] = {**slots, **dict(zip(cut, states, strict=True))}
        return tensor

    def _keep_parts(self) -> None:
        state = self._optimizer.state
        for whole in self._wholes:
            get_stored(whole.parameter).copy_(read_part(whole.tensor, whole.part))
            slots = state.pop(whole.tensor, None)
            if slots is None:
                continue
            for name, value in slots.items():
                if type(value) is torch.Tensor and value.ndim and value.shape == whole.tensor.shape:
                    part = read_part(value, whole.part).clone(memory_format=torch.contiguous_format)
                    slots[name] = place_as(whole.parameter, part)
            state[whole.parameter] = slots
        self._wholes = []


@dataclass(eq=False)
class _Whole:
    """The whole of a parameter, for one step."""

    parameter: DTensor
    tensor: torch.Tensor
    slots: dict[str, Any] | None  # the parameter's states before the step
    part: Part  # of which this rank keeps the values
