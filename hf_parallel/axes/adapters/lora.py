"""Low-rank adapters (Hu et al., 2021) around a split layer: W x + s B A x, for any number of adapters.

Only the sum W x + s B A x leaves a region, so adapters add no collective on activations: the wrapper around the base
layer and its adapters enters and leaves in the base layer's place, and everything inside is local.

base layer       A [r, in]                B [out, r]              sum over tp of the gradient of
column, head     whole                    Shard(0)                A, whose B sees 1/tp of the outputs
row              Shard(1)                 whole                   B, whose A sees 1/tp of the inputs
shared heads     whole                    whole, rows of a rank   A and B
embedding        [r, V] Shard(1)          whole                   B, whose A sees 1/tp of the tokens
whole, inside    whole                    whole                   A and B
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_parallel.axes.data.zero import without_sharding
from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.axes.tensor.dropout import draw_own_numbers, share_numbers, share_numbers_of_layer
from hf_parallel.axes.tensor.grid import JoinedHeads
from hf_parallel.axes.tensor.layers import (
    ColumnParallel,
    PartialGradient,
    RowParallel,
    SharedHeads,
    TensorParallelLayer,
    get_local_weight,
    get_rows_on,
    put_mixin_on,
)
from hf_parallel.axes.tensor.region import Region
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.axes.tensor.vocab_parallel import VocabParallel
from hf_parallel.model.anatomy import StoredOrder, look_again
from hf_parallel.ranks import all_reduce, copy_weight_to_group, reduce_product_from_group
from hf_parallel.ranks.local import get_local, hold_other_tensors, put_in_front

# ---- the wrapper ---------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Mixin for a wrapper that holds a split linear as `base_layer`: it enters and leaves in that layer's place."""

    base_layer: TensorParallelLayer

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        base = self.base_layer
        variants = getattr(self, "lora_variant", {}) or any(getattr(self, "use_dora", {}).values())
        # Adapters without magnitudes add to the base's product without reading it.
        base.only_added = hasattr(self, "lora_A") and not variants
        return base.leave(super().forward(base.enter(x), *args, **kwargs))


class AdaptedEmbedding(nn.Module):
    """Mixin for a wrapper around a split embedding: ids […] -> […, hidden], each rank from the rows it holds."""

    base_layer: VocabParallel
    lora_embedding_A: nn.ParameterDict
    lora_embedding_B: nn.ParameterDict

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        base, cut, whole = self.base_layer, self.lora_embedding_A, self.lora_embedding_B
        rows, inside, padding = base.locate(ids)
        group, former = base.region.group, base.padding_idx
        base.padding_idx = padding  # of what this rank holds
        try:
            with (
                hold_other_tensors(cut, {name: get_local(p) for name, p in cut._parameters.items()}),
                hold_other_tensors(
                    whole, {name: copy_weight_to_group(p, group) for name, p in whole.named_parameters(recurse=False)}
                ),
            ):
                output = super().forward(rows, *args, **kwargs)
        finally:
            base.padding_idx = former
        return reduce_product_from_group(output * inside.unsqueeze(-1), group)


def adapt_linear(wrapper: Any) -> None:
    """Let the wrapper communicate instead of its `base_layer`."""
    if isinstance(wrapper, Adapted | AdaptedEmbedding):
        return
    mixin = AdaptedEmbedding if isinstance(wrapper.base_layer, VocabParallel) else Adapted
    wrapper.base_layer.adapted = True
    put_in_front(mixin, wrapper)


# ---- A and B -------------------------------------------------------------------------------------------------------


class CutAdapter(TensorParallelLayer):
    """A […, in / tp] -> […, r] or B […, r] -> […, out / tp], from this rank's part of the weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gather_recompute.multiply_gathered(input, get_local(self.weight), get_local(self.bias))


class WholeAdapter(TensorParallelLayer):
    """A or B that every rank holds and uses for a part of the work."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        bias = None
        if self.bias is not None:  # what the ranks give is summed: the first one adds the bias
            bias = self.region.copy_weight(self, "bias") * float(group.rank() == 0)
        return gather_recompute.multiply_gathered(input, self.region.copy_weight(self, "weight"), bias)


class SharedRowsAdapter(TensorParallelLayer):
    """B […, r] -> […, this rank's rows] of heads that ranks share."""

    rows: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = get_rows_on(self, input.device)
        bias = None if self.bias is None else self.region.copy_weight(self, "bias")[rows]
        return F.linear(input, self.region.copy_weight(self, "weight")[rows], bias)


def split_linear_adapter(
    base: TensorParallelLayer, down: nn.Module, up: nn.Module, mesh: DeviceMesh, device: torch.device
) -> None:
    """Split one adapter of a linear: `down` [r, in] is A and `up` [out, r] is B, whole and equal on all ranks."""
    if isinstance(base, RowParallel):
        cut(down, base, 1, mesh, device)
        put_mixin_on(up, WholeAdapter, base.region)
        return
    put_mixin_on(down, WholeAdapter, base.region)
    if isinstance(base, ColumnParallel):
        cut(up, base, 0, mesh, device)
    elif isinstance(base, SharedHeads):
        put_mixin_on(up, SharedRowsAdapter, base.region).rows = base.rows
    else:
        put_mixin_on(up, WholeAdapter, base.region)


