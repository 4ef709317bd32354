"""The computation of split layers: a class gets a mixin in front and keeps its name, parameters and kind."""

from __future__ import annotations

import contextlib
import functools
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from hf_parallel.axes.eight_bit import Split, recipe_of
from hf_parallel.axes.tensor import eight_bit, gather_recompute
from hf_parallel.axes.tensor.infer import OF_HEADS
from hf_parallel.axes.tensor.region import Region, get_local_weight
from hf_parallel.model.anatomy import has_own_parameters
from hf_parallel.model.experts import is_experts
from hf_parallel.ranks import copy_weight_to_group, gather_last_dim
from hf_parallel.ranks.local import get_local, hold_other_tensors, put_in_front
from hf_parallel.ranks.observed import sum_next

SplitLayer = TypeVar("SplitLayer", bound="TensorParallelLayer")


class TensorParallelLayer(nn.Module):
    """Mixin of all split layers: the region they are in, and what the classes behind them hold."""

    region: Region
    weight: torch.Tensor
    bias: torch.Tensor | None
    enters = False  # does it enter the region by itself?
    adapted = False  # does a wrapper around this layer enter and leave in its place (`lora.py`)?
    only_added = False  # does such a wrapper only add to the layer's product before it leaves?

    def enter(self, input: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the layer multiplies. Entering twice is like entering once."""
        return self.region.enter(input) if self.enters else input

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, from what this rank has computed."""
        return output


class ColumnParallel(TensorParallelLayer):
    """Linear x […, in] -> […, out / tp]."""

    enters = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.region.column(self, input, get_local(self.bias))


class RowParallel(TensorParallelLayer):
    """Linear x […, in / tp] -> […, out] on every rank; the bias is added once, after the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.adapted:
            with sum_with_adapters(self):
                return self.region.product(self, input, get_local_weight(self))
        return self._with_bias(self.region.row(self, input, get_local_weight(self)))

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self.region.leave(output))

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return output
        # On a part of the sequence the bias gets a part of its gradient.
        return output + (self.region.copy_weight(self, "bias") if self.region.sequence_parallel else self.bias)


def sum_with_adapters(layer: TensorParallelLayer) -> contextlib.AbstractContextManager:
    """Return a context for the product of a row-parallel layer, which may be read by its sum over ranks alone."""
    return sum_next() if layer.adapted and layer.only_added else contextlib.nullcontext()


class SharedHeads(TensorParallelLayer):
    """Linear to fewer heads than ranks, which share them: x […, in] -> […, this rank's rows].

    Consecutive ranks share a key/value head, as their query heads do. Each rank keeps the weight whole.
    """

    enters = True
    rows: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group, rows = self.region.group, get_rows_on(self, input.device)
        weight = copy_weight_to_group(self.weight, group)[rows]
        bias = None if self.bias is None else copy_weight_to_group(self.bias, group)[rows]
        entered, recipe = self.region.enter(input), recipe_of(self)
        if recipe is None:
            return gather_recompute.multiply_gathered(entered, weight, bias)
        output = eight_bit.multiply_entered(entered, weight, bias, recipe, Split("out", group))
        return eight_bit.ShareOfGradient.apply(output, rows, len(self.weight), group)


class HasRows(Protocol):
    rows: torch.Tensor


def get_rows_on(layer: HasRows, device: torch.device) -> torch.Tensor:
    """Return the rows of a weight that this rank uses, moved once: a copy in each pass would make the process wait."""
    if layer.rows.device != device:
        layer.rows = layer.rows.to(device)
    return layer.rows


class HeadsEmbedding(TensorParallelLayer):
    """A bias per head from a table [buckets, heads]: ids […] -> […, heads / tp]. The small table stays whole."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        return F.embedding(input, copy_weight_to_group(self.weight, group).chunk(group.size(), dim=1)[group.rank()])


class LocalHeads(TensorParallelLayer):
    """Mixin for an attention that keeps numbers per head, such as sinks: it computes with this rank's."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        own = {name: get_local(self._parameters[name]) for name in OF_HEADS if name in self._parameters}
        with hold_other_tensors(self, own):
            return super().forward(*args, **kwargs)


class PartialGradient(TensorParallelLayer):
    """Mixin for a layer whose whole weights act on a part of the heads or tokens: f(w) sums the parts of the gradient.

    Summing in the backward of each micro-batch, not in the accumulated gradient, keeps accumulation right.
    """

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        own = {name: self.region.copy_weight(self, name) for name, p in self._parameters.items() if p is not None}
        with hold_other_tensors(self, own):
            return super().forward(*args, **kwargs)


class SplitNorm(PartialGradient):
    """A norm inside an attention or MLP, of what this rank's columns compute.

    Over all columns (OLMo 2's queries, BitNet's output): they are gathered, and this rank's part is kept. With a
    weight per head (Command R+): it is this rank's heads'. Over one head: as it is.
    """

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        group, input = self.region.group, args[0]
        if self.weight.dim() == 2 and self.weight.shape[0] in self.region.heads:
            heads = self.weight.shape[0]
            first, count = group.rank() * heads // group.size(), max(1, heads // group.size())
            whole = {n: self.region.copy_weight(self, n) for n, p in self._parameters.items() if p is not None}
            own = {name: parameter.narrow(0, first, count) for name, parameter in whole.items()}
            with hold_other_tensors(self, own):
                return super(PartialGradient, self).forward(*args, **kwargs)
        if input.shape[-1] * group.size() != self.weight.numel():
            return super().forward(*args, **kwargs)
        gathered = gather_last_dim(input, group)
        return super().forward(gathered, *args[1:], **kwargs).chunk(group.size(), dim=-1)[group.rank()]


def put_mixin_on(module: nn.Module, mixin: type[SplitLayer], region: Region) -> SplitLayer:
    """Put `mixin` in front of the class of `module`: it computes something else and keeps its name."""
    split = put_in_front(mixin, module)
    split.region = region
    if issubclass(mixin, ColumnParallel):
        region.columns[module] = functools.partial(get_local_weight, module)
    return split


def find_unsplit_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules in `root` that hold whole weights, but for experts, each of which is on one rank."""
    return [
        m
        for m in root.modules()
        if has_own_parameters(m) and not isinstance(m, TensorParallelLayer) and not is_experts(m)
    ]
