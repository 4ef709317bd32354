"""The auxiliary loss that balances experts (Fedus et al., 2022), over the rows of all data ranks: that of one process.

    aux = E Σ_e f_e P_e      f_e: share of tokens that chose expert e      P_e: mean probability of e

It is no mean over rows, so the ranks' own ones do not average to it: counts and sums of probabilities are added up
over the data ranks, 2 E + 1 numbers in one all-reduce. The model adds its own to its loss, which is put right here:

    loss + c (aux over all rows - aux over own rows)      whose second part takes back the model's, gradient and all
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.model.anatomy import get_backbone_of
from hf_parallel.model.experts import balance_coefficient, count_experts_per_token, iterate_routers
from hf_parallel.ranks import copy_to_group, reduce_from_group, start_all_gather
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from hf_parallel.axes.axis import SequenceParallelFlag
    from hf_parallel.model.calls import Batch


#: Does this rank take part with rows that do not count? Hooks know.
is_absent: Callable[[], bool] = lambda: False  # noqa: E731


def balance_over_data_ranks(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on the auxiliary loss of `model`, and its part in the loss, are those of all data ranks' rows."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    top_k = count_experts_per_token(model)
    last: list[tuple[torch.Tensor, ...] | None] = [None]  # router logits of the call in progress, see `correct`

    def keep(module: nn.Module, args: tuple, output: ModelOutput) -> None:
        last[0] = getattr(output, "router_logits", None)

    def correct(module: nn.Module, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits, last[0] = getattr(output, "router_logits", None) or last[0], None  # TRL's fused head gives none on
        if not torch.is_tensor(getattr(output, "aux_loss", None)) or logits is None:
            return output
        sums, group = torch.cat(balance_sums(logits, top_k, given.get("attention_mask"))), mesh.data_group
        # Forward and backward a sum: each rank's loss has all in it.
        sums = copy_to_group(reduce_from_group(sums, group), group)
        return with_exact(module, output, compute_loss_of_sums(sums))

    if (backbone := get_backbone_of(model)) is not None:
        backbone.register_forward_hook(keep)
    model.register_forward_hook(correct, with_kwargs=True)


def with_exact(model: PreTrainedModel, output: ModelOutput, exact: torch.Tensor) -> ModelOutput:
    """Return the output of `model` with this auxiliary loss instead of its own, in its loss too."""
    if output.loss is not None:
        change = balance_coefficient(model) * (exact - output.aux_loss.to(exact.device))
        output["loss"] = output.loss + change.to(output.loss.device)
    output["aux_loss"] = exact
    return output


def compute_loss_of_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return the auxiliary loss of what `balance_sums` counts, of which probabilities alone have a gradient."""
    experts = len(sums) // 2
    chosen, probable, tokens = sums.split([experts, experts, 1])
    return experts * torch.sum(chosen.detach() / tokens.detach() * probable / tokens.detach())