def cut(
    adapter: Any,
    base: TensorParallelLayer,
    dim: int,
    mesh: DeviceMesh,
    device: torch.device,
    mixin: type[TensorParallelLayer] = CutAdapter,
) -> None:
    """Cut A (dim 1) or B (dim 0), whole and equal on all ranks, in the order in which the base's weight is stored."""
    order = getattr(base, "stored_orders", {}).get("weight")
    names = ("weight", "bias") if dim == 0 else ("weight",)
    for name in names:
        if order is not None and adapter._parameters.get(name) is not None:
            stored = StoredOrder(dim, order.rows)  # of a Conv1D the base's dim is another
            adapter.stored_orders = {**getattr(adapter, "stored_orders", {}), name: stored}
            adapter._parameters[name].data = stored.to_stored(adapter._parameters[name].data)
    for name in names:
        shard_parameter(adapter, name, mesh, dim, device)
    put_mixin_on(adapter, mixin, base.region)


def can_split_adapter(base: nn.Module) -> TypeGuard[TensorParallelLayer]:
    """Return whether we know how adapters of this split layer are split."""
    known = ColumnParallel | RowParallel | SharedHeads | JoinedHeads | PartialGradient | VocabParallel
    return isinstance(base, known)


# ---- magnitudes ----------------------------------------------------------------------------------------------------


class SplitMagnitude(TensorParallelLayer):
    """Mixin for DoRA's magnitudes m (Liu et al., 2024): adds (m / |W + s B A| - 1) W x + m / |W + s B A| s B A x.

    Norms run along rows, so those of a row layer are summed over ranks; what is added is then a part like W x itself.
    """

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: TensorParallelLayer,
        base_result: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        weight, bias = get_local_weight(base_layer), get_local(base_layer.bias)
        rows = get_rows_on(base_layer, x.device) if isinstance(base_layer, SharedHeads) else None
        cut, up = isinstance(base_layer, ColumnParallel), get_local(lora_B.weight)
        magnitude = get_local(self.weight) if cut else self.region.copy_weight(self, "weight")
        if rows is not None:
            weight, up, magnitude = weight[rows], up[rows], magnitude[rows]
            bias = None if bias is None else bias[rows]
        if base_result is None:
            base_result = F.linear(x, weight)
        elif bias is not None and not isinstance(base_layer, RowParallel):  # a row's bias is added after the sum
            base_result = base_result - bias
        with torch.no_grad():
            squares = (weight + scaling * (up @ get_local(lora_A.weight))).float().square().sum(1)
            if isinstance(base_layer, RowParallel):
                squares = all_reduce(squares, self.region.group)
        scale = magnitude / squares.sqrt().to(magnitude.dtype)
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling


def split_magnitude(base: TensorParallelLayer, magnitude: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Split the magnitudes [out] of one adapter, whole and equal on all ranks."""
    if isinstance(base, ColumnParallel):
        cut(magnitude, base, 0, mesh, device, SplitMagnitude)
    else:
        put_mixin_on(magnitude, SplitMagnitude, base.region)


# ---- copies that are trained whole -------------------------------------------------------------------------------


def copy_in_group(module: nn.Module) -> nn.Module:
    """Return a copy with parameters of its own that communicates in the same group."""
    shared = {id(held): held for part in module.modules() for held in map(vars(part).get, ("region", "mesh")) if held}
    new = copy.deepcopy(without_sharding(module), shared)
    vars(new).pop("forward", None)  # of the original, which its model's loss reads
    for part in new.modules():
        if isinstance(part, TensorParallelLayer):
            region = part.region
            part.region = Region(part, region.group, region.switch, overlap=region.overlap)
        if isinstance(part, ColumnParallel):
            part.region.columns[part] = functools.partial(get_local_weight, part)
    return new


# ---- dropout -------------------------------------------------------------------------------------------------------


class SharedDropout(TensorParallelLayer):
    """Mixin: all ranks drop the same, as the input is the same on all of them."""

    number: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with self._numbers(input.device):
            return super().forward(input)

    def _numbers(self, device: torch.device) -> contextlib.AbstractContextManager:
        if self.training and self.region.sequence_parallel:
            return share_numbers_of_layer(device, self.region.group, self.number)
        return share_numbers()


class OwnDropout(TensorParallelLayer):
    """Mixin: ranks hold different features of the input, so they drop different things."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.region.sequence_parallel:  # the whole layer has numbers of its own
            return super().forward(input)
        with draw_own_numbers(input.device, self.region.group):
            return super().forward(input)


_numbers = itertools.count()


def split_adapter_dropout(
    base: TensorParallelLayer, dropout: nn.Module, of_columns: type[SharedDropout] = SharedDropout
) -> None:
    """Random numbers as the adapter of `base` needs them: one mask for a column's input, parts of one for a row's."""
    if not isinstance(dropout, nn.Dropout) or isinstance(dropout, TensorParallelLayer):
        return
    number = next(_numbers)
    if isinstance(base, RowParallel):
        put_mixin_on(dropout, OwnDropout, base.region)
    else:
        put_mixin_on(dropout, of_columns, base.region).number = number
    look_again()
