"""Adapters of a weight rather than of a layer (PEFT's `target_parameters`): the layer computes with W + s B A.

A split layer computes with its part of W, so the sum is made of parts:

weight cut along     A [r, in]     B [out, r]     sum over tp of the gradient of
rows                 whole         Shard(0)       A
columns              Shard(1)      whole          B
nothing              whole         whole          the weight: the layer sums that itself
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.adapters.lora import CutAdapter, WholeAdapter, cut
from hf_parallel.axes.adapters.lora_grid import is_on_grid
from hf_parallel.axes.data.units import gather_unit
from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.axes.tensor.layers import (
    ColumnParallel,
    HeadsEmbedding,
    PartialGradient,
    RowParallel,
    SharedHeads,
    TensorParallelLayer,
    put_mixin_on,
)
from hf_parallel.axes.tensor.tensor_parallel import SplitExperts
from hf_parallel.axes.tensor.vocab_parallel import VocabParallel
from hf_parallel.model.anatomy import StoredOrder
from hf_parallel.ranks import copy_weight_to_group
from hf_parallel.ranks.local import add_to_tensor, get_local, hold_other_tensors, put_in_front

# ---- Adapters of experts (PEFT's `target_parameters`): W_e + s B_e A_e, side by side for all experts of a layer
#     A [experts * r, in]    rows expert by expert         B [out, r * experts]    columns rank by rank of the product
#
# Both stay whole on the ranks of tp and ep, and are sharded over the data ranks with the layer around them. A rank
# makes of them what it needs for its part of W: its experts, or its part of the width of all. So each has a part of
# their gradients: those of data ranks are averaged anyway, those of tp are summed here.


class AdaptedExperts(nn.Module):
    """Mixin for a wrapper of one weight of experts; several may stand around each other."""

    parameter_name: str
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: dict[str, float]
    get_base_layer: Callable[[], SplitExperts | SharedOut]

    @contextlib.contextmanager
    def _activate_lora(self, active: list[str]) -> Iterator[None]:
        """Let the experts compute with the sum W + s B A."""
        names = [name for name in active if name in self.lora_A]
        if not names:
            yield
            return
        with add_to_tensor(
            self.get_base_layer(),
            self.parameter_name,
            lambda: functools.reduce(torch.add, map(self._multiply_factors, names)),
        ):
            yield

    def _multiply_factors(self, adapter: str) -> torch.Tensor:
        """Return what an adapter adds to this rank's part of the weight."""
        base, down, up = self.get_base_layer(), self.lora_A[adapter].weight, self.lora_B[adapter].weight
        group = base.region.group if isinstance(base, SplitExperts) else base.sharing.tp_group
        if group is not None:
            down, up = copy_weight_to_group(down, group), copy_weight_to_group(up, group)
        count = base.expert_facts.count
        transposed = getattr(base, "is_transposed", False)  # as PEFT reads it, also of experts that do not say it
        down, up = down.reshape(count, -1, down.shape[-1]), up.reshape(up.shape[0], -1, count)
        if not isinstance(base, SplitExperts):
            down = down.narrow(0, base.first, base.num_experts)
            up = up.narrow(2, base.first, base.num_experts)
        else:
            # The columns or rows of the weight that this rank has, as the model counts them.
            order: StoredOrder | None = getattr(base, "stored_orders", {}).get(self.parameter_name)
            by_outputs = base.expert_facts.widths[self.parameter_name] == (2 if transposed else 1)
            rows = torch.arange(len(up) if by_outputs else down.shape[-1]) if order is None else order.rows
            rows = rows.chunk(base.region.group.size())[base.region.group.rank()].to(down.device)
            down, up = (down, up[rows]) if by_outputs else (down[:, :, rows], up)
        equation = "ore,eri->eio" if transposed else "ore,eri->eoi"
        return torch.einsum(equation, up, down) * self.scaling[adapter]


def adapt_expert_weight(wrapper: Any, base: nn.Module) -> bool:
    """Let a wrapper of a weight of experts, of which ranks hold parts, add this rank's part; False: it is none."""
    if not isinstance(base, SplitExperts | SharedOut):
        return False
    held = base._parameters[wrapper.parameter_name]
    if held is None or held.dim() != 3:
        return False
    if not isinstance(wrapper, AdaptedExperts):
        put_in_front(AdaptedExperts, wrapper)
    return True


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
        """Let the layer hold this rank's part of the sum; its region asks for columns instead."""
        base, name = self.base_layer, self.parameter_name
        if base in base.region.columns:
            yield
            return
        if isinstance(base, FSDPModule):  # an embedding in a group of its own: its own hook would come too late
            gather_unit(base)
        with hold_other_tensors(base, {name: self._sum(active)}):
            yield

    def column(self) -> torch.Tensor:
        """Return this rank's part of the sum as [out, in]."""
        total = self._sum([] if self.disable_adapters or self.merged else self.active_adapters)
        return total.t() if isinstance(self.base_layer, Conv1D) else total

    def _sum(self, active: list[str]) -> torch.Tensor:
        total = weight = get_local(self.base_layer._parameters[self.parameter_name])
        for adapter in active:
            if adapter in self.lora_A:
                # Of a whole factor beside a cut one each rank has a part of the gradient.
                up, down = (
                    copy_weight_to_group(half.weight, half.region.group)
                    if isinstance(half, WholeAdapter)
                    else get_local(half.weight)
                    for half in (self.lora_B[adapter], self.lora_A[adapter])
                )
                total = total + (up @ down * self.scaling[adapter]).to(weight.dtype)
        return total


def split_weight(wrapper: Any, layer: nn.Module, mesh: DeviceMesh, device: torch.device) -> bool:
    """Split what is new of a wrapper's adapters, whole and equal on all ranks, as its layer's weight is split.

    Returns:
        whether it is known how an adapter of this parameter of the innermost `layer` is split.
    """
    known = ColumnParallel | RowParallel | SharedHeads | VocabParallel | HeadsEmbedding | PartialGradient
    if is_on_grid(layer) or not isinstance(layer, known) or wrapper.parameter_name != "weight":
        return False
    base = wrapper.base_layer
    if not isinstance(wrapper, AdaptedWeight):
        put_in_front(AdaptedWeight, wrapper)
    if base in base.region.columns:
        base.region.columns[base] = wrapper.column
    if isinstance(base, ColumnParallel | VocabParallel):
        dim = int(isinstance(base, Conv1D))
    elif isinstance(base, RowParallel):
        dim = int(not isinstance(base, Conv1D))
    else:
        return True
    for adapter in wrapper.lora_A:
        halves = wrapper.lora_B[adapter], wrapper.lora_A[adapter]  # with the rows and the columns of the weight
        if not isinstance(halves[dim], CutAdapter):
            cut(halves[dim], base, dim, mesh, device)
            put_mixin_on(halves[1 - dim], WholeAdapter, base.region)
    return True
