"""Evaluation: the numbers that one process would give, also where the last batch is ragged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hf_parallel.hooks import hangs, runtime
from hf_parallel.hooks.accelerate.data import is_ragged, real_rows, replacing, share_of_rows
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer import means, ragged, rows
from hf_parallel.hooks.trainer.record import StepRecord, record_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

T = TypeVar("T")


@patch("transformers.trainer:Trainer.evaluation_loop", "weighs batches that are split over ranks by whole ones")
def evaluation_loop(original: Callable, self: Trainer, *args: object, **kwargs: object) -> object:
    """With split_batches=True a data rank has a part of `per_device_eval_batch_size` examples, whose loss counts."""
    split, sizes = self.args.accelerator_config.split_batches, {}
    if split and runtime.mesh().data_size > 1:
        sizes["per_device_eval_batch_size"] = self.args.per_device_eval_batch_size // runtime.mesh().data_size
    with replacing(self.args, **sizes):
        return original(self, *args, **kwargs)


def prediction_step(
    self: Trainer,
    original: Callable,
    model: PreTrainedModel,
    inputs: dict,
    prediction_loss_only: bool,
    *args: object,
    **kwargs: object,
) -> object:
    """Evaluate only real rows of a ragged last batch, whatever it is that the script does with them."""
    hangs.mark("evaluation")
    runtime.compare_batches(model, inputs, "evaluation")
    batch = ragged.told_apart(self, inputs, self.args.eval_batch_size)
    blocks = ragged.rows_per_example(self, batch, self.args.eval_batch_size)
    count = rows.count(batch, blocks) or 0
    step = _step(self, count)
    real = count if step.real_rows is None else step.real_rows
    kept = rows.opened(_real(self, batch, real, count, blocks))
    with record_of(self).during(step), _computing(model, step, prediction_loss_only):
        loss, logits, labels = original(model, kept, prediction_loss_only, *args, **kwargs)
    if loss is not None and runtime.mesh().data_size > 1:
        loss = _mean_over_data_ranks(loss if step.weighted else means.weighted(loss, step.share))
    if step.real_rows is not None:
        logits, labels = _rows_to_gather(self, (logits, labels), real, count, rows.JOINED in batch)
    _inputs_to_gather(self, inputs, kept, step.real_rows)
    hangs.mark("evaluation", may_take_long=True)  # its metrics
    return loss, logits, labels


def _real(trainer: Trainer, batch: rows.Batch, real: int, count: int, blocks: int) -> rows.Batch:
    """The batch with its real examples alone, or with targets in these alone where no row tells its parts apart."""
    whole = ragged.must_be_whole(trainer, batch, count * blocks)  # all ranks ask, also those without repeated rows
    if real == count:
        return batch
    return rows.without_targets(batch, real, count) if whole else rows.trim(batch, real, count, blocks)


def _step(trainer: Trainer, count: int) -> StepRecord:
    """Of a batch of so many examples; 0 where they cannot be counted."""
    state = trainer.accelerator.gradient_state
    ragged_here = count > 0 and is_ragged(state)
    return StepRecord(real_rows(state, count), share_of_rows(state, count)) if ragged_here else StepRecord()


@contextlib.contextmanager
def _computing(model: PreTrainedModel, step: StepRecord, loss_only: bool) -> Iterator[None]:
    """A rank without a row of its own is absent, and a pipeline need not send logits that nobody wants."""
    state = runtime.parallel_state(model)
    engine = None if state is None else state.pipeline
    without_logits = contextlib.nullcontext() if engine is None else replacing(engine, loss_only=loss_only)
    with without_logits, means.computing(means.Scope(step.share)), runtime.absent(step.real_rows == 0):
        yield


def _rows_to_gather(trainer: Trainer, outputs: T, real: int, count: int, joined: bool) -> T:
    """Full again where `gather_for_metrics` drops the repeats; Seq2SeqTrainer gathers all there is."""
    if joined or trainer.gather_function == trainer.accelerator.gather:
        return rows.without_stand_in(outputs, real)
    return rows.fill(outputs, count)


def _inputs_to_gather(trainer: Trainer, inputs: dict, kept: rows.Batch, real: int | None) -> None:
    """`evaluation_loop` goes on with the batch that it gave: metrics see the real rows, those of all ranks."""
    if "inputs" not in trainer.args.include_for_metrics or runtime.mesh().data_size == 1:
        return
    if real is not None:
        inputs.update(rows.without_stand_in(dict(kept), real))
    if trainer.args.batch_eval_metrics:  # else the loop gathers them itself
        accelerator = trainer.accelerator
        for key, value in inputs.items():
            if torch.is_tensor(value) and value.ndim:
                inputs[key] = accelerator.gather(accelerator.pad_across_processes(value, dim=1, pad_index=-100))


def _mean_over_data_ranks(loss: torch.Tensor) -> torch.Tensor:
    """evaluation_loop repeats the loss for each row and cuts at the remainder: right if all ranks carry the mean."""
    total = loss.detach().float().clone()
    dist.all_reduce(total, group=runtime.mesh().data_group)
    return total / runtime.mesh().data_size
