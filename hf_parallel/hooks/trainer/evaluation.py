"""Evaluation: the numbers that one process would give, also where the last batch is ragged."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy
import torch
import torch.distributed as dist
from transformers import Seq2SeqTrainer, Trainer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.gathered_once import keep_gathered
from hf_parallel.axes.data.zero import separate_dtypes_at_first
from hf_parallel.hooks import hangs, report, runtime
from hf_parallel.hooks.accelerate.data import count_sharing_ranks, refuse_cut_examples
from hf_parallel.hooks.accelerate.shares import (
    OneLoader,
    compute_full_share,
    count_real_rows,
    cut_of,
    is_ragged,
    share_of_rows,
    take_batch,
    weigh_loss,
)
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.trainer import losses, means, own_means, rows
from hf_parallel.hooks.trainer.checkpoints import StepRecord, record_of
from hf_parallel.hooks.trl import experimental
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import messages
from hf_parallel.ranks.nested_batches import open_batches

if TYPE_CHECKING:
    from accelerate.state import GradientState
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel


_UNCOUNTED = (
    "the last batch is filled with repeated examples, which count twice, as under DDP, because it does not tell how "
    "many it has; dataloader_drop_last=True works"
)


#: Examples whose rows are looked at: those of one example may be alike.
_EXAMPLES_ASKED = 16


# ---- Batches that a data rank must weigh: the last one of a loader, which accelerate fills with repeated rows, and
# all of `batch_shares`


class Weighed:
    """A batch of which data ranks have unlike numbers of rows.

    Attributes:
        real_rows: the number of this rank's rows that are not repeated; None if none was left out, as in a copy.
        share: how much the mean over them weighs in the data ranks' average.
        examples: their number in this rank's part, where it is a single row.
    """

    real_rows: int | None = None
    share = 1.0
    examples: int | None = None


class WeighedBatch(Weighed, dict):
    """A weighed batch that a script can use as a dict."""


class WeighedParts(Weighed, list):
    """A weighed batch that is a sequence of tensors or of batches."""


def describe_batch(batch: Any) -> StepRecord:
    """Return what is known of the rows of a batch to train on."""
    return StepRecord(batch.real_rows, batch.share) if isinstance(batch, Weighed) else StepRecord()


def without_repeats(trainer: Trainer, batches: Iterator) -> Iterator:
    """Yield the batches to train on, the last one without the rows that fill it."""
    config = runtime.mesh().config
    for given, state in _read_with_loader(trainer, batches):
        take_batch(state)
        opened, close = open_batches(given)
        batch, blocks = tell_examples_apart(trainer, opened, trainer._train_batch_size, state)
        count = rows.count_examples(batch, blocks)
        if count is None and is_ragged(state):
            report.say(_UNCOUNTED)
        ends = count is not None and state.end_of_dataloader
        if count is not None and ends and (is_ragged(state) or cut_of(state) is None):
            real, whole = count_real_rows(state, count), must_be_whole(trainer, batch, count * blocks, state)
            # Data ranks with fewer rows would take another way through a pipeline than the rest: keep the shape there.
            # Its schedule reduces gradients before the loss is multiplied by anything, so that none may be needed.
            keep = whole or (_should_run_scheduled(trainer, batch) and rows.JOINED not in batch)
            turns = record_of(trainer).in_turns
            if keep:
                kept = rows.without_targets(batch, real, count, turns)
            else:
                kept = rows.trim(batch, real, count, blocks, turns)
            taken = dict(rows.open_batch(kept))
            last = close(taken if real else rows.with_tokens_for_decoder(taken, trainer.model))
            last = WeighedBatch(last) if isinstance(last, Mapping) else WeighedParts(last)
            last.real_rows, last.share = real, 1.0 if keep else share_of_rows(state, count)
            yield last
        elif ends or (config.shares_batches and not config.pack_tokens):
            # A full batch, of which data ranks have unlike parts. A schedule reduces gradients before the loss is
            # multiplied by anything; its losses are sums, which need no weight.
            what, cut = f"batch_shares={config.batch_shares}", cut_of(state)
            if cut is None:
                why = "the script's training loader is not one that accelerate shares out"
                refuse(what, why, "batch_shares=even")
            if not isinstance(given, Mapping):
                why = f"the rows of a batch that is a {type(batch).__name__} cannot be weighed"
                refuse(what, why, "batch_shares=even")
            weighed = WeighedBatch(close(rows.open_batch(batch)))
            weighed.share = 1.0 if _should_run_scheduled(trainer, batch) else compute_full_share(state)
            weighed.examples = cut[runtime.mesh().data_rank] if rows.count_examples(batch) == 1 else None
            yield weighed
        else:
            yield given if opened is not given else rows.open_batch(batch)


def _read_with_loader(trainer: Trainer, batches: Iterator) -> Iterator[tuple[Any, OneLoader]]:
    """Yield the batches of a pass, each with the state of their own loader: a script may read others meanwhile."""
    record, dealt = record_of(trainer), trainer.accelerator.gradient_state
    while True:
        former = len(dealt.dataloader_references)
        try:
            given = next(batches)
        except StopIteration:
            return
        if record.reads is not batches:  # its first batch: accelerate has begun its loader, if it is one of its own
            begins = len(dealt.dataloader_references) > former
            record.reads, record.loader = batches, dealt.active_dataloader if begins else None
        yield given, OneLoader(record.loader)


def must_be_whole(trainer: Trainer, batch: rows.Batch, held: int, dealt: GradientState | OneLoader) -> bool:
    """Return whether some data rank has a batch with parts that no row tells apart, so that rows only lose targets.

    Ranks that went by their own batch would weigh it differently. Collective over the data ranks, where the batch is
    ragged; so once per epoch, and per evaluation.

    Args:
        held: number of rows of this rank's batch.
        dealt: the state of its loader.

    Raises:
        SpecError: on all ranks, where the loss does not go by targets, and would count repeated rows, or where
            examples have unlike numbers of rows.
    """
    if not is_ragged(dealt):
        return False
    mesh, media = runtime.mesh(), [key for key in batch if str(key).startswith(rows.MEDIA)]
    # Pictures or sounds that hold no entry per row, such as the patches of all images: which of them belong to an
    # example only the model's processor knows, so that such a batch cannot be trimmed.
    tensors = {key: batch[key] for key in media if torch.is_tensor(batch[key]) and batch[key].ndim}
    key = next((key for key, value in tensors.items() if len(value) != held), None)
    vary = record_of(trainer).rows_vary
    found = torch.tensor([key is not None, "labels" not in batch, vary], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.data_group)
    somewhere, without_labels, vary = found.tolist()
    if vary:
        what = "a ragged last batch of examples that have unlike numbers of rows"
        refuse(what, "those repeated to fill it cannot be told apart", "dataloader_drop_last=True")
    if not somewhere:
        return False
    state = runtime.find_parallel_state(trainer.model)
    if state is None or not state.sums_over_tokens or losses.is_own(trainer) or without_labels:
        what = f"a ragged last batch with images or sounds that are not one per row ({key or 'on another rank'})"
        refuse(what, "repeated rows cannot be told apart, and this loss counts them", "dataloader_drop_last=True")
    return True


def _should_run_scheduled(trainer: Trainer, batch: rows.Batch) -> bool:
    """Return whether a batch is scheduled: not where a row without targets counts in a loss that balances experts."""
    state = runtime.find_parallel_state(trainer.model)
    if state is None or state.pipeline is None or state.pipeline.balance_of(dict(batch)) is not None:
        return False
    return state.sums_over_tokens and not losses.is_own(trainer)


def tell_examples_apart(
    trainer: Trainer, batch: rows.Batch, each: int, state: GradientState | OneLoader
) -> tuple[rows.Batch, int]:
    """Return the batch, and how many rows an example has, such as two of [chosen; rejected].

    A ragged last batch whose examples a collator has joined to one row then says whose a token is. Full batches tell
    how many rows an example has, also those of a data set that is less than one batch: it is repeated until the batch
    is full, where rows are shared out.

    Args:
        each: examples of a full batch on each data rank, without `batch_shares`.
        state: that of its loader.
    """
    cut = cut_of(state)
    full = each if cut is None else cut[runtime.mesh().data_rank]
    if is_ragged(state):
        batch = rows.tell_rows_apart(batch, full)
        if rows.JOINED not in batch and rows.count_examples(batch) == 1 < full:
            report.say(
                "the last batch joins examples to one row without saying where they begin, so that those repeated to "
                "fill it count twice; position_ids that begin anew, or dataloader_drop_last=True, work"
            )
    record, known = record_of(trainer), trl.count_trl_rows_per_example(trainer)
    held = rows.count_examples(batch) or full
    if known is None and held % full == 0:
        record.rows_per_example = held // full
    blocks = record.rows_per_example if known is None else known
    if blocks > 1 or held > full:
        refuse_cut_examples(count_sharing_ranks(state.active_dataloader))
    if blocks > 1 and known is None and is_ragged(state):
        record.in_turns = _are_rows_in_turns(state.active_dataloader, blocks)
    if is_ragged(state):
        unlike = held != full and known is None and rows.JOINED not in batch
        record.rows_vary = unlike and _do_rows_vary(state.active_dataloader)
    return batch, blocks if held % blocks == 0 else 1


def _do_rows_vary(dataloader: DataLoader) -> bool:
    """Ask the collator of a loader whether some examples have more rows than others, such as answers to a question."""
    numpy_state, python_state = numpy.random.get_state(), random.getstate()
    dataset = cast(Any, dataloader.dataset)
    with runtime.mesh().fork_random_state(), contextlib.suppress(Exception):  # it may take whole batches alone
        try:
            examples = (copy.deepcopy(dataset[index]) for index in range(min(_EXAMPLES_ASKED, len(dataset))))
            batches = [open_batches(dataloader.collate_fn([example]))[0] for example in examples]
            return len({rows.count_examples(batch) for batch in batches}) > 1
        finally:
            numpy.random.set_state(numpy_state)
            random.setstate(python_state)
    return False


def _are_rows_in_turns(dataloader: DataLoader, each: int) -> bool:
    """Ask the collator of a loader how it orders the rows of its examples, with the first that tells."""
    numpy_state, python_state = numpy.random.get_state(), random.getstate()
    with runtime.mesh().fork_random_state():
        try:
            for index in range(min(_EXAMPLES_ASKED, len(cast(Any, dataloader.dataset)))):
                found = rows.are_in_turns(dataloader.collate_fn, dataloader.dataset[index], each)
                if found is not None:
                    return found
        except Exception as error:  # a collator may take whole batches alone
            report.say(
                f"the last batch is filled with repeated examples of {each} rows each, and its collator does not take "
                f"one example to tell how it orders them ({type(error).__name__}: {error}): taken for "
                "[all first rows; all second rows]; dataloader_drop_last=True works in any order"
            )
        finally:
            numpy.random.set_state(numpy_state)
            random.setstate(python_state)
    return False


#: Libraries whose steps and callbacks change no weights while a model is evaluated.
_LIBRARIES = {"transformers", "trl", "accelerate", "sentence_transformers", "hf_parallel"}


@patch("transformers.trainer:Trainer.evaluation_loop", "weighs batches that are split over ranks by whole ones")
def evaluation_loop(original: Callable, self: Trainer, *args: object, **kwargs: object) -> object:
    """With split_batches=True a data rank has a part of `per_device_eval_batch_size` examples, whose loss counts.

    A loss and a `prediction_step` that a script has assigned to its trainer by now are used.
    """
    losses.follow_assigned_loss(self)
    assigned = vars(self).get("prediction_step")
    if assigned is not None and getattr(assigned, "func", None) is not evaluate_real_rows:
        vars(self)["prediction_step"] = functools.partial(evaluate_real_rows, self, assigned)
    split, sizes = self.args.accelerator_config.split_batches, {}
    if split and runtime.mesh().data_size > 1:
        sizes["per_device_eval_batch_size"] = self.args.per_device_eval_batch_size // runtime.mesh().data_size
    loader = bind_by_name(original, (self, *args), kwargs).get("dataloader")
    with replacing(self.args, **sizes), replacing(record_of(self), eval_loader=loader), _keep_weights_gathered(self):
        return original(self, *args, **kwargs)


def _keep_weights_gathered(trainer: Trainer) -> contextlib.AbstractContextManager:
    """Gather weights once in an evaluation if each rank holds whole ones in training.

    A script's own step or callback may put averages in their place for some batches: then for each batch.
    """
    state, kind = runtime.find_parallel_state(trainer.model), type(trainer)
    called = [kind.prediction_step, kind.compute_loss, *vars(trainer).values()]
    called += [type(callback).on_prediction_step for callback in trainer.callback_handler.callbacks]
    places = {getattr(inspect.unwrap(one), "__module__", "") for one in called if isinstance(one, types.FunctionType)}
    own = {place.partition(".")[0] for place in places} - _LIBRARIES
    casts = trainer.args.bf16_full_eval or trainer.args.fp16_full_eval
    if own or casts or state is None or state.pipeline is not None or state.config.zero_stage not in (1, 2):
        return contextlib.nullcontext()
    separate_dtypes_at_first(state.root)
    return keep_gathered(state.root, state.mesh)


def evaluate_real_rows(
    self: Trainer,
    original: Callable,
    model: PreTrainedModel,
    inputs: dict,
    prediction_loss_only: bool,
    *args: object,
    **kwargs: object,
) -> object:
    """Evaluate only real rows of a ragged last batch, whatever the script does with them."""
    if record_of(self).evaluates:  # an assigned `prediction_step` calls the one that it has replaced
        return original(model, inputs, prediction_loss_only, *args, **kwargs)
    hangs.mark_phase("evaluation")
    cast(runtime.Runtime, runtime.current()).loop.last = None  # repeated rows are left out here
    runtime.compare_batches(model, inputs, "evaluation")
    opened, close = open_batches(inputs)
    dealt, step = _get_state_of_evaluation(self), StepRecord()
    batch, blocks = tell_examples_apart(self, opened, self.args.eval_batch_size, dealt)
    count = rows.count_examples(batch, blocks) or 0
    if count or not is_ragged(dealt):  # 0 where examples cannot be counted
        step = StepRecord(count_real_rows(dealt, count) if is_ragged(dealt) else None, share_of_rows(dealt, count))
    own_step = getattr(original, "__func__", None) in (Trainer.prediction_step, Seq2SeqTrainer.prediction_step)
    step.loss_only = prediction_loss_only and own_step  # a script's own may read logits for numbers of its own
    real = count if step.real_rows is None else step.real_rows
    kept = rows.open_batch(_select_real_examples(self, batch, real, count, blocks))
    parallel = runtime.find_parallel_state(model)
    engine = None if parallel is None else parallel.pipeline
    # A pipeline need not send logits that nobody wants, and a rank without a row of its own is absent.
    wants = contextlib.nullcontext() if engine is None else replacing(engine, loss_only=step.loss_only)
    scope = means.Scope(step.share, predicts=True, corrects=experimental.adds_mean_over_tokens(self))
    absent = replacing(runtime.current(), real_rows=step.real_rows)
    following: Any = contextlib.nullcontext()
    if step.real_rows is not None and not own_step:
        step.own = following = rows.OfBatch([value for value in kept.values() if torch.is_tensor(value)])
    with (
        replacing(record_of(self), step=step, evaluates=True),
        wants,
        means.compute_in_scope(scope),
        absent,
        following,
    ):
        targets = None if own_step else own_means.count_targets_of_own_mean(self, kept)  # of its mean in training
        loss, logits, labels = original(model, close(kept), prediction_loss_only, *args, **kwargs)
        share: torch.Tensor | float = 1.0 if step.weighted else step.share
        if targets is not None and loss is not None and not (step.weighted or scope.counted):
            share = own_means.compute_share(self, targets)
    logits, labels = rows.mark_per_example((logits, labels), rows.count_examples(kept, blocks) or 0)
    if not prediction_loss_only:
        logits = _give_as_many_parts(self, logits)
    gathers_all = self.gather_function == self.accelerator.gather  # as Seq2SeqTrainer does
    if loss is not None:
        loss = _average_loss(self, loss, share, gathers_all)
    if step.real_rows is not None:  # full again where `gather_for_metrics` drops the repeats
        if rows.JOINED in batch or gathers_all:
            logits, labels = rows.without_stand_in((logits, labels), real)
        else:
            logits, labels = rows.fill_rows((logits, labels), real, count)
    _refill_inputs_to_gather(self, inputs, kept, step.real_rows)
    hangs.mark_phase("evaluation", may_take_long=True)  # its metrics
    return loss, logits, labels


def _get_state_of_evaluation(trainer: Trainer) -> GradientState | OneLoader:
    """Return the state of the loader that is evaluated: a script's step may have begun another one since."""
    dealt, loader = trainer.accelerator.gradient_state, record_of(trainer).eval_loader
    return OneLoader(loader) if any(one is loader for one in dealt.dataloader_references) else dealt


