"""Tokens on their way to experts and back, none dropped but those that `capacity.py` has marked.

Each rank sorts its (token, expert) pairs by expert, which is by rank, as each holds a range of experts. Counts travel
first; reading them is the one time that the process waits for the device.

    rank 0   t0->E0 t0->E3 t1->E2        ─┐   counts, then tokens    ┌─   E0: t0    E1: t2
    rank 1   t2->E1 t3->E3 t3->E2        ─┘   <- results ->          └─   E2: t1 t3   E3: t0 t3

The weights of a token's experts stay with the token: what comes back is weighted and summed where it was sent from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from hf_parallel.collectives import exchange, exchange_counts, exchange_during, join_sequence, split_sequence


@dataclass(frozen=True)
class Arrived:
    """What this rank's experts compute: rows, and which of its experts each is for, with what leads them back."""

    rows: torch.Tensor
    experts: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]


def send(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] | None = None,
) -> Arrived:
    """Bring each token [t, hidden] to its experts [t, k], numbered over all ranks of the group.

    Args:
        count: experts over all ranks. A pair of this number, which no expert has, does not travel.
        meanwhile: computes something while tokens travel.
    """
    ranks, chosen = group.size(), experts.reshape(-1)
    order = chosen.argsort()
    own = torch.zeros(count + 1, dtype=torch.long, device=tokens.device)
    own = own.scatter_add_(0, chosen, torch.ones_like(chosen))[:count].view(ranks, -1)
    theirs = exchange_counts(own, group)
    sent, received = _sizes(own, theirs, len(chosen))
    leaving = tokens[order[: sum(sent)] // experts.shape[-1]]
    if meanwhile is None:
        rows = exchange(leaving, sent, received, group)
    else:
        rows = exchange_during(leaving, sent, received, group, meanwhile)
    local = torch.arange(count // ranks, device=tokens.device).repeat(ranks)
    return Arrived(rows, local.repeat_interleave(theirs.flatten(), output_size=len(rows)), order, sent, received)


def _sizes(own: torch.Tensor, theirs: torch.Tensor, pairs: int) -> tuple[list[int], list[int]]:
    """How many pairs go to each rank, and come from each; of tensors without values equally many."""
    if isinstance(own, FakeTensor):
        even = [pairs // len(own) + (rank < pairs % len(own)) for rank in range(len(own))]
        return even, even
    sent, received = torch.stack([own.sum(1), theirs.sum(1)]).tolist()
    return sent, received


def bring_back(
    results: torch.Tensor, arrived: Arrived, weights: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """The weighted sums [t, hidden] of what the experts made of each token."""
    returned = exchange(results, arrived.received, arrived.sent, group)
    returned = F.pad(returned, (0, 0, 0, len(arrived.order) - len(returned)))  # nothing came of what was dropped
    places = torch.empty_like(arrived.order)
    places[arrived.order] = torch.arange(len(places), device=places.device)
    by_token = returned[places].view(*weights.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1)


class Shares:
    """The rows of tensors that ranks of a group hold alike, shared out: the last rank may have fewer, or none."""

    def __init__(self, count: int, group: dist.ProcessGroup) -> None:
        self.group, self.count = group, count
        self.size = -(-count // group.size())
        self.real = max(0, min(self.size, count - group.rank() * self.size))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """[count, …] -> this rank's rows."""
        return split_sequence(self._padded(tensor, self.size * self.group.size()), self.group)[: self.real]

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows -> [count, …] on all ranks, which must go on to compute the same thing."""
        return join_sequence(self._padded(tensor, self.size), self.group)[: self.count]

    def _padded(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return F.pad(tensor, (0, 0, 0, rows - len(tensor)))
