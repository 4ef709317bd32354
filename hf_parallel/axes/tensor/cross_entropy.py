"""Cross-entropy of logits that are cut along the vocabulary, a chunk of tokens at a time.

Kept from the forward to the backward are the logits themselves, and two numbers per token; beside them the backward
makes the gradient, in their dtype. What is computed in fp32 exists for a chunk only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.axes.tensor.log_probs import CHUNK, chunks, inside_columns
from hf_parallel.collectives import all_reduce

if TYPE_CHECKING:
    from hf_parallel.collectives.context import Context


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, first: int, group: dist.ProcessGroup, ignore_index: int
) -> torch.Tensor:
    """Sum of -log softmax(logits)[target] over the targets; the logits […, columns] are those from `first` on."""
    return _CrossEntropy.apply(logits, target, first, group, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: torch.Tensor,
        target: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
        ignore_index: int,
    ) -> torch.Tensor:
        rows, columns, counts = logits.flatten(0, -2), target.flatten() - first, target.flatten() != ignore_index
        largest = all_reduce(rows.amax(-1).float(), group, dist.ReduceOp.MAX)
        parts = zip(rows.split(CHUNK), columns.split(CHUNK), largest.split(CHUNK), strict=True)
        total, at_target = all_reduce(torch.cat([_sums(*part) for part in parts], dim=1), group)
        ctx.save_for_backward(logits, columns, largest + total.log(), counts)
        return ((total.log() - at_target) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, columns, log_total, counts = ctx.saved_tensors
        rows, weights = logits.flatten(0, -2), gradient * counts
        of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        of_rows = of_logits.view(rows.shape)
        for chunk in chunks(len(rows), CHUNK):
            softmax = torch.sub(rows[chunk], log_total[chunk, None]).exp_()
            inside, column = inside_columns(columns[chunk], rows)
            softmax.scatter_add_(1, column, -inside.to(softmax.dtype)[:, None])
            of_rows[chunk] = softmax.mul_(weights[chunk, None])
        return of_logits, None, None, None, None


def _sums(logits: torch.Tensor, columns: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """[sum of exponentials, logit of the target], both beside the largest logit, of each token."""
    x = torch.sub(logits, largest[:, None])  # in fp32, as the second is
    inside, column = inside_columns(columns, logits)
    at_target = torch.where(inside, x.gather(1, column)[:, 0], 0.0)
    return torch.stack([x.exp_().sum(1), at_target])
