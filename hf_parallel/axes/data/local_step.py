"""Optimizer steps on the parts that a rank stores: plain tensors, whatever meshes their DTensors lie on.

A tensor-parallel model has DTensors beside plain norms, which torch's foreach and fused kernels do not take together;
foreach is the default on CUDA, and others' kernels take no DTensor at all. What treats every number by itself
([reach](reach.py)) gives the same on the parts. Around each `step` of such an optimizer:

    group["params"]   DTensors -> their local parts, with the local parts of their gradients     -> DTensors again
    state             moved to the parts, its DTensors likewise                                  -> moved back

What reads several tensors together, or draws random numbers, keeps its DTensors, and is asked to step one by one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.reach import Reach, find_reaches
from hf_parallel.ranks.mesh import place_as
from hf_parallel.ranks.steps import call_after_steps, call_before_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer

_HELD = "_hf_parallel_on_parts"  # what an optimizer is in the midst of


def step_on_local_parts() -> None:
    """From here on torch's optimizers step on local parts, where they have DTensors. A second call changes nothing."""
    call_before_steps(_begin_local_step)
    call_after_steps(_end_local_step)


def _begin_local_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    _end_local_step(optimizer)  # of a step that has failed
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return None
    kind, reaches = type(optimizer).__name__, find_reaches(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        refuse(kind, "it needs whole tensors, of which ranks hold parts", "AdamW")
    held = vars(optimizer)[_HELD] = OnLocalParts(optimizer, states_too=True, reaches=reaches)
    held.begin()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or Reach.NUMBERS not in reaches:
        return None

    def call_outside() -> object:
        """Show the closure the parameters themselves."""
        held.end()
        try:
            return closure()
        finally:
            held.begin()

    return (args[0], call_outside, *args[2:]), {key: v for key, v in kwargs.items() if key != "closure"}


def _end_local_step(optimizer: Optimizer, *_: object) -> None:
    held = optimizer.__dict__.pop(_HELD, None)
    if held is not None:
        held.end()


def list_parameters_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, also in the midst of a step on their parts."""
    held = vars(optimizer).get(_HELD)
    former = {} if held is None else held.former
    return [former.get(number, group["params"]) for number, group in enumerate(optimizer.param_groups)]


@dataclass(eq=False)
class OnLocalParts:
    """Between `begin` and `end` an optimizer has plain tensors for DTensors, with their gradients and states.

    Args:
        states_too: its states have the parameters' shapes, and are DTensors where those are.
        reaches: of each group; what steps on whole tensors is left alone, and what reads several keeps its DTensors.
    """

    optimizer: Optimizer
    states_too: bool
    reaches: list[Reach] | None = None
    former: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by the number of the group
    _parts: dict[DTensor, torch.Tensor] = field(default_factory=dict)
    _states: dict[int, DTensor] = field(default_factory=dict)  # by the id of its local part: most are kept
    _one_by_one: list[dict] = field(default_factory=list)  # groups whose foreach is off

    def begin(self) -> None:
        """Exchange them."""
        groups = self.optimizer.param_groups
        reaches = self.reaches or [Reach.NUMBERS] * len(groups)
        self.former = {n: groups[n]["params"] for n, reach in enumerate(reaches) if reach is Reach.NUMBERS}
        for parameter in (p for p in itertools.chain(*self.former.values()) if isinstance(p, DTensor)):
            # No nn.Parameter: what looks for parameters before a step, and comes after this, passes it over.
            part, gradient = parameter._local_tensor.detach(), parameter.grad
            part.requires_grad_(parameter.requires_grad)
            if gradient is not None:
                assert isinstance(gradient, DTensor)
                if gradient._local_tensor.shape != part.shape:  # of a model that transformers has split
                    gradient = gradient.redistribute(placements=parameter.placements)
                part.grad = gradient._local_tensor
            self._parts[parameter] = part
        for number, parameters in self.former.items():
            groups[number]["params"] = [self._parts[p] if isinstance(p, DTensor) else p for p in parameters]
        state = self.optimizer.state
        for parameter, part in self._parts.items():
            if parameter not in state:
                continue
            slots = state[part] = state.pop(parameter)
            for name, value in slots.items() if self.states_too else ():
                if isinstance(value, DTensor):
                    slots[name] = value._local_tensor
                    self._states[id(value._local_tensor)] = value
        for group in groups:
            meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
            if group.get("foreach") and len(meshes) > 1:
                group["foreach"] = False
                self._one_by_one.append(group)

    def end(self) -> None:
        """Back again."""
        for number, parameters in self.former.items():
            self.optimizer.param_groups[number]["params"] = parameters
        state = self.optimizer.state
        for parameter, part in self._parts.items():
            if part not in state:
                continue
            slots = state[parameter] = state.pop(part)
            for name, value in slots.items() if self.states_too else ():
                if torch.is_tensor(value) and value.ndim and value.shape == part.shape:
                    known = self._states.get(id(value))
                    slots[name] = place_as(parameter, value) if known is None else known
        for group in self._one_by_one:
            group["foreach"] = True
        self._parts, self._states, self._one_by_one = {}, {}, []


@contextlib.contextmanager
def on_local_parts(optimizer: Optimizer) -> Iterator[OnLocalParts]:
    """Give plain tensors for DTensors to an optimizer whose states are local anyway."""
    held = OnLocalParts(optimizer, states_too=False)
    held.begin()
    try:
        yield held
    finally:
        held.end()
