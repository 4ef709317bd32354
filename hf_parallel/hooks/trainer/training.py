"""Trainer: its model becomes parallel, and its steps give the numbers of one process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_pt_utils import nested_gather

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import hangs, monitoring, own_loops, report, runtime
from hf_parallel.hooks.accelerate.accelerator import (
    follow_parameters,
    make_parallel,
    normalise_over_data_ranks,
)
from hf_parallel.hooks.bitsandbytes import finish_casts
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.trainer import (
    auto_shares,
    bad_numbers,
    checkpoints,
    delayed_steps,
    evaluation,
    joint_steps,
    losses,
    means,
    rows,
    token_budget,
)
from hf_parallel.hooks.trainer.checkpoints import record_of, wait_for_save
from hf_parallel.hooks.trainer.joining import draw_noise_of_examples
from hf_parallel.hooks.trainer.refused_batches import check_batch, count_targets_of_step
from hf_parallel.hooks.trainer.settings import check_arguments, check_shared_examples
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.model.calls import bind_by_name
from hf_parallel.monitor.meter import COMPUTE
from hf_parallel.monitor.profile import Profile
from hf_parallel.monitor.session import list_known_groups
from hf_parallel.ranks import desync, messages
from hf_parallel.ranks.nested_batches import open_batches

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments


# ---- What all ranks decide on together at the end of a step ---------------------------------------------------------
# - SIGTERM (a job that is preempted, a node that is drained): all ranks save after the same step, and end.
# - A save in the background is whole: what follows it (`on_save` callbacks, uploads) follows on all ranks. Where it
#   has failed on one of them, all of them end.
#
# One all-reduce of three numbers, beside the optimizer's step, agrees on this.
#
# After an evaluation, rank 0's metrics and the requests of its callbacks hold on all ranks. Callbacks stop a training
# by metrics, and Trainer chooses the best checkpoint by them.


#: The exit code by which a shell reports that SIGTERM ended a process.
EXIT_CODE = 128 + signal.SIGTERM
#: Where torch's DTensors are, and how torch says that they do not mix with other tensors.
_DTENSOR = "torch.distributed.tensor"
_MIXED = ("got mixed torch.Tensor and DTensor", "on inputs with different meshes")
#: The ends of the names of metrics that always differ between ranks.
_SPEEDS = ("_runtime", "_per_second", "_time")


@dataclass(eq=False)
class StepsTogether(TrainerCallback):
    """Turns SIGTERM on any rank into a save and the end of the training on all ranks; notices finished saves.

    Attributes:
        asked: what this rank wants: to stop; to leave a save to its thread; to end by its error. Three integers.
        agreed: the same of all ranks.
    """

    trainer: Trainer
    group: dist.ProcessGroup
    asked: torch.Tensor
    agreed: torch.Tensor
    pending: dist.Work | None = None
    stops: bool = False

    def ask(self, number: int, frame: object) -> None:
        """Handle SIGTERM. A second signal ends the process at once."""
        print(f"hf_parallel: rank {dist.get_rank()}: SIGTERM, saving after this step", file=sys.stderr, flush=True)
        self.asked[0] = 1
        signal.signal(number, signal.SIG_DFL)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        unfinished = record_of(self.trainer).unfinished_save
        if unfinished is None:
            self.asked[1:] = 0
        else:
            self.asked[1] = unfinished.thread is not None and unfinished.thread.is_alive()
            self.asked[2] = unfinished.error is not None
        self.agreed.copy_(self.asked)
        self.pending = dist.all_reduce(self.agreed, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> object:
        cast(dist.Work, self.pending).wait()
        stops, writing, failed = self.agreed.tolist()
        if stops:
            self.stops = control.should_save = control.should_training_stop = True
        if failed or not writing:
            wait_for_save(self.trainer)
        return control


def on_evaluate(
    trainer: Trainer,
    original: Callable,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    metrics: dict[str, float],
    **kwargs: object,
) -> TrainerControl:
    """Call the callbacks of an evaluation with rank 0's metrics, and do what rank 0's callbacks ask for.

    Ranks that went different ways would wait for each other forever. Collective.
    """
    if not dist.is_initialized():
        return original(args, state, control, metrics, **kwargs)
    own = {key: value for key, value in metrics.items() if not key.endswith(_SPEEDS)}
    metrics.update(_take_from_rank_0(trainer, "the value of", own))
    with desync.let_rank_0_be_alone():
        control = original(args, state, control, metrics, **kwargs)
        desync.wait_for_rank_0()
    asked = {key: value for key, value in vars(control).items() if key.startswith("should_")}
    vars(control).update(_take_from_rank_0(trainer, "a callback's", asked))
    return control


def _take_from_rank_0(trainer: Trainer, what: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's values, and say once which of them differ on some rank. Collective."""
    everywhere, told = messages.gather_objects(own), record_of(trainer).told_to_differ
    first = everywhere[0]
    differ = [key for key in first if any(repr(one.get(key)) != repr(first[key]) for one in everywhere)]
    new = [key for key in differ if key not in told]
    told.update(new)
    if new:
        report.say(f"{what} {', '.join(new)} differs between ranks; rank 0's holds for all")
    return first


