"""What a forward is called with: its arguments by name, and the tokens among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
