"""Layers of which this rank holds some experts: the products stay transformers' own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Shard, distribute_tensor

from hf_parallel.model.families import SHARED_AFTER
from hf_parallel.ranks import (
    exchange,
    exchange_during,
    exchange_equally,
    join_sequence,
    scale_gradient,
    split_sequence,
)
from hf_parallel.ranks.differentiable import once_differentiable
from hf_parallel.ranks.local import get_local, hold_other_tensors, put_in_front, with_added
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import SequenceParallelFlag
    from hf_parallel.model.experts import ExpertFacts


# ---- Tokens on their way to experts and back; only tokens that `Capacity` (balance.py) has marked are dropped ----
# Each rank sorts its (token, expert) pairs by expert, which is by rank, as each holds a range of experts. Counts
# travel first; reading them is the one time that the process waits for the device.
#
#     rank 0   t0->E0 t0->E3 t1->E2        ─┐   counts, then tokens    ┌─   E0: t0    E1: t2
#     rank 1   t2->E1 t3->E3 t3->E2        ─┘   <- results ->          └─   E2: t1 t3   E3: t0 t3
#
# The weights of a token's experts stay with the token: what comes back is weighted and summed where it was sent from.


class Arrived(NamedTuple):
    """The rows that this rank's experts compute, the expert of each row, and how the rows get back."""

    rows: torch.Tensor
    experts: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]


