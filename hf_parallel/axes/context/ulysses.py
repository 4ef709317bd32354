"""DeepSpeed-Ulysses (Jacobs et al., 2023): all tokens of some heads in attention, some tokens of all heads elsewhere.

    before      q, k, v of n tokens and all heads on each of U ranks
    attention   of U n tokens and 1 / U of the heads                  one all-to-all of q, k and v together
    after       n tokens and all heads again                          one all-to-all of the output

Key/value heads that U does not divide are repeated until it does, as often as they must.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_parallel.collectives import exchange_equally


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [b, h, n, d], k and v [b, h / g, n, d] -> [b, h / U, U n, d] and as many of k and v as these heads read."""
    ranks = group.size()
    repeats = key_repeats(q.shape[1], k.shape[1], ranks)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]
    arrived = exchange_equally(torch.cat(parts, 2).movedim(1, 0), group)  # [U, b, heads, n, d]
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return tuple(whole.split([part.shape[2] for part in parts], 1))  # type: ignore[return-value]


def to_tokens(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, h / U, U n, d] -> [b, h, n, d]."""
    sent = out.unflatten(2, (group.size(), -1)).movedim(2, 0)  # [U, b, heads, n, d]
    return exchange_equally(sent, group).movedim(0, 1).flatten(1, 2)


def key_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key/value head is sent, so that every rank gets those that its query heads read."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
