"""Several documents in one call of torch's flash kernel on CUDA, each seeing itself alone.

    tokens       a a a a a b b b c c c c        [tokens, heads, width], rows and documents one behind the other
    boundaries   0         5     8       12     on the device; the longest document on the host

Sinks are a further score per head whose value is nothing. They change the log-sum-exp and scale the output; the
backward kernel is given both as they are then, and so returns the right share of every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

from hf_parallel.axes.context.attention import one_process
from hf_parallel.axes.context.flash import TORCH
from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.layout import Layout
from hf_parallel.axes.context.packs import Call, Window, upload

if TYPE_CHECKING:
    from hf_parallel.collectives.context import Context


@dataclass(frozen=True, eq=False)
class Pack:
    """The documents of a batch as the kernel wants them.

    Attributes:
        boundaries: [documents + 1], int32.
        longest: document, in tokens.
        tokens: where they lie in the flattened rows, less padding; None: all of them, in order.
    """

    boundaries: torch.Tensor
    longest: int
    tokens: torch.Tensor | None

    def call(self, window: Window) -> Call:
        """Each document of itself, as the kernel is called."""
        return Call(slice(None), slice(None), (self.boundaries,) * 2, (self.longest,) * 2, window)


def pack(layout: Layout, device: torch.device) -> Pack:
    """Made once per batch."""
    lengths = torch.tensor([length for row in layout.rows for length in row.lengths])
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    tokens = None
    if any(row.order is not None for row in layout.rows):
        inside = [row.tokens()[: sum(row.lengths)] + i * row.length for i, row in enumerate(layout.rows)]
        tokens = upload(torch.cat(inside), device)
    return Pack(upload(boundaries, device), int(lengths.max()), tokens)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: tuple[int, int],
    packed: Pack,
) -> torch.Tensor:
    """[b, h, n, d], [b, h / g, n, d] twice -> [b, h, n, d]; `window`: tokens seen before and after, -1: all."""
    b, h, n, d = q.shape
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    if packed.tokens is not None:
        flat = [t[packed.tokens] for t in flat]
    out = _Varlen.apply(*(t.contiguous() for t in flat), sinks, scale, window, packed)
    if packed.tokens is not None:
        out = out.new_zeros(b * n, h, d).index_copy(0, packed.tokens, out)
    return out.view(b, n, h, d).transpose(1, 2)


class _Varlen(torch.autograd.Function):
    """q [t, h, d], k and v [t, h / g, d] -> [t, h, d]."""

    @staticmethod
    def forward(
        ctx: Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        window: tuple[int, int],
        packed: Pack,
    ) -> torch.Tensor:
        ctx.scores, ctx.call = Scores(scale), packed.call(window)
        out, lse = TORCH.forward(q, k, v, ctx.call, ctx.scores)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))  # [t, h]
            out, lse = (out * (lse - total).exp()[..., None]).to(q.dtype), total
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradient, of_sinks = gradient.contiguous(), None
        if sinks is not None:
            share = (sinks.to(lse.dtype) - lse).exp()
            of_sinks = -(share * (gradient * out).to(lse.dtype).sum(-1)).sum(0).to(sinks.dtype)
        given = TORCH.backward(gradient, q, k, v, out, lse, ctx.call, ctx.scores)
        return *given, of_sinks, None, None, None


# ---- a trial -----------------------------------------------------------------------------------------------------


def gap(device: str, dtype: torch.dtype, width: int) -> float | str:
    """The largest relative difference to a matrix of scores, in output and gradients, or the error; milliseconds."""
    try:
        return _trial(torch.device(device), dtype, width)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return str(error).strip().splitlines()[0]


def _trial(device: torch.device, dtype: torch.dtype, width: int, lengths: tuple[int, ...] = (5, 20, 8)) -> float:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 33, width), (1, 2, 33, width), (1, 2, 33, width), (4,)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    distance = torch.arange(33, device=device)[:, None] - torch.arange(33, device=device)
    seen = (number[:, None] == number) & (distance >= 0) & (distance < 7)
    ends = torch.tensor([0, 5, 25, 33], dtype=torch.int32, device=device)
    inputs = [t.clone().requires_grad_() for t in drawn]
    ours = attend(inputs[0], inputs[1], inputs[2], inputs[3], None, (6, 0), Pack(ends, 20, None))
    expected_inputs = [t.float().requires_grad_() for t in drawn]
    q, k, v, sinks = expected_inputs
    expected = one_process(q, k, v, seen[None, None], 0.0, None, None, sinks, True)
    ours.backward(torch.ones_like(ours))
    expected.backward(torch.ones_like(expected))
    pairs = [(ours, expected), *((a.grad, b.grad) for a, b in zip(inputs, expected_inputs, strict=True))]
    found = [(a.detach().float(), b.detach()) for a, b in pairs if a is not None and b is not None]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in found)
