"""What a region's input is cast to before it is communicated: to what autocast lowers it to anyway.

Where all that reads an input are products, each of them casts it under autocast: cast once, before the collective, it
has half the bytes and the forward pass the same numbers. Whether that is so stands in the source of the region's
owner; where it is not certain, the input travels as it is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

#: What may be asked of an input without reading a value of it or its dtype.
_SHAPE = {"shape", "size", "dim", "ndim", "device"}


def only_multiplied(owner: nn.Module, name: str) -> bool:
    """Does the forward of this attention or MLP read its input `name` with linears of its own alone?"""
    linears = frozenset(key for key, child in owner.named_children() if isinstance(child, nn.Linear | Conv1D))
    return _only_multiplied(_written_class(type(owner)), name, linears)


def _written_class(kind: type) -> type:
    """The class whose forward is the model's own, behind the mixins of this package."""
    return next(cls for cls in kind.__mro__ if "forward" in vars(cls) and not cls.__module__.startswith("hf_parallel"))


@functools.cache
def _only_multiplied(kind: Any, name: str, linears: frozenset[str]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):  # no source, or none that stands alone
        return False
    for statement in tree.body[0].body:  # type: ignore[attr-defined]
        harmless = {id(use) for node in ast.walk(statement) for use in _harmless(node, linears)}
        uses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if any(isinstance(use.ctx, ast.Load) and id(use) not in harmless for use in uses):
            return False
        if isinstance(statement, ast.Assign) and any(isinstance(use.ctx, ast.Store) for use in uses):
            return True  # from here on the name means something else
    return True


def _harmless(node: ast.AST, linears: frozenset[str]) -> list[ast.AST]:
    """The names that this node only multiplies, or asks for a shape."""
    if isinstance(node, ast.Attribute) and node.attr in _SHAPE:
        return [node.value]
    called = node.func if isinstance(node, ast.Call) else None
    own = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
    if own and called.attr in linears:  # type: ignore[union-attr]
        return [*node.args, *(keyword.value for keyword in node.keywords)]  # type: ignore[attr-defined]
    return []
