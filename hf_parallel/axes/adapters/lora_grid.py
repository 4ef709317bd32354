"""Adapters of layers on a grid (`axes/tensor/grid.py`): inner products are summed over columns, r numbers a token.

base layer       A [r, in]                 B [out, r]                sum over rows of the gradient of
column, heads    Shard(in) by columns      Shard(out) over tp        A
row              Shard(in) over tp         Shard(out) by columns     B
"""

from __future__ import annotations

import contextlib
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_parallel.axes.adapters.lora import SharedDropout, SharedRowsAdapter, cut
from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.axes.tensor.dropout import draw_numbers_of_each
from hf_parallel.axes.tensor.grid import GridRegion, JoinedHeads
from hf_parallel.axes.tensor.layers import ColumnParallel, RowParallel, TensorParallelLayer, put_mixin_on
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.ranks import copy_weight_to_group, sum_of_parts
from hf_parallel.ranks.local import get_local


def is_on_grid(base: nn.Module) -> TypeGuard[TensorParallelLayer]:
    """Return whether the weight of this layer is cut along both dims."""
    cut_twice = isinstance(base, ColumnParallel | RowParallel | JoinedHeads)
    return cut_twice and isinstance(base.region, GridRegion)


class _GridAdapter(TensorParallelLayer):
    region: GridRegion

    def of_rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a part that all rows hold, each of which has a part of its gradient."""
        return copy_weight_to_group(get_local(parameter), self.region.over_rows)


class DownOfColumns(_GridAdapter):
    """A of a column layer: x […, in / C] -> […, r], whole on all ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = gather_recompute.multiply_gathered(input, self.of_rows(self.weight), None)
        return sum_of_parts(part, self.region.over_columns)


class DownOfRows(_GridAdapter):
    """A of a row layer: x […, in / p] -> […, r], a part of a sum over rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return sum_of_parts(F.linear(input, get_local(self.weight)), self.region.over_columns)


class UpOfRows(_GridAdapter):
    """B of a row layer: […, r] -> […, out / C], a part of a sum over rows: the first of them adds the bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first = float(self.region.over_rows.rank() == 0)
        bias = None if self.bias is None else self.of_rows(self.bias) * first
        return F.linear(input, self.of_rows(self.weight), bias)


def split_adapter_on_grid(
    base: TensorParallelLayer, down: nn.Module, up: nn.Module, mesh: DeviceMesh, device: torch.device
) -> None:
    """Split one adapter of a linear: `down` [r, in] is A and `up` [out, r] is B, whole and equal on all ranks."""
    region = base.region
    assert isinstance(region, GridRegion)
    columns = region.grid.mesh["tp_col"]
    if isinstance(base, RowParallel):
        cut(down, base, 1, mesh, device)
        put_mixin_on(down, DownOfRows, region)
        for name in ("weight", "bias"):
            shard_parameter(up, name, columns, 0, device)
        put_mixin_on(up, UpOfRows, region)
        return
    shard_parameter(down, "weight", columns, 1, device)
    put_mixin_on(down, DownOfColumns, region)
    if isinstance(base, JoinedHeads):
        put_mixin_on(up, SharedRowsAdapter, region).rows = base.rows
    else:
        cut(up, base, 0, mesh, device)


class ColumnsDropout(SharedDropout):
    """Mixin: ranks of one column of the grid drop the same of an input's features, as it is the same on them."""

    def _numbers(self, device: torch.device) -> contextlib.AbstractContextManager:
        region = self.region
        assert isinstance(region, GridRegion)
        stack = contextlib.ExitStack()
        stack.enter_context(super()._numbers(device))
        stack.enter_context(draw_numbers_of_each(device, region.over_columns))
        return stack
