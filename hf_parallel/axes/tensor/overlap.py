"""Leave a region in halves: one is communicated while the other is computed (Wang et al., ASPLOS 2023).

    pass        while this runs for one half         this is computed for the other
    forward     reduce-scatter (or all-reduce)       x Wᵀ
    backward    all-gather (or nothing)              gradient of x

The bytes are those of the plain path, in twice as many collectives. Sums over `in` and over ranks may be rounded in
another order; the weight's gradient is one product of the whole, so not even that. What is gained on the way in:
deferred_wgrad.py.

On CUDA, collectives run on their own stream, and a product that fills the device delays a collective launched after
it: with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order of their calls. torch's fused products over symmetric
memory (`torch.ops.symm_mem`) cut finer, one piece per rank, but need NVLink and sum in another order than NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_parallel.ranks import (
    cut_sequence,
    join_parts_of_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import cast_as_autocast
from hf_parallel.ranks.observed import COLLECTIVE, keep_or_compute


def multiply_row_overlapped(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> torch.Tensor:
    """Sum x […, s, in / n] Wᵀ over ranks: […, s, out], or this rank's part of the sequence […, s / n, out]."""
    # Weights are cast again in the backward: a copy would be kept beside one that lives anyway.
    x = cast_as_autocast(x)
    kept: list[Context] = []
    # The way of a gradient to x must not lead to the weight too, or who asks for one would get both.
    x = _Keep.apply(x, weight.detach() if x.requires_grad else weight, weight.requires_grad, kept)
    # A view of the weight: `is_wanted` cannot ask about leaves.
    return _RowLinear.apply(x, weight.view_as(weight), kept, group, sequence_parallel)


class _Keep(torch.autograd.Function):
    """Identity for x; saves what the gradients need, each only if the other's gradient is wanted.

    A node of its own, because a Function saves after its forward has run: a checkpoint recomputes up to the last
    tensor that is saved, and would repeat the collectives of a row whose output nobody reads.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, weight_wanted: bool, kept: list[Context]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if weight_wanted else None, weight if ctx.needs_input_grad[0] else None)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        return gradient, None, None, None


class _RowLinear(torch.autograd.Function):
    """F.linear and g, or F.linear and the reduce-scatter along the sequence."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        kept: list[Context],
        group: dist.ProcessGroup,
        by_parts: bool,
    ) -> torch.Tensor:
        ctx.kept, ctx.group, ctx.by_parts = kept, group, by_parts
        product = _multiply_and_scatter if by_parts else _multiply_and_reduce
        return keep_or_compute(lambda: product(x, cast_as_autocast(weight), group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight = ctx.kept[0].saved_tensors
        weight = weight.to(gradient.dtype) if weight is not None and is_wanted(ctx, 0) else None
        x = x if is_wanted(ctx, 1) else None
        if ctx.by_parts:
            gradient, grad_x = _gather_and_multiply(gradient, weight, ctx.group, x is not None)
        else:
            grad_x = None if weight is None else gradient @ weight
        # The sum of two halves would be rounded to the weight's type in between.
        grad_weight = None if x is None else gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight, None, None, None


def _multiply_and_reduce(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, in / n] -> […, out]. No view: models add their residual in place, which autograd allows to no view."""
    output, started = x.new_empty(*x.shape[:-1], weight.shape[0]), []
    rows, sums = x.flatten(0, -2), output.flatten(0, -2)
    for half in _cut_into_halves(rows.shape[0]):
        torch.mm(rows[half], weight.t(), out=sums[half])
        started.append(start_all_reduce(sums[half], group))
    for reduce in started:
        reduce.wait()
    return output


def _multiply_and_scatter(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, in / n] -> […, s / n, out]. A half is half of every rank's part, so each rank gets half of its own."""
    parts = cut_sequence(x, group)
    own = x.new_empty(*parts.shape[1:-1], weight.shape[0])
    parts, sums = parts.flatten(1, -2), own.flatten(0, -2)
    matrices, started = weight.t().expand(len(parts), -1, -1), []
    for half in _cut_into_halves(parts.shape[1]):
        # Ordered by ranks, as it is sent.
        started.append(start_reduce_scatter(torch.bmm(parts[:, half], matrices), group, sums[half]))
    for scatter in started:
        scatter.wait()
    return own


def _gather_and_multiply(
    own: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup, whole_wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[…, s / n, out] -> if wanted the whole […, s, out] and, given W [out, in / n], its product with W."""
    tokens = own.flatten(0, -2)
    halves, size = _cut_into_halves(len(tokens)), group.size()
    started = [start_all_gather(tokens[half], group) for half in halves]
    products = None if weight is None else own.new_empty(size, len(tokens), weight.shape[1])
    for gather, half in zip(started, halves, strict=True):
        gathered = gather.wait()
        if weight is not None and products is not None:
            torch.bmm(gathered, weight.expand(size, -1, -1), out=products[:, half])
    # The weight's gradient is one product of the whole: its halves are joined, which copies them.
    joined = torch.cat([gather.result for gather in started], dim=1) if whole_wanted else None
    # Parts [n, tokens, h] of all ranks -> […, s, h], where a part has the shape of `own`.
    whole, product = (
        None if parts is None else join_parts_of_sequence(parts.unflatten(1, own.shape[:-1]))
        for parts in (joined, products)
    )
    return own if whole is None else whole, product


def _cut_into_halves(tokens: int) -> list[slice]:
    """Return two slices of nearly the same length, or one if there are no two tokens."""
    middle = (tokens + 1) // 2
    return [slice(0, middle), slice(middle, tokens)] if tokens > 1 else [slice(0, tokens)]


def is_wanted(ctx: Context, index: int) -> bool:
    """Return whether this pass over the graph asks for the gradient of a Function's tensor number `index`.

    Zero-bubble schedules ask for gradients of inputs and of weights in two passes; `needs_input_grad` is true in both.
    """
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)
