"""Losses that compare each example of a batch with all others, as CLIP's and SigLIP's, over data ranks.

A data rank sees only its own part of the batch, so the embeddings of all of them are gathered (OpenCLIP does so, too):

    rank 0    its texts and images -> towers -> pooler_output ┐ gathered   ┌ projections, similarities, loss
    rank 1    its texts and images -> towers -> pooler_output ┘ in order   └ of the whole batch

Each rank then has the loss of the whole batch. What comes back to an embedding is summed over ranks, so that the data
ranks' average of gradients is the gradient of one process, whatever each rank's loss is weighed with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.model.families import PAIRED
from hf_parallel.ranks.differentiable import all_reduce, once_differentiable

if TYPE_CHECKING:
    from hf_parallel.ranks.differentiable import Context

Value = TypeVar("Value")


class ExamplesOfRanks(NamedTuple):
    """The number of examples of each data rank, and which data rank this one is."""

    counts: list[int]
    rank: int
    group: dist.ProcessGroup

    @property
    def own(self) -> slice:
        """The place of this rank's examples among all."""
        start = sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])


class PairedLoss:
    """Gathers what the towers of a model make, while its forward computes a loss over pairs of examples."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.takes_loss = "return_loss" in inspect.signature(model.forward).parameters and any(
            "logit_scale" in name or name == "temperature" for name, _ in model.named_parameters(recurse=False)
        )
        self.examples: ExamplesOfRanks | None = None
        self.computing = False
        for tower in PAIRED.get(self.name, ()):
            getattr(model, tower).register_forward_hook(self._gather)
        if self.name in PAIRED:
            model.register_forward_hook(self._leave, always_call=True)

    def begin(self, given: Mapping[str, object]) -> bool:
        """Return whether this forward computes such a loss.

        Raises:
            SpecError: it does, and it is not known what to gather.
        """
        self.computing = bool(self.takes_loss and given.get("return_loss"))
        if self.computing and self.name not in PAIRED:
            refuse_pairs()
        return self.computing

    def _gather(self, tower: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput | None:
        if not self.computing:
            return None
        pooled = output["pooler_output"]
        if self.examples is None:
            self.examples = count_examples_of_ranks(pooled)
        gathered = copy.copy(output)
        gathered["pooler_output"] = OfAllRanks.apply(pooled, self.examples)
        return gathered

    def _leave(self, model: nn.Module, args: tuple, output: Value) -> Value:
        """Leave each rank the outputs of its own examples, as after any other forward."""
        examples, self.examples, self.computing = self.examples, None, False
        if examples is None:
            return output
        total, own = sum(examples.counts), examples.own
        own = slice(own.start, max(own.stop, own.start + 1))  # a rank without an example shows one all the same
        own = slice(min(own.start, total - 1), own.stop)

        def cut(value: object) -> object:
            if isinstance(value, ModelOutput):
                return type(value)(**{key: cut(part) for key, part in value.items()})
            return value[own] if torch.is_tensor(value) and value.ndim and len(value) == total else value

        return tree_map(cut, output, is_leaf=lambda value: isinstance(value, ModelOutput))


def count_examples_of_ranks(pooled: torch.Tensor) -> ExamplesOfRanks:
    mesh = runtime.mesh()
    own = torch.tensor(0 if runtime.is_absent() else len(pooled), device=pooled.device)
    counts = [torch.zeros_like(own) for _ in range(mesh.data_size)]
    dist.all_gather(counts, own, group=mesh.data_group)
    return ExamplesOfRanks([int(count) for count in counts], mesh.data_rank, mesh.data_group)


class OfAllRanks(torch.autograd.Function):
    """Examples of all data ranks in their order forward, the sum of the ranks' gradients of the own ones backward."""

    @staticmethod
    def forward(ctx: Context, pooled: torch.Tensor, examples: ExamplesOfRanks) -> torch.Tensor:
        ctx.examples, ctx.shape = examples, pooled.shape
        most, own = max(examples.counts), examples.counts[examples.rank]
        padded = pooled.new_zeros(most, *pooled.shape[1:])
        padded[:own] = pooled[:own]
        parts = [torch.empty_like(padded) for _ in examples.counts]
        dist.all_gather(parts, padded, group=examples.group)
        return torch.cat([part[:count] for part, count in zip(parts, examples.counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total, own = all_reduce(gradient.contiguous(), ctx.examples.group), ctx.examples.own
        gradient = gradient.new_zeros(ctx.shape)
        gradient[: own.stop - own.start] = total[own]
        return gradient, None


def refuse_pairs() -> NoReturn:
    """Refuse data ranks for a loss whose parts are not known."""
    config = runtime.mesh().config
    name = "dp_shard_size" if config.dp_shard_size > 1 else "dp_replicate_size"
    why = "the model's loss compares each row of a batch with all others, of which a data rank sees only its own"
    refuse(f"{name}={getattr(config, name)}", why, f"{name}=1")
