"""What a forward is called with: its arguments by name, the tokens among them, and which of them a rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

#: The arguments of a model call, by name.
Batch = dict[str, Any]


def by_name(names: Iterable[str], args: tuple, kwargs: dict, owner: object) -> dict:
    """The arguments of a call of the owner's forward; the owner leads where accelerate rebinds what it wraps."""
    args = args[1:] if args and args[0] is owner else args
    return {**dict(zip(names, args, strict=False)), **kwargs}


def tokens_of(batch: Mapping) -> torch.Tensor:
    """What a backbone reads: [rows, length] or [rows, length, width]."""
    found = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
    if found is None:
        raise ValueError("hf_parallel: a model needs input_ids or inputs_embeds in the batch")
    return found


@dataclass(frozen=True)
class HeldTokens:
    """Which tokens of a script's batch a rank computes with.

    Attributes:
        shape: rows and length of the script's batch.
        part: gives what this rank holds of a tensor [rows, length, …].
    """

    shape: tuple[int, int]
    part: Callable[[torch.Tensor], torch.Tensor]


_held: ContextVar[HeldTokens | None] = ContextVar("held_tokens", default=None)


def held_tokens() -> HeldTokens | None:
    """The tokens of the backbone that runs now; None where it reads the script's batch as it is."""
    return _held.get()


@contextlib.contextmanager
def holding(shape: tuple[int, int], part: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In here a backbone reads `part` of tokens [rows, length], which may themselves be a part of a batch."""
    around = _held.get()
    held = HeldTokens(shape, part) if around is None else HeldTokens(around.shape, lambda x: part(around.part(x)))
    token = _held.set(held)
    try:
        yield
    finally:
        _held.reset(token)
