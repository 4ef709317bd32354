"""Linear layers that a script has written, such as LoRA by hand or by loralib: whole on every tp rank.

What such a layer computes is not known, so it is given a whole input and gives a whole output. The layers around it
are split: a rank takes its columns of the output, or gathers the columns of the input.

    in the place of a column layer    x -> layer -> own columns        gradients of weights are parts, which are summed
    in the place of a row layer       columns of x -> gather -> layer  each rank has whole gradients
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_parallel.axes.tensor.dropout import share_numbers
from hf_parallel.axes.tensor.grid import GridRegion
from hf_parallel.axes.tensor.layers import ColumnParallel, RowParallel, SharedHeads, TensorParallelLayer, put_mixin_on
from hf_parallel.axes.tensor.region import Region, get_local_weight
from hf_parallel.model.anatomy import has_own_parameters
from hf_parallel.ranks import gather_last_dim, join_last_dim, reduce_from_group, split_last_dim, split_sequence
from hf_parallel.ranks.local import hold_other_tensors, without_mixins

#: What the styles of these layers begin with; behind it comes the style that a Linear there would have.
WHOLE = "whole_"
#: Those that a layer of a script can have.
REPLACED = ("colwise", "packed_halves", "packed_qkv", "falcon_qkv", "colwise_shared_heads", "rowwise")


class WholeColumn(TensorParallelLayer):
    """A layer x […, in] -> […, out] of which this rank's columns of the output are used."""

    enters = True
    style: str

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        entered = self.region.enter(input)
        with contextlib.ExitStack() as held:
            for module in _list_whole_modules(self):
                own = {n: self.region.copy_weight(module, n) for n, p in module._parameters.items() if p is not None}
                held.enter_context(hold_other_tensors(module, own))
            whole = super().forward(entered, *args, **kwargs)
        columns = find_own_columns(self.style, whole.shape[-1], self.region)
        return torch.cat([whole[..., part] for part in columns], dim=-1)


class WholeRow(TensorParallelLayer):
    """A layer x […, in / tp] -> […, out] that is given all columns and computes the same on every rank."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.region.scope.end()
        with share_numbers():
            output = super().forward(join_last_dim(input, self.region.group), *args, **kwargs)
        return split_sequence(output, self.region.group) if self.region.sequence_parallel else output


class GatheredColumn(TensorParallelLayer):
    """A column layer that is inside of a whole one, and keeps its part of the weight: it gives all columns."""

    adapted = True  # what is around it has entered

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gather_last_dim(super().forward(input), self.region.group)


class SlicedRow(TensorParallelLayer):
    """A row layer that is inside of a whole one, and keeps its part of the weight: it is given all columns."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        product = self.region.product(self, split_last_dim(input, group), get_local_weight(self))
        output = reduce_from_group(product, group)
        return output if self.bias is None else output + self.bias


def _list_whole_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the modules in a whole layer that hold parameters, but for a linear of which each rank keeps a part."""
    kept = (GatheredColumn, SlicedRow)
    return [module for module in layer.modules() if has_own_parameters(module) and not isinstance(module, kept)]


def find_linear_that_is_wrapped(layer: nn.Module, owner: nn.Module) -> TensorParallelLayer | None:
    """Return the split linear that `layer` has been put around since, in its place in `owner`; None if it is other."""
    found = [inner for inner in layer.modules() if isinstance(inner, ColumnParallel | RowParallel | SharedHeads)]
    fits = len(found) == 1 and found[0].region.owner is owner and not hasattr(found[0], "stored_orders")
    return found[0] if fits and layer is not found[0] and not isinstance(found[0].region, GridRegion) else None


def keep_whole_around(layer: nn.Module, linear: TensorParallelLayer) -> None:
    """Let a layer that a script has put around a split linear compute as a whole; the linear keeps its part."""
    region, style = linear.region, "colwise_shared_heads"
    if isinstance(linear, SharedHeads):  # each rank has all of it
        linear.__class__ = without_mixins(type(linear))
    else:
        style = "colwise" if isinstance(linear, ColumnParallel) else "rowwise"
        put_mixin_on(linear, GatheredColumn if style == "colwise" else SlicedRow, region)
    keep_layer_whole(layer, region, style)


def find_own_columns(style: str, width: int, region: Region) -> list[slice]:
    """Return which of the `width` columns of a whole output this rank takes, where a Linear would have this style."""
    rank, size, (heads, kv_heads) = region.group.rank(), region.group.size(), region.heads
    if style == "colwise_shared_heads":
        first, each = rank * kv_heads // size, width // kv_heads
        return [slice(first * each, (first + 1) * each)]
    segments = [width]
    if style == "packed_halves":
        segments = [width // 2] * 2
    elif style == "packed_qkv":
        each = width // (heads + 2 * kv_heads)
        segments = [heads * each, kv_heads * each, kv_heads * each]
    if sum(segments) != width or any(segment % size for segment in segments):
        where = f"a layer of the script in {type(region.owner).__name__}"
        raise NotImplementedError(f"hf_parallel: tp_size={size} does not divide the {width} outputs of {where}")
    starts = [sum(segments[:place]) for place in range(len(segments))]
    parts = [segment // size for segment in segments]
    return [slice(start + rank * part, start + (rank + 1) * part) for start, part in zip(starts, parts, strict=True)]


def keep_layer_whole(module: nn.Module, region: Region, style: str) -> None:
    """Let a layer of a script compute as a whole in the place of a Linear of this style."""
    if style == "colwise_shared_heads":  # all query heads of a rank share its one key/value head
        region.owner.num_key_value_groups = region.heads[0] // region.group.size()
    for inner in (inner for inner in _list_whole_modules(module) if inner is not module):
        put_mixin_on(inner, TensorParallelLayer, region)  # nothing else adds up its gradients
    if style == "rowwise":
        put_mixin_on(module, WholeRow, region)
    else:
        put_mixin_on(module, WholeColumn, region).style = style


def _split_around(module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region, style: str) -> None:
    keep_layer_whole(module, region, style)


WHOLE_STYLES = {f"{WHOLE}{style}": functools.partial(_split_around, style=style) for style in REPLACED}
