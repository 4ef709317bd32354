"""Room for so many tokens per expert (Lepikhin et al., 2021): what comes after they are taken is dropped.

    room = ⌈factor · tokens · k / experts⌉      of the tokens of all data and cp ranks in one call of the layer

First come, first served, in the order of the ranks and on each of its tokens: over data ranks that is the order of the
rows of a batch, so the same tokens are dropped on any number of them. Each rank tells how many tokens each expert has
of it, and so knows how many come before its own; no token is looked at, and the process does not wait.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.experts import balance
from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.collectives import start_all_gather
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model.anatomy import owns_parameters
from hf_parallel.model.experts import ExpertFacts

if TYPE_CHECKING:
    from hf_parallel.axes.axis import SequenceParallelFlag


class Capacity:
    """What a model's experts have room for, and what they have dropped since this was last read."""

    def __init__(self, factor: float, mesh: ParallelMesh, switch: SequenceParallelFlag | None) -> None:
        self.factor, self.mesh, self._switch = factor, mesh, switch
        self.sums = torch.zeros(2, device=mesh.device)  # of pairs (token, expert): dropped ones, and all

    def limit(self, experts: int, module: nn.Module, args: tuple) -> tuple | None:
        """A hook before a module of experts, while it trains: what is dropped counts nothing, and does not travel."""
        if not module.training:
            return None
        hidden, index, weights = args
        kept = self.kept(index, experts)
        self.sums = self.sums.to(index.device)
        self.sums += torch.stack([(~kept).sum(), kept.new_ones((), dtype=torch.long) * kept.numel()])
        shown = index if not isinstance(module, SharedOut) else index.masked_fill(~kept, experts)
        return hidden, shown, weights * kept

    def kept(self, index: torch.Tensor, experts: int) -> torch.Tensor:
        """Which pairs of `index` [tokens, k] there is room for, over all ranks."""
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        own = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        place = torch.empty_like(chosen)
        place[order] = torch.arange(len(chosen), device=index.device) - (own.cumsum(0) - own)[chosen[order]]
        before, total = self._over_ranks(own * (not balance.is_absent()))
        room = torch.ceil(self.factor * total.sum().double() / experts)
        return (place + before[chosen] < room).view(index.shape)

    def _over_ranks(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens of each expert ranks before this one have, and all: from the ranks nearest each other on."""
        parts = [self.mesh.group("tp")] if self._switch is not None and self._switch.on else []
        groups = [*parts, self.mesh.group("cp"), self.mesh.data_group]
        before, total = torch.zeros_like(own), own
        for group in (group for group in groups if group.size() > 1):
            theirs = start_all_gather(total, group).wait()
            before, total = before + theirs[: group.rank()].sum(0), theirs.sum(0)
        return before, total

    def read(self) -> float:
        """The share of pairs that were dropped. Collective over all ranks."""
        sums, self.sums = self.sums.to(self.mesh.device), torch.zeros(2, device=self.mesh.device)
        dist.all_reduce(sums)
        dropped, all_ = sums.tolist()
        return dropped / max(1, all_)


def limit_experts(model: nn.Module, experts: dict[str, ExpertFacts], capacity: Capacity) -> None:
    """From here on experts of `model` drop what they have no room for."""
    for name, facts in experts.items():
        module = model.get_submodule(name)
        if owns_parameters(module):  # not where another stage holds it
            module.register_forward_pre_hook(functools.partial(capacity.limit, facts.count))
