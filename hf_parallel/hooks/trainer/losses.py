"""The loss of a Trainer's step: weighted over data ranks as one process would, and scheduled in a pipeline."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import Trainer

from hf_parallel.axes.chunked_loss import find_reason_against_chunks
from hf_parallel.axes.experts.balance import LOAD, ExpertLoad
from hf_parallel.axes.loss import LOSS
from hf_parallel.axes.pipeline.script_loss import Plan, Prepared, can_cut_alike, can_cut_batch, find_plan, run_plan
from hf_parallel.axes.pipeline.unscheduled import Made, serve_script
from hf_parallel.axes.tensor import lean_loss
from hf_parallel.hooks import hangs, monitoring, report, runtime
from hf_parallel.hooks.accelerate.shares import OneLoader, cut_of, weigh_loss
from hf_parallel.hooks.logits_read import find_reader_before_trainer, has_own_compute_loss
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.trainer import bad_numbers, checkpoints, means, other_batches, own_means
from hf_parallel.hooks.trainer.bad_numbers import Joined, remember_counts
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trl import experimental, online, preferences
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.model.calls import bind_by_name, note_unread_logits
from hf_parallel.ranks.nested_batches import is_path, open_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.apply.parallelize import ParallelState
    from hf_parallel.axes.pipeline.engine import PipelineEngine


class Computed(TypedDict):
    """The results of a script's loss for a batch. In a pipeline they go from the last stage to the others.

    Attributes:
        targets: the number of targets that the loss is a mean over, if that was seen.
        known: is it known what the loss is a mean over?
        weighs: does the script weigh means by the number of targets?
        again: must the batch be computed once more, without our factor?
    """

    loss: torch.Tensor
    outputs: list[object]
    targets: torch.Tensor | None
    known: bool
    logged: list[dict[str, object]]
    weighs: bool
    again: bool


def prepare_own_loss(trainer: Trainer) -> None:
    """Note whether the trainer computes the model's loss or the script's own."""
    record = record_of(trainer)
    record.loss_plans.clear()
    seen = has_own_compute_loss(type(trainer)) or trainer.compute_loss_func is not None
    record.weighs = None if seen else trainer.label_smoother is not None  # Trainer itself passes the count on
    state = runtime.find_parallel_state(trainer.model)
    if state is not None and state.pipeline is not None and is_own(trainer):
        state.notes.append(
            "the script computes its own loss: its first step and incomplete batches keep all activations"
        )


def follow_assigned_loss(trainer: Trainer) -> None:
    """Make a `compute_loss` that a script has assigned, to its trainer or to a class, a method of the class."""
    known = vars(trainer).get("compute_loss")
    if known is None:  # it was made before the layout was active
        return
    is_ours = getattr(known, "func", None) is compute_loss
    current = types.MethodType(type(trainer).compute_loss, trainer) if is_ours else known
    if is_ours and current == known.args[1]:
        return
    if not is_ours:

        @functools.wraps(current)
        def call_assigned(self: Trainer, *args: object, **kwargs: object) -> object:
            return current(*args, **kwargs)

        kind: Any = type(trainer)
        own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "compute_loss": call_assigned}
        trainer.__class__ = type(kind.__name__, (kind,), own)
    vars(trainer)["compute_loss"] = functools.partial(compute_loss, trainer, current)
    prepare_own_loss(trainer)


def is_own(trainer: Trainer) -> bool:
    """Return whether the script computes the loss, not the model."""
    given = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return given or has_own_compute_loss(type(trainer))


def find_reader_of_logits(trainer: Trainer, state: ParallelState | None) -> str | None:
    """Return what may read logits in training beside the loss of the one model, or None."""
    why = find_reader_before_trainer(
        type(trainer), trainer.compute_loss_func is not None, trainer.label_smoother is not None
    )
    return why or ("the model is around others" if state is None or state.plan is None else None)


def describe_loss(trainer: Trainer) -> str:
    """Describe how head and loss are computed, for the start-up report."""
    state = runtime.find_parallel_state(trainer.model)
    part = None if state is None or state.plan is None else state.plan.part(LOSS)
    if state is None or part is None:
        return "whole logits"
    held = state.pipeline is None or state.pipeline.last
    why = part.why_not or find_reader_of_logits(trainer, state) or find_reason_against_chunks(state.config)
    why = why or lean_loss.find_reason_for_whole_logits(trainer.model, held)
    if why is not None:
        return f"whole logits: {why}"
    return "in chunks of tokens" + ("" if part.always else ", where that needs less memory than whole logits")


_UNLIKE = (
    "the script's loss needs as many micro-batches on all data ranks to be scheduled: the pipeline keeps all "
    "activations of a batch; a pipeline_microbatches that divides the examples of each data rank is scheduled"
)


def compute_loss(
    self: Trainer, own: Callable, model: PreTrainedModel, inputs: dict, *args: object, **kwargs: object
) -> object:
    """Return the loss as the model or the script computes it, without Trainer's factor for the number of processes."""
    if record_of(self).computes:  # an assigned `compute_loss` calls the one that it has replaced
        return own(model, inputs, *args, **kwargs)
    other = other_batches.find_other_batch(self, inputs)
    if other is not None:
        with other_batches.compute_with(self, other[0]):
            return compute_loss(self, own, model, other[1], *args, **kwargs)
    state = runtime.find_parallel_state(model)
    engine = state.pipeline if state is not None and is_own(self) else None
    inputs, own = _open_batches_for(own, inputs)
    # Count now: scripts remove from a batch what they have read.
    items, targets, kwargs = _count_items_and_targets(self, model, inputs, args, kwargs)
    call_own, record = functools.partial(_call_compute_loss, self, state, own), record_of(self)
    call = functools.partial(call_own, model, args=args, kwargs=kwargs)
    record.step.weighted = True
    looks = not record.knows_mean and runtime.mesh().data_size > 1 and is_own(self)
    looks = looks and (not _is_of_trl(self) or trl.does_subclass_add_to_loss(self))
    first_loss = own_means.keep_first_loss(model, inputs) if looks else contextlib.nullcontext()
    if record.mean_over is not None and targets is not None:
        own_means.fill_missing_target(inputs, record.mean_over, targets)

    def loss_of(stand_in: object, part: dict, endless: bool) -> torch.Tensor:
        given = _replace_count(items, args, kwargs) if endless and items is not None else (args, kwargs)
        computing = functools.partial(call_own, stand_in, part, args=given[0], kwargs=given[1])
        return (computing() if engine is None else Prepared(engine, []).run(computing))["loss"]

    def weigh(result: Computed, first: own_means.FirstLoss | None) -> object:
        if first is None:
            return _weigh_result(self, result, targets)
        return _weigh_first_result(self, result, first, loss_of, computes=engine is None or engine.last)

    if state is None or engine is None:
        with first_loss as first:
            result = _compute_settled_loss(self, inputs, call, items, first)
        return weigh(result, first)
    trains = _can_schedule(self, state)
    plan = record.loss_plans.get(tuple(inputs)) if trains else None
    if plan is not None and can_cut_batch(plan, inputs, engine.config):
        return _compute_scheduled_loss(self, engine, plan, inputs, call, counts=not record.weighs)
    made: list[Made] = []

    def serve(batch: dict) -> Computed:
        result, made[:] = serve_script(engine, dict(batch), lambda: call(dict(batch)))
        return result

    with first_loss as first:
        result = _compute_settled_loss(self, inputs, serve, items, first)
    for logs in result["logged"]:
        self.log(logs)
    if trains and tuple(inputs) not in record.loss_plans:
        plan = _plan_schedule(self, engine, inputs, made, call)
        if plan is not None:
            plan.logs = bool(result["logged"])
    return weigh(result, first)