@contextlib.contextmanager
def end_together(trainer: Trainer) -> Iterator[None]:
    """Let SIGTERM, inside the `with`, save a checkpoint and then end the process with exit code 143.

    Do nothing if the script never saves (save_strategy="no") or has a handler of its own. Collective.
    """
    if not checkpoints.does_save_checkpoints(trainer.args):
        yield
        return
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    takes_signals = all(messages.gather_objects(free))
    if not takes_signals and not runtime.mesh().config.async_save:
        yield
        return
    asked = torch.zeros(3, dtype=torch.int32)
    together = StepsTogether(trainer, runtime.mesh().host_group_of_training, asked, asked.clone())
    trainer.add_callback(together)
    if takes_signals:
        signal.signal(signal.SIGTERM, together.ask)
    try:
        yield
    finally:
        if takes_signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer.remove_callback(together)
    if together.stops:
        report.say(f"stopped by SIGTERM after step {trainer.state.global_step}, which is saved")
        raise SystemExit(EXIT_CODE)


# ---- set-up ------------------------------------------------------------------------------------------------------


@patch("transformers.trainer:Trainer.__init__", "models made in code become parallel; settings are checked")
def init(
    original: Callable,
    self: Trainer,
    model: PreTrainedModel | None = None,
    args: TrainingArguments | None = None,
    *rest: object,
    **kwargs: object,
) -> None:
    """Make a model that was built in code parallel, and refuse settings that cannot work, before anything trains."""
    if args is None:
        from transformers import TrainingArguments

        args = TrainingArguments(output_dir="tmp_trainer")
    check_arguments(args)
    auto_shares.measure_shares()
    _count_all_targets(args)
    # Rank 0 makes the output folder, as Trainer would; where it cannot, all ranks say so.
    folder = args.output_dir
    try:
        messages.send_from_one(lambda: os.makedirs(folder, exist_ok=True))
    except OSError as error:
        refuse(f"output_dir={folder}", f"cannot be made ({error.strerror or error})", do="give another", cause=error)
    given = bind_by_name(original, (self, model, args, *rest), kwargs)
    trl.check_trl_trainer(self, args, given.get("eval_dataset"), model, given.get("train_dataset"))
    if model is not None:
        _make_ready(model, given.get("optimizers"))
    with replacing(args, save_only_model=True):  # Trainer refuses sharded models that checkpoint, our save does not
        original(self, model, args, *rest, **kwargs)
    self.is_distributed_loading_by_transformers = True
    self._mixed_mesh_grads = False  # one path for all norms: Accelerator.clip_grad_norm_
    # On the object, so that a subclass's own methods are wrapped as well.
    self.compute_loss = functools.partial(losses.compute_loss, self, self.compute_loss)
    if type(self).training_step.__module__.partition(".")[0] not in ("transformers", "trl"):
        self.training_step = functools.partial(run_own_step, self, self.training_step)
    self.prediction_step = functools.partial(evaluation.evaluate_real_rows, self, self.prediction_step)
    self.callback_handler.on_save = functools.partial(checkpoints.on_save, self, self.callback_handler.on_save)
    self.callback_handler.on_evaluate = functools.partial(on_evaluate, self, self.callback_handler.on_evaluate)
    self.callback_handler.on_step_end = functools.partial(on_step_end, self, self.callback_handler.on_step_end)
    token_budget.check_trainer_for_joining(self)
    check_shared_examples(self)
    losses.prepare_own_loss(self)
    means.tell_of_sums_over_processes(self)
    delayed_steps.check_trainer_for_delay(self)
    joint_steps.check_trainer_for_fill(self)
    joint_steps.check_mirrored_trainer(self)


