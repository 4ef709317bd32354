"""Enter a region so that its weight gradients are computed while the gradient of its input is communicated.

The backward of a layer gives its input's gradient at once and puts aside the two factors of its weight's gradient.
When all layers are done, the entry of the region starts its all-reduce (or reduce-scatter), multiplies what was put
aside, and only then waits, as Megatron-LM does within one layer. Numbers and collectives are those of the plain path.

    forward     weights' nodes -> entry's node -> layers' nodes
    backward    layers: factors aside -> entry: start, multiply, wait -> weights: hand the products on

Of a gathered input each rank keeps its part, as in gather_recompute.py: what the first layer of the backward starts to
gather again is read when the entry multiplies.

Autograd runs nodes that were made later first, so the weights' nodes are made before that of the entry. In another
order they would multiply for themselves: that would cost the overlap, not the numbers.

The forward pass gains nothing: the model asks for one layer's product with the whole sequence, so the gather of a
second half has nothing to run behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.axes.tensor.overlap import is_wanted
from hf_parallel.ranks import (
    cut_sequence,
    join_parts_of_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import cast_as_autocast


@dataclass(eq=False)
class LateGradient:
    """The gradient of one weight: first its two factors, then their product, then taken."""

    _factors: tuple[torch.Tensor | gather_recompute.GatheredAgain, torch.Tensor] | None = None
    _product: torch.Tensor | None = None
    passes: int = 0  # over the graph, counted by `GatheredAgain`

    def put(self, x: torch.Tensor | gather_recompute.GatheredAgain, gradient: torch.Tensor) -> None:
        """Keep the factors of a weight gradient, in place of what a pass without weight gradients has left."""
        self._factors, self._product = (x, gradient), None

    def compute(self) -> None:
        """Multiply, unless that is done."""
        if self._factors is not None:
            x, gradient = self._factors
            whole = x.take(self) if isinstance(x, gather_recompute.GatheredAgain) else x
            self._factors, self._product = None, gradient.flatten(0, -2).t() @ whole.flatten(0, -2)

    def take(self) -> torch.Tensor | None:
        """Hand the product over."""
        self.compute()
        product, self._product = self._product, None
        return product


class LateWeight(NamedTuple):
    """A weight [out / n, in] for a single call of `multiply_columns`."""

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
    return gather_recompute.remember_origin(entered, x, group) if sequence_parallel else entered, late


def multiply_columns(entered: torch.Tensor, weight: LateWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear for one layer of the region: […, h] -> […, out / n]."""
    origin = gather_recompute.find_origin_of(entered, weight.tensor)
    return _ColumnLinear.apply(cast_as_autocast(entered), weight.tensor, bias, weight.gradient, origin)


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
        # Never a view: models may change the output in place, which autograd does not allow for views.
        lowered = cast_as_autocast(weight)
        output = x.new_empty(*x.shape[:-1], weight.shape[0])
        rows, products = x.flatten(0, -2), output.flatten(0, -2)
        if bias is None:
            torch.mm(rows, lowered.t(), out=products)
        else:
            torch.addmm(cast_as_autocast(bias), rows, lowered.t(), out=products)
        return output

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
        return join_parts_of_sequence(start_all_gather(x, group).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.sequence_parallel:
            started = start_reduce_scatter(cut_sequence(gradient, ctx.group), ctx.group)
        else:  # others may hold the gradient too: not in place
            started = start_all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group)
        for late in ctx.late:
            late.compute()
        return started.wait(), None, None, None
