"""Optimizer steps on the parts that a rank stores: plain tensors, whatever meshes their DTensors lie on.

A tensor-parallel model has DTensors beside plain norms, which torch's foreach and fused kernels do not take together;
foreach is the default on CUDA. What treats every number by itself gives the same on the parts. Around each `step` of
such an optimizer of torch:

    group["params"]   DTensors -> their local parts, with the local parts of their gradients     -> DTensors again
    state             moved to the parts, its DTensors likewise                                  -> moved back

What others' optimizers do with a number is not known: they keep their DTensors, and are asked to step one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_parallel.ask.spec import refuse
from hf_parallel.ranks.mesh import place_as

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Where torch defines the steps that treat every number by itself; the others read whole matrices or norms.
_KINDS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
_ELEMENTWISE = {f"torch.optim.{kind}" for kind in _KINDS}
#: Where optimizers are defined that read rows, columns or norms of one parameter at a time, and so step on it whole.
_OF_WHOLE_TENSORS = {"torch.optim._adafactor", "torch.optim._muon", "transformers.optimization"}
#: Others that cannot do so in DTensors: they step on all parameters at once, or in ways that nobody has read.
_REFUSED = {"Adafactor", "LBFGS"}
_HELD = "_hf_parallel_on_parts"  # what an optimizer is in the midst of


@functools.cache
def step_on_local_parts() -> None:
    """From here on torch's optimizers step on local parts, where they have DTensors. A second call changes nothing."""
    register_optimizer_step_pre_hook(_begin_local_step)
    register_optimizer_step_post_hook(_end_local_step)


def _begin_local_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    _end_local_step(optimizer)  # of a step that has failed
    kind = type(optimizer).__name__
    if (
        kind in _REFUSED
        and not reads_whole_tensors(optimizer)
        and any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    ):
        works = "AdamW" if kind == "LBFGS" else "transformers.Adafactor"
        refuse(kind, "it needs whole tensors, of which ranks hold parts", works)
    held = OnLocalParts(optimizer, states_too=True) if is_elementwise(optimizer) else OneByOne(optimizer)
    vars(optimizer)[_HELD] = held
    held.begin()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or isinstance(held, OneByOne):
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


def is_elementwise(optimizer: Optimizer) -> bool:
    """Is it one of torch's that treat every number by itself?"""
    if type(optimizer).step.__module__ not in _ELEMENTWISE:
        return False
    return not any(group.get("differentiable") for group in optimizer.param_groups)


def reads_whole_tensors(optimizer: Optimizer) -> bool:
    """Does it read rows or columns of one parameter at a time, and so step on whole tensors?"""
    return type(optimizer).step.__module__ in _OF_WHOLE_TENSORS


def list_parameters_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, also in the midst of a step on their parts."""
    held = vars(optimizer).get(_HELD)
    return [group["params"] for group in optimizer.param_groups] if held is None else held.former


@dataclass(eq=False)
class OnLocalParts:
    """Between `begin` and `end` an optimizer has plain tensors for DTensors, with their gradients and states.

    Args:
        states_too: its states have the parameters' shapes, and are DTensors where those are.
    """

    optimizer: Optimizer
    states_too: bool
    former: list[list[torch.Tensor]] = field(default_factory=list)
    _parts: dict[DTensor, torch.Tensor] = field(default_factory=dict)
    _states: dict[int, DTensor] = field(default_factory=dict)  # by the id of its local part: most are kept

    def begin(self) -> None:
        """Exchange them."""
        self.former = [group["params"] for group in self.optimizer.param_groups]
        for parameter in (p for p in itertools.chain(*self.former) if isinstance(p, DTensor)):
            part, gradient = parameter._local_tensor.detach(), parameter.grad
            if gradient is not None:
                assert isinstance(gradient, DTensor)
                if gradient._local_tensor.shape != part.shape:  # of a model that transformers has split
                    gradient = gradient.redistribute(placements=parameter.placements)
                part.grad = gradient._local_tensor
            self._parts[parameter] = part
        for group, parameters in zip(self.optimizer.param_groups, self.former, strict=True):
            group["params"] = [self._parts[p] if isinstance(p, DTensor) else p for p in parameters]
        state = self.optimizer.state
        for parameter, part in self._parts.items():
            if parameter not in state:
                continue
            slots = state[part] = state.pop(parameter)
            for name, value in slots.items() if self.states_too else ():
                if isinstance(value, DTensor):
                    slots[name] = value._local_tensor
                    self._states[id(value._local_tensor)] = value

    def end(self) -> None:
        """Back again."""
        for group, parameters in zip(self.optimizer.param_groups, self.former, strict=True):
            group["params"] = parameters
        state = self.optimizer.state
        for parameter, part in self._parts.items():
            if part not in state:
                continue
            slots = state[parameter] = state.pop(part)
            for name, value in slots.items() if self.states_too else ():
                if torch.is_tensor(value) and value.ndim and value.shape == part.shape:
                    known = self._states.get(id(value))
                    slots[name] = place_as(parameter, value) if known is None else known
        self._parts, self._states = {}, {}


class OneByOne:
    """Between `begin` and `end` another's optimizer has foreach off, where its tensors are not all of one mesh."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.former = [group["params"] for group in optimizer.param_groups]
        self._changed = []
        for group in optimizer.param_groups:
            meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
            if group.get("foreach") and len(meshes) > 1:
                self._changed.append(group)

    def begin(self) -> None:
        """Nothing else is changed: what it reads of whole tensors, DTensors answer."""
        for group in self._changed:
            group["foreach"] = False

    def end(self) -> None:
        """Back again."""
        for group in self._changed:
            group["foreach"] = True


@contextlib.contextmanager
def on_local_parts(optimizer: Optimizer) -> Iterator[OnLocalParts]:
    """Give plain tensors for DTensors to an optimizer whose states are local anyway."""
    held = OnLocalParts(optimizer, states_too=False)
    held.begin()
    try:
        yield held
    finally:
        held.end()