def _count_all_targets(args: TrainingArguments) -> None:
    """Divide by the targets of all data ranks, as one process does, also where a script asks for means of means."""
    if runtime.mesh().data_size > 1 and not args.average_tokens_across_devices:
        args.average_tokens_across_devices = True
        report.say(
            "average_tokens_across_devices=False has no effect; the loss is over all targets, as in one process"
        )


@patch("transformers.trainer:Trainer.call_model_init", "models from model_init become parallel")
def call_model_init(original: Callable, self: Trainer, trial: object = None) -> object:
    """Make a model from `model_init` parallel before it is used."""
    model = original(self, trial)
    _make_ready(model, None)
    self.model = model
    if hasattr(self, "compute_loss_func"):  # otherwise Trainer.__init__ is still running, and `init` does this
        losses.prepare_own_loss(self)
        delayed_steps.check_trainer_for_delay(self)
        joint_steps.check_trainer_for_fill(self)
        joint_steps.check_mirrored_trainer(self)
    return model


def _make_ready(model: PreTrainedModel, optimizers: tuple | None) -> None:
    make_parallel(model)
    finish_casts(model)  # on a base in 4 bits TRL casts adapters
    if optimizers and optimizers[0] is not None:
        follow_parameters(optimizers[0])
    normalise_over_data_ranks(model)
    model._is_distributed_loading_by_transformers = True  # Trainer neither moves nor wraps such a model
    if not hasattr(type(model), "is_distributed_loading_by_transformers"):
        model.is_distributed_loading_by_transformers = True
    model._tp_size = 1  # batches are counted in data ranks already


# ---- training ----------------------------------------------------------------------------------------------------


@patch("transformers.trainer:Trainer.get_batch_samples", "repeats rows to fill a ragged last batch")
def get_batch_samples(
    original: Callable, self: Trainer, epoch_iterator: Iterator, num_batches: int, device: torch.device
) -> object:
    """Drop the rows that accelerate repeats to fill the last batch: one process does not train on them twice."""
    # A step of `profile_steps` begins before its batches are read, and ends after its last callback. Collective.
    state, step = runtime.find_parallel_state(self.model), self.state.global_step + 1
    record, asked = record_of(self), () if state is None else state.config.profile_steps or ()
    last = self.state.max_steps
    late = [asked_step for asked_step in asked if asked_step > last]
    if late and not record.told_unreached:
        record.told_unreached = True
        report.say(f"profile_steps: the training ends after step {last}, before {late}")
    if state is not None and step in asked:
        monitoring.watch_model(self.model)  # its own notes begin before those of a profile, and end after them
        record.profile = Profile(state.mesh, list_known_groups(state), step)
    own_loops.note_first_weight(self.model)
    hangs.mark_phase("the data loader")
    with monitoring.measure_reading(self):
        batches = evaluation.without_repeats(self, epoch_iterator)
        read = functools.partial(original, self, batches, num_batches, device)
        samples = delayed_steps.read_step(self, epoch_iterator, read)
    if not self.state.global_step and record.loader is None:
        check_unshared_loader(self, samples[0])
    if (active := runtime.current()) is not None:
        active.loop.last = None  # what is repeated is cut off already, for steps of a script's own, too
    monitoring.count_samples(samples[0])
    joint_steps.note_batches(self, samples[0])
    report.report_at_first_batch(self, samples[0], losses.describe_loss)
    return samples


def check_unshared_loader(trainer: Trainer, batches: list) -> None:
    """Refuse a loader that was not shared out, from which all data ranks read the same batches. Collective.

    Trainers that make a `DataLoader` of their own, such as those of streams of batches, may leave out `prepare`.
    """
    mesh, state = runtime.mesh(), runtime.find_parallel_state(trainer.model)
    if state is None or mesh.data_size == 1:
        return
    if state.batches.is_equal_on_data_ranks(batches[0] if batches else None):  # all ask, also one without a batch
        name = "dp_shard_size" if mesh.config.dp_shard_size > 1 else "dp_replicate_size"
        why = (
            f"get_train_dataloader of {type(trainer).__name__} gives all {mesh.data_size} data ranks the same batches"
        )
        do = (
            f"prepare(loader), or a part or seed of its own by process_index, both of self.accelerator; {name}=1 works"
        )
        refuse(f"{name}={getattr(mesh.config, name)}", why, do=do)


