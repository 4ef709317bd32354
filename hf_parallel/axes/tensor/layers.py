"""What a split layer computes. Its class gets one of these mixins in front and keeps its name, parameters and kind."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.axes.tensor.infer import OF_HEADS
from hf_parallel.axes.tensor.region import Region
from hf_parallel.collectives import copy_weight_to_group, gather_last_dim
from hf_parallel.model.anatomy import owns_parameters


class TensorParallelLayer(nn.Module):
    """Mixin of all split layers: the region they are in, and what the classes behind them hold."""

    region: Region
    weight: Any
    bias: Any
    adapted = False  # then a wrapper around this layer enters and leaves in its place: `lora.py`

    def enter(self, input: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies; twice is as once."""
        return input

    def leave(self, output: Any) -> Any:
        """The layer's result, from what this rank has computed."""
        return output


class ColumnParallel(TensorParallelLayer):
    """Linear x […, in] -> […, out / tp]."""

    def enter(self, input: torch.Tensor) -> torch.Tensor:
        return self.region.enter(input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.region.column(self, input, local(self.bias))


class RowParallel(TensorParallelLayer):
    """Linear x […, in / tp] -> […, out] on every rank; the bias is added once, after the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.adapted:
            return F.linear(input, local_weight(self))
        return self._with_bias(self.region.row(input, local_weight(self)))

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self.region.leave(output))

    def _with_bias(self, output: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return output
        # On a part of the sequence the bias gets a part of its gradient.
        bias = copy_weight_to_group(self.bias, self.region.group) if self.region.sequence_parallel else self.bias
        return output + bias


class SharedHeads(TensorParallelLayer):
    """Linear to heads that ranks share, being fewer: x […, in] -> […, this rank's rows].

    Consecutive ranks share a key/value head, as their query heads do. Each rank keeps the weight whole.
    """

    rows: torch.Tensor

    def enter(self, input: torch.Tensor) -> torch.Tensor:
        return self.region.enter(input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group, rows = self.region.group, rows_on(self, input.device)
        weight = copy_weight_to_group(self.weight, group)[rows]
        bias = None if self.bias is None else copy_weight_to_group(self.bias, group)[rows]
        return gather_recompute.linear(self.region.enter(input), weight, bias)


def rows_on(layer: Any, device: torch.device) -> torch.Tensor:
    """The rows of a layer's weight that this rank uses, moved once: a copy in each pass would hold the process up."""
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: local(self._parameters[name]) for name in OF_HEADS if name in self._parameters}
        with holding(self, own):
            return super().forward(*args, **kwargs)


class PartialGradient(TensorParallelLayer):
    """Mixin for a layer whose whole weights act on a part of the heads or tokens: f(w) sums the parts of the gradient.

    Summing in the backward of each micro-batch, not in the accumulated gradient, keeps accumulation right.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {
            name: copy_weight_to_group(p, self.region.group) for name, p in self._parameters.items() if p is not None
        }
        with holding(self, own):
            return super().forward(*args, **kwargs)


class SplitNorm(PartialGradient):
    """A norm inside an attention or MLP, on what a rank's columns give.

    Over all columns (OLMo 2's queries, BitNet's output): they are gathered, and this rank's part is kept. With a
    weight per head (Command R+): it is this rank's heads'. Over one head: as it is.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group, input = self.region.group, args[0]
        if self.weight.dim() == 2 and self.weight.shape[0] in self.region.heads:
            heads = self.weight.shape[0]
            first, count = group.rank() * heads // group.size(), max(1, heads // group.size())
            whole = {name: copy_weight_to_group(p, group) for name, p in self._parameters.items() if p is not None}
            own = {name: parameter.narrow(0, first, count) for name, parameter in whole.items()}
            with holding(self, own):
                return super(PartialGradient, self).forward(*args, **kwargs)
        if input.shape[-1] * group.size() != self.weight.numel():
            return super().forward(*args, **kwargs)
        gathered = gather_last_dim(input, group)
        return super().forward(gathered, *args[1:], **kwargs).chunk(group.size(), dim=-1)[group.rank()]


@contextlib.contextmanager
def holding(module: Any, changed: dict[str, Any]) -> Iterator[None]:
    """In here `module` holds other tensors in place of some parameters."""
    before = {name: module._parameters[name] for name in changed}
    module._parameters.update(changed)
    try:
        yield
    finally:
        module._parameters.update(before)


def local(parameter: Any) -> Any:
    """This rank's shard as a plain tensor that autograd still follows back to the parameter."""
    return _Local.apply(parameter) if isinstance(parameter, DTensor) else parameter


class _Local(torch.autograd.Function):
    """`DTensor.to_local` in 0.6 of its time, the rest of which goes into what a gradient's placement could be."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None
        # Strides belong to the spec, so those of the gradient must be the parameter's.
        return DTensor(gradient.contiguous(), copy.copy(ctx.spec), requires_grad=False)


def local_weight(module: Any) -> torch.Tensor:
    """This rank's weight as [out, in]; a Conv1D keeps it the other way round."""
    weight = local(module.weight)
    return weight.t() if isinstance(module, Conv1D) else weight


def become(module: Any, mixin: type, region: Region) -> None:
    """Change what `module` computes, not what it is called: its class gets `mixin` in front."""
    kind: Any = type(module)
    module.__class__, module.region = _with_mixin(mixin, kind), region
    if issubclass(mixin, ColumnParallel):
        region.columns[module] = functools.partial(local_weight, module)


@functools.cache
def _with_mixin(mixin: Any, cls: Any) -> type:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def unsplit(root: nn.Module) -> list[nn.Module]:
    """The modules in `root` that hold whole weights."""
    return [m for m in root.modules() if owns_parameters(m) and not isinstance(m, TensorParallelLayer)]


def partial_gradient(module: Any, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    """Mark a layer whose whole weights act on a part of its input."""
    become(module, PartialGradient, region)
