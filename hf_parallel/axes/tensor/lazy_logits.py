"""Logits that come into being only if someone reads them; until then, what they would be made of.

A causal model scales or caps its logits and hands them to its loss: as long as it does no more, this stands for them.
Whatever else is done makes them, exactly as the model's own head does.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hf_parallel.axes.tensor.log_probs import Scaling

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Source:
    """Of what logits are made. `done`: what the model has done with them, in order."""

    head: nn.Module
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    plain: Callable[[], torch.Tensor]
    done: tuple[tuple[str, float], ...] = ()
    repeat: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def then(self, step: tuple[tuple[str, float], ...], function: Callable[[torch.Tensor], torch.Tensor]) -> Source:
        """After one more step."""
        return replace(self, done=self.done + step, repeat=(*self.repeat, function))

    @property
    def scaling(self) -> Scaling | None:
        """The steps as one formula: a factor, or a factor, tanh and a factor; None if they are neither."""
        caps = [place for place, (kind, _) in enumerate(self.done) if kind == "tanh"]
        if len(caps) > 1:
            return None
        before = functools.reduce(_times, self.done[: caps[0]] if caps else self.done, 1.0)
        if not caps:
            return Scaling(scale=before)
        cap = functools.reduce(_times, self.done[caps[0] + 1 :], 1.0)
        return Scaling(softcap=cap, scale=before * cap)


def _times(product: float, step: tuple[str, float]) -> float:
    return product * step[1]


class LazyLogits(torch.Tensor):
    """Has the shape of logits, and no memory."""

    source: Source
    made: torch.Tensor | None

    @staticmethod
    def of(source: Source, shape: torch.Size, dtype: torch.dtype) -> LazyLogits:
        """Logits of this shape, from this source."""
        lazy = torch.Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=source.hidden.device)
        lazy.source, lazy.made = source, None
        return lazy

    def plain(self) -> torch.Tensor:
        """As the model's own head makes them: a vocabulary that is cut over ranks stays so."""
        if self.made is None:
            logits = self.source.plain()
            for function in self.source.repeat:
                logits = function(logits)
            self.made = logits
        return self.made

    def full_tensor(self) -> torch.Tensor:
        """Whole logits. Where ranks hold parts of the vocabulary, all of them ask alike."""
        logits = self.plain()
        return logits.full_tensor() if isinstance(logits, DTensor) else logits

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return repr(self.full_tensor())

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pending = _pending(func, args, kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs) if pending is None else pending

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.full_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


_TENSOR = torch.Tensor
#: What can be asked without logits.
_OF_SHAPE = {
    *(getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(_TENSOR, name).__get__ for name in ("is_leaf", "is_cuda", "is_sparse", "is_meta", "_base")),
    *(getattr(_TENSOR, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__", "__hash__")),
    *(_TENSOR.is_floating_point, torch.is_floating_point, _TENSOR.is_complex, torch.is_complex),
}


def _pending(func: Callable, args: tuple, kwargs: dict[str, object]) -> LazyLogits | None:
    """The result, still not made, of a step that the loss can do by itself."""
    name, lazy = getattr(func, "__name__", ""), args[0] if args else None
    if not isinstance(lazy, LazyLogits) or lazy.made is not None or kwargs:
        return None
    step: tuple[tuple[str, float], ...] | None = None
    dtype, rest = lazy.dtype, args[1:]
    factor = float(rest[0]) if len(rest) == 1 and isinstance(rest[0], numbers.Real) else None
    if name in ("mul", "__mul__", "__rmul__", "multiply") and factor is not None:
        step = (("mul", factor),)
    elif name in ("div", "__truediv__", "true_divide", "divide") and factor:
        step = (("mul", 1 / factor),)
    elif name == "tanh":
        step = (("tanh", 1.0),)
    elif name in ("float", "contiguous") and not rest:
        step, dtype = (), torch.float32 if name == "float" else dtype
    if step is None:
        return None
    return LazyLogits.of(lazy.source.then(step, lambda logits: func(logits, *rest)), lazy.shape, dtype)
