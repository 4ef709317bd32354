"""Attention tile by tile, by torch's fused kernels that take a mask, or none at all.

device                  kernel
CPU                     _scaled_dot_product_flash_attention_for_cpu      full, causal, band
else                    _scaled_dot_product_efficient_attention          full, causal, band
scores with a soft cap  plain products (`capped.py`), in squares         full, causal, band
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from hf_parallel.axes.context import capped
from hf_parallel.axes.context.kernels import Scores, Tensors, repeat_per_query_head
from hf_parallel.axes.context.layout import Ring
from hf_parallel.axes.context.tiles import Tile

_aten = torch.ops.aten


class Tiles:
    """[b, h, n, d] queries of a tile, [b, h / g, m, d] keys and values."""

    flat: ClassVar[bool] = False

    def parts(self, ring: Ring, keys: int, scores: Scores, device: torch.device) -> Iterable[Tile]:
        """The tiles."""
        return scores.tiles(ring.tiles(keys))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Tile, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [b, h, n, d], log-sum-exp [b, h, n] in fp32."""
        causal, mask, scale = part.kind == "causal", _make_band_mask(part, q), scores.scale
        if scores.cap is not None:
            return capped.forward(q, repeat_per_query_head(k, q), repeat_per_query_head(v, q), mask, scale, scores.cap)
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
        """The tile's share of the gradients of q, k and v."""
        causal, mask, scale, lse = part.kind == "causal", _make_band_mask(part, q), scores.scale, lse.contiguous()
        if scores.cap is None and q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
        if scores.cap is not None:
            dq, dk, dv = capped.run_capped_backward(gradient, q, k, v, out, lse, mask, scale, scores.cap)
        else:
            lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
            seed = torch.zeros(1, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
            dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
                *(gradient, q, k, v, mask, out, lse, seed, seed, 0.0, [True, True, True, False], causal), scale=scale
            )
        return dq, _sum_per_key_head(dk, groups), _sum_per_key_head(dv, groups)


TILES = Tiles()


def _sum_per_key_head(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


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
