"""What is known of a batch's padding while its parts run: transformers would ask the device for each part.

A pipeline calls the backbone per micro-batch and stage, and each call would wait for the device to say whether the
mask hides anything, or whether positions start again. The batch is asked once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KnownMask:
    """Of the batch in progress.

    Attributes:
        length: of its rows; a mask of another length, such as a padded one, is not known.
        hides: does its mask hide any token? None: it has no mask of one entry per token.
        packs: may positions start again within a row? Not where the model counts them itself.
    """

    length: int
    hides: bool | None
    packs: bool


_known: KnownMask | None = None


@contextlib.contextmanager
def known_mask(batch: Mapping[str, object], tokens: torch.Tensor) -> Iterator[None]:
    """In here parts of this batch run, and no other. Waits once for its mask."""
    global _known
    mask = batch.get("attention_mask")
    hides = not bool(mask.all()) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    former, _known = _known, KnownMask(tokens.shape[1], hides, batch.get("position_ids") is not None)
    try:
        yield
    finally:
        _known = former


def hides_nothing(mask: torch.Tensor) -> bool:
    """Does this mask [rows, length] hide no token? Waits for the device unless the batch in progress is known."""
    if _known is None or _known.hides is None or mask.shape[-1] != _known.length:
        return bool(mask.all())
    return not _known.hides


def what_is_known() -> KnownMask | None:
    """None: nothing."""
    return _known
