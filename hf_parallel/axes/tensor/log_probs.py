"""Log-probabilities of tokens from hidden states, over a vocabulary that is cut over tp: no logits, no whole head.

Each rank multiplies by its rows of the head, a chunk of tokens at a time, and keeps a few numbers per token; two small
all-reduces make them those of the whole vocabulary. The backward multiplies again. As memory goes this is the
cross-entropy of `vocab_parallel.py` without the logits (chunked over tokens as by Wijmans et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.autocast import autocast_dtype
from hf_parallel.collectives import all_reduce, copy_to_group

if TYPE_CHECKING:
    from hf_parallel.collectives.context import Context

CHUNK = 1024  # tokens whose logits over this rank's rows exist at a time


@dataclass(frozen=True)
class Scaling:
    """logits = softcap · tanh(scale · product / softcap) / temperature, or scale · product / temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """fp32, from the head's products."""
        z = product.float() * self.scale
        return (z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)) / self.temperature

    def backward(self, gradient: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """The gradient of the products from that of the logits."""
        if self.softcap is not None:
            capped = torch.tanh(product.float() * self.scale / self.softcap)
            gradient = gradient * (1 - capped.square())
        return gradient * (self.scale / self.temperature)


@dataclass
class TokenScores:
    """Per token, shape [tokens]: fp32, and bool for `is_top1`. Gradients flow to the first two."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
    scaling: Scaling,
) -> TokenScores:
    """Scores of `targets` [tokens] under softmax(head(hidden)).

    Args:
        hidden: [tokens, hidden], equal on all ranks of `group`.
        weight: this rank's rows of the head, from row `first` on.
        bias: of the same rows.
    """
    return TokenScores(
        *_LogProbs.apply(copy_to_group(hidden, group), weight, bias, targets, group, first, vocabulary, scaling)
    )


class _LogProbs(torch.autograd.Function):
    """The gradient of `hidden` is this rank's part of it."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        group: dist.ProcessGroup,
        first: int,
        vocabulary: int,
        scaling: Scaling,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = autocast_dtype(hidden.device) or hidden.dtype
        lowered = weight.to(ctx.dtype)
        parts = [
            _statistics(scaling.logits(_product(x, lowered, bias, ctx.dtype)), target - first)
            for x, target in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        ]
        maxima, sums = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        largest, before = all_reduce(maxima, group, dist.ReduceOp.MAX)
        factor = torch.exp(maxima[0] - largest)
        sums[:2] *= factor
        sums[2] *= factor.square()
        total, weighted, squares, logits, at_target = all_reduce(sums, group)
        log_total = largest + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets - first, log_total, entropy)
        ctx.scaling = scaling
        results = (
            at_target - log_total,
            entropy,
            squares.log() - 2 * total.log(),
            logits / vocabulary,
            (at_target >= largest) & (at_target > before),
        )
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None, *_: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        tensors = (hidden, weight, bias)
        into, lowered = zeros_for(tensors, wanted), weight.to(ctx.dtype)
        for chunk in chunks(len(hidden), CHUNK):
            x = hidden[chunk].to(ctx.dtype)
            product = _product(x, lowered, bias, ctx.dtype)
            logs = ctx.scaling.logits(product) - log_total[chunk, None]
            probabilities, gradient = logs.exp(), torch.zeros_like(logs)
            if of_log_probs is not None:
                gradient -= of_log_probs[chunk, None] * probabilities
                inside, column = inside_columns(targets[chunk], logs)
                gradient.scatter_add_(1, column, (of_log_probs[chunk] * inside)[:, None])
            if of_entropy is not None:
                gradient -= of_entropy[chunk, None] * probabilities * (logs + entropy[chunk, None])
            gradient = ctx.scaling.backward(gradient, product).to(ctx.dtype)
            add_gradients(into, chunk, x, lowered, gradient)
        gradients = [None if g is None else g.to(t.dtype) for g, t in zip(into, tensors, strict=True)]
        return (*gradients, None, None, None, None, None)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        product = x.to(dtype) @ weight.to(dtype).t()
        return product if bias is None else product + bias.to(dtype)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Of so many tokens, one behind the other."""
    return (slice(start, start + size) for start in range(0, tokens, size))


def zeros_for(tensors: Iterable[torch.Tensor | None], wanted: Iterable[bool]) -> list[torch.Tensor | None]:
    """What gradients of hidden states, weight and bias are summed in, where they are wanted: fp32."""
    both = zip(tensors, wanted, strict=True)
    return [torch.zeros_like(t, dtype=torch.float32) if t is not None and w else None for t, w in both]


def add_gradients(
    into: list[torch.Tensor | None], chunk: slice, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Those of a chunk of tokens, from the gradient of its products x Wᵀ + b."""
    of_hidden, of_weight, of_bias = into
    if of_hidden is not None:
        of_hidden[chunk] = gradient @ weight
    if of_weight is not None:
        of_weight += gradient.t() @ x
    if of_bias is not None:
        of_bias += gradient.sum(0, dtype=torch.float32)


def inside_columns(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are among these columns, and a column for each."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    return inside, targets.clamp(0, logits.shape[1] - 1)[:, None]


def _statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [tokens, columns]: [largest, largest before the target] and [Σe, Σe·z, Σe², Σz, z of the target]."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    earlier = logits.masked_fill(columns >= targets[:, None], -torch.inf)
    largest, before = logits.amax(1), earlier.amax(1)
    e = torch.exp(logits - largest[:, None])
    inside, column = inside_columns(targets, logits)
    at_target = torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
    sums = (e.sum(1), (e * logits).sum(1), e.square().sum(1), logits.sum(1), at_target)
    return torch.stack([largest, before]), torch.stack(sums)
