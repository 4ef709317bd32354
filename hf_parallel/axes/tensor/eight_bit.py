"""Split linears that multiply in 8 bits, and what travels in 8 bits around them.

Under sequence parallelism, with one scale for a whole operand, what is gathered is multiplied at once: ranks agree on
the scale, round their parts and send one byte per number in the place of two or four.

    forward     entry: parts of x -> codes -> all-gather      x Wᵀ of a column-parallel layer reads the codes
                leave: reduce-scatter of the row-parallel layer's product, as ever
    backward    leave: parts of g -> codes -> all-gather      g W and gᵀ x of that layer read the codes
                entry: codes of x gathered again for gᵀ x; reduce-scatter of the gradient, as ever

Scales by row are made along another dim for gᵀ x, so one rounding would not serve both products: x and g then travel
as they are, as they do where anything else reads them, such as adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.axes import eight_bit
from hf_parallel.axes.eight_bit import Float8, G, Recipe, Split, X
from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.ranks import all_reduce, cut_sequence, start_all_gather, start_reduce_scatter
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import switch_autocast_off
from hf_parallel.ranks.observed import COLLECTIVE, keep_or_compute

if TYPE_CHECKING:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor


def multiply_entered(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, split: Split
) -> torch.Tensor:
    """`F.linear` of what has entered a region, whole or in codes."""
    codes, version = getattr(x, "_codes", (None, 0))
    if version != x._version:  # changed in place since
        codes = None
    return eight_bit.linear(x, weight, bias, recipe, split, codes, gather_recompute.find_origin_of(x, weight))


def without_padding(x: torch.Tensor, padding: tuple[int, int], cut: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return x […, tokens, features] with zeros where a token only fills a row: it must not make a scale.

    Args:
        padding: tokens of a row, and how many more fill it.
        cut: the group whose ranks each have a part of the tokens.
    """
    length, extra = padding
    if not extra:
        return x
    tokens = x.shape[:-1].numel()
    first = 0 if cut is None else cut.rank() * tokens
    filled = torch.arange(first, first + tokens, device=x.device) % (length + extra) >= length
    return x.masked_fill(filled.view(*x.shape[:-1], 1), 0.0)


# ---- columns: the entry of a region -------------------------------------------------------------------------------


def gather_as_codes(part: torch.Tensor, recipe: Float8, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h], one byte per number on the way: what `multiply_entered` multiplies."""
    made: list[torch.Tensor] = []
    whole = _GatherCodes.apply(part, recipe, group, made)
    sent, codes = made
    gather_recompute.remember_origin(whole, sent, group)
    whole._codes = codes, whole._version
    return whole


class _GatherCodes(torch.autograd.Function):
    """All-gather of codes forward, reduce-scatter backward: rounding has the gradient of the identity."""

    @staticmethod
    def forward(
        ctx: Context, part: torch.Tensor, recipe: Float8, group: dist.ProcessGroup, made: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.group = group
        with switch_autocast_off(part.device.type):
            sent, codes = _gather_operand(part, recipe, X, group)
            made += [sent, codes]
            whole = codes.to_original_precision()
        return torch.ops.aten._unsafe_view(whole, (*part.shape[:-2], -1, part.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return start_reduce_scatter(cut_sequence(gradient, ctx.group), ctx.group).wait(), None, None, None


def _gather_operand(
    part: torch.Tensor, recipe: Float8, dims: tuple[str, str], group: dist.ProcessGroup
) -> tuple[torch.Tensor, Float8TrainingTensor]:
    """Return this rank's part in codes, as bytes, and the whole operand [tokens, features]."""
    how = {X: recipe.config.cast_config_input, G: recipe.config.cast_config_grad_output}[dims]
    operand = recipe.cast(part.flatten(0, -2), dims, "in", how, Split("tokens", group))  # with the whole one's scale
    sent = operand._data.view(torch.uint8)
    codes = start_all_gather(sent, group).wait().flatten(0, -2).view(operand._data.dtype)
    return sent.view(part.shape), recipe.of_codes(codes, operand._scale, dims, part.dtype)


# ---- rows: the way out ---------------------------------------------------------------------------------------------


class RowOfCodes(torch.autograd.Function):
    """x […, s, in / n] Wᵀ summed over ranks, this rank's part of the sequence; its gradient is gathered in codes."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, recipe: Float8, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.recipe, ctx.group, ctx.split = recipe, group, Split("in", group)
        with switch_autocast_off(x.device.type):
            product, ctx.scales = recipe.output(x.flatten(0, -2), weight, ctx.split)
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if weight_wanted else None, weight if x_wanted else None)
        parts = cut_sequence(product.view(*x.shape[:-1], product.shape[-1]), group)
        return keep_or_compute(lambda: start_reduce_scatter(parts, group).wait(), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        recipe, of_x, of_weight = ctx.recipe, None, None
        with switch_autocast_off(gradient.device.type):
            _, whole = _gather_operand(gradient.contiguous(), recipe, G, ctx.group)
            if weight is not None:
                of_x, _ = recipe.grad_input(whole, weight, ctx.split, ctx.scales)
                tokens = gradient.shape[-2] * ctx.group.size()
                of_x = of_x.view(*gradient.shape[:-2], tokens, of_x.shape[-1])
            if x is not None:
                of_weight = recipe.grad_weight(whole, x.flatten(0, -2), ctx.split, ctx.scales)
        return of_x, of_weight, None, None


# ---- heads that ranks share -----------------------------------------------------------------------------------------


class ShareOfGradient(torch.autograd.Function):
    """The identity for this rank's rows of a layer, whose whole gradient its ranks then have, each an equal share.

    A rank's query heads give a part of the gradient of a key that others use too, and parts round otherwise than sums.
    """

    @staticmethod
    def forward(
        ctx: Context, output: torch.Tensor, rows: torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.rows, ctx.total, ctx.group = rows, total, group
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        tokens = gradient.flatten(0, -2)
        whole = tokens.new_zeros(len(tokens) + 1, ctx.total)
        whole[:-1, ctx.rows], whole[-1, ctx.rows] = tokens, 1.0  # the last one counts the ranks
        own = all_reduce(whole, ctx.group)[:, ctx.rows]
        return (own[:-1] / own[-1]).view(gradient.shape), None, None, None
