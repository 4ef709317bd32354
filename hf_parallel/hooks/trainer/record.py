"""What is remembered with a Trainer: all of it at one attribute, `trainer._hf_parallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_parallel.axes.pipeline.script_loss import Plan
    from hf_parallel.hooks.trainer.checkpoints import UnfinishedSave
    from hf_parallel.hooks.trainer.deal import Dealing
    from hf_parallel.monitor.profile import Profile

_PLACE = "_hf_parallel"


@dataclass
class StepRecord:
    """The batch whose loss is being computed, in training or in evaluation.

    Attributes:
        real_rows: how many of this rank's rows are not repeated; None away from the end of a loader.
        share: how much the mean over them weighs in the data ranks' average.
        weighted: has `compute_loss` given the loss its weight?
        logged: what the script's loss logs on the last stage, for all stages to log later.
        generated: real rows of each data rank's generated batch (GRPO, RLOO); None if none is repeated.
    """

    real_rows: int | None = None
    share: float = 1.0
    weighted: bool = False
    logged: list[dict[str, object]] = field(default_factory=list)
    generated: list[int] | None = None


@dataclass
class TrainerRecord:
    """What holds for all steps, and the one in progress.

    Attributes:
        step: the step in progress; outside of steps one without repeated rows.
        rows_per_example: as the last full batch told, such as two in a batch of [chosen; rejected].
        loss_plans: the entries of a batch -> how the script's loss is scheduled; None if it needs whole batches.
        weighs: does the script weigh means by the count of targets itself? None: not seen yet.
        told_unknown: has it been said that the script's loss is taken for a mean over rows?
        told_unreached: has it been said that steps of `profile_steps` come after the end?
        told_to_differ: metrics and wishes of callbacks of which it has been said that ranks differ.
        drawn_steps: those of `profile_steps` whose timeline is drawn.
        profile: of the step in progress, if it is one of them.
        upcoming: rows of the generation batch after this one, whose completions are drawn ahead (GRPO).
        run: the name of the run that the output folder belongs to.
        unfinished_save: the checkpoint that is being written in the background.
        dealing: how examples are dealt by tokens; None: by rows.
        resumed_from: the checkpoint that the training goes on from.
    """

    step: StepRecord = field(default_factory=StepRecord)
    rows_per_example: int = 1
    loss_plans: dict[tuple[str, ...], Plan | None] = field(default_factory=dict)
    weighs: bool | None = None
    told_unknown: bool = False
    told_unreached: bool = False
    told_to_differ: set[str] = field(default_factory=set)
    drawn_steps: set[int] = field(default_factory=set)
    profile: Profile | None = None
    upcoming: list[dict[str, object]] | None = None
    run: str | None = None
    unfinished_save: UnfinishedSave | None = None
    dealing: Dealing | None = None
    resumed_from: str | None = None

    @contextlib.contextmanager
    def during(self, step: StepRecord) -> Iterator[StepRecord]:
        """In here this is the step in progress."""
        former, self.step = self.step, step
        try:
            yield step
        finally:
            self.step = former

    def take_unfinished_save(self) -> UnfinishedSave | None:
        """The save to wait for, which is nobody else's from now on."""
        taken, self.unfinished_save = self.unfinished_save, None
        return taken


def record_of(trainer: Trainer) -> TrainerRecord:
    """The trainer's record, made when it is first asked for."""
    if _PLACE not in vars(trainer):
        vars(trainer)[_PLACE] = TrainerRecord()
    return vars(trainer)[_PLACE]
