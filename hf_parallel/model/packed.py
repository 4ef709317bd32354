"""Packed projections: one weight that holds several, such as [q | k | v] or [gate | up].

Cutting such a weight into contiguous parts would give one rank queries and another keys. So it is stored in another
order of rows: rank by rank, and within a rank segment by segment. The stored DTensor is then an ordinary `Shard`,
about which FSDP2 and the optimizer need not know; whoever reads or writes whole tensors translates, here.

    model's own   q0 q1 q2 q3 | k0 k1 | v0 v1            stored (tp=2)   q0 q1 k0 v0 | q2 q3 k1 v1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class StoredOrder:
    """Along `dim`, index i of the stored tensor is index `rows[i]` of the model's own."""

    dim: int
    rows: torch.Tensor

    def to_stored(self, own: torch.Tensor) -> torch.Tensor:
        """The model's own tensor in stored order."""
        return own.index_select(self.dim, self.rows.to(own.device))

    def to_own(self, stored: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_stored`: what the Hub, the optimizer's checkpoints and people expect."""
        return stored.index_select(self.dim, self.rows.argsort().to(stored.device))


def packed_order(segments: list[int], tp_size: int, dim: int) -> StoredOrder:
    """The stored order of consecutive segments of these sizes, each cut into `tp_size` equal parts.

    Raises:
        ValueError: a segment does not divide.
    """
    if any(size % tp_size for size in segments):
        raise ValueError(f"tp_size={tp_size} does not divide segments of {segments}")
    starts = [sum(segments[:i]) for i in range(len(segments))]
    parts = [
        torch.arange(start + size // tp_size * rank, start + size // tp_size * (rank + 1))
        for rank in range(tp_size)
        for start, size in zip(starts, segments, strict=True)
    ]
    return StoredOrder(dim, torch.cat(parts))


def stored_order(model: nn.Module, key: str) -> StoredOrder | None:
    """The order in which the tensor of this full name is stored, or None if it is the model's own."""
    owner, _, name = key.rpartition(".")
    return getattr(model.get_submodule(owner), "stored_orders", {}).get(name)
