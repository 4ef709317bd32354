"""Tokens and features on a grid of ranks: the pairs of `axes/tensor/grid.py` that go along both.

A tensor [t/p, h] holds a rank's tokens with all their features, [t/R, h/C] those of all ranks of its row of the grid
with 1/C of them. Ranks count by rows, so the tokens of a row are consecutive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.ranks.all_to_all import all_to_all
from hf_parallel.ranks.differentiable import parts_of_sequence, start_all_gather, start_reduce_scatter, whole_sequence
from hf_parallel.ranks.observed import COLLECTIVE, kept_or

if TYPE_CHECKING:
    from hf_parallel.ranks.differentiable import Context


class _ColumnsOfTokens(torch.autograd.Function):
    """Each way is the other's transpose. Nothing is kept: what arrives is as large as what left."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, over_columns: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = over_columns
        return _to_columns(tensor, over_columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(gradient, ctx.group), None


class _LeaveGrid(torch.autograd.Function):
    """Reduce-scatter of tokens and all-to-all forward, all-to-all and all-gather backward."""

    @staticmethod
    def forward(
        ctx: Context, tensor: torch.Tensor, over_rows: dist.ProcessGroup, over_columns: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.groups = over_rows, over_columns

        def left() -> torch.Tensor:
            return _to_tokens(
                start_reduce_scatter(parts_of_sequence(tensor, over_rows), over_rows).wait(), over_columns
            )

        return kept_or(left, COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        over_rows, over_columns = ctx.groups
        return whole_sequence(start_all_gather(_to_columns(gradient, over_columns), over_rows).wait()), None, None


def columns_of_tokens(tensor: torch.Tensor, over_columns: dist.ProcessGroup) -> torch.Tensor:
    """[…, s / p, h] -> […, s / R, h / C]: the tokens of the ranks of a row, this rank's part of their features."""
    return _ColumnsOfTokens.apply(tensor, over_columns)


def leave_grid(tensor: torch.Tensor, over_rows: dist.ProcessGroup, over_columns: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, h / C], a part of a sum over rows -> […, s / p, h] of the sum: this rank's tokens, all features."""
    return _LeaveGrid.apply(tensor, over_rows, over_columns)


def _to_columns(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    width = tensor.shape[-1] // group.size()
    parts = tensor.reshape(-1, group.size(), width).transpose(0, 1)
    return all_to_all(parts, group).view(*tensor.shape[:-2], -1, width)


def _to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size, width = group.size(), tensor.shape[-1]
    parts = all_to_all(tensor.reshape(size, -1, width), group).transpose(0, 1)
    whole = parts.reshape(*tensor.shape[:-2], tensor.shape[-2] // size, size * width)
    return torch.ops.aten._unsafe_view(whole, whole.shape)  # no view: models add to it in place