def send(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] | None = None,
) -> Arrived:
    """Bring each token [t, hidden] to its experts [t, k], numbered over all ranks of the group.

    Args:
        count: experts over all ranks. A pair of this number, which no expert has, does not travel.
        meanwhile: computes something while tokens travel.
    """
    ranks, chosen = group.size(), experts.reshape(-1)
    order = chosen.argsort()
    own = torch.zeros(count + 1, dtype=torch.long, device=tokens.device)
    own = own.scatter_add_(0, chosen, torch.ones_like(chosen))[:count].view(ranks, -1)
    theirs = exchange_equally(own, group)
    if isinstance(own, FakeTensor):  # tensors without values go to all ranks in equal numbers
        sent = received = [len(chosen) // ranks + (rank < len(chosen) % ranks) for rank in range(ranks)]
    else:
        sent, received = torch.stack([own.sum(1), theirs.sum(1)]).tolist()
    leaving = tokens[order[: sum(sent)] // experts.shape[-1]]
    if meanwhile is None:
        rows = exchange(leaving, sent, received, group)
    else:
        rows = exchange_during(leaving, sent, received, group, meanwhile)
    local = torch.arange(count // ranks, device=tokens.device).repeat(ranks)
    return Arrived(rows, local.repeat_interleave(theirs.flatten(), output_size=len(rows)), order, sent, received)


def fill_with_zeros(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[n, width] -> [count, width]: zeros follow the rows. Rows that are `count` already are not copied."""
    return rows if len(rows) == count else F.pad(rows, (0, 0, 0, count - len(rows)))


# ---- Shared experts, which every token meets, computed while tokens travel to the others ----------------------------
#     model's order    experts( send … compute … bring back )   shared(x)   sum
#     here             experts( send, shared(x) meanwhile, wait, compute … bring back )   shared(x): there already
# sum
#
# The way back in the backward starts before the gradients of shared experts are computed, and is waited for after
# them.


class Early(nn.Module):
    """Mixin of shared experts that may have been computed ahead."""

    done: tuple[torch.Tensor, torch.Tensor] | None = None  # of which tokens, and what

    def ahead(self, tokens: torch.Tensor) -> None:
        """Compute them for these tokens now: the model will ask for them later."""
        self.done = None
        self.done = tokens, self(tokens)

    @torch.compiler.disable  # ahead, too, they run outside of the graphs of a layer
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:  # around hooks, which have run then
        done, self.done = self.done, None
        if done is not None:
            tokens, values = done
            # Are both views of the same values?
            same = tokens.untyped_storage()._cdata == hidden.untyped_storage()._cdata
            same = same and tokens.storage_offset() == hidden.storage_offset() and tokens.numel() == hidden.numel()
            if same and tokens.is_contiguous() and hidden.is_contiguous():
                return values.view(hidden.shape)
        return super().__call__(hidden)


@dataclass(eq=False)
class Sharing:
    """The way in which the experts of a model are shared out, the same for all its layers."""

    group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None
    gradient_factor: float
    sequence_flag: SequenceParallelFlag | None


#: Numbers in one part of the products of rows and weights: smaller parts take Python longer than the GPU.
PART = 2**25


class _Weigh(torch.autograd.Function):
    """Rows of all pairs [t k, hidden], the place of each [t, k], weights [t, k] -> sums of each token [t, hidden].

    Some tokens at a time: where weights are in fp32, all products at once are twice as large as all rows.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, places, weights)
        sums = rows.new_empty(len(weights), rows.shape[1])
        for part in _list_parts(rows, weights):
            sums[part] = (rows[places[part]] * weights[part].unsqueeze(-1)).sum(1)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        rows, places, weights = ctx.saved_tensors
        of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
        for part in _list_parts(rows, weights):
            given = gradient[part].unsqueeze(1).to(torch.promote_types(rows.dtype, weights.dtype))
            of_weights[part] = (given * rows[places[part]]).sum(-1)
            of_rows[places[part]] = (given * weights[part].unsqueeze(-1)).to(rows.dtype)
        return of_rows, None, of_weights


def _list_parts(rows: torch.Tensor, weights: torch.Tensor) -> list[slice]:
    """Return the tokens of each part."""
    size = max(1, PART // max(1, weights.shape[1] * rows.shape[1]))
    return [slice(start, start + size) for start in range(0, len(weights), size)]


class SharedOut(nn.Module):
    """Mixin of a module that holds this rank's experts alone: tokens [t, hidden] of all ranks travel to their own."""

    sharing: Sharing
    expert_facts: ExpertFacts
    num_experts: int  # of this rank
    first: int  # number of this rank's first expert
    beside: tuple[Early | None]  # the shared experts to compute meanwhile, or None; no child of this module

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Ranks of tp have the same tokens, of which each sends a part; under sequence parallelism each has its own.
        flag, alike = self.sharing.sequence_flag, self.sharing.tp_group
        alike = None if flag is not None and flag.on else alike
        shared, meanwhile = self.beside[0], None
        if shared is not None:
            meanwhile = functools.partial(shared.ahead, hidden_states)
        try:
            if alike is None:
                return self._run_routed(hidden_states, index, weights, meanwhile)
            count, ranks = len(hidden_states), alike.size()
            size = -(-count // ranks)
            real = max(0, min(size, count - alike.rank() * size))  # the last rank may have fewer, or none
            own = [
                split_sequence(fill_with_zeros(rows, size * ranks), alike)[:real]
                for rows in (hidden_states, index, weights)
            ]
            results = fill_with_zeros(self._run_routed(own[0], own[1], own[2], meanwhile), size)
            return join_sequence(results, alike)[:count]  # on all ranks, which must go on to compute the same thing
        except BaseException:
            # A checkpoint stops its second run as soon as it has what it needs: nobody asks, and nothing may be kept.
            if shared is not None:
                shared.done = None
            raise

    def _run_routed(
        self,
        tokens: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        group, factor = self.sharing.group, self.sharing.gradient_factor
        rows, experts, order, sent, received = send(tokens, index, self.expert_facts.count, group, meanwhile)
        own = {}
        for name in self.expert_facts.widths:
            weight = scale_gradient(get_local(self._parameters[name]), factor)
            # FSDP2 lowers fp32 weights, but not those of experts that no other rank holds.
            own[name] = weight.to(tokens.dtype) if tokens.dtype.itemsize < weight.dtype.itemsize else weight
        with hold_other_tensors(self, {name: with_added(self, name, weight) for name, weight in own.items()}):
            # A rank without rows computes one, so that its weights have gradients: zeros.
            count, filled = len(rows), max(1, len(rows))
            rows, experts = fill_with_zeros(rows, filled), fill_with_zeros(experts.unsqueeze(-1), filled)
            forward: Any = super().forward
            results = forward(rows, experts, rows.new_ones(filled, 1))[:count]
            del rows  # nobody but autograd needs them while results travel
        # Bring back what the experts made of each token, zeros for what was dropped, and weigh it: sums [t, hidden].
        returned = fill_with_zeros(exchange(results, received, sent, group), len(order))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(places), device=places.device)
        return cast(torch.Tensor, _Weigh.apply(returned, places.view_as(weights), weights)).to(tokens.dtype)


def share_out(
    model: PreTrainedModel, experts: dict[str, ExpertFacts], mesh: ParallelMesh, switch: SequenceParallelFlag | None
) -> None:
    """Keep this rank's experts of the modules with these names, in place.

    Works on meta tensors and on values, which must be the same on all ranks. No communication.
    """
    tp_group = mesh.group("tp") if mesh.size("tp") > 1 else None
    # Gradients are averaged over data and cp ranks, and FSDP2 averages over the ranks with the same experts alone.
    factor = mesh.size("ep_shard") * mesh.size("dp_replicate") / mesh.config.sharing_size
    sharing = Sharing(mesh.group("ep"), tp_group, factor, switch)
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
        block = model.get_submodule(name.rpartition(".")[0])
        beside = getattr(block, "shared_experts", None)
        # Shared experts may be computed ahead, except where the model has them first.
        can_wait = type(block).__name__ in SHARED_AFTER
        shared_out.beside = (put_in_front(Early, beside) if can_wait and isinstance(beside, nn.Module) else None,)
