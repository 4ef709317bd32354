"""DeepSpeed-Ulysses (Jacobs et al., 2023): all tokens of some heads in attention, some tokens of all heads elsewhere.

    before      q, k, v of n tokens and all heads on each of U ranks
    attention   of U n tokens and 1 / U of the heads                  one all-to-all of q, k and v together
    after       n tokens and all heads again                          one all-to-all of the output

Key/value heads that U does not divide are repeated until it does, as often as they must.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class _AllToAll(torch.autograd.Function):
    """[U, …] -> [U, …]: what is at place u goes to rank u, and what came from rank u is at place u."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = tensor.contiguous()
    arrived = torch.empty_like(tensor)
    dist.all_to_all_single(arrived, tensor, group=group)
    return arrived


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [b, h, n, d], k and v [b, h / g, n, d] -> [b, h / U, U n, d] and as many of k and v as these heads read."""
    ranks = group.size()
    repeats = key_repeats(q.shape[1], k.shape[1], ranks)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]
    arrived = _AllToAll.apply(torch.cat(parts, 2).movedim(1, 0), group)  # [U, b, heads, n, d]
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return tuple(whole.split([part.shape[2] for part in parts], 1))  # type: ignore[return-value]


def to_tokens(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, h / U, U n, d] -> [b, h, n, d]."""
    sent = out.unflatten(2, (group.size(), -1)).movedim(2, 0)  # [U, b, heads, n, d]
    return _AllToAll.apply(sent, group).movedim(0, 1).flatten(1, 2)


def key_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key/value head is sent, so that every rank gets those that its query heads read."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
