"""What transformers' causal loss compares logits with, and over how many it takes the mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def targets_of(labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """The token that each one is to predict [b, s]: the next one's label, unless they are given shifted already."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def item_count(targets: torch.Tensor, given: torch.Tensor | int | None, ignore_index: int) -> torch.Tensor | int:
    """`num_items_in_batch` as it is given, on the targets' device, or else how many of the targets count."""
    if given is None:
        return (targets != ignore_index).sum()
    return given.to(targets.device) if torch.is_tensor(given) else given