def balance_sums(logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return each expert's choices, the sums of its probabilities, and the number of tokens, over all layers.

    Args:
        logits: of each layer, [tokens, experts].
        mask: which tokens count, [rows, length]; None: all.
    """
    device = logits[0].device
    counted = logits[0].new_ones(len(logits[0]), dtype=torch.float32)
    if mask is not None:
        counted = mask.reshape(-1).to(device=device, dtype=torch.float32)
    if is_absent():
        counted = torch.zeros_like(counted)
    chosen = torch.zeros(logits[0].shape[-1], dtype=torch.float32, device=device)
    probable, tokens = torch.zeros_like(chosen), torch.zeros(1, dtype=torch.float32, device=device)
    for layer in logits:
        probabilities = layer.to(device).softmax(-1)
        best = probabilities.topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, best.flatten(), counted.repeat_interleave(top_k))
        probable = probable + (probabilities.float() * counted.unsqueeze(-1)).sum(0)
        tokens = tokens + counted.sum()
    return chosen, probable, tokens


# ---- Room for so many tokens per expert (Lepikhin et al., 2021): what comes after they are taken is dropped ---------
#     room = ⌈factor · tokens · k / experts⌉      of the tokens of all data and cp ranks in one call of the layer
#
# First come, first served, in the order of the ranks and on each of its tokens: over data ranks that is the order of
# the rows of a batch, so the same tokens are dropped on any number of them. Each rank tells how many tokens each
# expert has of it, and so knows how many come before its own; no token is looked at, and the process does not wait.


class Capacity:
    """The room of a model's experts, and what they have dropped since this was last read."""

    def __init__(self, factor: float, mesh: ParallelMesh, switch: SequenceParallelFlag | None) -> None:
        self.factor, self.mesh, self._switch = factor, mesh, switch
        self.sums = torch.zeros(2, device=mesh.device)  # of pairs (token, expert): dropped ones, and all

    def limit(self, experts: int, module: nn.Module, args: tuple) -> tuple | None:
        """A hook before a module of experts, while it trains: what is dropped counts nothing, and does not travel."""
        if not module.training:
            return None
        hidden, index, weights = args
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        own = chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        place = torch.empty_like(chosen)
        place[order] = torch.arange(len(chosen), device=index.device) - (own.cumsum(0) - own)[chosen[order]]
        # How many tokens of each expert the ranks before this one have, and all: from the nearest ranks on.
        parts = [self.mesh.group("tp")] if self._switch is not None and self._switch.on else []
        total = own * (not is_absent())
        before = torch.zeros_like(total)
        for group in (*parts, self.mesh.group("cp"), self.mesh.data_group):
            if group.size() > 1:
                theirs = start_all_gather(total, group).wait()
                before, total = before + theirs[: group.rank()].sum(0), theirs.sum(0)
        room = torch.ceil(self.factor * total.sum().double() / experts)
        kept = (place + before[chosen] < room).view(index.shape)  # the pairs for which there is room, over all ranks
        self.sums = self.sums.to(index.device)
        self.sums += torch.stack([(~kept).sum(), kept.new_ones((), dtype=torch.long) * kept.numel()])
        shown = index if not isinstance(module, SharedOut) else index.masked_fill(~kept, experts)
        return hidden, shown, weights * kept

    def read(self) -> float:
        """Return the share of pairs that were dropped. Collective over all ranks."""
        sums, self.sums = self.sums.to(self.mesh.device), torch.zeros(2, device=self.mesh.device)
        dist.all_reduce(sums)
        dropped, all_ = sums.tolist()
        return dropped / max(1, all_)


# ---- How evenly tokens fall on experts: counted on the device while a model trains, read when something is logged


#: The attribute of a model that holds its `ExpertLoad`.
LOAD = "_hf_parallel_expert_load"


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


# ---- The auxiliary loss of a model whose layers are on several stages: that of all layers, rows and data ranks
#     every pass      a stage counts what its routers chose, and adds up their probabilities     2 E + 1 numbers
#     after the last  one sum over stages and data ranks: the loss, which the last stage adds to the model's
#     backward        d aux / d probabilities is the same of every layer: each stage adds it to the gradient of its own
#
# The share of tokens that an expert gets is known after all micro-batches have gone forward, so backward passes come
# after that, as GPipe's do.


#: Router logits [rows, own tokens, experts] of a batch -> those of all its tokens on all ranks.
Whole = Callable[[torch.Tensor, "Batch"], torch.Tensor]


class StageBalance:
    """The counts that the stages of a pipeline make of their routers, call by call of the backbone."""

    def __init__(
        self, model: PreTrainedModel, experts: int, mesh: ParallelMesh, last_rank: int, whole: list[Whole]
    ) -> None:
        self.mesh, self.last_rank, self.whole, self.experts = mesh, last_rank, whole, experts
        self.top_k = count_experts_per_token(model)
        self.exact: torch.Tensor | None = None  # of the last call
        self.logits: list[torch.Tensor] | None = None  # of the layers of the pass in progress
        for _, router, index in iterate_routers(model):
            router.register_forward_hook(functools.partial(self._collect, index))
        # The loss is put right on the last stage, inside of what a pipeline makes of the model's forward.
        forward = model.forward

        @functools.wraps(forward)
        def exact(*args: object, **kwargs: object) -> torch.Tensor:
            output = forward(*args, **kwargs)
            own = torch.is_tensor(getattr(output, "aux_loss", None))
            return with_exact(model, output, self.exact) if own and self.exact is not None else output

        def of_others(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
            """Put right a balance of stand-ins, made around the model later: TRL's fused head keeps no logits."""
            foreign = not hasattr(output, "router_logits") and not getattr(output, "is_balanced", False)
            own = torch.is_tensor(getattr(output, "aux_loss", None))
            return with_exact(model, output, self.exact) if foreign and own and self.exact is not None else output

        model.forward = exact
        model.register_forward_hook(of_others)

    def _collect(
        self, index: int, router: nn.Module, args: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        """Collect what a router has chosen, but not when layers run again for their backward pass."""
        if self.logits is not None:
            self.logits.append(output[index] if isinstance(output, tuple) else output)


class CallBalance:
    """The counts of one call, on each stage."""

    def __init__(self, balance: StageBalance) -> None:
        self.of, self._factors = balance, torch.zeros(balance.experts, device=balance.mesh.device)
        self._sums = torch.zeros(2 * balance.experts + 1, device=balance.mesh.device)

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[torch.Tensor]]:
        """Router logits of the layers that run inside, one tensor each."""
        logits: list[torch.Tensor] = []
        former, self.of.logits = self.of.logits, logits
        try:
            yield logits
        finally:
            self.of.logits = former

    def attach(
        self, hidden: torch.Tensor, logits: list[torch.Tensor], batch: Batch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Count a pass, or what `mask` shows of it; `hidden`, which leaves it, takes the gradient of that along."""
        if not logits:
            return hidden
        rows = [layer.unflatten(0, (len(hidden), -1)) for layer in logits]
        for whole in self.of.whole:
            rows = [whole(layer, batch) for layer in rows]
        chosen, probable, tokens = balance_sums([layer.flatten(0, 1) for layer in rows], self.of.top_k, mask)
        self._sums += torch.cat([chosen, probable, tokens]).detach()
        return _Along.apply(hidden, probable, self._factors)

    def close(self, tokens: int) -> tuple[torch.Tensor]:
        """Compute the loss over all passes, which are made. Collective over stages and data ranks.

        Returns:
            What stands for router logits of so many tokens of this rank in the model's own loss, which is put right.
        """
        mesh = self.of.mesh
        for group in (mesh.group("pp"), mesh.data_group):
            dist.all_reduce(self._sums, group=group)
        self._exact = compute_loss_of_sums(self._sums).requires_grad_(torch.is_grad_enabled())
        self.of.exact = self._exact
        return (self._sums.new_zeros(()).expand(tokens, self.of.experts),)

    def weigh(self) -> None:
        """Let passes go backward, because what the last stage's loss makes of the counts is known. Collective."""
        mesh = self.of.mesh
        gradient = self._exact.new_zeros(()) if self._exact.grad is None else self._exact.grad
        dist.broadcast(gradient, group=mesh.group("pp"), group_src=self.of.last_rank)
        dist.all_reduce(gradient, group=mesh.data_group)  # it is a part of each rank's loss
        chosen, tokens = self._sums[: self.of.experts], self._sums[-1]
        self._factors.copy_(gradient * self.of.experts * chosen / tokens**2)


class _Along(torch.autograd.Function):
    """Hidden states as they are; what was counted beside them has a gradient that is known by the backward pass."""

    @staticmethod
    def forward(ctx: Context, hidden: torch.Tensor, counted: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        ctx.factors = factors
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple:
        return gradient, ctx.factors, None
