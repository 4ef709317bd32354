"""Attention of one tile by torch's own fused kernels, which return the log-sum-exp of each query's scores.

    device, dtype           kernel
    CPU                     _scaled_dot_product_flash_attention_for_cpu      full, causal, band
    CUDA, 16 bits           _scaled_dot_product_flash_attention              full, causal
    CUDA, else              _scaled_dot_product_efficient_attention          full, causal, band
    scores with a soft cap  plain products (`capped.py`), in squares         full, causal, band

No kernel builds a matrix of scores. The backward pass takes the log-sum-exp over all keys instead of the tile's, and
the output over all keys: its result is then the tile's share of the gradients, and shares add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hf_parallel.axes.context import capped
from hf_parallel.axes.context.tiles import Tile, squares

_aten: Any = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys: by default times d^-1/2, and no soft cap."""

    scale: float | None = None
    cap: float | None = None

    def tiles(self, tiles: Iterable[Tile]) -> Iterable[Tile]:
        """As large as their kernel may have them."""
        return tiles if self.cap is None else (square for tile in tiles for square in squares(tile))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scores: Scores) -> tuple:
    """[b, h, n, d] queries of a tile, [b, h / g, m, d] keys -> output [b, h, n, d], log-sum-exp [b, h, n] in fp32."""
    scale = scores.scale
    if scores.cap is not None:
        k, v = per_query_head(k, q), per_query_head(v, q)
        return capped.forward(q, k, v, _mask(tile, q), scale, scores.cap)
    causal, mask = tile.kind == "causal", _mask(tile, q)
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    k, v = per_query_head(k, q), per_query_head(v, q)
    if _flash(q, mask):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # padded to a multiple of 32


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tile: Tile,
    scores: Scores,
) -> Tensors:
    """The tile's share of the gradients of q, k and v; `out` and `lse` are over all keys."""
    scale, groups = scores.scale, q.shape[1] // k.shape[1]
    if scores.cap is not None:
        k, v = per_query_head(k, q), per_query_head(v, q)
        dq, dk, dv = capped.backward(gradient, q, k, v, out, lse, _mask(tile, q), scale, scores.cap)
        return dq, _per_key_head(dk, groups), _per_key_head(dv, groups)
    causal, mask = tile.kind == "causal", _mask(tile, q)
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    k, v = per_query_head(k, q), per_query_head(v, q)
    n, m = q.shape[2], k.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    if _flash(q, mask):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, n, m, 0.0, causal, seed, seed.new_empty(0), scale=scale
        )
    else:
        lse = torch.nn.functional.pad(lse, (0, -n % 32), value=float("inf"))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, mask, out, lse, seed[:1], seed[:1], 0.0, [True, True, True, False], causal, scale=scale
        )
    return dq, _per_key_head(dk, groups), _per_key_head(dv, groups)


def _flash(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def per_query_head(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values [b, h / g, m, d], each as often as queries [b, h, n, d] read it."""
    groups = q.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, 1)


def _per_key_head(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


def _mask(tile: Tile, q: torch.Tensor) -> torch.Tensor | None:
    """Of a band: zero where a query sees a key. Finite elsewhere, as a row may see nothing in this tile."""
    if tile.kind != "band":
        return None
    behind, low, high = tile.band
    rows, columns = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    distance = torch.arange(rows, device=q.device)[:, None] + behind - torch.arange(columns, device=q.device)
    hidden = -3e4 if q.dtype == torch.float16 else -1e30
    mask = torch.zeros(rows, columns + -columns % 8, dtype=q.dtype, device=q.device)[:, :columns]  # aligned rows
    mask.masked_fill_((distance < low) | (distance > high), hidden)
    return mask if q.device.type == "cpu" else mask.expand(q.shape[0], q.shape[1], rows, columns)
