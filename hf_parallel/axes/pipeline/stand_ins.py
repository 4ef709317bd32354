"""What stands in a model where modules of other stages were.

StandIn      has the class, the name, the children and the attributes of the module it stands for, so that scripts
             may walk the model, count and print it, and ask for shapes; no parameters, and no forward
PassThrough  the same while a stage runs: hands the hidden states on
Described    a tensor of such a module: all but its values
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = TypeVar("Kind", bound="StandIn")


class Described(torch.Tensor):
    """A tensor of another stage: writing to it does nothing, as whoever holds it writes too; it has no values."""

    origin: tuple[str, torch.device]  # what it is and where it is held, and the device of this rank's tensors

    @classmethod
    def of(cls, tensor: torch.Tensor, where: str, device: torch.device) -> Described:
        """The description of a tensor on the meta device."""
        described: Any = tensor.detach().as_subclass(cls)
        described.origin, described._is_param = (where, device), isinstance(tensor, nn.Parameter)
        return described.requires_grad_(tensor.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        own = next(value for value in _flat((*args, *kwargs.values())) if isinstance(value, Described))
        if func == _DEVICE:
            return own.origin[1]
        if func == _SET_DATA:
            return None
        if func is torch.Tensor.__repr__:
            return f"tensor(..., size={tuple(own.shape)}, dtype={own.dtype})  # {own.origin[0]}"
        if func.__name__ in _DRAWS:
            func(torch.empty(own.shape, dtype=own.dtype, device=own.origin[1]), *args[1:], **kwargs)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                f"hf_parallel: {own.origin[0]}, so {func.__name__} cannot have its values; "
                "hf_parallel.full_state_dict(model), called on all ranks, gathers them"
            ) from error
        for tensor in _flat((result,)):
            if isinstance(tensor, Described):
                tensor.__dict__.setdefault("origin", own.origin)
        return result


#: In-place functions that draw random numbers: all ranks must draw as many.
_DRAWS = {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"}
_DEVICE, _SET_DATA = torch.Tensor.device.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class StandIn(nn.Module):
    """Mixin in front of the class of the module it stands for."""

    real: nn.Module  # that module, without values
    where: str
    device_here: Callable[[], torch.device]
    same: dict[str, tuple[nn.Module, str]]  # parameters that a module of this rank holds too, being tied

    def forward(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"hf_parallel: {self.where}, so it cannot be called by itself here; call the model")

    __call__ = nn.Module.__call__  # the class behind may have one of its own, such as checkpointing

    def __repr__(self) -> str:
        return repr(self.real)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__") or "real" not in vars(self):
                raise
        if name in self.same:
            owner, leaf = self.same[name]
            return getattr(owner, leaf)
        value = getattr(self.real, name)
        return self._described(name, value) if isinstance(value, torch.Tensor) and value.is_meta else value

    def _described(self, name: str, value: torch.Tensor) -> torch.Tensor:
        known = vars(self).setdefault("described", {}).get(name)
        if known is None or known[0] is not value:
            known = value, Described.of(value, _of(name, self.where), self.device_here())
            self.described[name] = known
        return known[1]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A parameter that a script sets, or ties, belongs to whoever holds the module."""
        empty = None if param is None else torch.empty(param.shape, dtype=param.dtype, device="meta")
        self.real._parameters[name] = None if empty is None else nn.Parameter(empty)


class PassThrough(StandIn):
    """Stands where another stage's module was while a stage runs: hands the hidden states on."""

    tuples = False  # do the layers it stands among return tuples?

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._as_layer(args[0] if args else next(iter(kwargs.values())))

    def _as_layer(self, hidden: object) -> object:
        return (hidden, None) if self.tuples else hidden


class Entry(PassThrough):
    """Stands where the previous stage's last layer was: gives that layer's output."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._as_layer(self.hidden)


class LeaveAtExit(BaseException):  # not an Exception: model code that catches errors must let it pass
    """Unwinds the model's forward on every stage but the last, carrying what leaves for the next stage."""

    def __init__(self, carried: Any) -> None:
        super().__init__()
        self.carried = carried


class Exit(PassThrough):
    """Stands where the next stage's first layer was: what reaches it leaves for that stage."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise LeaveAtExit(args[0] if args else kwargs["hidden_states"])


class AddsNothing(PassThrough):
    """Stands where an embedding was whose output is added to the stream, such as that of positions."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(
            (), device=next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)).device
        )


def stand_in_for(module: nn.Module, kind: type[Kind]) -> Kind:
    """What stands in the place of `module`, or of the one that `module` stands for."""
    known = {key: vars(module)[key] for key in ("real", "same", "where", "device_here") if isinstance(module, StandIn)}
    real = known.get("real", module)
    kinds: tuple[type, type] = kind, type(real)
    new: Any = object.__new__(_class(*kinds))
    nn.Module.__init__(new)
    vars(new).update({"real": real, "same": {}, **known}, training=module.training)
    new._is_hf_initialized = True  # transformers need not draw its weights
    if kind is StandIn:
        new._modules.update({name: child and stand_in_for(child, StandIn) for name, child in real._modules.items()})
    elif known:  # a layer that this rank runs in another stage shows no parts: they have parameters
        new._modules.update(module._modules)
    return new


@functools.cache
def _class(kind: type, real: type) -> type:
    return type(real.__name__, (kind, real), {"__module__": real.__module__})


def stand_ins(model: nn.Module, prefix: str = "") -> dict[str, StandIn]:
    """Those in `model` by name, without those that are parts of another one."""
    found: dict[str, StandIn] = {}
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        found.update({full: child} if isinstance(child, StandIn) else stand_ins(child, f"{full}."))
    return found


def settle(model: nn.Module, stage_of: Callable[[str], int]) -> None:
    """Let the stand-ins of a model that has been cut know what they are."""
    found = stand_ins(model)
    whole = {
        f"{top}.{name}".rstrip("."): part for top, module in found.items() for name, part in module.named_modules()
    }
    for name, part in whole.items():
        top = next(top for top in found if name == top or name.startswith(f"{top}."))
        part.where = f"{name} is held by pipeline stage {stage_of(top)}, not by this rank"
        part.device_here = lambda: next(model.parameters()).device
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for gone, kept in (pair, pair[::-1]):
            (owner, _, leaf), (home, _, theirs) = gone.rpartition("."), kept.rpartition(".")
            if owner in whole and home not in whole:
                whole[owner].same[leaf] = (model.get_submodule(home), theirs)


def _of(name: str, where: str) -> str:
    """`lm_head is held …` -> `lm_head.weight is held …`."""
    module, _, rest = where.partition(" ")
    return f"{module}.{name} {rest}"
