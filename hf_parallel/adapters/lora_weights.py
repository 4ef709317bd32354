"""Adapters of a weight rather than of a layer (PEFT's `target_parameters`): the layer computes with W + s B A.

A split layer computes with its part of W, so the sum is made of parts:

weight cut along     A [r, in]     B [out, r]     sum over tp of the gradient of
rows                 whole         Shard(0)       A
columns              Shard(1)      whole          B
nothing              whole         whole          the weight: the layer sums that itself
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from hf_parallel.adapters.lora import CutAdapter, WholeAdapter, cut
from hf_parallel.axes.data.ends import gather
from hf_parallel.axes.tensor.layers import (
    ColumnParallel,
    HeadsEmbedding,
    PartialGradient,
    RowParallel,
    SharedHeads,
    TensorParallelLayer,
    become,
)
from hf_parallel.axes.tensor.vocab_parallel import VocabParallel
from hf_parallel.collectives import copy_weight_to_group
from hf_parallel.local import holding, local, put_in_front


class AdaptedWeight(nn.Module):
    """Mixin for a wrapper of one weight of a split layer, its `base_layer`."""

    base_layer: TensorParallelLayer
    parameter_name: str
    lora_A: Mapping[str, nn.Linear | WholeAdapter]
    lora_B: Mapping[str, nn.Linear | WholeAdapter]
    scaling: dict[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool

    @contextlib.contextmanager
    def _activate_lora(self, active: list[str]) -> Iterator[None]:
        """In here the layer holds this rank's part of the sum; columns are asked for by their region instead."""
        base, name = self.base_layer, self.parameter_name
        if base in base.region.columns:
            yield
            return
        if isinstance(base, FSDPModule):  # an embedding in a group of its own: its own hook would come too late
            gather(base)
        with holding(base, {name: self._sum(active)}):
            yield

    def column(self) -> torch.Tensor:
        """This rank's part of the sum as [out, in]."""
        total = self._sum([] if self.disable_adapters or self.merged else self.active_adapters)
        return total.t() if isinstance(self.base_layer, Conv1D) else total

    def _sum(self, active: list[str]) -> torch.Tensor:
        total = weight = local(self.base_layer._parameters[self.parameter_name])
        for adapter in active:
            if adapter in self.lora_A:
                product = _factor(self.lora_B[adapter]) @ _factor(self.lora_A[adapter])
                total = total + (product * self.scaling[adapter]).to(weight.dtype)
        return total


def _factor(half: nn.Linear | WholeAdapter) -> torch.Tensor:
    """A or B for this rank's part: of a whole one beside a cut one each rank has a part of the gradient."""
    return (
        copy_weight_to_group(half.weight, half.region.group) if isinstance(half, WholeAdapter) else local(half.weight)
    )


def split_weight(wrapper: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Split what is new of a wrapper's adapters, whole and equal on all ranks, as its layer's weight is split."""
    base = wrapper.base_layer
    if not isinstance(wrapper, AdaptedWeight):
        put_in_front(AdaptedWeight, wrapper)
    if base in base.region.columns:
        base.region.columns[base] = wrapper.column
    dim = _cut_dim(base)
    if dim is None:
        return
    for adapter in wrapper.lora_A:
        halves = wrapper.lora_B[adapter], wrapper.lora_A[adapter]  # with the rows and the columns of the weight
        if not isinstance(halves[dim], CutAdapter):
            cut(halves[dim], base, dim, mesh, device)
            become(halves[1 - dim], WholeAdapter, base.region)


def can_split(base: nn.Module, name: str) -> bool:
    """Is it known how an adapter of this layer's parameter `name` is split?"""
    known = ColumnParallel | RowParallel | SharedHeads | VocabParallel | HeadsEmbedding | PartialGradient
    return isinstance(base, known) and name == "weight"


def _cut_dim(base: nn.Module) -> int | None:
    if isinstance(base, ColumnParallel | VocabParallel):
        return int(isinstance(base, Conv1D))
    return int(not isinstance(base, Conv1D)) if isinstance(base, RowParallel) else None
