"""Mixed precision without data ranks: one 16-bit copy of each matrix per call of the model, for all micro-batches.

torch.autocast makes a copy at each use, and every micro-batch in flight keeps its own until its backward pass. It
caches copies of plain trained weights for one forward pass, of frozen or split ones not at all:

    fp32 matrices       made                                      held
    autocast            per micro-batch, again when recomputed    per micro-batch in flight
    here                once per accumulation                     one; of frozen ones until training begins or ends

A script may change weights in ways that leave no trace (`p.data.add_`), so no copy is trusted after a backward pass,
unless it was of a micro-batch but the last of a step. A model in which nothing trains may follow one that does, as a
reference or a teacher: its copies are trusted no longer.

The numbers are autocast's: what it lowers for a product is lowered already. While an attention or an MLP runs, its
modules hold the copies in the place of their weights, to which autograd leads back through the one cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.weak import WeakIdKeyDictionary
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.data.units import (
    forget_gathered_memory,
    get_state_of,
    holds_whole_gradient,
    iterate_parameter_groups,
    iterate_sharded_modules,
)
from hf_parallel.axes.eight_bit import recipe_of
from hf_parallel.ranks.local import get_autocast_dtype, note_source
from hf_parallel.ranks.steps import call_after_steps

_users: weakref.WeakSet[Lowered] = weakref.WeakSet()
_HANDLES = "_hf_parallel_lowered"


def lower_once_per_call(
    roots: list[tuple[nn.Module, list[nn.Module]]], device: torch.device
) -> Callable[[bool, torch.Size], None]:
    """From here on the layers of `roots`, and matrices beside them, use copies while autocast is on.

    Returns:
        What is to be called before each call of the model, with its mode and the shape of its tokens.
    """
    call_after_steps(_forget_copies)
    made = [Lowered(root, device) for root, _ in roots]
    for lowered, (root, layers) in zip(made, roots, strict=True):
        inside = {id(module) for layer in layers for module in layer.modules()}
        beside = [module for module in root.modules() if id(module) not in inside and _is_matrix(module)]
        # Not around a whole layer: its forward alone is what checkpointing runs again.
        parts = [part for layer in layers for part in (list(layer.children()) or [layer])]
        for unit in (*parts, *beside):
            before = unit.register_forward_pre_hook(lowered.put_in)
            after = unit.register_forward_hook(lowered.take_out, always_call=True)
            vars(unit)[_HANDLES] = before, after

    def begin(training: bool, tokens: torch.Size) -> None:
        for lowered in made:
            lowered.begin(training, tokens)

    return begin


def begin_at_call(model: nn.Module, begin: Callable[[bool, torch.Size], None]) -> None:
    """Call `begin` where the script calls the model."""

    def tell(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = next((value for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
        begin(module.training, torch.Size() if given is None else given.shape)

    model.register_forward_pre_hook(tell, with_kwargs=True)


def keep_copies() -> None:
    """A micro-batch that is not a step's last has been through: until the next one weights stay as they are."""
    for lowered in _users:
        lowered.keeps = True


def drop_copies() -> None:
    """Forget all copies, before weights are cast: torch exchanges none that anybody refers to weakly."""
    for lowered in _users:
        lowered._copies.clear()


def leave_layer(layer: nn.Module) -> None:
    """Let a layer cast by itself again, as one does whose graph is compiled: hooks would be in the graph."""
    for unit in layer.modules():
        for handle in vars(unit).pop(_HANDLES, ()):
            handle.remove()


def _forget_copies(*_: object) -> None:
    for lowered in _users:
        lowered.forget()


def _is_matrix(module: nn.Module) -> bool:
    """Return whether there is a weight to lower. A weight that is multiplied in 8 bits is rounded once, from fp32."""
    lowered = isinstance(module, nn.Linear | Conv1D) and recipe_of(module) is None
    return lowered and getattr(module, "weight", None) is not None


