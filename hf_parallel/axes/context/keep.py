"""Activation checkpointing that does not attend twice: output and log-sum-exp of each attention are kept.

A recomputed layer needs its queries, keys and values again, which it computes; what came of them, with all its
communication, it is given: h + 1 numbers per token and head for the price of a whole ring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from hf_parallel.collectives.kept import ATTENTION, Store, Within

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For `context_fn` of torch's checkpoint: around the first run, and around the second."""
    store = Store(frozenset({ATTENTION}))
    return Within(store, False), Within(store, True)


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
