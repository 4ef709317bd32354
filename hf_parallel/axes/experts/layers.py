"""What a module computes of which this rank holds some experts: the products stay transformers' own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from hf_parallel.axes.experts.beside import Early, shared_beside
from hf_parallel.axes.experts.dispatch import Shares, bring_back, send
from hf_parallel.collectives import scale_gradient
from hf_parallel.local import holding, local, put_in_front, with_added
from hf_parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import SequenceParallelFlag
    from hf_parallel.model.experts import ExpertFacts


class Sharing:
    """How the experts of a model are shared out: the same for all its layers.

    `alike`: the ranks whose tokens are the same, of which each sends a part; None where each has its own.
    """

    def __init__(self, mesh: ParallelMesh, switch: SequenceParallelFlag | None) -> None:
        self.group, self._switch = mesh.group("ep"), switch
        self.tp_group = mesh.group("tp") if mesh.size("tp") > 1 else None
        # Gradients are averaged over data and cp ranks, and FSDP2 averages over the ranks with the same experts alone.
        self.gradient_factor = mesh.size("ep_shard") * mesh.size("dp_replicate") / mesh.config.sharing_size

    @property
    def alike(self) -> dist.ProcessGroup | None:
        """Under sequence parallelism tp ranks have tokens of their own."""
        return None if self._switch is not None and self._switch.on else self.tp_group


class SharedOut(nn.Module):
    """Mixin of a module that holds this rank's experts alone: tokens [t, hidden] of all ranks travel to their own."""

    sharing: Sharing
    expert_facts: ExpertFacts
    num_experts: int  # of this rank
    first: int  # number of this rank's first expert
    beside: tuple[Early | None]  # the shared experts to compute meanwhile, or None; no child of this module

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        shared = self.beside[0]
        if shared is None:
            return self._shared_out(hidden_states, index, weights, None)
        with shared.unless_stopped():
            return self._shared_out(hidden_states, index, weights, functools.partial(shared.ahead, hidden_states))

    def _shared_out(
        self,
        hidden_states: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        if self.sharing.alike is None:
            return self._routed(hidden_states, index, weights, meanwhile)
        shares = Shares(len(hidden_states), self.sharing.alike)
        own = shares.own(hidden_states), shares.own(index), shares.own(weights)
        return shares.joined(self._routed(*own, meanwhile))

    def _routed(
        self,
        tokens: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        arrived = send(tokens, index, self.expert_facts.count, self.sharing.group, meanwhile)
        with holding(self, self._own_weights()):
            results = self._experts(arrived.rows, arrived.experts)
        return bring_back(results, arrived, weights, self.sharing.group).to(tokens.dtype)

    def _experts(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each row through its expert; a rank without rows computes one, so that its weights have gradients: zeros."""
        count, filled = len(rows), max(1, len(rows))
        rows = F.pad(rows, (0, 0, 0, filled - count))
        experts = F.pad(experts, (0, filled - count)).unsqueeze(-1)
        ones = rows.new_ones(filled, 1)
        forward: Any = super().forward
        return forward(rows, experts, ones)[:count]

    def _own_weights(self) -> dict[str, torch.Tensor]:
        factor = self.sharing.gradient_factor
        own = {name: scale_gradient(local(self._parameters[name]), factor) for name in self.expert_facts.widths}
        return {name: with_added(self, name, weight) for name, weight in own.items()}


def share_out(
    model: PreTrainedModel, experts: dict[str, ExpertFacts], mesh: ParallelMesh, switch: SequenceParallelFlag | None
) -> None:
    """Keep this rank's experts of the modules with these names, in place.

    Works on meta tensors and on values, which must be the same on all ranks. No communication.
    """
    sharing = Sharing(mesh, switch)
    for name, facts in experts.items():
        module = model.get_submodule(name)
        for key, parameter in list(module._parameters.items()):
            value = parameter.detach() if parameter.is_meta else parameter.detach().to(mesh.device)
            own = distribute_tensor(value, mesh["ep"], [Shard(0)], src_data_rank=None)
            module._parameters[key] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        module.num_experts = facts.count // mesh.size("ep")
        shared_out = put_in_front(SharedOut, module)
        shared_out.first = sharing.group.rank() * module.num_experts
        shared_out.sharing, shared_out.expert_facts = sharing, facts
        shared_out.beside = (shared_beside(model, name),)
