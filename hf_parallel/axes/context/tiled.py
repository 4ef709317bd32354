"""Attention tile by tile, by torch's fused kernels that take a mask, or none at all.

device                  kernel
CPU                     _scaled_dot_product_flash_attention_for_cpu      full, causal, band
else                    _scaled_dot_product_efficient_attention          full, causal, band
scores with a soft cap  plain products, in squares                       full, causal, band
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from hf_parallel.axes.context.kernels import Scores, Tensors, repeat_per_query_head
from hf_parallel.axes.context.layout import Ring
from hf_parallel.axes.context.tiles import Tile, cut_into_squares

_aten = torch.ops.aten


class Tiles:
    """[b, h, n, d] queries of a tile, [b, h / g, m, d] keys and values."""

    flat: ClassVar[bool] = False

    def parts(self, ring: Ring, keys: int, scores: Scores, device: torch.device) -> Iterable[Tile]:
        """Return the tiles, under a soft cap in squares."""
        tiles = ring.tiles(keys)
        return tiles if scores.cap is None else (square for tile in tiles for square in cut_into_squares(tile))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Tile, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, h, n, d] and the log-sum-exp [b, h, n] in fp32."""
        causal, mask, scale = part.kind == "causal", _make_band_mask(part, q), scores.scale
        if scores.cap is not None:
            k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
            _, capped = _compute_capped_scores(q, k, scale, scores.cap)
            capped = capped if mask is None else capped.add_(mask)
            lse = capped.logsumexp(-1)
            return (capped - lse[..., None]).exp_().to(v.dtype) @ v, lse
        if q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]  # padded to a multiple of 32

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: Tile,
        scores: Scores,
    ) -> Tensors:
        """Return the tile's share of the gradients of q, k and v."""
        causal, mask, scale, lse = part.kind == "causal", _make_band_mask(part, q), scores.scale, lse.contiguous()
        if scores.cap is None and q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
        if scores.cap is not None:
            slope, capped = _compute_capped_scores(q, k, scale, scores.cap)
            capped = capped if mask is None else capped.add_(mask)
            shares = (capped - lse[..., None]).exp_()
            dv = shares.to(v.dtype).transpose(-1, -2) @ gradient
            moved = (gradient @ v.transpose(-1, -2)).to(shares.dtype)
            moved -= (gradient.to(shares.dtype) * out).sum(-1, keepdim=True)
            moved *= shares * slope
            of_scores = moved.to(q.dtype)
            dq, dk = of_scores @ k, of_scores.transpose(-1, -2) @ q
        else:
            lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
            seed = torch.zeros(1, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                *(gradient, q, k, v, mask, out, lse, seed, seed, 0.0, [True, True, True, False], causal), scale=scale
            )
        if groups > 1:
            dk, dv = (each.unflatten(1, (-1, groups)).sum(2) for each in (dk, dv))
        return dq, dk, dv


TILES = Tiles()


def _make_band_mask(tile: Tile, q: torch.Tensor) -> torch.Tensor | None:
    """Return a band's mask: zero where a query sees a key, finite elsewhere, as a row may see nothing in this tile."""
    if tile.kind != "band":
        return None
    behind, low, high = tile.band
    rows, columns = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    distance = torch.arange(rows, device=q.device)[:, None] + behind - torch.arange(columns, device=q.device)
    hidden = -3e4 if q.dtype == torch.float16 else -1e30
    mask = torch.zeros(rows, columns + -columns % 8, dtype=q.dtype, device=q.device)[:, :columns]  # aligned rows
    mask.masked_fill_((distance < low) | (distance > high), hidden)
    return mask if q.device.type == "cpu" else mask.expand(q.shape[0], q.shape[1], rows, columns)


# ---- A square whose scores have a soft cap, c tanh(s / c) as in Gemma 2, which no fused kernel here has -------------
# Plain products with a matrix of the square's scores, of at most 1,024 by 1,024 tokens. torch's `flex_attention` has
# such scores on a GPU, compiled; on a CPU it has no backward.


def _compute_capped_scores(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slope of capped scores with the products of queries and keys, and the scores, in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    part = ((q * scale) @ k.transpose(-1, -2)).to(wide).div_(cap).tanh_()
    return (1 - part.square()) * scale, part * cap
