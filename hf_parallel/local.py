"""Modules that compute with the part of a parameter that this rank stores."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.collectives.context import Context


@contextlib.contextmanager
def holding(module: nn.Module, changed: dict[str, Any]) -> Iterator[None]:
    """In here `module` holds other tensors in place of some parameters."""
    before = {name: module._parameters[name] for name in changed}
    module._parameters.update(changed)
    try:
        yield
    finally:
        # What somebody has put there since stays: FSDP2 frees a weight in the module's own hook.
        module._parameters.update({n: p for n, p in before.items() if module._parameters.get(n) is changed[n]})


@contextlib.contextmanager
def adding(module: nn.Module, name: str, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """In here `module` computes with the sum of what it stores under this name and of `make()`."""
    added = vars(module).setdefault("_hf_parallel_added", {})
    added[name] = make
    try:
        yield
    finally:
        del added[name]


def with_added(module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter with what is to be added to it."""
    make = vars(module).get("_hf_parallel_added", {}).get(name)
    return value if make is None else value + make().to(value.dtype)


def local(parameter: Any) -> Any:
    """This rank's shard as a plain tensor that autograd still follows back to the parameter."""
    return _Local.apply(parameter) if isinstance(parameter, DTensor) else parameter


class _Local(torch.autograd.Function):
    """`DTensor.to_local` in 0.6 of its time, the rest of which goes into what a gradient's placement could be."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        # Strides belong to the spec, so those of the gradient must be the parameter's.
        return DTensor(gradient.contiguous(), copy.copy(ctx.spec), requires_grad=False)


@functools.cache
def in_front(mixin: type, cls: type) -> type:
    """The class `cls` with a mixin before it, by the same name."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, _BEHIND: cls})


#: Of a class that `in_front` or `computing` has made: the one that it was.
_BEHIND, _OWN = "_hf_parallel_behind", "_hf_parallel_own"


def has_mixin(cls: type) -> bool:
    """Has `in_front` made this class?"""
    return _BEHIND in vars(cls)


def without_mixins(cls: type) -> type:
    """The class that it was before any mixin, and any other forward."""
    while has_mixin(cls):
        cls = vars(cls)[_BEHIND]
    return vars(cls).get(_OWN, cls)


@functools.cache
def computing(forward: Callable, cls: type) -> type:
    """The class `cls` with another forward, behind the mixins before it."""
    if has_mixin(cls):
        return in_front(cls.__bases__[0], computing(forward, vars(cls)[_BEHIND]))
    own = vars(cls).get(_OWN, cls)
    return type(cls.__name__, (own,), {"__module__": own.__module__, "forward": forward, _OWN: own})
