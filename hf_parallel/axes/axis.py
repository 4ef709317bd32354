"""The interface of an axis, and the data that axes hand to each other: `Axis`, `Plan`, `Building`, `PipelineServices`.

An axis is one kind of parallelism. It has keys in the spec, reads facts of a model, resolves them to its part of the
plan or refuses, and applies that part. A setting of every layer, such as the attention kernel, is an axis, too: one
without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.model.calls import Batch
    from hf_parallel.ranks.mesh import ParallelMesh


# ---- What the axes around a pipeline give its engine: each fills in its own part before the first step --------------


class HeldRun(Protocol):
    """A run of a step with several runs. Its gradients are not reduced yet."""

    def take(self) -> None:
        """Take the gradients that the run has left unreduced, and free its weights."""

    def hand_over(self, scale: torch.Tensor | None) -> None:
        """Hold these gradients, times `scale`; reduce all held ones after the step's last run."""


class CallBalance(Protocol):
    """Counts what routers choose during one call of the model, on each stage."""

    def listening(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Collect the router logits of the layers that run inside, one tensor each."""

    def attach(
        self, hidden: torch.Tensor, logits: list[torch.Tensor], batch: Batch, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Count a pass. Return `hidden`, which takes the gradient of the balance along."""

    def close(self, tokens: int) -> tuple[torch.Tensor]:
        """Compute the loss over all passes. Collective over stages and data ranks.

        Returns:
            Empty router logits of so many tokens of this rank, for the model's own loss.
        """

    def weigh(self) -> None:
        """Take the gradient of that loss from the last stage. Collective."""


class AdapterSwitch(Protocol):
    """Reads and sets which adapters of a model are on."""

    def read(self) -> object:
        """Return which adapters are on."""

    def as_in(self, state: Any) -> AbstractContextManager[None]:
        """Switch adapters, inside the `with`, as they were when `state` was read."""

    def set_in(self, root: nn.Module, state: Any) -> None:
        """Switch the adapters of modules that the model does not show."""


@dataclass
class PipelineServices:
    """The services of one pipeline.

    Attributes:
        loss_in_chunks: may a micro-batch's loss be computed in chunks of tokens?
        balance: starts to count what routers choose in one call of the model, if a loss can balance experts.
        adapters: the switch of the model's adapters, if it has any.
        scale_loss: multiplies a loss by the factor that fp16 needs.
        lowered_dtype: returns the dtype of weights that data ranks gather, or None.
        before_run: called before each run with whether it trains and the shape of its tokens.
        begin_held_run: starts a run whose gradients wait for the step's last one; None if the step has no other.
        reduce_stages: reduces gradients of this rank's stages that no backward pass has reduced over data ranks.
        gradients_scaled: called in the backward pass of a run's loss with the factor of its gradients.
    """

    loss_in_chunks: bool = False
    balance: Callable[[], CallBalance] | None = None
    adapters: AdapterSwitch | None = None
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    lowered_dtype: Callable[[], torch.dtype | None] = lambda: None
    before_run: Callable[[bool, torch.Size], None] = lambda training, tokens: None
    begin_held_run: Callable[[], HeldRun | None] = lambda: None
    reduce_stages: Callable[[], None] = lambda: None
    gradients_scaled: Callable[[torch.Tensor | None], None] = lambda scale: None


class PipelinedModel(Protocol):
    """A pipeline engine, as the other axes see it while a layout is applied."""

    config: ParallelConfig
    stages: nn.ModuleList
    last_rank: int

    def attach(self) -> None:
        """Put the engine behind `model.forward`."""


Facts = TypeVar("Facts")  # what an axis reads of a model
Part = TypeVar("Part")  # what an axis will do: its part of the plan


class Axis(Generic[Facts, Part]):
    """An axis. Each method has a neutral default; none but `apply` and `finish` changes anything.

    `read` and `resolve` raise SpecError; `apply` and `finish` never do.
    """

    name: ClassVar[str]
    inside: ClassVar[bool] = False  # does it cut a model inside, so that it must be one of transformers?
    key: ClassVar[str | None] = None  # of the config, where it is not the number of the axis' ranks
    off: ClassVar[object] = 1  # the value of the key with which the axis does nothing
    always_on: ClassVar[bool] = False  # does it do something under any config?

    def is_on(self, config: ParallelConfig) -> bool:
        """Return whether the axis does anything under this config."""
        return self.always_on or getattr(config, self.key or f"{self.name}_size", self.off) != self.off

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> Facts | None:
        """Read from a model, without changing it, what the axis needs to know."""
        return None

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: Facts) -> Part | None:
        """Decide what the axis will do to a model with these facts."""
        return None

    def settle(self, config: ParallelConfig, part: Part | None) -> ParallelConfig:
        """Return the config with the values that it left to the axis."""
        return config

    def notes(self, part: Part) -> list[str]:
        """Return lines for the start-up report."""
        return []

    def apply(self, model: nn.Module, part: Part, building: Building) -> None:
        """Change the model as `part` says."""

    def finish(self, model: nn.Module, part: Part, building: Building) -> None:
        """Change what has to come after every axis has been applied."""


@dataclass(frozen=True)
class Plan:
    """Everything that will be done to a model.

    Attributes:
        config: all sizes are numbers, and the schedule is chosen.
        axes: all axes, in the order in which they are applied.
        parts: what each axis that is on will do, by its name.
        problems: the reasons why it cannot be done; a plan that `resolve` returned has none.
    """

    config: ParallelConfig
    anatomy: Anatomy
    axes: tuple[Axis, ...]
    parts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def part(self, axis: Axis[Any, Part]) -> Part | None:
        """Return what this axis will do, or None if it is off."""
        return self.parts.get(axis.name)


@dataclass(eq=False)
class SequenceParallelFlag:
    """A flag for sequence parallelism that all modules of a model share. It is off while the model generates.

    `padding`: the tokens of each sequence in the latest forward pass, and the number of tokens that pad it.
    """

    on: bool
    padding: tuple[int, int] = (0, 0)


class Packing(Protocol):
    """Gives a model weights of another kind, between splitting and sharding."""

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Raise a SpecError for what cannot be packed. Do not change the model."""

    def __call__(self, model: PreTrainedModel) -> None:
        """Pack the weights of the split model."""


@dataclass
class Building:
    """A model under construction: what each axis leaves for the next."""

    mesh: ParallelMesh
    on_meta: bool  # the weights come later
    roots: list[tuple[nn.Module, list[nn.Module]]]  # what runs layers, and the layers: the model, or each stage
    pack: Packing | None = None
    sequence_flag: SequenceParallelFlag | None = None
    local_length: Callable[[int], int] | None = None  # tokens of a row -> those of it that a cp rank holds
    #: Router logits [rows, own tokens, experts] of a batch -> those of all its tokens, one axis after another.
    whole_tokens: list[Callable[[torch.Tensor, Batch], torch.Tensor]] = field(default_factory=list)
    services: PipelineServices = field(default_factory=PipelineServices)  # what a pipeline engine is given
    pipeline: PipelinedModel | None = None