def _count_items_and_targets(
    trainer: Trainer, model: PreTrainedModel, inputs: dict, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, torch.Tensor | None, dict[str, Any]]:
    """Return what a loss divides by, the targets of a mean that it takes itself, and its arguments by name."""
    items = bind_by_name(Trainer.compute_loss, (trainer, model, inputs, *args), kwargs).get("num_items_in_batch")
    targets = trl.count_targets_of_mean(trainer, inputs) if items is None else None
    if targets is not None and runtime.mesh().data_size > 1 and trl.does_subclass_add_to_loss(trainer):
        # An evaluation of SFT: with a count its loss is a sum, to which a subclass adds its terms as in training.
        dist.all_reduce(targets, group=runtime.mesh().data_group)
        items, targets = targets / runtime.mesh().data_size, None
        kwargs = {**kwargs, "num_items_in_batch": items}
    targets = own_means.count_targets_of_own_mean(trainer, inputs) if targets is None else targets
    return items, targets, kwargs


def _open_batches_for(own: Callable, inputs: Any) -> tuple[dict, Callable]:
    """Return a batch of batches as one dictionary, and the script's loss of such a dictionary."""
    opened, close = open_batches(inputs)
    if opened is inputs:
        return inputs, own

    @functools.wraps(own)
    def compute_own(model: object, part: dict, *args: object, **kwargs: object) -> object:
        return own(model, close(part), *args, **kwargs)

    return opened, compute_own


