"""Attention of one square whose scores have a soft cap, c tanh(s / c) as in Gemma 2, which no fused kernel here has.

Plain products with a matrix of the square's scores, of at most 1,024 by 1,024 tokens (`tiles.squares`). torch's
`flex_attention` has such scores on a GPU, compiled; on a CPU it has no backward.
"""

from __future__ import annotations

import torch


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, h, n, d] queries, [b, h, m, d] keys and values -> output [b, h, n, d], log-sum-exp [b, h, n] in fp32."""
    scores = _compute_capped_scores(q, k, scale, cap)[1]
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(v.dtype) @ v, lse


def run_capped_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its share of the gradients of q, k and v; `out` and `lse` are over all keys."""
    slope, scores = _compute_capped_scores(q, k, scale, cap)
    if mask is not None:
        scores += mask
    shares = (scores - lse[..., None]).exp_()
    of_values = shares.to(v.dtype).transpose(-1, -2) @ gradient
    moved = (gradient @ v.transpose(-1, -2)).to(shares.dtype)
    moved -= (gradient.to(shares.dtype) * out).sum(-1, keepdim=True)
    moved *= shares * slope
    of_scores = moved.to(q.dtype)
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, of_values


def _compute_capped_scores(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slope of capped scores with the products of queries and keys, and the scores, in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    part = ((q * scale) @ k.transpose(-1, -2)).to(wide).div_(cap).tanh_()
    return (1 - part.square()) * scale, part * cap
