"""Tensor parallelism (Shoeybi et al., 2019): parameters stored as DTensors, computed as local tensors.

A split layer keeps its class for `isinstance` and its parameter names: its class becomes a subclass that computes on
the local shard. The layers of one attention or one MLP form a region: its input enters once, whatever the number of
layers that read it, so there is one collective forward and one backward per region and direction.

    style                            weight placement   forward of the layer
    colwise                          Shard(0)           y_local = enter(x) W_localᵀ
    rowwise                          Shard(1)           y = leave(x_local W_localᵀ) + b
    colwise_gather_output            Shard(0)           y = join(enter(x) W_localᵀ)       (head: vocab_parallel.py)
    embedding_rowwise                Shard(0)           y = g(masked lookup)         (embedding: vocab_parallel.py)
    replicated_with_grad_allreduce   plain              y = layer(x) with weight f(w), whose gradient is a part
    colwise_shared_heads             plain              y_local = enter(x) f(w)[rows of this rank's heads]ᵀ

    enter, leave                     f, g; under sequence parallelism all-gather and reduce-scatter
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_parallel.collectives import copy_to_group, gather_sequence, reduce_from_group, reduce_scatter_sequence
from hf_parallel.config import SpecError


class Switch:
    """Is sequence parallelism on? Shared by all of a model, which turns it off while it generates."""

    def __init__(self, on: bool) -> None:
        self.on = on


class Region:
    """The layers between one `enter` and one `leave`: an attention, an MLP, or a single layer."""

    def __init__(self, owner: Any, group: dist.ProcessGroup, switch: Switch) -> None:
        self.owner, self.group, self.switch = owner, group, switch
        self._input: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    @property
    def sequence_parallel(self) -> bool:
        """Do inputs come, and outputs go, as parts of the sequence?"""
        return self.switch.on

    def gather(self, owner: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook of the owner under sequence parallelism: it works on the whole sequence."""
        if not self.switch.on:
            return args, kwargs
        if args:
            return (gather_sequence(args[0], self.group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": gather_sequence(kwargs["hidden_states"], self.group)}

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for use by all ranks; the same input enters once. A gathered one has entered already."""
        if self.sequence_parallel:
            return tensor
        if tensor is not self._input:
            self._input, self._entered = tensor, copy_to_group(tensor, self.group)
        assert self._entered is not None
        return self._entered

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, whole or this rank's part of the sequence."""
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group)(tensor, self.group)

    def close(self, *args: Any) -> None:
        """Forget the input, whose memory would else live until the next one. Also a forward hook."""
        self._input = self._entered = None


def tensor_parallel(
    model: Any, mesh: DeviceMesh, styles: dict[str, str], device: torch.device, switch: Switch
) -> None:
    """Split the modules named in `styles` over the one-axis `mesh`, in place.

    Works on meta tensors (then nothing is allocated) and on values (then each rank keeps its slice; the values must be
    the same on all ranks). No communication.
    """
    regions: dict[str, Region] = {}
    for name, style in styles.items():
        if style not in _STYLES:
            continue  # the vocabulary's: vocab_parallel.py
        module, parent = model.get_submodule(name), name.rpartition(".")[0]
        expected, build = _STYLES[style]
        if expected is nn.Linear and type(module) is not nn.Linear:  # a subclass may compute something else
            raise SpecError(
                f"tp_size={mesh.size()}: {name} is a {type(module).__name__}, but style {style} is for Linear; "
                "tp_size=1 works"
            )
        if parent not in regions:
            owner = model.get_submodule(parent)
            regions[parent] = Region(owner, mesh.get_group(), switch)
            owner.register_forward_hook(regions[parent].close, always_call=True)
            if switch.on:
                owner.register_forward_pre_hook(regions[parent].gather, with_kwargs=True)
        build(module, mesh, device, regions[parent])
    model.register_forward_pre_hook(functools.partial(_refuse_partial_outputs, switch), with_kwargs=True)


def _refuse_partial_outputs(switch: Switch, model: Any, args: tuple, kwargs: dict) -> None:
    """What each rank would have only a part of must not look whole."""
    wanted = {
        key for key in ("output_attentions", "output_hidden_states") if kwargs.get(key, getattr(model.config, key))
    }
    if "output_attentions" in wanted:
        raise NotImplementedError("hf_parallel: output_attentions=True needs all heads on one rank; tp_size=1 works")
    if wanted and switch.on:
        raise NotImplementedError("hf_parallel: output_hidden_states=True needs sequence_parallel=false")


class TensorParallelLayer(nn.Module):
    """Mixin of all split layers: the region they are in."""

    region: Region


class ColumnParallelLinear(TensorParallelLayer, nn.Linear):
    """x […, in] -> […, out / tp]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(self.region.enter(input), local(self.weight), local(self.bias))


class RowParallelLinear(TensorParallelLayer, nn.Linear):
    """x […, in / tp] -> […, out] on every rank; the bias is added once, after the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.region.leave(F.linear(input, local(self.weight)))
        if self.bias is None:
            return output
        # On a part of the sequence the bias gets a part of its gradient.
        bias = copy_to_group(self.bias, self.region.group) if self.region.sequence_parallel else self.bias
        return output + bias


class SharedHeadsLinear(TensorParallelLayer, nn.Linear):
    """Key or value projection with fewer heads than ranks: x […, in] -> […, head_dim], one head per rank.

    Consecutive ranks share a head, as their query heads do. The weight is small: each rank keeps it whole.
    """

    head_dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group, heads = self.region.group, self.out_features // self.head_dim
        first = group.rank() * heads // group.size() * self.head_dim
        rows = slice(first, first + self.head_dim)
        weight = copy_to_group(self.weight, group)[rows]
        bias = None if self.bias is None else copy_to_group(self.bias, group)[rows]
        return F.linear(self.region.enter(input), weight, bias)


class PartialGradientLayer(TensorParallelLayer):
    """Mixin for a layer whose whole weights act on a part of the heads or tokens: f(w) sums the parts of the gradient.

    Summing in the backward of each micro-batch, not in the accumulated gradient, keeps accumulation right.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = dict(self._parameters)
        partial: Any = {name: copy_to_group(p, self.region.group) for name, p in whole.items() if p is not None}
        self._parameters.update(partial)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(whole)


def local(parameter: Any) -> Any:
    """This rank's shard as a plain tensor that autograd still follows back to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def become(module: Any, parallel_class: type, region: Region) -> None:
    """Change what `module` computes, not what it is called."""
    module.__class__ = parallel_class
    module.region = region


def shard_parameter(module: Any, name: str, mesh: DeviceMesh, dim: int, device: torch.device) -> None:
    """Turn a parameter into a DTensor cut along `dim`; nothing if the module has none of that name."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    value = parameter.detach() if parameter.is_meta else parameter.detach().to(device)
    # No source rank: all ranks hold the same values, so each cuts its own slice.
    shard = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
    module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _column(module: Any, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    shard_parameter(module, "weight", mesh, 0, device)
    shard_parameter(module, "bias", mesh, 0, device)
    become(module, ColumnParallelLinear, region)


def _row(module: Any, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    shard_parameter(module, "weight", mesh, 1, device)
    become(module, RowParallelLinear, region)


def partial_gradient(module: Any, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    """Mark a layer whose whole weights act on a part of its input."""
    cls = type(module)
    become(module, type(f"PartialGradient{cls.__name__}", (PartialGradientLayer, cls), {}), region)


def _shared_heads(module: Any, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    become(module, SharedHeadsLinear, region)
    module.head_dim = region.owner.head_dim
    # All query heads of a rank share its one key/value head.
    region.owner.num_key_value_groups = region.owner.config.num_attention_heads // mesh.size()


Builder = Callable[[Any, DeviceMesh, torch.device, Region], None]
_STYLES: dict[str, tuple[type, Builder]] = {
    "colwise": (nn.Linear, _column),
    "rowwise": (nn.Linear, _row),
    "replicated_with_grad_allreduce": (nn.Module, partial_gradient),
    "colwise_shared_heads": (nn.Linear, _shared_heads),
}