def _give_as_many_parts(trainer: Trainer, logits: Any) -> Any:
    """Add empty outputs of encoders where a data rank has no images and others have, so that all gather equally many
    parts.

    The same on all ranks, whatever their batches hold: does the model read images or sounds beside words?
    """
    modalities, mesh = getattr(trainer.model, "input_modalities", "text"), runtime.mesh()
    if mesh.data_size == 1 or isinstance(modalities, str) or len(set(modalities)) == 1:
        return logits
    parts = logits if isinstance(logits, tuple) else (logits,)
    own = sum(isinstance(part, ModelOutput) for part in parts)
    most = max(messages.gather_objects(own, mesh.data_group))
    return logits if own == most else (*parts, *(BaseModelOutput() for _ in range(most - own)))


def _average_loss(
    trainer: Trainer, loss: torch.Tensor, share: torch.Tensor | float, gathers_all: bool
) -> torch.Tensor:
    """Return the mean over all data ranks' rows, and let `evaluation_loop` count it for as many as in one process."""
    mesh, dealt = runtime.mesh(), trainer.accelerator.gradient_state
    if mesh.data_size > 1:
        # evaluation_loop repeats the loss for each row and cuts at the remainder: right if all ranks carry the mean.
        loss = weigh_loss(loss, share).detach().float().clone()
        dist.all_reduce(loss, group=mesh.data_group)
        loss = loss / mesh.data_size
    loader = dealt.active_dataloader
    cut = getattr(loader, "remainder_by_length", dealt.remainder)
    if cut == -1 and hasattr(loader, "slice_fn"):  # one process too learns a stream's length where rank 0 reads it
        cut = dealt.remainder
    gather, own = trainer.gather_function, _get_state_of_evaluation(trainer).active_dataloader
    if loader is not own and not gathers_all:
        # One process cuts losses by the loader that was begun last, also by one that a script's step has begun.
        gather = (
            gather
            if getattr(gather, "func", None) is _gather_rows
            else functools.partial(_gather_rows, trainer.accelerator.gradient_state, own, gather)
        )
        cut = cut if dealt.end_of_dataloader else -1
        trainer.gather_function = functools.partial(_gather_losses, trainer, gather, cut)
    elif dealt.end_of_dataloader and cut != dealt.remainder and not gathers_all:
        trainer.gather_function = functools.partial(_gather_losses, trainer, gather, cut)
    return loss


