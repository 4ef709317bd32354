"""Attention over keys that come block by block, with nothing kept but the output and one number per query.

    output = sum over blocks of exp(lse_block - lse) output_block,   lse = log sum exp(lse_block)        in fp32

What a query sees of a block follows from who holds what (`layout.py`), so masks cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_parallel.axes.context import kernels
from hf_parallel.axes.context.tiles import Tile

Part = tuple[slice, slice, slice]


class Sum:
    """The output of queries [b, h, n, d] over the blocks so far."""

    def __init__(self, q: torch.Tensor, scores: kernels.Scores) -> None:
        self.q, self.scores = q, scores
        wide = torch.promote_types(q.dtype, torch.float32)
        b, h, n, d = q.shape  # in memory [b, n, h, d], as layers want it: nothing is copied, or kept twice
        self.out = torch.zeros(b, n, h, d, dtype=wide, device=q.device).transpose(1, 2)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)

    def add(self, k: torch.Tensor, v: torch.Tensor, tiles: Iterable[Tile]) -> None:
        """Another block of keys and values."""
        for tile in self.scores.tiles(tiles):
            mine, theirs = _parts(tile)
            out, lse = kernels.forward(self.q[mine], k[theirs], v[theirs], tile, self.scores)
            self._merge(mine, out, lse)

    def _merge(self, part: Part, out: torch.Tensor, lse: torch.Tensor) -> None:
        former = self.lse[part]
        total = torch.logaddexp(former, lse)
        self.out[part] = self.out[part] * (former - total).exp_()[..., None] + out * (lse - total).exp_()[..., None]
        self.lse[part] = total

    def with_sinks(self, sinks: torch.Tensor) -> None:
        """A further score per head [h] whose value is nothing, as in gpt-oss."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[None, :, None])
        self.out *= (self.lse - total).exp_()[..., None]
        self.lse = total


class Gradients:
    """The gradient of those queries over the blocks so far."""

    def __init__(
        self, gradient: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, scores: kernels.Scores
    ) -> None:
        self.gradient, self.q, self.out, self.lse, self.scores = gradient.contiguous(), q, out, lse, scores
        self.dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

    def add(self, k: torch.Tensor, v: torch.Tensor, tiles: Iterable[Tile]) -> torch.Tensor:
        """The share of a block of keys and values; returns their gradients [2, b, h, m, d] in fp32."""
        found = torch.zeros((2, *k.shape), dtype=self.dq.dtype, device=k.device)
        for tile in self.scores.tiles(tiles):
            mine, theirs = _parts(tile)
            dq, dk, dv = kernels.backward(
                self.gradient[mine],
                self.q[mine],
                k[theirs],
                v[theirs],
                self.out[mine],
                self.lse[mine].contiguous(),
                tile,
                self.scores,
            )
            self.dq[mine] += dq
            found[0][theirs] += dk
            found[1][theirs] += dv
        return found

    def of_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """The gradient of the further score."""
        share = (sinks.to(self.lse.dtype)[None, :, None] - self.lse).exp()
        return -(share * (self.gradient * self.out).to(share.dtype).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _parts(tile: Tile) -> tuple[Part, Part]:
    rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
    return (rows, slice(None), tile.q), (rows, slice(None), tile.k)
