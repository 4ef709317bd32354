"""Modules that compute with the part of a parameter that this rank stores."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.ask.session import of_process
from hf_parallel.ranks.desync import Answering
from hf_parallel.ranks.differentiable import once_differentiable

if TYPE_CHECKING:
    from torch import nn
    from transformers.utils import ModelOutput

    from hf_parallel.ranks.differentiable import Context

Mixin = TypeVar("Mixin", bound="nn.Module")


def make_gradient_whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a plain tensor: of a scalar that multiplies split logits torch makes a DTensor."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def hook_gradients_of_scalars(
    root: nn.Module, hook: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> set[nn.Parameter]:
    """Put `hook` on the gradients of parameters without a dim, such as a temperature, and return these.

    They stay whole on every rank, on `device`: neither tp nor FSDP2 can cut them.
    """
    named = ((module, *item) for module in root.modules() for item in module._parameters.items())
    places = [(module, name) for module, name, p in named if p is not None and p.dim() == 0]

    def follow(module: nn.Module, args: tuple) -> None:
        for owner, name in places:  # weights that are loaded later are other tensors
            scalar = cast("nn.Parameter", owner._parameters[name])
            scalar.data = scalar.data.to(device)
            if scalar.requires_grad and hook not in (scalar._backward_hooks or {}).values():
                scalar.register_hook(hook)

    if places:
        root.register_forward_pre_hook(follow, prepend=True)
    return {cast("nn.Parameter", owner._parameters[name]) for owner, name in places}


@contextlib.contextmanager
def hold_other_tensors(module: nn.Module, changed: dict[str, Any]) -> Iterator[None]:
    """Let `module` hold other tensors in place of some parameters inside the `with`."""
    before = {name: module._parameters[name] for name in changed}
    module._parameters.update(changed)
    try:
        yield
    finally:
        # A tensor that was put there since stays: FSDP2 frees a weight in the module's own hook.
        module._parameters.update({n: p for n, p in before.items() if module._parameters.get(n) is changed[n]})


@contextlib.contextmanager
def add_to_tensor(module: nn.Module, name: str, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Let `module` compute, inside the `with`, with its tensor `name` plus `make()`."""
    added = vars(module).setdefault("_hf_parallel_added", {})
    added[name] = make
    try:
        yield
    finally:
        del added[name]


def with_added(module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return `value` plus the tensor that `add_to_tensor` has announced for this name, if any."""
    make = vars(module).get("_hf_parallel_added", {}).get(name)
    return value if make is None else value + make().to(value.dtype)


def get_local(parameter: Any) -> Any:
    """Return this rank's shard as a plain tensor that autograd still follows back to the parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local() if torch.compiler.is_compiling() else _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """`DTensor.to_local` in 0.6 of its time: torch spends the rest on possible placements of the gradient."""

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
def make_class_in_front(mixin: type, cls: type) -> type:
    """Return the class `cls` with a mixin before it, by the same name."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, _BEHIND: cls})


@functools.cache
def make_class(name: str, module: str, *bases: type) -> type:
    """Return a class of these bases; the same one each time."""
    return type(name, bases, {"__module__": module})


def put_in_front(mixin: type[Mixin], module: nn.Module) -> Mixin:
    """Put a mixin before the class of a module. The class keeps its name and the module its parameters."""
    front: type = mixin
    behind: type = type(module)
    module.__class__ = make_class_in_front(front, behind)
    assert isinstance(module, mixin)
    return module


#: Attributes of a class that `make_class_in_front` or `make_class_computing` has made: the class it was before.
_BEHIND, _OWN = "_hf_parallel_behind", "_hf_parallel_own"


def has_mixin(cls: type) -> bool:
    """Return whether `make_class_in_front` made this class."""
    return _BEHIND in vars(cls)


def without_mixins(cls: type) -> type:
    """Return the class as it was before any mixin and any replaced forward."""
    while has_mixin(cls):
        cls = vars(cls)[_BEHIND]
    return vars(cls).get(_OWN, cls)


@functools.cache
def make_class_computing(forward: Callable, cls: type) -> type:
    """Return the class `cls` with another forward. Mixins before it stay before it."""
    if has_mixin(cls):
        return make_class_in_front(cls.__bases__[0], make_class_computing(forward, vars(cls)[_BEHIND]))
    own = vars(cls).get(_OWN, cls)
    return type(cls.__name__, (own,), {"__module__": own.__module__, "forward": forward, _OWN: own})


# ---- Casts of autocast, where this package does them before, or instead of, autocast itself -------------------------


def get_autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast now computes products; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def cast_as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast casts an argument of F.linear, or of attention."""
    dtype = get_autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


_LOWERED_FROM = "_hf_parallel_lowered_from"


def note_source(lowered: torch.Tensor, source: torch.Tensor) -> None:
    """Note that a tensor is `source` in autocast's dtype, and stands in its place."""
    setattr(lowered, _LOWERED_FROM, weakref.ref(source))


def is_lowered_from(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a tensor is `source` in autocast's dtype."""
    found: weakref.ref[torch.Tensor] | None = getattr(tensor, _LOWERED_FROM, None)
    return found is not None and found() is source


def switch_autocast_off(device: str) -> contextlib.AbstractContextManager:
    """Return a context without autocast, or none if it is off already, as in most backward passes: it is slow."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


# ---- Outputs of which ranks hold parts: whole when a script reads them, and never if it does not --------------------

Whole = Callable[[torch.Tensor], torch.Tensor]


class WholeWhenRead:
    """Mixin for a model's output: a tensor of parts is made whole when it is read, by all ranks alike."""

    _parts: dict[str, list[Whole]] = {}  # of an output that a script has made of one

    def __getitem__(self, key: str | int | slice) -> object:
        if not isinstance(key, str):
            return tuple(self.values())[key]
        return self._make_whole(key, dict.__getitem__(self, key))  # type: ignore[index]

    def get(self, key: str, default: object = None) -> object:
        return self[key] if dict.__contains__(self, key) else default  # type: ignore[operator]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value if name.startswith("_") else self._make_whole(name, value)

    def __reduce_ex__(self, protocol: object) -> tuple:
        """Leaves a plain output."""
        return functools.partial(type(self).__mro__[2], **dict(self.items())), ()

    def is_whole(self, key: str) -> bool:
        """Return whether the tensor has been read, or is no tensor of parts."""
        return key not in self._parts

    def _make_whole(self, key: str, value: Any) -> Any:
        for function in self._parts.pop(key, ()):
            value = function(value)
            self[key] = value
        return value

    def items(self) -> list[tuple[str, object]]:
        return [(key, self[key]) for key in self.keys()]

    def values(self) -> list:
        return [self[key] for key in self.keys()]


def whole_when_read(output: ModelOutput | dict[str, Any], key: str, function: Whole) -> None:
    """Let whoever reads `output[key]` get what `function` makes of it; of several, in the order given.

    A plain dict, which a script's own model may return, gets it now, and so does what rank 0 alone will read.
    """
    if type(output) in (dict, OrderedDict) or of_process(Answering).is_in_shared_call:
        output[key] = function(output[key])
        return
    if not isinstance(output, WholeWhenRead):
        output.__class__ = make_class_in_front(WholeWhenRead, output.__class__)
    vars(output).setdefault("_parts", {}).setdefault(key, []).append(function)
