"""The last batch of a loader, which accelerate fills with repeated rows: what a Trainer is given in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.data import is_ragged, real_rows, refuse_cut_examples, share_of_rows
from hf_parallel.hooks.trainer import losses, rows
from hf_parallel.hooks.trainer.record import StepRecord, record_of
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import Trainer


class LastBatch(dict):
    """The last batch of a loader, a dict like others to a script.

    Attributes:
        real_rows: of this rank, those that are not repeated; None if nothing was left out, as in a copy.
        share: how much the mean over them weighs in the data ranks' average.
    """

    real_rows: int | None = None
    share = 1.0


def opened(batch: dict) -> tuple[dict, StepRecord]:
    """The batch as it was, and what is known of its rows."""
    if not isinstance(batch, LastBatch):
        return batch, StepRecord()
    return dict(batch), StepRecord(batch.real_rows, batch.share)


def without_repeats(trainer: Trainer, batches: Iterator) -> Iterator:
    """The batches to train on, the last one without the rows that fill it."""
    for batch in batches:
        full = trainer._train_batch_size
        batch = told_apart(trainer, batch, full)
        blocks = rows_per_example(trainer, batch, full)
        count = rows.count(batch, blocks)
        if count is not None and trainer.accelerator.gradient_state.end_of_dataloader:
            yield _last(trainer, batch, count, blocks)
        else:
            yield rows.opened(batch)


def _last(trainer: Trainer, batch: rows.Batch, count: int, blocks: int) -> LastBatch:
    state = trainer.accelerator.gradient_state
    real, whole = real_rows(state, count), must_be_whole(trainer, batch, count * blocks)
    # Data ranks with fewer rows would take another way through a pipeline than the rest: keep the shape there.
    # Its schedule reduces gradients before the loss is multiplied by anything, so that none may be needed.
    keep = whole or (_runs_scheduled(trainer, batch) and rows.JOINED not in batch)
    kept = rows.without_targets(batch, real, count) if keep else rows.trim(batch, real, count, blocks)
    last = LastBatch(rows.opened(kept))
    last.real_rows, last.share = real, 1.0 if keep else share_of_rows(state, count)
    return last


def must_be_whole(trainer: Trainer, batch: rows.Batch, held: int) -> bool:
    """Does some data rank have a batch with parts that no row tells apart? Repeated rows can only lose their targets.

    Ranks that went by their own batch would weigh it differently. Collective over the data ranks, where the batch is
    ragged; so once per epoch, and per evaluation.

    Args:
        held: number of rows of this rank's batch.

    Raises:
        SpecError: on all ranks, where the loss does not go by targets, and would count repeated rows.
    """
    if not is_ragged(trainer.accelerator.gradient_state):
        return False
    mesh, key = runtime.mesh(), rows.not_by_row(batch, held)
    found = torch.tensor([key is not None, "labels" not in batch], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.data_group)
    somewhere, without_labels = found.tolist()
    if not somewhere:
        return False
    state = runtime.parallel_state(trainer.model)
    if state is None or not state.sums_over_tokens or losses.is_own(trainer) or without_labels:
        what = f"a ragged last batch with images or sounds that are not one per row ({key or 'on another rank'})"
        refuse(what, "repeated rows cannot be told apart, and this loss counts them", "dataloader_drop_last=True")
    return True


def _runs_scheduled(trainer: Trainer, batch: rows.Batch) -> bool:
    """A row without targets still counts in the loss that balances experts, whose batches are not scheduled."""
    state = runtime.parallel_state(trainer.model)
    if state is None or state.pipeline is None or state.pipeline.balance_of(dict(batch)) is not None:
        return False
    return state.sums_over_tokens and not losses.is_own(trainer)


def told_apart(trainer: Trainer, batch: rows.Batch, full: int) -> rows.Batch:
    """Whose a token is, in a ragged last batch whose examples a collator has joined to one row."""
    if not is_ragged(trainer.accelerator.gradient_state):
        return batch
    told = rows.told_apart(batch, full)
    if rows.JOINED not in told and rows.count(told) == 1 < full:
        report.say(
            "the last batch joins examples to one row without saying where they begin, so that those repeated to fill "
            "it count twice; position_ids that begin anew, or dataloader_drop_last=True, work"
        )
    return told


def rows_per_example(trainer: Trainer, batch: rows.Batch, full: int) -> int:
    """How many rows an example has, such as two in a batch of [chosen; rejected]; batches of `full` examples tell.

    Also of a data set that is less than one batch: it is repeated until the batch is full, where rows are shared out.
    """
    record, known = record_of(trainer), trl.rows_per_example(trainer)
    held = rows.count(batch) or full
    if known is None and held % full == 0:
        record.rows_per_example = held // full
    blocks = record.rows_per_example if known is None else known
    if blocks > 1 or held > full:
        refuse_cut_examples(trainer.accelerator.gradient_state.active_dataloader)
    return blocks if held % blocks == 0 else 1
