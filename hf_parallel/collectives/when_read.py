"""Outputs of which ranks hold parts: whole when a script reads them, and never if it does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


Whole = Callable[[torch.Tensor], torch.Tensor]


class WholeWhenRead:
    """Mixin for a model's output: a tensor of parts is made whole when it is read, by all ranks alike."""

    _parts: dict[str, list[Whole]] = {}  # of an output that a script has made of one

    def __getitem__(self, key: str | int | slice) -> object:
        if not isinstance(key, str):
            return tuple(self.values())[key]
        return self._whole(key, dict.__getitem__(self, key))  # type: ignore[index]

    def get(self, key: str, default: object = None) -> object:
        return self[key] if dict.__contains__(self, key) else default  # type: ignore[operator]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value if name.startswith("_") else self._whole(name, value)

    def __reduce_ex__(self, protocol: object) -> tuple:
        """Leaves a plain output."""
        return functools.partial(type(self).__mro__[2], **dict(self.items())), ()

    def is_whole(self, key: str) -> bool:
        """Has it been read, or is it no tensor of parts?"""
        return key not in self._parts

    def _whole(self, key: str, value: Any) -> Any:
        for function in self._parts.pop(key, ()):
            value = function(value)
            self[key] = value
        return value

    def items(self) -> list[tuple[str, object]]:
        return [(key, self[key]) for key in self.keys()]

    def values(self) -> list:
        return [self[key] for key in self.keys()]


@functools.cache
def _class(cls: type) -> type:
    return type(cls.__name__, (WholeWhenRead, cls), {"__module__": cls.__module__})


def whole_when_read(output: ModelOutput, key: str, function: Whole) -> None:
    """Let whoever reads `output[key]` get what `function` makes of it; of several, in the order given."""
    if not isinstance(output, WholeWhenRead):
        output.__class__ = _class(output.__class__)
    vars(output).setdefault("_parts", {}).setdefault(key, []).append(function)
