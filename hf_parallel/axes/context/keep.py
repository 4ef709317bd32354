"""Activation checkpointing that does not attend twice: output and log-sum-exp of each attention are kept.

A recomputed layer needs its queries, keys and values again, which it computes; what came of them, with all its
communication, it is given: h + 1 numbers per token and head for the price of a whole ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Result = tuple[torch.Tensor, torch.Tensor]


class _Store:
    """What the attentions of one checkpoint have given, in their order."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.used: int | None = None  # how many of them a second run has taken; None in the first


class _Within:
    """In here attentions give to a store, or take from it. A layer may be recomputed several times."""

    def __init__(self, store: _Store, recomputing: bool) -> None:
        self.store, self.recomputing = store, recomputing

    def __enter__(self) -> None:
        self.store.used = 0 if self.recomputing else None
        _stores.append(self.store)

    def __exit__(self, *error: Any) -> None:
        _stores.remove(self.store)


_stores: list[_Store] = []


def kept_or(compute: Callable[[], Result]) -> Result:
    """The result that the checkpoint around this has kept, or else what `compute` gives, which it then keeps."""
    store = _stores[-1] if _stores else None
    if store is None:
        return compute()
    if store.used is None:
        store.results.append(compute())
        return store.results[-1]
    store.used += 1
    return store.results[store.used - 1]


def contexts() -> tuple[Any, Any]:
    """For `context_fn` of torch's checkpoint: around the first run, and around the second."""
    store = _Store()
    return _Within(store, False), _Within(store, True)


def keep_attention(layers: Iterable[nn.Module]) -> None:
    """Let layers that are checkpointed keep what their attention gives. Called before each forward: cheap."""
    for layer in layers:
        function = getattr(layer, "_gradient_checkpointing_func", None)
        if function is None or not getattr(layer, "gradient_checkpointing", False):
            continue
        keywords = getattr(function, "keywords", {})
        if keywords.get("use_reentrant", False) or "context_fn" in keywords:
            continue  # a script's own way, which runs attention again
        vars(layer)["_gradient_checkpointing_func"] = functools.partial(function, context_fn=contexts)
