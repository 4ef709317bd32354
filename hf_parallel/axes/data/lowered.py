"""Mixed precision without data ranks: one 16-bit copy of each matrix per step, for all of its micro-batches.

torch.autocast makes a copy at each use, and every micro-batch in flight keeps its own until its backward pass. It
caches copies of plain trained weights for one forward pass, of frozen or split ones not at all:

    fp32 matrices       made                                      held
    autocast            per micro-batch, again when recomputed    per micro-batch in flight
    here                once per step                             one; of frozen ones for good

The numbers are autocast's: what it lowers for a product is lowered already. While an attention or an MLP runs, its
modules hold the copies in the place of their weights, to which autograd leads back through the one cast.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from hf_parallel.autocast import autocast_dtype
from hf_parallel.axes.eight_bit import recipe_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


_users: weakref.WeakSet[Lowered] = weakref.WeakSet()
_installed: list[RemovableHandle] = []
_HANDLES = "_hf_parallel_lowered"


def lower_once_per_step(roots: list[tuple[nn.Module, list[nn.Module]]], device: torch.device) -> None:
    """From here on the layers of `roots`, and matrices beside them, use copies while autocast is on."""
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_forget))
    for root, layers in roots:
        lowered = Lowered(device)
        inside = {id(module) for layer in layers for module in layer.modules()}
        beside = [module for module in root.modules() if id(module) not in inside and _is_matrix(module)]
        # Not around a whole layer: its forward alone is what checkpointing runs again.
        parts = [part for layer in layers for part in (list(layer.children()) or [layer])]
        for unit in (*parts, *beside):
            before = unit.register_forward_pre_hook(lowered.put_in)
            after = unit.register_forward_hook(lowered.take_out, always_call=True)
            vars(unit)[_HANDLES] = before, after


def leave(layer: nn.Module) -> None:
    """Let a layer cast by itself again, as one does whose graph is compiled: hooks would be in the graph."""
    for unit in layer.modules():
        for handle in vars(unit).pop(_HANDLES, ()):
            handle.remove()


def _forget(*_: object) -> None:
    for lowered in _users:
        lowered.forget()


def _is_matrix(module: nn.Module) -> bool:
    """Is there a weight to lower? What is multiplied in 8 bits is rounded once, from fp32."""
    lowered = isinstance(module, nn.Linear | Conv1D) and recipe_of(module) is None
    return lowered and getattr(module, "weight", None) is not None


class Lowered:
    """The copies of one model's or stage's matrices. `forget` after each optimizer step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = WeakIdKeyDictionary()  # of a parameter: what it was, and its copy
        self._matrices: dict[int, list[Any]] = {}  # of a unit
        self._held: dict[
            int, list[tuple[nn.Module, nn.Parameter]]
        ] = {}  # of units that run: modules and their own weights
        _users.add(self)

    def put_in(self, unit: nn.Module, args: tuple) -> None:
        """Give the matrices of `unit` their copies."""
        dtype = autocast_dtype(self.device)
        if dtype is None or id(unit) in self._held:
            return
        if id(unit) not in self._matrices:
            self._matrices[id(unit)] = [module for module in unit.modules() if _is_matrix(module)]
        held = self._held[id(unit)] = []
        for module in self._matrices[id(unit)]:
            weight = module._parameters.get("weight")
            if isinstance(weight, nn.Parameter) and weight.dtype == torch.float32:
                held.append((module, weight))
                module._parameters["weight"] = self._copy(weight, dtype)

    def take_out(self, unit: nn.Module, args: tuple, output: object) -> None:
        """Give them back their own weights."""
        for module, weight in self._held.pop(id(unit), ()):
            module._parameters["weight"] = weight

    def forget(self) -> None:
        """Trained weights have changed; adapters may have come."""
        self._matrices.clear()
        for weight in [weight for weight, (_, copy) in self._copies.items() if copy.requires_grad]:
            del self._copies[weight]

    def _copy(self, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        now = getattr(weight, "_local_tensor", weight)._version, weight.requires_grad, dtype
        former, copy = self._copies.get(weight, (None, None))
        if former != now:
            with _recording():
                copy = weight.to(dtype)
            self._copies[weight] = now, copy
        return copy


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """A copy that an evaluation makes is that of a training step, too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
