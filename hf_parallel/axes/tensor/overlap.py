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

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.ranks import (
    parts_of_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    whole_sequence,
)
from hf_parallel.ranks.local import as_autocast
from hf_parallel.ranks.observed import COLLECTIVE, kept_or

if TYPE_CHECKING:
    from hf_parallel.ranks.differentiable import Context


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> torch.Tensor:
    """x […, s, in / n] Wᵀ summed over ranks: […, s, out], or this rank's part of the sequence […, s / n, out]."""
    x = as_autocast(x)  # weights are cast again in the backward: a copy would be kept beside one that lives anyway
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
        product = _scattered_product if by_parts else _reduced_product
        return kept_or(lambda: product(x, as_autocast(weight), group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight = ctx.kept[0].saved_tensors
        weight = weight.to(gradient.dtype) if weight is not None and is_wanted(ctx, 0) else None
        x = x if is_wanted(ctx, 1) else None
        if ctx.by_parts:
            gradient, grad_x = _gathered_product(gradient, weight, ctx.group, x is not None)
        else:
            grad_x = None if weight is None else gradient @ weight
        # The sum of two halves would be rounded to the weight's type in between.
        return grad_x, None if x is None else weight_gradient(x, gradient), None, None, None


def _reduced_product(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, in / n] -> […, out]. No view: models add their residual in place, which autograd allows to no view."""
    output, started = x.new_empty(*x.shape[:-1], weight.shape[0]), []
    rows, sums = x.flatten(0, -2), output.flatten(0, -2)
    for half in _halves(rows.shape[0]):
        torch.mm(rows[half], weight.t(), out=sums[half])
        started.append(start_all_reduce(sums[half], group))
    for reduce in started:
        reduce.wait()
    return output


def _scattered_product(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, in / n] -> […, s / n, out]. A half is half of every rank's part, so each rank gets half of its own."""
    parts = parts_of_sequence(x, group)
    own = x.new_empty(*parts.shape[1:-1], weight.shape[0])
    parts, sums = parts.flatten(1, -2), own.flatten(0, -2)
    matrices, started = weight.t().expand(len(parts), -1, -1), []
    for half in _halves(parts.shape[1]):
        # Ordered by ranks, as it is sent.
        started.append(start_reduce_scatter(torch.bmm(parts[:, half], matrices), group, sums[half]))
    for scatter in started:
        scatter.wait()
    return own


def _gathered_product(
    own: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup, whole_wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[…, s / n, out] -> if wanted the whole […, s, out] and, given W [out, in / n], its product with W."""
    tokens = own.flatten(0, -2)
    halves, size = _halves(len(tokens)), group.size()
    started = [start_all_gather(tokens[half], group) for half in halves]
    products = None if weight is None else own.new_empty(size, len(tokens), weight.shape[1])
    for gather, half in zip(started, halves, strict=True):
        gathered = gather.wait()
        if weight is not None and products is not None:
            torch.bmm(gathered, weight.expand(size, -1, -1), out=products[:, half])
    # The weight's gradient is one product of the whole: its halves are joined, which copies them.
    whole = _of_all(torch.cat([gather.result for gather in started], dim=1), own) if whole_wanted else own
    return whole, None if products is None else _of_all(products, own)


def _halves(tokens: int) -> list[slice]:
    """Two of nearly the same length, or one if there are no two tokens."""
    middle = (tokens + 1) // 2
    return [slice(0, middle), slice(middle, tokens)] if tokens > 1 else [slice(0, tokens)]


def _of_all(parts: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Parts [n, tokens, h] of all ranks -> […, s, h], where a part has the shape of `own`."""
    return whole_sequence(parts.unflatten(1, own.shape[:-1]))


def is_wanted(ctx: Context, index: int) -> bool:
    """Does this pass over the graph ask for the gradient of a Function's tensor number `index`?

    Zero-bubble schedules ask for gradients of inputs and of weights in two passes; `needs_input_grad` is true in both.
    """
    node = ctx.next_functions[index][0]
    return node is not None and torch._C._will_engine_execute_node(node)


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """x […, in], gradient […, out] -> [out, in]."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


# ---- Enter a region so that its weight gradients are computed while the gradient of its input is communicated
# The backward of a layer gives its input's gradient at once and puts aside the two factors of its weight's gradient.
# When all layers are done, the entry of the region starts its all-reduce (or reduce-scatter), multiplies what was put
# aside, and only then waits, as Megatron-LM does within one layer. Numbers and collectives are those of the plain
# path.
#
#     forward     weights' nodes -> entry's node -> layers' nodes
#     backward    layers: factors aside -> entry: start, multiply, wait -> weights: hand the products on
#
# Of a gathered input each rank keeps its part, as in gather_recompute.py: what the first layer of the backward starts
# to gather again is read when the entry multiplies.
#
# Autograd runs nodes that were made later first, so the weights' nodes are made before that of the entry. In another
# order they would multiply for themselves: that would cost the overlap, not the numbers.
#
# The forward pass gains nothing: the model asks for one layer's product with the whole sequence, so the gather of a
# second half has nothing to run behind.


class LateGradient:
    """The gradient of one weight: first its two factors, then their product, then taken."""

    def __init__(self) -> None:
        self._factors: tuple[torch.Tensor | gather_recompute.GatheredAgain, torch.Tensor] | None = None
        self._product: torch.Tensor | None = None
        self.passes = 0  # over the graph, counted by `GatheredAgain`

    def put(self, x: torch.Tensor | gather_recompute.GatheredAgain, gradient: torch.Tensor) -> None:
        """What to multiply. Replaces what a pass that did not ask for weight gradients has left."""
        self._factors, self._product = (x, gradient), None

    def compute(self) -> None:
        """Multiply, unless that is done."""
        if self._factors is not None:
            x, gradient = self._factors
            whole = x.take(self) if isinstance(x, gather_recompute.GatheredAgain) else x
            self._factors, self._product = None, weight_gradient(whole, gradient)

    def take(self) -> torch.Tensor | None:
        """Hand the product over."""
        self.compute()
        product, self._product = self._product, None
        return product


class LateWeight(NamedTuple):
    """A weight [out / n, in] for a single call of `column_linear`."""

    tensor: torch.Tensor
    gradient: LateGradient


def enter_columns(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[torch.Tensor, list[LateWeight]]:
    """Enter with x […, s, h], or gather parts […, s / n, h] of the sequence; and the weights of the layers inside."""
    late = []
    for weight in weights:  # before the entry
        gradient = LateGradient()
        late.append(LateWeight(_Weight.apply(weight, gradient), gradient))
    entered = _Enter.apply(x, [weight.gradient for weight in late], group, sequence_parallel)
    return gather_recompute.remember(entered, x, group) if sequence_parallel else entered, late


def column_linear(entered: torch.Tensor, weight: LateWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear for one layer of the region: […, h] -> […, out / n]."""
    origin = gather_recompute.origin_of(entered, weight.tensor)
    return _ColumnLinear.apply(as_autocast(entered), weight.tensor, bias, weight.gradient, origin)


class _Weight(torch.autograd.Function):
    """Identity, whose gradient does not come along the graph but lies in `late`."""

    @staticmethod
    def forward(ctx: Context, weight: torch.Tensor, late: LateGradient) -> torch.Tensor:
        ctx.late = late
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, nothing: None) -> tuple[torch.Tensor | None, None]:
        return ctx.late.take(), None


class _ColumnLinear(torch.autograd.Function):
    """F.linear, whose backward puts the factors of the weight's gradient aside."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        late: LateGradient,
        origin: gather_recompute.Origin | None,
    ) -> torch.Tensor:
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        kept, ctx.gathered_again = (x, None) if origin is None else origin.read_by(late, x.dtype)
        ctx.late = late
        ctx.save_for_backward(kept if weight_wanted else None, weight if x_wanted else None)
        return _product(x, as_autocast(weight), None if bias is None else as_autocast(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        if is_wanted(ctx, 1) and ctx.gathered_again is not None:
            ctx.gathered_again.begin(ctx.late, kept)
            ctx.late.put(ctx.gathered_again, gradient)
        elif is_wanted(ctx, 1):
            ctx.late.put(kept.detach(), gradient)
        grad_x = gradient @ weight.to(gradient.dtype) if is_wanted(ctx, 0) else None
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None


class _Enter(torch.autograd.Function):
    """f, or the gather along the sequence; what was put aside is multiplied while the backward communicates."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, late: list[LateGradient], group: dist.ProcessGroup, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.late, ctx.group, ctx.sequence_parallel = late, group, sequence_parallel
        if not sequence_parallel:
            return x.view_as(x)
        return whole_sequence(start_all_gather(x, group).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.sequence_parallel:
            started = start_reduce_scatter(parts_of_sequence(gradient, ctx.group), ctx.group)
        else:  # others may hold the gradient too: not in place
            started = start_all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group)
        for late in ctx.late:
            late.compute()
        return started.wait(), None, None, None


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear, but never a view: models may change the output in place, which autograd does not allow for views."""
    output = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows, products = x.flatten(0, -2), output.flatten(0, -2)
    if bias is None:
        torch.mm(rows, weight.t(), out=products)
    else:
        torch.addmm(bias, rows, weight.t(), out=products)
    return output
