"""What a region's input is cast to before it is communicated: to what autocast lowers it to anyway.

Where all that reads an input are products, each of them casts it under autocast: cast once, before the collective, it
has half the bytes and the forward pass the same numbers. Whether that is so is seen by running the region's owner on
the meta device; where it is not certain, the input travels as it is.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_TOKENS, _WIDTH = 4, 8  # of the row that is run; its width does not matter to products
#: What may be asked of an input without reading a value of it or its dtype.
_SHAPE = {torch.Tensor.size, torch.Tensor.dim}
_SHAPE |= {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "device")}


class _Watched(torch.Tensor):
    """An input that remembers whether anything but its shape was asked for."""

    read: bool

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _SHAPE:
                for value in (*args, *(kwargs or {}).values()):
                    for tensor in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(tensor, _Watched):
                            tensor.read = True
            return func(*args, **(kwargs or {}))


class _Product(nn.Module):
    """Stands for a linear of the owner: what it multiplies counts as not read."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.width = linear.nf if isinstance(linear, Conv1D) else linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _empty(*input.shape[:-1], self.width)


#: Owner's class, config, linears and input -> the answer, and the config, whose id is no other's while it is here.
_known: dict[tuple[type, int, tuple[str, ...], str], tuple[bool, object]] = {}


def only_multiplied(owner: nn.Module, name: str) -> bool:
    """Does the forward of this attention or MLP read its input `name` with linears of its own alone?"""
    linears = {key: child for key, child in owner.named_children() if isinstance(child, nn.Linear | Conv1D)}
    config = vars(owner).get("config")
    key = (type(owner), id(config), tuple(linears), name)
    if key not in _known:  # layers of one model are alike
        with _on_meta(owner, linears):
            answer = bool(linears) and all(_reads_nothing(owner, name, more) for more in (False, True))
        _known[key] = answer, config
    return _known[key][0]


@contextlib.contextmanager
def _on_meta(owner: nn.Module, linears: dict[str, object]) -> Iterator[None]:
    """In here the owner's linears are stand-ins, and its attention is written out."""
    modules, config = dict(owner._modules), vars(owner).get("config")
    owner._modules.update({key: _Product(child) for key, child in linears.items()})
    if config is not None:
        owner.config = written_out = copy.deepcopy(config)
        written_out._attn_implementation = "eager"
    try:
        yield
    finally:
        owner._modules.update(modules)
        if config is not None:
            owner.config = config


def _reads_nothing(owner: nn.Module, name: str, more: bool) -> bool:
    """Whether a pass gets to its end without reading the input itself; `more`: with inputs that may be left out."""
    head = int(getattr(owner, "head_dim", None) or 8)
    for angles in (head, getattr(owner, "rotary_ndims", head), head // 2):
        watched = _empty(1, _TOKENS, _WIDTH).as_subclass(_Watched)
        watched.read = False
        values = {key: value.to("meta") for key, value in (*owner.named_parameters(), *owner.named_buffers())}
        with contextlib.suppress(Exception):  # whatever its code does with what it is not given
            result = torch.func.functional_call(owner, values, (), {name: watched, **_besides(owner, angles, more)})
            given_back = any(part is watched for part in (result if isinstance(result, tuple) else (result,)))
            return not watched.read and not given_back
    return False


def _besides(owner: nn.Module, angles: int, more: bool) -> dict[str, object]:
    """The other inputs of the owner that it needs, and those that may decide what it does."""
    width = getattr(getattr(owner, "config", None), "hidden_size", None) or _WIDTH
    known: dict[str, object] = {"position_embeddings": (_empty(1, _TOKENS, angles),) * 2}
    known["residual"] = _empty(1, 1, 1)  # fits what it is added to
    if more:
        known["attention_mask"] = _empty(1, 1, _TOKENS, _TOKENS)
        known.update(dict.fromkeys(("key_value_states", "encoder_hidden_states"), _empty(1, _TOKENS, width)))
    first, *others = inspect.signature(owner.forward).parameters.values()
    needed = [p for p in others if p.name in known or (p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)]
    return {p.name: known.get(p.name) for p in needed}


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")