def _gather_rows(state: GradientState, loader: object, gather: Callable, rows_of_rank: object) -> object:
    """Gather rows of this loader's batch, and drop those that fill it, as if no other loader had been begun since."""
    former = state.dataloader_references
    state.dataloader_references = [*former, loader]
    try:
        return gather(rows_of_rank)
    finally:
        state.dataloader_references = former


def _gather_losses(trainer: Trainer, gather_rows: Callable, cut: int, losses: torch.Tensor) -> torch.Tensor:
    """Gather the loss of a last batch, repeated for each row, and cut it where one process does.

    That is at the remainder of the data set's length, also where the sampler draws more, as TRL's does for its groups;
    and not at all in a stream, whose length is -1.
    """
    trainer.gather_function = gather_rows
    gathered = trainer.accelerator.gather(losses)
    return gathered[:cut] if cut > 0 else gathered


def _select_real_examples(trainer: Trainer, batch: rows.Batch, real: int, count: int, blocks: int) -> rows.Batch:
    """Return the batch with its real examples alone, or with targets in these alone if no row tells parts apart."""
    dealt = _get_state_of_evaluation(trainer)
    whole = must_be_whole(trainer, batch, count * blocks, dealt)  # all ranks ask, also those without repeated rows
    if real == count:
        return batch
    turns = record_of(trainer).in_turns
    if whole:
        kept = rows.without_targets(batch, real, count, turns)
    else:
        kept = rows.trim(batch, real, count, blocks, turns)
    kept.pop(rows.LABELS_COUNTED, None)
    return kept if real else rows.with_tokens_for_decoder(kept, trainer.model)


def _refill_inputs_to_gather(trainer: Trainer, inputs: dict, kept: rows.Batch, real: int | None) -> None:
    """`evaluation_loop` goes on with the batch that it gave: metrics see the real rows, those of all ranks."""
    if "inputs" not in trainer.args.include_for_metrics or runtime.mesh().data_size == 1:
        return
    if real is not None:  # of the same names on every rank: a stand-in may have tokens for a decoder besides
        inputs.update({key: value for key, value in rows.without_stand_in(dict(kept), real).items() if key in inputs})
    if trainer.args.batch_eval_metrics:  # else the loop gathers them itself
        accelerator = trainer.accelerator
        for key, value in inputs.items():
            if torch.is_tensor(value) and value.ndim:
                inputs[key] = accelerator.gather(accelerator.pad_across_processes(value, dim=1, pad_index=-100))