class Lowered:
    """The copies of one model's or stage's matrices."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root, self.device = weakref.ref(root), device
        self._copies = WeakIdKeyDictionary()  # of a parameter: what it was, and its copy
        self._matrices: dict[int, list[Any]] = {}  # of a unit
        #: Of units that run: modules and their own weights.
        self._held: dict[int, list[tuple[nn.Module, nn.Parameter]]] = {}
        self.keeps = False  # for the next call?
        self._used = False  # has a backward pass been through the copies?
        self._mode: tuple[bool, bool] | None = None  # of the last call: training, with gradients
        _users.add(self)

    def begin(self, training: bool, tokens: torch.Size) -> None:
        """Before a call: copies are kept for calls whose backward passes are still to come, and for the next token."""
        former, self._mode = self._mode, (training, torch.is_grad_enabled())
        kept, self.keeps = self.keeps, False
        if kept and former == self._mode:
            self._used = False  # what went through them has changed nothing
            return
        if former is not None and former[0] != training:
            self._copies.clear()  # frozen weights may have been merged with adapters
        elif self._used or former != self._mode or not (self._mode[1] or tokens[1:2] == (1,)):
            self.forget()

    def put_in(self, unit: nn.Module, args: tuple) -> None:
        """Give the matrices of `unit` their copies."""
        dtype = get_autocast_dtype(self.device)
        if dtype is None or id(unit) in self._held:
            return
        if id(unit) not in self._matrices:
            self._matrices[id(unit)] = [module for module in unit.modules() if _is_matrix(module)]
        held = self._held[id(unit)] = []
        for module in self._matrices[id(unit)]:
            weight = module._parameters.get("weight")
            if not isinstance(weight, nn.Parameter) or weight.dtype != torch.float32:
                continue
            held.append((module, weight))
            own = getattr(weight, "_local_tensor", weight)
            now = own.untyped_storage()._cdata, own._version, weight.requires_grad, dtype
            former, copy = self._copies.get(weight, (None, None))
            if former != now:
                with torch.inference_mode(False), torch.enable_grad():  # evaluation's copy is a training step's, too
                    copy = weight.to(dtype)
                note_source(copy, weight)
                if copy.requires_grad:
                    copy.register_hook(self._use)
                self._copies[weight] = now, copy
            module._parameters["weight"] = copy

    def take_out(self, unit: nn.Module, args: tuple, output: object) -> None:
        """Give them back their own weights."""
        for module, weight in self._held.pop(id(unit), ()):
            module._parameters["weight"] = weight

    def forget(self) -> None:
        """Trained weights may have changed; adapters may have come."""
        self._used = False
        self._matrices.clear()
        root = self.root()
        if self._copies and root is not None and not any(weight.requires_grad for weight in root.parameters()):
            self._copies.clear()  # it may be an average of what trains
        for weight in [weight for weight, (_, copy) in self._copies.items() if copy.requires_grad]:
            del self._copies[weight]

    def _use(self, gradient: torch.Tensor) -> None:
        self._used = True


# ---- Mixed precision of weights that data ranks share: kept and summed in fp32, gathered and multiplied in 16 bits
# torch.autocast alone would gather fp32, and keep a 16-bit copy of every weight beside it until the backward pass:
#
#                           travels at a gather      held from forward to backward
#     autocast              4 bytes per parameter    4 + 2
#     MixedPrecisionPolicy  2                        2
#
# Weights of 16 bits are gathered as they are; their gradients are summed in fp32 too. A policy belongs to
# `fully_shard`, but which one holds is known later, when a script has prepared the model or runs it under autocast.
# torch has no call to change it: a unit's state and its parameter groups are its internals, looked at in torch 2.13.

_HALF = (torch.bfloat16, torch.float16)
_SETTLED = "_hf_parallel_computes_in"


def make_policy_for(root: nn.Module, dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Return what `fully_shard` is to do with the weights of `root` while they are computed with in `dtype`."""
    widened = dtype is not None or any(parameter.dtype in _HALF for parameter in root.parameters())
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if widened else None)


def follow_dtype_now(root: nn.Module, device: torch.device) -> None:
    """Let the next gathers of `root` be in the dtype that is settled, or else in that of autocast here and now."""
    change(root, getattr(root, _SETTLED, None) or get_autocast_dtype(device))


def compute_in(root: nn.Module, dtype: torch.dtype) -> None:
    """From here on `root`, or each stage of a pipeline, gathers its weights in this dtype, also in evaluation."""
    for unit in root if isinstance(root, nn.ModuleList) else [root]:
        if isinstance(unit, FSDPModule):
            setattr(unit, _SETTLED, dtype)
            change(cast(nn.Module, unit), dtype)


def find_lowered_dtype(root: nn.Module, device: torch.device) -> torch.dtype | None:
    """Return the dtype that a forward pass of `root` would gather its fp32 weights in, here and now."""
    if not isinstance(root, FSDPModule):
        return None
    # The schedule of a script's loss asks outside of the model's forward, where accelerate's autocast is off.
    dtype = getattr(root, _SETTLED, None) or get_autocast_dtype(device)
    if dtype in (None, get_state_of(root)._mp_policy.param_dtype):
        return dtype
    return None if any(weight.dtype != torch.float32 for weight in _iterate_weights(root)) else dtype


def change(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Let the units below `root` gather in `dtype`, if their weights are fp32; not while they hold gathered ones."""
    if not isinstance(root, FSDPModule) or dtype == get_state_of(root)._mp_policy.param_dtype:
        return
    first = next(_iterate_weights(root), None)  # this is asked before each forward pass
    if first is None or (dtype is not None and first.dtype != torch.float32):
        return
    held = [parameter for group in iterate_parameter_groups(root) for parameter in group.fsdp_params]
    if any(p.sharded_state.name != "SHARDED" or holds_whole_gradient(p) for p in held):
        return
    if dtype is not None and any(weight.dtype != torch.float32 for weight in _iterate_weights(root)):
        return
    policy = make_policy_for(root, dtype)
    for unit in iterate_sharded_modules(root):
        get_state_of(unit)._mp_policy = policy
    for group in iterate_parameter_groups(root):
        if hasattr(group, "mp_policy"):  # torch 2.15 has it of each parameter alone
            group.mp_policy = policy
        for parameter in group.fsdp_params:
            parameter.mp_policy = policy
    forget_gathered_memory(root)


def _iterate_weights(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that units of `root` store, but for packed ones, which are integers."""
    for group in iterate_parameter_groups(root):
        yield from (p.sharded_param for p in group.fsdp_params if p.sharded_param.is_floating_point())
