"""What the axes around a pipeline give its engine: each fills in its own part before the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.batches import Batch


class HeldRun(Protocol):
    """One of several runs of a step, whose gradients are not reduced yet."""

    def take(self) -> None:
        """Take the gradients that the run has left unreduced, and free its weights."""

    def hand_over(self, scale: torch.Tensor | None) -> None:
        """Hold these gradients, times `scale`; reduce all held ones after the step's last run."""


class HeldGradients(Protocol):
    """Gradients of a step's runs, where data ranks reduce them once per step."""

    def run(self) -> HeldRun | None:
        """Start a run. Return None where it is the only one of its step."""


class CallBalance(Protocol):
    """Counts what routers choose during one call of the model, on each stage."""

    def listening(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Collect the router logits of the layers that run inside, one tensor each."""

    def attach(
        self, hidden: torch.Tensor, logits: list[torch.Tensor], batch: Batch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Count a pass. Return `hidden`, which takes the gradient of the balance along."""

    def close(self) -> None:
        """Compute the loss over all passes. Collective over stages and data ranks."""

    def weigh(self) -> None:
        """Take the gradient of that loss from the last stage. Collective."""

    def stand_in(self, tokens: int) -> tuple[torch.Tensor]:
        """Return empty router logits of this rank's tokens for the model's own loss."""


class RouterBalance(Protocol):
    """The loss that balances experts over all stages."""

    def call(self) -> CallBalance:
        """Start counting one call of the model."""


class AdapterSwitch(Protocol):
    """Reads and sets which adapters of a model are on."""

    def read(self) -> object:
        """Return which adapters are on."""

    def as_in(self, state: Any) -> AbstractContextManager[None]:
        """Switch adapters as they were when `state` was read."""


@dataclass
class PipelineServices:
    """The services of one pipeline.

    Attributes:
        loss_in_chunks: may a micro-batch's loss be computed in chunks of tokens?
        balance: counts what routers choose, where a loss asks for it.
        adapters: the switch of the model's adapters, if it has any.
        scale_loss: multiplies a loss by the factor that fp16 needs.
        lowered_dtype: returns the dtype of weights that data ranks gather, or None.
        before_run: is told of each run: does it train, and the shape of its tokens.
        at_rest: replaces gathered parameters by the stored ones.
        held: gradients that wait for the step's last run.
    """

    loss_in_chunks: bool = False
    balance: RouterBalance | None = None
    adapters: AdapterSwitch | None = None
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    lowered_dtype: Callable[[], torch.dtype | None] = lambda: None
    before_run: Callable[[bool, torch.Size], None] = lambda training, tokens: None
    at_rest: Callable[[list[nn.Parameter]], list[nn.Parameter]] = list
    held: HeldGradients | None = None


class PipelinedModel(Protocol):
    """A pipeline engine, as the other axes see it while a layout is applied."""

    config: ParallelConfig
    stages: nn.ModuleList
    last_rank: int

    def attach(self) -> None:
        """Put the engine behind `model.forward`."""
