"""How evenly tokens fall on experts: counted on the device while a model trains, read when something is logged."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.experts.capacity import Capacity
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model.anatomy import owns_parameters
from hf_parallel.model.experts import named_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PLACE = "_hf_parallel_expert_load"


class ExpertLoad:
    """Tokens per expert of this rank's layers since it was last read."""

    def __init__(self, modules: list[nn.Module], experts: int, mesh: ParallelMesh, capacity: Capacity | None) -> None:
        self.mesh, self._shape, self._capacity = mesh, (len(modules), experts), capacity
        self.counts: torch.Tensor | None = None  # made where the first tokens are
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(functools.partial(self._count, layer))

    def _count(self, layer: int, module: nn.Module, args: tuple) -> None:
        if module.training and len(args) > 1:
            chosen = args[1].flatten()
            if self.counts is None:
                self.counts = torch.zeros(self._shape, device=chosen.device)
            self.counts[layer].scatter_add_(0, chosen, self.counts.new_ones(()).expand(len(chosen)))

    def read(self) -> dict[str, float]:
        """Mean and worst of all layers' max / mean, and their mean entropy, 1 if even. Collective over all ranks."""
        mesh = self.mesh
        counts = torch.zeros(self._shape, device=mesh.device) if self.counts is None else self.counts
        self.counts = None
        for group in (mesh.data_group, mesh.group("cp"), mesh.group("tp")):
            dist.all_reduce(counts, group=group)
        tokens = counts.sum(1, keepdim=True)
        shares = counts / tokens.clamp(min=1)
        peaks = shares.amax(1) * shares.shape[1]
        entropies = torch.special.entr(shares).sum(1) / math.log(max(2, shares.shape[1]))
        seen = (tokens > 0).sum().float()
        sums = torch.stack([peaks.sum(), entropies.sum(), seen])
        worst = peaks.amax() if len(peaks) else seen.new_zeros(())
        dist.all_reduce(sums, group=mesh.group("pp"))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.group("pp"))
        peak, entropy, layers = sums.tolist()
        if not layers:
            return {}
        dropped = {} if self._capacity is None else {"expert_dropped": self._capacity.read()}
        return {
            "expert_load": peak / layers,
            "expert_load_worst": worst.item(),
            "expert_entropy": entropy / layers,
            **dropped,
        }


def watch_load(model: nn.Module, experts: int, mesh: ParallelMesh, capacity: Capacity | None) -> None:
    """Count from here on."""
    own = [module for _, module in named_experts(model) if owns_parameters(module)]
    vars(model)[_PLACE] = ExpertLoad(own, experts, mesh, capacity)


def load_of(model: PreTrainedModel) -> ExpertLoad | None:
    """What is counted of a model with experts."""
    return getattr(model, _PLACE, None)
