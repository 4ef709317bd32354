"""DeepSpeed-Ulysses (Jacobs et al., 2023): all tokens of some heads in attention, some tokens of all heads elsewhere.

    before      q, k, v of n tokens and all heads on each of U ranks
    attention   of U n tokens and 1 / U of the heads                  one all-to-all of q, k and v together
    after       n tokens and all heads again                          one all-to-all of the output

Key/value heads that U does not divide are repeated until it does, as often as they must. The output is kept once, as
what follows reads it: the backward of attention needs of a query's output O and its gradient G only their product, so
that is sent with G, and G <G, O> / <G, G> taken for O.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_parallel.ranks import exchange_equally


def to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [b, h, n, d], k and v [b, h / g, n, d] -> [b, h / U, U n, d] and as many of k and v as these heads read."""
    ranks = group.size()
    repeats = compute_key_repeats(q.shape[1], k.shape[1], ranks)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]
    arrived = exchange_equally(torch.cat(parts, 2).movedim(1, 0), group)  # [U, b, heads, n, d]
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [b, heads, U n, d]
    return tuple(whole.split([part.shape[2] for part in parts], 1))


def to_tokens(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, h / U, U n, d] -> [b, h, n, d], in memory [b, n, h, d], as layers want it."""
    sent = out.unflatten(2, (group.size(), -1)).movedim(2, 0)  # [U, b, heads, n, d]
    return exchange_equally(sent, group).permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def to_heads_with_output(
    gradient: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient and output [b, h, n, d] -> the gradient [b, h / U, U n, d], and what is as good as the output to it."""
    wide = torch.promote_types(out.dtype, torch.float32)
    products = (gradient.to(wide) * out).sum(-1, keepdim=True)
    both = torch.cat([gradient, products.view(gradient.dtype)], -1)  # two numbers of 16 bits for one of 32
    arrived = exchange_equally(both.unflatten(1, (group.size(), -1)).movedim(1, 0), group)  # [U, b, heads, n, d]
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    gradient, products = whole[..., : out.shape[-1]].contiguous(), whole[..., out.shape[-1] :].contiguous().view(wide)
    size = gradient.abs().amax(-1, keepdim=True).to(wide)
    size = size.masked_fill_(size == 0, 1)
    unit = gradient / size  # its square neither vanishes nor overflows
    squares = unit.square().sum(-1, keepdim=True)
    return gradient, (unit * (products / size / squares.masked_fill_(squares == 0, 1))).to(out.dtype)


def compute_key_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key/value head is sent, so that every rank gets those that its query heads read."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads
