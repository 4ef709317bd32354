"""Run a function on stand-ins, to see what it would do: no weights, no memory, no data.

A stand-in takes any operation, attribute or call and answers with a stand-in, so that a model's forward runs from its
first line to the call that is looked for. Where it cannot, nothing is known of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

#: Operations after which a function that is still running is given up.
_LIMIT = 2_000
_OPERATIONS = (
    *("call", "getitem", "neg", "invert", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "matmul"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")),
)


class StandIn:
    """Whatever is done with it, another one comes out; it is false, empty, and has the attributes it is given."""

    _left: list[int]

    def __init__(self, left: list[int], **known: object) -> None:
        vars(self).update(known, _left=left)

    def _another(self, *args: object, **kwargs: object) -> StandIn:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise RecursionError("it does not end on stand-ins")
        return StandIn(self._left)

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._another()

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> object:
        return iter(())

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> StandIn:
        return StandIn([_LIMIT])


for _name in _OPERATIONS:
    setattr(StandIn, f"__{_name}__", StandIn._another)


class _Reached(Exception):
    """The call that was looked for."""


def keywords_of_loss(model: nn.Module, **given: object) -> set[str]:
    """The keywords with which a model's forward calls `self.loss_function` if it is given labels and these."""
    found: set[str] = set()

    def loss_function(*args: object, **kwargs: object) -> None:
        found.update(kwargs)
        raise _Reached

    forward, left = inspect.unwrap(type(model).forward), [_LIMIT]
    config = copy.deepcopy(getattr(model, "config", None))  # heads of BERT's kind write in it what their loss is
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            inputs = {name: StandIn(left) for name in (*needed, "input_ids", "labels")}
            forward(StandIn(left, config=config, loss_function=loss_function), **inputs, **given)
    except Exception:  # also by what stand-ins cannot do
        return found
    return found
