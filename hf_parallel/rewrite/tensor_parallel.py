"""Tensor parallelism (Shoeybi et al., 2019): parameters stored as DTensors, computed as local tensors.

A split layer keeps its class for `isinstance` and its parameter names: its class becomes a subclass that computes on
the local shard and calls explicit collectives.

    style                            weight placement   forward of the layer
    colwise                          Shard(0)           y_local = f(x) W_localᵀ
    rowwise                          Shard(1)           y = g(x_local W_localᵀ) + b
    colwise_gather_output            Shard(0)           y = gather(f(x) W_localᵀ)
    embedding_rowwise                Shard(0)           y = g(masked lookup in the local rows)
    replicated_with_grad_allreduce   plain              y = layer(x) with weight f(w), whose gradient is a part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_parallel.collectives import copy_to_group, gather_last_dim, reduce_from_group
from hf_parallel.config import SpecError


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: dict[str, str], device: torch.device) -> None:
    """Split the modules named in `styles` over the one-axis `mesh`, in place.

    Works on meta tensors (then nothing is allocated) and on values (then each rank keeps its slice; the values must be
    the same on all ranks). No communication.
    """
    for name, style in styles.items():
        module = model.get_submodule(name)
        expected, build = _STYLES[style]
        if expected is not nn.Module and type(module) is not expected:  # a subclass may compute something else
            raise SpecError(
                f"tp_size={mesh.size()}: {name} is a {type(module).__name__}, but style {style} is for "
                f"{expected.__name__}; tp_size=1 works"
            )
        build(module, mesh, device)


class TensorParallelLayer(nn.Module):
    """Mixin of all split layers: the group they talk over."""

    tp_group: dist.ProcessGroup


class ColumnParallelLinear(TensorParallelLayer, nn.Linear):
    """x […, in] -> […, out / tp]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(copy_to_group(input, self.tp_group), local(self.weight), local(self.bias))


class ColumnParallelHead(ColumnParallelLinear):
    """x […, in] -> […, out] on every rank."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gather_last_dim(super().forward(input), self.tp_group)


class RowParallelLinear(TensorParallelLayer, nn.Linear):
    """x […, in / tp] -> […, out] on every rank; the bias is added once, after the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = reduce_from_group(F.linear(input, local(self.weight)), self.tp_group)
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(TensorParallelLayer, nn.Embedding):
    """ids […] -> […, hidden]: each rank looks up the rows it holds, the others count as zero."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        first = self.tp_group.rank() * weight.shape[0]
        inside = (input >= first) & (input < first + weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None  # the row without gradient lives on another rank
        rows = F.embedding((input - first).clamp(0, weight.shape[0] - 1), weight, padding)
        return reduce_from_group(rows * inside.unsqueeze(-1), self.tp_group)


class PartialGradientLayer(TensorParallelLayer):
    """Mixin for a layer whose whole weights act on a part of the heads: f(w) sums the parts of the gradient.

    Summing in the backward of each micro-batch, not in the accumulated gradient, keeps accumulation right.
    """

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        whole = dict(self._parameters)
        partial: Any = {name: copy_to_group(p, self.tp_group) for name, p in whole.items() if p is not None}
        self._parameters.update(partial)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(whole)


def local(parameter: Any) -> Any:
    """This rank's shard as a plain tensor that autograd still follows back to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _become(module: Any, parallel_class: type, mesh: DeviceMesh) -> None:
    module.__class__ = parallel_class
    module.tp_group = mesh.get_group()


def _shard(module: Any, name: str, mesh: DeviceMesh, dim: int, device: torch.device) -> None:
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    value = parameter.detach() if parameter.is_meta else parameter.detach().to(device)
    # No source rank: all ranks hold the same values, so each cuts its own slice.
    shard = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
    module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _column(module: Any, mesh: DeviceMesh, device: torch.device, cls: type = ColumnParallelLinear) -> None:
    _shard(module, "weight", mesh, 0, device)
    _shard(module, "bias", mesh, 0, device)
    _become(module, cls, mesh)


def _head(module: Any, mesh: DeviceMesh, device: torch.device) -> None:
    _column(module, mesh, device, ColumnParallelHead)


def _row(module: Any, mesh: DeviceMesh, device: torch.device) -> None:
    _shard(module, "weight", mesh, 1, device)
    _become(module, RowParallelLinear, mesh)


def _embedding(module: Any, mesh: DeviceMesh, device: torch.device) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise SpecError("embedding with max_norm, scale_grad_by_freq or sparse cannot be split; tp_size=1 works")
    _shard(module, "weight", mesh, 0, device)
    _become(module, VocabParallelEmbedding, mesh)


def _partial_gradient(module: Any, mesh: DeviceMesh, device: torch.device) -> None:
    cls = type(module)
    _become(module, type(f"PartialGradient{cls.__name__}", (PartialGradientLayer, cls), {}), mesh)


_STYLES: dict[str, tuple[type, Callable[[nn.Module, DeviceMesh, torch.device], None]]] = {
    "colwise": (nn.Linear, _column),
    "colwise_gather_output": (nn.Linear, _head),
    "rowwise": (nn.Linear, _row),
    "embedding_rowwise": (nn.Embedding, _embedding),
    "replicated_with_grad_allreduce": (nn.Module, _partial_gradient),
}
