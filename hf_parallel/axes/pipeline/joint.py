"""The batches of one optimizer step in one run of the schedule: gradient accumulation without flushes in between.

Whoever knows all batches of a step announces its calls of the model first. The first real call then runs the
micro-batches of all of them, and each call returns its own loss. The last one hands the gradients over.

    announced      batches 1, 2 and 3: cut, counted, nothing computed
    call 1         schedule over the micro-batches of 1, 2 and 3    -> loss of batch 1
    call 2                                                          -> loss of batch 2
    call 3                                                          -> loss of batch 3; its backward: the gradients

With m micro-batches per call on p ranks, a step of n calls is busy for n m / (n m + p - 1) of its time, not for
m / (m + p - 1). As many micro-batches are alive at once as in a run of one batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_parallel.model.known_masks import KnownMask, get_known_mask, use_known_mask

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.stages import StageView

#: One micro-batch on one stage, from what arrived there: what leaves it, on the last stage the loss.
Run = Callable[["StageView", "torch.Tensor | None", int], torch.Tensor]
Fresh = list[tuple[torch.nn.Parameter, torch.Tensor | None]]


@dataclass
class ScheduledCall:
    """A training call of the model.

    Attributes:
        count: of its micro-batches.
        tokens: the shape of the tokens of one of them.
        boundary: what travels between stages for one of them, on the meta device.
        run: computes one of them on one stage.
        known: what is known of the batch's mask.
    """

    count: int
    tokens: torch.Size
    boundary: torch.Tensor
    run: Run
    known: KnownMask | None = field(default_factory=get_known_mask)


class Parts:
    """The micro-batches of several calls, in order."""

    def __init__(self, calls: list[ScheduledCall]) -> None:
        self.calls = calls
        self.places = [(call, i) for call in calls for i in range(call.count)]
        self.boundaries = [call.boundary for call, _ in self.places]  # what travels between stages

    def __len__(self) -> int:
        return len(self.places)

    def around(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a micro-batch is computed."""
        return use_known_mask(self.places[micro_batch][0].known)

    def run(self, view: StageView, hidden: torch.Tensor | None, micro_batch: int) -> torch.Tensor:
        """Compute a micro-batch on one stage."""
        call, own = self.places[micro_batch]
        return call.run(view, hidden, own)

    def losses(self, of_parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the loss of each call, from those of all micro-batches; zeros on ranks that compute none."""
        if not of_parts:
            return torch.zeros(len(self.calls), device=device)
        parts = torch.stack([part.detach().float() for part in of_parts])
        return torch.stack([own.sum() for own in parts.split([call.count for call in self.calls])])


@dataclass
class Ran:
    """The results of a run of the schedule.

    Attributes:
        losses: of each call.
        fresh: gradients of all calls.
        scale: by which fp16 has multiplied the losses; None without it.
    """

    losses: list[torch.Tensor]
    fresh: Fresh
    scale: torch.Tensor | None


@dataclass(eq=False)
class JointStep:
    """The calls of the optimizer step in progress that have not come yet; the first one runs all of them."""

    calls: list[ScheduledCall]
    run: Callable[[list[ScheduledCall]], Ran]
    ran: Ran | None = None
