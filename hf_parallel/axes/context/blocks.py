"""Attention over keys that come block by block, with nothing kept but the output and one number per query.

    output = sum over blocks of exp(lse_block - lse) output_block,   lse = log sum exp(lse_block)        in fp32

What a query sees of a block follows from who holds what (`layout.py`), so masks cost nothing. Kernels that take many
sequences in one call have rows as tokens [b n, h, …] behind each other, others as they come, [b, h, n, …]: `flat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_parallel.axes.context.kernels import Kernel, Scores
from hf_parallel.axes.context.packs import Call
from hf_parallel.axes.context.tiles import Tile

Part = Tile | Call


Place = slice | torch.Tensor | tuple[slice, slice, slice]  # of a part, among tokens or rows


class Sum:
    """The output of queries [b, h, n, d] over the blocks so far."""

    def __init__(self, q: torch.Tensor, scores: Scores, kernel: Kernel) -> None:
        self.scores, self.kernel = scores, kernel
        wide = torch.promote_types(q.dtype, torch.float32)
        b, h, n, d = q.shape  # in memory [b, n, h, d], as layers want it: nothing is copied, or kept twice
        self.out = torch.zeros(b, n, h, d, dtype=wide, device=q.device).transpose(1, 2)
        self.lse = _make_room((b, h, n), -torch.inf, self.out, kernel)
        self._q, self._out, self._lse = (_arrange_for_kernel(tensor, kernel) for tensor in (q, self.out, self.lse))

    def add(self, k: torch.Tensor, v: torch.Tensor, parts: Iterable[Part]) -> None:
        """Another block of keys and values [b, h / g, m, d]."""
        k, v = _arrange_for_kernel(k, self.kernel), _arrange_for_kernel(v, self.kernel)
        for part in parts:
            mine, theirs = _find_places(part)
            self._merge(mine, *self.kernel.forward(self._q[mine], k[theirs], v[theirs], part, self.scores))

    def _merge(self, place: Place, out: torch.Tensor, lse: torch.Tensor) -> None:
        former = self._lse[place]
        total = torch.logaddexp(former, lse)
        self._out[place] = (
            self._out[place] * (former - total).exp_()[..., None] + out * (lse - total).exp_()[..., None]
        )
        self._lse[place] = total

    def with_sinks(self, sinks: torch.Tensor) -> None:
        """A further score per head [h] whose value is nothing, as in gpt-oss."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[None, :, None])
        self.out *= (self.lse - total).exp_()[..., None]
        self.lse = total


class Gradients:
    """The gradient of those queries over the blocks so far."""

    def __init__(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
        kernel: Kernel,
    ) -> None:
        self.gradient, self.out, self.lse, self.scores, self.kernel = gradient, out, lse, scores, kernel
        self.dq = _make_room(q.shape, 0, lse, kernel)
        gradient = gradient if kernel.flat else gradient.contiguous()
        self._queries = [_arrange_for_kernel(tensor, kernel) for tensor in (gradient, q, out, lse)]
        self._dq = _arrange_for_kernel(self.dq, kernel)

    def add(self, k: torch.Tensor, v: torch.Tensor, parts: Iterable[Part]) -> torch.Tensor:
        """The share of a block of keys and values; returns their gradients [2, b, h / g, m, d] in fp32."""
        found = _make_room((2 * k.shape[0], *k.shape[1:]), 0, self.dq, self.kernel).unflatten(0, (2, -1))
        of_k, of_v = (_arrange_for_kernel(tensor, self.kernel) for tensor in found)
        k, v = _arrange_for_kernel(k, self.kernel), _arrange_for_kernel(v, self.kernel)
        for part in parts:
            mine, theirs = _find_places(part)
            gradient, q, out, lse = (tensor[mine] for tensor in self._queries)
            shares = self.kernel.backward(gradient, q, k[theirs], v[theirs], out, lse, part, self.scores)
            for total, place, share in zip((self._dq, of_k, of_v), (mine, theirs, theirs), shares, strict=True):
                if isinstance(place, torch.Tensor):  # keys may be there several times
                    total.index_add_(0, place, share.to(total.dtype))
                else:
                    total[place] += share
        return found

    def of_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """The gradient of the further score."""
        share = (sinks.to(self.lse.dtype)[None, :, None] - self.lse).exp()
        return -(share * (self.gradient * self.out).to(share.dtype).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _make_room(shape: Sequence[int], value: float, like: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """[b, h, n, …], in memory as the kernel has it."""
    b, h, n, *rest = shape
    return (
        like.new_full((b, n, h, *rest), value).transpose(1, 2) if kernel.flat else like.new_full(tuple(shape), value)
    )


def _arrange_for_kernel(rows: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """[b, h, n, …] as it is, or as [b n, h, …]: the same memory where that is [b, n, h, …]."""
    return rows.transpose(1, 2).flatten(0, 1) if kernel.flat else rows


def _find_places(part: Part) -> tuple[Place, Place]:
    if isinstance(part, Call):
        return part.queries, part.keys
    rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
    return (rows, slice(None), part.q), (rows, slice(None), part.k)
