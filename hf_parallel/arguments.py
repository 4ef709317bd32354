"""What a call was given, whether by name or by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def by_name(function: Callable | inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the function, or its signature, gives them; without defaults."""
    signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
