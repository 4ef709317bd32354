"""The auxiliary loss of a model whose layers are on several stages: that of all layers, rows and data ranks.

    every pass      a stage counts what its routers chose, and adds up their probabilities     2 E + 1 numbers
    after the last  one sum over stages and data ranks: the loss, which the last stage adds to the model's
    backward        d aux / d probabilities is the same of every layer: each stage adds it to the gradient of its own

The share of tokens that an expert gets is known after all micro-batches have gone forward, so backward passes come
after that, as GPipe's do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.experts.balance import balance_sums, loss_of_sums, with_exact
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model.experts import experts_per_token, named_routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from hf_parallel.collectives.context import Context
    from hf_parallel.model.batches import Batch


#: Router logits [rows, own tokens, experts] of a batch -> those of all its tokens on all ranks.
Whole = Callable[[torch.Tensor, "Batch"], torch.Tensor]


class StageBalance:
    """What the stages of a pipeline count of their routers, call by call of its backbone."""

    def __init__(
        self, model: PreTrainedModel, experts: int, mesh: ParallelMesh, last_rank: int, whole: list[Whole]
    ) -> None:
        self.mesh, self.last_rank, self.whole, self.experts = mesh, last_rank, whole, experts
        self.top_k = experts_per_token(model)
        self.exact: torch.Tensor | None = None  # of the last call
        self.logits: list[torch.Tensor] | None = None  # of the layers of the pass in progress
        for _, router, index in named_routers(model):
            router.register_forward_hook(functools.partial(self._collect, index))
        _put_right(model, self)

    def call(self) -> CallBalance:
        """Nothing counted yet."""
        return CallBalance(self)

    def _collect(
        self, index: int, router: nn.Module, args: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        """Not when layers run again for their backward."""
        if self.logits is not None:
            self.logits.append(output[index] if isinstance(output, tuple) else output)


class CallBalance:
    """The same of one call, on each stage."""

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

    def close(self) -> None:
        """All passes are made: the loss over all of them. Collective over stages and data ranks."""
        mesh = self.of.mesh
        for group in (mesh.group("pp"), mesh.data_group):
            dist.all_reduce(self._sums, group=group)
        self._exact = loss_of_sums(self._sums).requires_grad_(torch.is_grad_enabled())
        self.of.exact = self._exact

    def weigh(self) -> None:
        """What the last stage's loss makes of it is known: from here on passes may go backward. Collective."""
        mesh = self.of.mesh
        gradient = self._exact.new_zeros(()) if self._exact.grad is None else self._exact.grad
        dist.broadcast(gradient, group=mesh.group("pp"), group_src=self.of.last_rank)
        dist.all_reduce(gradient, group=mesh.data_group)  # it is a part of each rank's loss
        chosen, tokens = self._sums[: self.of.experts], self._sums[-1]
        self._factors.copy_(gradient * self.of.experts * chosen / tokens**2)

    def stand_in(self, tokens: int) -> tuple[torch.Tensor]:
        """Of so many tokens of this rank, for the model's own loss, which is put right."""
        return (self._sums.new_zeros(()).expand(tokens, self.of.experts),)


class _Along(torch.autograd.Function):
    """Hidden states as they are; what was counted beside them has a gradient that is known by the backward pass."""

    @staticmethod
    def forward(ctx: Context, hidden: torch.Tensor, counted: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        ctx.factors = factors
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple:
        return gradient, ctx.factors, None


def _put_right(model: PreTrainedModel, balance: StageBalance) -> None:
    """On the last stage, inside of what a pipeline makes of `model`'s forward."""
    forward = model.forward

    @functools.wraps(forward)
    def exact(*args: object, **kwargs: object) -> torch.Tensor:
        output = forward(*args, **kwargs)
        own = torch.is_tensor(getattr(output, "aux_loss", None))
        return with_exact(model, output, balance.exact) if own and balance.exact is not None else output

    def of_others(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
        """What was put around the model later has balanced stand-ins, as TRL's fused head, which keeps no logits."""
        foreign = not hasattr(output, "router_logits") and not getattr(output, "is_balanced", False)
        own = torch.is_tensor(getattr(output, "aux_loss", None))
        return with_exact(model, output, balance.exact) if foreign and own and balance.exact is not None else output

    model.forward = exact
    model.register_forward_hook(of_others)
