"""Trainer: the same numbers per step, in evaluation and on disk as one process would give."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.axes.pipeline.schedules import micro_batch_count
from hf_parallel.config import SpecError
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.accelerator import defer_reduction as deferred
from hf_parallel.hooks.accelerate.accelerator import follow_parameters, make_parallel, normalise_over_data_ranks
from hf_parallel.hooks.accelerate.data import is_ragged, real_rows, refuse_cut_examples, share_of_rows
from hf_parallel.hooks.trainer import losses, means, rows, save_callbacks
from hf_parallel.hooks.trl import trainers as trl

# ---- set-up ------------------------------------------------------------------------------------------------------


def init(original: Callable) -> Callable:
    """Make a model that was built in code parallel, and refuse settings that cannot hold, before anything trains."""

    def replacement(self: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if args is None:
            from transformers import TrainingArguments

            args = TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        trl.check(self, args, kwargs.get("eval_dataset"))
        if model is not None:
            bound = inspect.signature(original).bind_partial(self, model, args, *rest, **kwargs)
            _make_ready(model, bound.arguments.get("optimizers"))
        with _set(args, save_only_model=True):  # Trainer refuses sharded models that checkpoint; our save handles them
            original(self, model, args, *rest, **kwargs)
        self.is_distributed_loading_by_transformers = True
        self._mixed_mesh_grads = False  # one path for all norms: Accelerator.clip_grad_norm_
        self._real_rows = {}  # id of a batch at the end of its loader -> its real rows, and how much they weigh
        self._rows_of_step, self._share_of_step = None, 1.0
        self._weighted, self._told_unknown = False, False
        self._rows_of_example = 1
        self._joins_metrics = trl.rows_per_example(self) is not None
        self._drawn = set()  # steps of profile_steps
        # On the object, so that a subclass's own methods are wrapped as well.
        self.compute_loss = functools.partial(losses.compute_loss, self, self.compute_loss)
        self.prediction_step = functools.partial(prediction_step, self, self.prediction_step)
        self.callback_handler.on_save = functools.partial(save_callbacks.on_save, self, self.callback_handler.on_save)
        losses.prepare(self)

    return replacement


def call_model_init(original: Callable) -> Callable:
    """A model from `model_init` becomes parallel before it is used."""

    def replacement(self: Any, trial: Any = None) -> Any:
        model = original(self, trial)
        _make_ready(model, None)
        self.model = model
        losses.prepare(self)
        return model

    return replacement


def _make_ready(model: Any, optimizers: Any) -> None:
    if runtime.parallel_state(model) is None:
        make_parallel(model)
    if optimizers and optimizers[0] is not None:
        follow_parameters(optimizers[0])
    normalise_over_data_ranks(model)
    model._is_distributed_loading_by_transformers = True  # Trainer neither moves nor wraps such a model
    if not hasattr(type(model), "is_distributed_loading_by_transformers"):
        model.is_distributed_loading_by_transformers = True
    model._tp_size = 1  # batches are counted in data ranks already


def check_arguments(args: Any) -> None:
    """Refuse what this version cannot do under the active layout, by name."""
    config = runtime.mesh().config
    block = config.world_size // config.data_parallel_size
    refusals = [
        (args.fp16 and runtime.mesh().device.type == "cpu", "fp16=True", "loss scaling on CPUs", "bf16=True"),
        (bool(args.fsdp), f"fsdp={args.fsdp}", "a second sharding beside --parallel", "dp_shard in the spec"),
        (bool(args.deepspeed), "deepspeed", "a second engine beside --parallel", "dp_shard in the spec"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "retrying sharded models", "a fixed batch size"),
        (bool(getattr(args, "torch_compile", False)), "torch_compile=True", "compiling parallel layers", "False"),
        (args.parallelism_config is not None, "parallelism_config", "a second layout beside --parallel", "the spec"),
        (
            args.train_sampling_strategy == "batch_rebalance" and block > 1,
            "train_sampling_strategy=batch_rebalance",
            "rebalancing by process",
            "group_by_length",
        ),
        (
            "adafactor" in str(args.optim).lower(),
            "optim=adafactor",
            "row and column statistics of shards",
            "optim=adamw_torch",
        ),
        (
            "underflow_overflow" in args.debug and config.tp_size > 1,
            "debug=underflow_overflow",
            "watching split weights",
            "dp_shard in the place of tp",
        ),
        (
            args.use_liger_kernel and block > 1,
            "use_liger_kernel=True",
            "kernels in the place of split layers and stages",
            "False, or dp_shard in the place of tp and pp,",
        ),
        (args.fp16_full_eval, "fp16_full_eval=True", "casting sharded models", "bf16=True"),
        (args.bf16_full_eval, "bf16_full_eval=True", "casting sharded models", "bf16=True"),
    ]
    for asked, spelled, what, works in refusals:
        if asked:
            raise SpecError(f"{spelled}: {what} is not part of this version; {works} works")
    if config.pp_size > 1:
        _check_micro_batches(args.per_device_train_batch_size, config)


def _check_micro_batches(rows: int, config: Any) -> None:
    try:
        micro_batch_count(rows, config)
    except SpecError as error:
        raise SpecError(f"per_device_train_batch_size={rows}: {error}") from None


@contextlib.contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    former = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(target, name, value)


# ---- training ----------------------------------------------------------------------------------------------------


def get_batch_samples(original: Callable) -> Callable:
    """Drop the rows that accelerate repeats to fill the last batch: one process does not train on them twice."""

    def replacement(self: Any, epoch_iterator: Iterator, num_batches: int, device: Any) -> Any:
        self._real_rows.clear()
        samples = original(self, _without_repeats(self, epoch_iterator), num_batches, device)
        report.at_first_batch(self, samples[0])
        return samples

    return replacement


def _without_repeats(trainer: Any, batches: Iterator) -> Iterator:
    state = trainer.accelerator.gradient_state
    for batch in batches:
        batch = _told_apart(trainer, batch, trainer._train_batch_size)
        blocks = _blocks(trainer, batch, trainer._train_batch_size)
        count = rows.count(batch, blocks)
        if count is not None and state.end_of_dataloader:
            real = real_rows(state, count)
            # Data ranks with fewer rows would take another way through a pipeline than the rest: keep the shape there.
            # Its schedule reduces gradients before the loss is multiplied by anything, so that none may be needed.
            keep = _runs_scheduled(trainer) and rows.JOINED not in batch
            batch = rows.without_targets(batch, real, count) if keep else rows.trim(batch, real, count, blocks)
            batch = rows.opened(batch)
            trainer._real_rows[id(batch)] = real, 1.0 if keep else share_of_rows(state, count)
        yield rows.opened(batch)


def _told_apart(trainer: Any, batch: Any, full: int) -> Any:
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


def _runs_scheduled(trainer: Any) -> bool:
    state = runtime.parallel_state(trainer.model)
    return state is not None and state.pipeline is not None and state.sums_over_tokens and not losses.is_own(trainer)


def _blocks(trainer: Any, batch: Any, full: int) -> int:
    """How many rows an example has, such as two in a batch of [chosen; rejected]; batches of `full` examples tell.

    Also of a data set that is less than one batch: it is repeated until the batch is full, where rows are shared out.
    """
    known = trl.rows_per_example(trainer)
    held = rows.count(batch) or full
    if known is None and held % full == 0:
        trainer._rows_of_example = held // full
    blocks = trainer._rows_of_example if known is None else known
    if blocks > 1 or held > full:
        refuse_cut_examples(trainer.accelerator.gradient_state.active_dataloader)
    return blocks if held % blocks == 0 else 1


def num_items_in_batch(original: Callable) -> Callable:
    """This data rank's share of the tokens: FSDP2 averages over data ranks, so sum / share averages to sum / total."""

    def replacement(self: Any, batch_samples: list, device: Any) -> Any:
        items = original(self, batch_samples, device)
        if items is not None and self.args.average_tokens_across_devices:
            return items / runtime.mesh().data_size
        return items

    return replacement