@patch("transformers.trainer:Trainer._get_num_items_in_batch", "share of the tokens per data rank")
def num_items_in_batch(original: Callable, self: Trainer, batch_samples: list, device: torch.device) -> object:
    """Return the mean number of tokens per data rank: FSDP2 averages the losses sum / mean to sum / total."""
    items: Any = count_targets_of_step(original, self, batch_samples, device)
    return None if items is None else items / runtime.mesh().data_size


@patch("transformers.trainer:Trainer.training_step", "does not know which rows are repeated")
def training_step(
    original: Callable, self: Trainer, model: PreTrainedModel, inputs: dict, *args: object, **kwargs: object
) -> object:
    """Run a micro-step, and know how many rows of its batch are real while its loss is computed."""
    hangs.mark_step(self.state.global_step + 1)
    given = bind_by_name(original, (self, model, inputs, *args), kwargs)
    engine = joint_steps.find_engine_of(self)
    fill = None if engine is None else engine.fill
    if fill is not None and not fill.in_step:
        fill.begin_step()
    if engine is None or engine.delayed is None:
        joint_steps.announce_step(self, model, inputs, given.get("num_items_in_batch"))
    else:
        delayed_steps.announce_steps(self, model, inputs)
    looked_at = bad_numbers.watch_micro_batch(model, inputs, args, kwargs)
    step = record_of(self).step if record_of(self).step.own else evaluation.describe_batch(inputs)
    if isinstance(inputs, evaluation.Weighed):  # the batch as it was
        inputs = dict(inputs) if isinstance(inputs, dict) else list(inputs)
    check_batch(inputs)
    noise = draw_noise_of_examples(self, inputs)
    runtime.compare_batches(model, inputs, "training")
    # It holds on each stage, and where layers run again for their backward.
    now = replacing(runtime.current(), real_rows=step.real_rows, in_trainer=True)
    small = monitoring.measure_small_batch(inputs, step.real_rows)
    timed = monitoring.measure_phase(COMPUTE)
    mixed = explain_mixed_tensors()
    with mixed, looked_at, noise, replacing(record_of(self), step=step), now, _record_timeline(self), timed, small:
        loss = original(self, model, inputs, *args, **kwargs)
        # Gradients are preconditioned after the last batch of their step, before Trainer clips them.
        if fill is not None and self.accelerator.sync_gradients and (line := fill.end_step()) is not None:
            report.say(f"pipeline_fill=kfac: {line}")
    return loss


