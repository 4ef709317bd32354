"""Adapters of experts (PEFT's `target_parameters`): W_e + s B_e A_e, side by side for all experts of a layer.

    A [experts * r, in]    rows expert by expert         B [out, r * experts]    columns rank by rank of the product

Both stay whole on the ranks of tp and ep, and are sharded over the data ranks with the layer around them. A rank makes
of them what it needs for its part of W: its experts, or its part of the width of all. So each has a part of their
gradients: those of data ranks are averaged anyway, those of tp are summed here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.axes.tensor.experts import SplitExperts
from hf_parallel.collectives import copy_weight_to_group
from hf_parallel.local import adding, put_in_front
from hf_parallel.model.packed import StoredOrder


class AdaptedExperts(nn.Module):
    """Mixin for a wrapper of one weight of experts; several may stand around each other."""

    parameter_name: str
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: dict[str, float]
    get_base_layer: Callable[[], SplitExperts | SharedOut]

    @contextlib.contextmanager
    def _activate_lora(self, active: list[str]) -> Iterator[None]:
        """In here the experts compute with the sum."""
        names = [name for name in active if name in self.lora_A]
        if not names:
            yield
            return
        with adding(self.get_base_layer(), self.parameter_name, lambda: self._own_part(names)):
            yield

    def _own_part(self, names: list[str]) -> torch.Tensor:
        halves = ((self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]) for name in names)
        return functools.reduce(torch.add, (self._product(*each) for each in halves))

    def _product(self, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
        base = self.get_base_layer()
        group = base.region.group if isinstance(base, SplitExperts) else base.sharing.tp_group
        if group is not None:
            down, up = copy_weight_to_group(down, group), copy_weight_to_group(up, group)
        count = base.expert_facts.count
        down, up = down.reshape(count, -1, down.shape[-1]), up.reshape(up.shape[0], -1, count)
        if not isinstance(base, SplitExperts):
            down = down.narrow(0, base.first, base.num_experts)
            up = up.narrow(2, base.first, base.num_experts)
        else:
            rows = _own_rows(base, self.parameter_name).to(down.device)
            by_outputs = base.expert_facts.widths[self.parameter_name] == (2 if base.is_transposed else 1)
            down, up = (down, up[rows]) if by_outputs else (down[:, :, rows], up)
        return torch.einsum("ore,eri->eio" if base.is_transposed else "ore,eri->eoi", up, down) * scaling


def _own_rows(base: SplitExperts, name: str) -> torch.Tensor:
    """Which of a weight's columns or rows this rank has, as the model counts them."""
    order: StoredOrder | None = getattr(base, "stored_orders", {}).get(name)
    group, facts = base.region.group, base.expert_facts
    rows = torch.arange(facts.width) if order is None else order.rows
    return rows.chunk(group.size())[group.rank()]


def can_adapt(base: nn.Module, name: str) -> bool:
    """Is this a weight of experts of which ranks hold parts?"""
    if not isinstance(base, SplitExperts | SharedOut) or base.expert_facts.dense:
        return False
    held = base._parameters[name]
    return held is not None and held.dim() == 3


def adapt(wrapper: Any) -> None:
    """Let a wrapper of a weight of experts add this rank's part."""
    if not isinstance(wrapper, AdaptedExperts):
        put_in_front(AdaptedExperts, wrapper)