def training_step(original: Callable) -> Callable:
    """Remember how many rows of this batch are real while its loss is computed."""

    def replacement(self: Any, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        self._rows_of_step, self._share_of_step = self._real_rows.get(id(inputs), (None, 1.0))
        compare_batches(model, inputs, "training")
        with _recorded(self):
            return original(self, model, inputs, *args, **kwargs)

    return replacement


def compare_batches(model: Any, inputs: Any, kind: str) -> None:
    """Do the ranks of this model read the same rows? A script's own loss may call less than the model."""
    state = runtime.parallel_state(model)
    if state is not None:
        state.batches.check(inputs, kind)


def _recorded(trainer: Any) -> contextlib.AbstractContextManager:
    """Draw the first batch of each step of `profile_steps`, for the pipeline of rank 0."""
    state, step = runtime.parallel_state(trainer.model), trainer.state.global_step + 1
    if state is None or state.pipeline is None or step not in (state.config.profile_steps or ()):
        return contextlib.nullcontext()
    mesh, path = state.mesh, os.path.join(trainer.args.output_dir, f"timeline_step_{step}.svg")
    if mesh.data_rank or mesh.index("tp") or mesh.index("cp") or step in trainer._drawn:
        return contextlib.nullcontext()
    trainer._drawn.add(step)
    return state.pipeline.recorded(path)


def floating_point_ops(original: Callable) -> Callable:
    """Trainer adds up what all ranks count: each gives its share, whatever part of the model it holds."""

    def replacement(self: Any, inputs: dict) -> float:
        state, name = runtime.parallel_state(self.model), getattr(self.model, "main_input_name", "input_ids")
        if state is None or name not in inputs:
            return original(self, inputs)
        return state.flops_per_token * inputs[name].numel()

    return replacement


def defer_reduction(original: Callable) -> Callable:
    """`no_sync` of the parallel model."""
    return lambda self: deferred(self.model)


def nothing(original: Callable) -> Callable:
    """Leave out: all parameters are equal where they must be."""
    return lambda self, *args, **kwargs: None


# ---- evaluation --------------------------------------------------------------------------------------------------


def prediction_step(
    self: Any, original: Callable, model: Any, inputs: dict, prediction_loss_only: bool, *args: Any, **kwargs: Any
) -> Any:
    """Evaluate only real rows of a ragged last batch, whatever it is that the script does with them."""
    compare_batches(model, inputs, "evaluation")
    batch = _told_apart(self, inputs, self.args.eval_batch_size)
    blocks = _blocks(self, batch, self.args.eval_batch_size)
    state, count = self.accelerator.gradient_state, rows.count(batch, blocks) or 0
    real = real_rows(state, count)
    kept = rows.opened(batch if real == count else rows.trim(batch, real, count, blocks))
    ragged = count > 0 and is_ragged(state)
    self._rows_of_step, self._share_of_step = (real, share_of_rows(state, count)) if ragged else (None, 1.0)
    self._weighted = False  # by compute_loss, if it is called
    scope = means.Scope(self._share_of_step)
    with _loss_only(model, prediction_loss_only), means.computing(scope), runtime.absent(ragged and real == 0):
        loss, logits, labels = original(model, kept, prediction_loss_only, *args, **kwargs)
    if loss is not None and runtime.mesh().data_size > 1:
        loss = _mean_over_data_ranks(loss if self._weighted else means.weighted(loss, self._share_of_step))
    if ragged:
        logits, labels = _rows_to_gather(self, (logits, labels), real, count, rows.JOINED in batch)
    _inputs_to_gather(self, inputs, kept, real, ragged)
    return loss, logits, labels


def _rows_to_gather(trainer: Any, outputs: Any, real: int, count: int, joined: bool) -> Any:
    """Full again where `gather_for_metrics` drops the repeats; Seq2SeqTrainer gathers all there is."""
    if joined or trainer.gather_function == trainer.accelerator.gather:
        return rows.without_stand_in(outputs, real)
    return rows.fill(outputs, count)


def _inputs_to_gather(trainer: Any, inputs: dict, kept: dict, real: int, ragged: bool) -> None:
    """`evaluation_loop` goes on with the batch that it gave: metrics see the real rows, those of all ranks."""
    if "inputs" not in trainer.args.include_for_metrics or runtime.mesh().data_size == 1:
        return
    if ragged:
        inputs.update(rows.without_stand_in(dict(kept), real))
    if trainer.args.batch_eval_metrics:  # else the loop gathers them itself
        accelerator = trainer.accelerator
        for key, value in inputs.items():
            if torch.is_tensor(value) and value.ndim:
                inputs[key] = accelerator.gather(accelerator.pad_across_processes(value, dim=1, pad_index=-100))


@contextlib.contextmanager
def _loss_only(model: Any, wanted: bool) -> Iterator[None]:
    state = runtime.parallel_state(model)
    if state is None or state.pipeline is None:
        yield
        return
    with _set(state.pipeline, loss_only=wanted):
        yield


def _mean_over_data_ranks(loss: torch.Tensor) -> torch.Tensor:
    """evaluation_loop repeats the loss for each row and cuts at the remainder: right if all ranks carry the mean."""
    total = loss.detach().float().clone()
    dist.all_reduce(total, group=runtime.mesh().data_group)
    return total / runtime.mesh().data_size