@contextlib.contextmanager
def explain_mixed_tensors() -> Iterator[None]:
    """Say in words why a script's step cannot combine weights, of which this rank stores a part, with other tensors.

    torch stops with the name of an operation, or with an assertion that says nothing.

    Raises:
        NotImplementedError: in the place of torch's error.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        bare = isinstance(error, AssertionError) and frames[-1][0].f_globals.get("__name__", "").startswith(_DTENSOR)
        if isinstance(error, NotImplementedError) or not (bare or any(words in str(error) for words in _MIXED)):
            raise
        raise NotImplementedError(
            "hf_parallel: the step computes with weights and other tensors in one operation; ranks store parts of "
            "weights, which mix with numbers, and with what has a weight's shape and is the same on all ranks "
            "(docs/idioms.md); torch says "
            f"{error!r}"
        ) from error


def run_own_step(
    self: Trainer, own: Callable, model: PreTrainedModel, inputs: dict, *args: object, **kwargs: object
) -> object:
    """Run a step of the script's own, which need not call Trainer's, and know how many rows of its batch are real."""
    if not isinstance(inputs, evaluation.Weighed):
        with explain_mixed_tensors():
            return own(model, inputs, *args, **kwargs)
    step = evaluation.describe_batch(inputs)
    step.own = rows.OfBatch([value for value in open_batches(inputs)[0].values() if torch.is_tensor(value)])
    with (
        explain_mixed_tensors(),
        contextlib.nullcontext() if step.real_rows is None else step.own,
        replacing(record_of(self), step=step),
        replacing(runtime.current(), real_rows=step.real_rows, in_trainer=True),
    ):
        return own(model, inputs, *args, **kwargs)


def on_step_end(trainer: Trainer, original: Callable, *args: object, **kwargs: object) -> object:
    """End a step after its last callback: logging, evaluation and saving are not part of its time."""
    own_loops.refuse_steps_without_backward(type(trainer).__name__)
    checkpoints.refuse_unsavable_optimizer(trainer)
    control, record = original(*args, **kwargs), record_of(trainer)
    monitoring.end_monitored_step()
    if record.profile is not None:
        for line in record.profile.finish(trainer.args.output_dir):
            report.say(line)
        record.profile = None
    return control


def _record_timeline(trainer: Trainer) -> contextlib.AbstractContextManager:
    """Record the first batch of each step of `profile_steps`, in the pipeline of rank 0."""
    state, step = runtime.find_parallel_state(trainer.model), trainer.state.global_step + 1
    if state is None or state.pipeline is None or step not in (state.config.profile_steps or ()):
        return contextlib.nullcontext()
    mesh, drawn = state.mesh, record_of(trainer).drawn_steps
    path = os.path.join(trainer.args.output_dir, f"timeline_step_{step}.svg")
    if mesh.data_rank or mesh.index("tp") or mesh.index("cp") or step in drawn:
        return contextlib.nullcontext()
    drawn.add(step)
    return state.pipeline.recorded(path)


@patch("transformers.trainer:Trainer.floating_point_ops", "counts repeated rows")
def floating_point_ops(original: Callable, self: Trainer, inputs: dict) -> float:
    """Count the floating-point operations of real rows."""
    return original(self, _select_counted(self, inputs))


@patch("transformers.trainer:Trainer.store_flos", "counts a batch once per rank of a model")
def store_flos(original: Callable, self: Trainer) -> None:
    """Add this rank's share of the floating-point operations, also of a script's own count: Trainer sums all ranks."""
    config = runtime.mesh().config
    if runtime.find_parallel_state(self.model) is not None:
        self.current_flos *= config.data_parallel_size / config.world_size
    original(self)


@patch("transformers.trainer:Trainer._track_num_input_tokens", "counts repeated rows")
def track_num_input_tokens(original: Callable, self: Trainer, inputs: dict) -> None:
    """Count the tokens of real rows."""
    original(self, _select_counted(self, inputs))


def _select_counted(trainer: Trainer, inputs: dict) -> dict:
    """Return a batch without the rows that only fill it, for Trainer to count."""
    if not isinstance(inputs, evaluation.WeighedBatch) or inputs.real_rows is None:
        return inputs
    if not inputs.real_rows:
        return {key: value[:0] if torch.is_tensor(value) and value.ndim else value for key, value in inputs.items()}
    record = record_of(trainer)
    held = rows.count_examples(inputs, record.rows_per_example)
    if held in (None, inputs.real_rows):
        return inputs
    return rows.trim(inputs, inputs.real_rows, held, record.rows_per_example, record.in_turns)


@patch("transformers.trainer:Trainer._finalize_training", "adds a rank's own loss of the steps not logged yet")
def finalize_training(original: Callable, self: Trainer, *args: object, **kwargs: object) -> object:
    """Average the losses of the last steps over all ranks, as Trainer averages those that it logs."""
    if self.state.global_step > self._globalstep_last_logged:
        self._tr_loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean()
    return original(self, *args, **kwargs)


@patch("transformers.trainer:is_fsdp_managed_module", "then asks its own config what waits", since="5.23")
def is_managed(original: Callable, module: nn.Module) -> bool:
    """Return False for a parallel model, so that Trainer calls `Accelerator.no_sync` for it, as for others."""
    return runtime.find_parallel_state(module) is None and original(module)


@patch("transformers.trainer:Trainer._sync_replicated_trainable_parameters", "would average over stages", since="5.19")
def nothing(original: Callable, self: Trainer, *args: object, **kwargs: object) -> None:
    """Do nothing, because parameters are equal on all ranks that must agree."""