def _can_schedule(trainer: Trainer, state: ParallelState) -> bool:
    """Return whether the batch may be scheduled.

    Data ranks may have unlike numbers of rows, and must all go the same way.
    """
    cut = cut_of(OneLoader(record_of(trainer).loader))
    if not torch.is_grad_enabled() or record_of(trainer).step.real_rows is not None:
        return False
    if cut is None or can_cut_alike(cut, state.config):
        return True
    if state.note_line(_UNLIKE):
        report.say(_UNLIKE)
    return False


def _replace_count(items: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace the count in a call of `compute_loss` by one so large that what is divided by it vanishes."""
    endless = torch.full_like(torch.as_tensor(items), 10**18)
    given = {name: endless if value is items else value for name, value in kwargs.items()}
    return tuple(endless if value is items else value for value in args), given


def _weigh_first_result(
    trainer: Trainer, result: Computed, first: own_means.FirstLoss, loss_of: own_means.Loss, *, computes: bool
) -> object:
    """Find what a loss is a mean over when it is first seen, and weigh it by that."""
    if own_means.find_mean(trainer, first, result["targets"] is not None, loss_of, computes):
        _tell_unknown_mean(trainer)
    targets = own_means.count_targets_of_own_mean(trainer, first.batch)
    if targets is not None and not targets:
        _stop_gradients(first.outputs)
    return _weigh_result(trainer, result, targets)


def _plan_schedule(
    trainer: Trainer, engine: PipelineEngine, inputs: dict, made: list[Made], call: Callable
) -> Plan | None:
    """Find how the script's loss may be scheduled, and say it on rank 0; None if it needs whole batches."""
    record, quietly, plan = record_of(trainer), functools.partial(_undo_counts, trainer), None
    if not trl.needs_whole_batches(trainer) and not any(map(is_path, inputs)):
        counts = not record.weighs
        plan = find_plan(engine, dict(inputs), made, lambda part: call(part)["loss"], quietly, counts=counts)
    verdict = "the script's loss needs whole batches, so the pipeline keeps all activations of a batch"
    if plan is not None:
        how, schedule = "is a mean" if plan.cut.mean else "adds up", engine.config.pipeline_schedule
        verdict = f"the script's loss {how} over micro-batches: {schedule} from now on"
    if trainer.args.gradient_accumulation_steps > 1 and plan is not None and plan.why_apart is not None:
        verdict += f"; the batches of a step run one by one, and the pipeline drains after each: {plan.why_apart}"
    report.say(verdict)
    record.loss_plans[tuple(inputs)] = plan
    return plan


def _compute_scheduled_loss(
    trainer: Trainer, engine: PipelineEngine, plan: Plan, inputs: dict, call: Callable, *, counts: bool
) -> torch.Tensor:
    """Compute the loss by micro-batches. What the script logs for them becomes one entry.

    If a step runs as one schedule, the announced call of a batch collects what the batch logs.
    """
    record = record_of(trainer)
    announces, syncs, state = engine.announced is not None, record.step.syncs, trainer.accelerator.gradient_state
    logged = record.joint_logs.pop(0) if engine.joint is not None else []

    # TRL's trainers count metrics of parts as of a whole batch.
    parts = Joined(trainer) if trl.is_known(trainer) else None

    def loss_of(part: dict) -> torch.Tensor:
        with contextlib.nullcontext() if parts is None else parts.part():
            with contextlib.nullcontext() if syncs is None else replacing(state, sync_gradients=syncs):
                result = call(part)
            logged.extend(result["logged"])
            return result["loss"]

    def try_loss_of(part: dict) -> torch.Tensor:
        with _undo_counts(trainer):
            return call(part)["loss"]

    quietly = functools.partial(_undo_counts, trainer)
    share = record.step.share
    loss = run_plan(engine, plan, dict(inputs), loss_of, try_loss_of, quietly, counts=counts, share=share)
    if announces:
        record.joint_logs.append(logged)
    elif plan.logs:
        # Tell every stage, as one entry for the batch, what the last stage logged for each micro-batch.
        merged: dict[str, object] = {}
        for key in {key: None for logs in logged for key in logs}:
            values: list = [logs[key] for logs in logged if key in logs]
            merged[key] = sum(values) / len(values) if isinstance(values[0], int | float) else values[-1]
        engine.tell(merged)
        trainer.log(merged)
    return loss


def _compute_settled_loss(
    trainer: Trainer,
    inputs: dict,
    computed: Callable[[dict], Computed],
    items: object,
    first: own_means.FirstLoss | None,
) -> Computed:
    """Compute a batch's loss. If the script then turns out to weigh means by the count of targets, compute it anew.

    We see that only while the loss is computed. A model that is called without the count returns the mean over the
    targets of all data ranks. If the script then weighs this mean, the batch is computed once more with plain means.
    """
    record = record_of(trainer)
    if record.weighs is not None or items is None:
        return computed(inputs)
    kept, restore, stream = copy.copy(inputs), remember_counts(trainer), runtime.mesh().read_random_state()
    held: list[Callable[[], object]] = []
    with replacing(record, held_logs=held):
        result = computed(inputs)
    record.weighs = result["weighs"]
    if not result["again"]:
        for log_held in held:
            log_held()
        return result
    restore()
    runtime.mesh().set_random_state(stream)
    if first is not None:
        first.outputs.clear()
    return computed(kept)


def _call_compute_loss(
    self: Trainer,
    state: ParallelState | None,
    own: Callable,
    model: PreTrainedModel,
    inputs: dict,
    *,
    args: tuple,
    kwargs: dict,
) -> Computed:
    """Call the script's `compute_loss`."""
    record, former = record_of(self), self.args.average_tokens_across_devices
    given = bind_by_name(Trainer.compute_loss, (self, model, inputs, *args), kwargs)
    step, items = record.step, given.get("num_items_in_batch")
    weighs = items is not None and bool(record.weighs)
    scope = means.Scope(step.share, weighs, corrects=experimental.adds_mean_over_tokens(self))
    step.logged = []
    # Our share of the tokens already contains the factor for processes. Some scripts multiply by it themselves.
    whole = former and means.does_know_processes(self)
    if items is not None and former:
        items = items * (scope.share or 1.0) * (runtime.mesh().data_size if whole else 1)
    if items is not None:
        count = items
        if is_own(self):
            count = torch.as_tensor(items).as_subclass(means.Count)
            count.scope = scope
        if len(args) > 1:  # pass it by position, because a script may name it otherwise
            args = (args[0], count, *args[2:])
        else:
            kwargs = {**kwargs, "num_items_in_batch": count}
    unread = note_unread_logits(find_reader_of_logits(self, state) is None and not given.get("return_outputs"))
    counted_by = replacing(self.args, average_tokens_across_devices=whole)
    computing, watching = replacing(record, computes=True), trl.watch_loss_function(self, items)
    with (
        computing,
        counted_by,
        means.compute_in_scope(scope),
        _without_gradients_of_absent(model, is_own(self) and step.real_rows == 0),
        unread,
        preferences.count_metrics_by_rows(self),
        checkpoints.note_kept_numbers(self),
        watching as seen,
    ):
        result = own(model, inputs, *args, **kwargs)
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    loss = online.weigh_online_loss(self, loss, inputs)
    if outputs and step.loss_only:
        outputs = [{}]  # Trainer reads all of them, and drops them: logits and hidden states would be made whole
    targets = scope.taken[1] if scope.taken is not None and loss is scope.taken[0] else seen.targets
    weighs = scope.weighs_itself or scope.reads_count
    return {
        "loss": loss,
        "outputs": outputs,
        "targets": targets,
        "known": weighs or scope.counted or targets is not None,
        "logged": step.logged,
        "weighs": weighs,
        "again": scope.assumed and weighs,
    }


@contextlib.contextmanager
def _without_gradients_of_absent(model: nn.Module, absent: bool) -> Iterator[None]:
    """Give the model zeros for the gradients of a loss of no example, which may be a mean over nothing: 0/0."""
    if not absent or not torch.is_grad_enabled() or not isinstance(model, nn.Module):
        yield
        return

    handle = model.register_forward_hook(lambda module, args, output: _stop_gradients(output))
    try:
        yield
    finally:
        handle.remove()


def _stop_gradients(outputs: object) -> None:
    for value in tree_leaves(outputs):
        if torch.is_tensor(value) and value.requires_grad:
            value.register_hook(torch.zeros_like)


def _weigh_result(self: Trainer, result: Computed, targets: torch.Tensor | None) -> object:
    """Weigh the loss of this data rank so that the average over data ranks is the loss of all rows."""
    loss, outputs, mesh, record = result["loss"], result["outputs"], runtime.mesh(), record_of(self)
    if mesh.data_size > 1:
        share: torch.Tensor | float = record.step.share
        if is_own(self):
            # Of the rows, or of the targets if the script returned their mean.
            share = own_means.compute_share(self, result["targets"] if targets is None else targets)
        loss = weigh_loss(loss, share)
        if not result["known"] and is_own(self) and not _is_of_trl(self):
            _tell_unknown_mean(self)
    return (loss, *outputs) if outputs else loss


def _tell_unknown_mean(trainer: Trainer) -> None:
    """Say once that the loss, or a part of it, may differ from that of one process."""
    record = record_of(trainer)
    if not record.told_unknown:
        record.told_unknown = True
        report.say(
            "the script's loss is taken for a mean over rows: if data ranks have different numbers of targets, it "
            "is the mean of their means, not one process's loss; divide by num_items_in_batch to have that. A sum "
            f"over rows is 1/{runtime.mesh().data_size} of one process's: multiply it by accelerator.num_processes, "
            "with dataloader_drop_last=True"
        )


def _is_of_trl(trainer: Trainer) -> bool:
    """Return whether TRL computes the loss; then we know what it is a mean over."""
    return trl.is_known(trainer) and trainer.compute_loss_func is None and not trl.is_loss_of_subclass(trainer)


@contextlib.contextmanager
def _undo_counts(trainer: Trainer) -> Iterator[None]:
    """Undo what a loss counts and collects in its trainer inside the `with`."""
    restore = remember_counts(trainer)
    try:
        yield
    finally:
        restore()


#: What Trainer logs of its steps, on all ranks.
_OF_TRAINING = {"loss", "learning_rate"}
#: What it logs when all steps are done, before it loads the best model.
_OF_THE_END = {"train_loss", "total_flos"}


@patch("transformers.trainer:Trainer.log", "metrics of a pipelined loss are known on the last stage")
def log(original: Callable, self: Trainer, logs: dict, *args: object, **kwargs: object) -> None:
    """Show on rank 0 what a script's loss has collected on the last stage."""
    state = runtime.find_parallel_state(self.model)
    record = record_of(self)
    if record.tries:
        return
    if state is not None and state.pipeline is not None and state.pipeline.pipelines.session is not None:
        # compute_loss runs on the last stage alone: the others log with it later
        record.step.logged.append(dict(logs))
        return
    if record.held_logs is not None:
        record.held_logs.append(functools.partial(self.log, logs, *args, **kwargs))
        return
    if state is not None and state.pipeline is not None and is_own(self):
        state.pipeline.tell(logs)
    load: ExpertLoad | None = None if state is None else getattr(self.model, LOAD, None)
    if load is not None and logs.keys() >= _OF_TRAINING:
        logs.update({key: round(value, 4) for key, value in load.read().items()})
    if logs.keys() >= _OF_TRAINING:
        watched = monitoring.watch_model(self.model)
        logs.update({} if watched is None else watched.read(self.args, self.state.global_step))
    ends = logs.keys() >= _OF_THE_END
    if ends:
        # The best model is loaded, and checkpoints are counted, when all of them are there.
        hangs.mark_phase("the end of the training", may_take_long=True)
        checkpoints.wait_for_save(self)
        checkpoints.forget_in_flight(self)
    looking = bad_numbers.find_looking()
    if looking is not None:
        looking.logged(logs)
    original(self, logs, *args, **kwargs)
    if ends:
        monitoring.keep_measured_step()
        report.report_at_end(self, monitoring.get_critical_batch())
