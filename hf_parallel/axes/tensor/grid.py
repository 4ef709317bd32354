"""Regions on a grid: weights cut along both dims, over R rows and C columns of tp's ranks (`tp_mesh=RxC`).

Weights stay where they are (Pope et al., 2022, arXiv:2211.05102, section 3.2.2), unlike SUMMA's (arXiv:2104.05343).
Of t tokens, hidden size h and p = R C ranks:

                     weight, cut by rows, columns    forward
    enter            -                               [t/p, h] -> tokens of a row [t/R, h/C] -> all tokens [t, h/C]
    colwise, packed  Shard(out), Shard(in)           x W_rcᵀ [t, n/R] -> reduce-scatter over columns [t, n/p]
    shared heads     Shard(out), Shard(in)           the same, then gather over the ranks of a head
    rowwise          Shard(in), Shard(out)           [t, k/p] -> gather over columns [t, k/R] -> x W_rcᵀ -> leave
    leave            -                               [t, h/C] -> sum over rows [t/R, h/C] -> [t/p, h]

The backward of `enter` is `leave`, and the other way round; so are gather and reduce-scatter over columns.

Between a column and a row layer every tensor is as without a grid, and between regions too. So heads, norms, packed
orders, the vocabulary and experts know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.axes.tensor.layers import TensorParallelLayer, get_local_weight, get_rows_on
from hf_parallel.axes.tensor.region import READ_BESIDES, Region, does_read_features
from hf_parallel.ranks import (
    copy_to_group,
    copy_weight_to_group,
    exchange_tokens_for_columns,
    gather_last_dim,
    join_last_dim,
    leave_grid,
    reduce_from_group,
    scatter_last_dim,
    split_last_dim,
)
from hf_parallel.ranks.local import cast_as_autocast
from hf_parallel.ranks.observed import sum_next

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hf_parallel.axes.axis import SequenceParallelFlag


@dataclass(frozen=True)
class Grid:
    """The ranks of tp by rows and columns, and the ranks that share a key/value head, if any do."""

    mesh: DeviceMesh
    sharing: dist.ProcessGroup | None


class GridRegion(Region):
    """A region whose linears are cut by the rows and columns of a grid."""

    def __init__(
        self, owner: nn.Module, grid: Grid, tp: DeviceMesh, switch: SequenceParallelFlag, at_owner: bool
    ) -> None:
        super().__init__(owner, tp.get_group(), switch, at_owner)
        self.grid = grid
        self.over_rows, self.over_columns = (grid.mesh[axis].get_group() for axis in TP_AXES)
        #: The other inputs of the owner that it only multiplies.
        self._multiplied = {
            name for name in READ_BESIDES if name in self._names and does_read_features(owner, name) is False
        }

    def column(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x […, in / C] -> […, out / p]."""
        entered = x if layer.adapted else self.enter(x)
        with sum_next():  # a checkpoint keeps the sum, and not the C times larger part of it
            part = gather_recompute.multiply_gathered(entered, self.columns[layer](), None)
        output = scatter_last_dim(part, self.over_columns)
        return output if bias is None else output + bias

    def product(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x […, in / p] -> […, out / C], a part of a sum over rows."""
        gathered = gather_last_dim(x, self.over_columns)
        entered = gather_recompute.remember_origin(
            gathered, x, self.over_columns, lambda parts: parts.movedim(0, -2).flatten(-2)
        )
        return gather_recompute.multiply_gathered(entered, weight, None)

    def row(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute a row layer and leave the region."""
        with sum_next():
            part = self.product(layer, x, weight)
        return self.leave(part)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over rows and join all columns; return the whole sequence or this rank's part of it."""
        self.scope.end()
        if self.sequence_parallel:
            return leave_grid(tensor, self.over_rows, self.over_columns)
        return join_last_dim(reduce_from_group(tensor, self.over_rows), self.over_columns)

    def _open(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = cast_as_autocast(tensor) if self.lowers else tensor
        if self.sequence_parallel:
            return gather_recompute.gather_for_linear(
                exchange_tokens_for_columns(tensor, self.over_columns), self.over_rows
            )
        return copy_to_group(split_last_dim(tensor, self.over_columns), self.over_rows)

    def _open_beside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._multiplied:
            kind = type(self.owner).__name__
            raise NotImplementedError(
                f"hf_parallel: {kind} may do more with {name} than multiply it, and tp_mesh gives it a part of the "
                f"features; tp={self.group.size()} without tp_mesh works"
            )
        return copy_to_group(split_last_dim(tensor, self.over_columns), self.over_rows)


class JoinedHeads(TensorParallelLayer):
    """Linear to fewer heads than ranks, which share them: x […, in / C] -> […, this rank's head].

    Consecutive ranks share a key/value head, as in `SharedHeads`; here each has a part of the weight, and of the head.
    """

    enters = True
    rows: torch.Tensor  # of the whole layer's outputs

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        region = self.region
        assert isinstance(region, GridRegion)
        assert region.grid.sharing is not None
        with sum_next():
            part = gather_recompute.multiply_gathered(region.enter(input), get_local_weight(self), None)
        output = gather_last_dim(scatter_last_dim(part, region.over_columns), region.grid.sharing)
        if self.bias is None:
            return output
        return output + copy_weight_to_group(self.bias, region.group)[get_rows_on(self, input.device)]
