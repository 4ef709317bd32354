"""What a call was given, whether by name or by position."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_name(function: Callable | inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the function, or its signature, gives them; without defaults."""
    return {**dict(zip(_signature(function).parameters, args, strict=False)), **kwargs}


def _signature(function: Callable | inspect.Signature) -> inspect.Signature:
    if isinstance(function, inspect.Signature):
        return function
    return _known(function) if isinstance(function, types.FunctionType) else inspect.signature(function)


#: Of functions alone: a method that is remembered would keep its model.
_known = functools.cache(inspect.signature)
