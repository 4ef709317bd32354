"""Gradient accumulation in a pipeline: Trainer has all batches of a step before it trains on the first of them.

They are announced to the engine, which runs them as one schedule (`axes/pipeline/joint.py`): the pipeline drains once
per optimizer step instead of once per batch. Announcing calls `compute_loss` for each batch; the model then notes what
it is called with and computes nothing. A loss of the script's own is not called: what it computes of a micro-batch is
known from its first step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from transformers import Trainer

from hf_parallel.ask.keys.pipeline import DELAYED_SCHEDULES, JOINING_SCHEDULES
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline import script_loss
from hf_parallel.axes.pipeline.batches import count_rows
from hf_parallel.axes.pipeline.engine import run_calls
from hf_parallel.axes.pipeline.joint import JointStep
from hf_parallel.axes.pipeline.schedules import can_run_micro_batches, count_micro_batches
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.hooks.trainer import bad_numbers, losses
from hf_parallel.hooks.trainer.checkpoints import StepRecord, record_of
from hf_parallel.hooks.trainer.evaluation import Weighed
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.ranks import messages
from hf_parallel.ranks.nested_batches import is_nested

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_parallel.axes.pipeline.engine import PipelineEngine
    from hf_parallel.axes.pipeline.joint import ScheduledCall


#: Optimizers that step while the backward pass runs.
FUSED, LAYERWISE = ("lomo", "adalomo"), "_layerwise"
#: Methods in which a subclass of Trainer may do something else with a batch.
_METHODS = ("training_step", "_prepare_inputs", "compute_loss_context_manager")


def note_batches(trainer: Trainer, batches: list) -> None:
    """Remember the batches of the step that begins; say once whether they run as one schedule."""
    record, state = record_of(trainer), runtime.find_parallel_state(trainer.model)
    record.batches_of_step = []
    if state is None or state.pipeline is None:
        return
    engine = state.pipeline
    engine.joint = None
    if len(batches) < 2 or engine.delayed is not None:
        return
    reason = find_reason_to_run_apart(trainer, engine)
    if reason is None:
        record.batches_of_step = batches
    if not record.told_joint:
        record.told_joint = True
        how = f"run one by one, and the pipeline drains after each: {reason}"
        how = how if reason is not None else "are one run of the schedule, so the pipeline drains once per step"
        if reason is None and losses.is_own(trainer):
            how += ", once the first step has shown that the script's loss can be computed so"
        state.notes.append(f"gradient accumulation: the {len(batches)} batches of a step {how}")


def announce_step(
    trainer: Trainer, model: PreTrainedModel, inputs: dict, num_items_in_batch: torch.Tensor | int | None
) -> None:
    """Before the first batch of a step: announce the others, if all of them can run as one schedule."""
    record = record_of(trainer)
    batches, record.batches_of_step = record.batches_of_step, []
    looking = bad_numbers.find_looking()
    if not batches or inputs is not batches[0] or (looking is not None and looking.wanted):
        return
    if any(isinstance(batch, Weighed) or is_nested(batch) for batch in batches):  # repeated rows, or no one batch
        return
    engine = cast("PipelineEngine", find_engine_of(trainer))
    model.train()
    prepared = [trainer._prepare_inputs(dict(batch)) for batch in batches]
    if losses.is_own(trainer):  # the first step has shown how the script's losses of such batches may be cut
        plans, counts = [record.loss_plans.get(tuple(batch)) for batch in prepared], []
        for batch, plan in zip(prepared, plans, strict=True):
            if plan is not None and plan.why_apart is None and script_loss.can_cut_batch(plan, batch, engine.config):
                counts.append(count_micro_batches(count_rows(batch) // plan.cut.rows, engine.config))
        together = len(counts) == len(plans) and can_run_micro_batches(engine.config, sum(counts))
    else:
        together = engine.can_schedule_together(prepared)
    if engine.mesh.data_size > 1:
        # Reductions follow the schedule, and data ranks may have unlike numbers of rows: all go the same way.
        together = all(messages.gather_objects(together, engine.mesh.host_group_of_training))
    if together:
        calls = list_announced_calls(trainer, engine, model, prepared, num_items_in_batch)
        engine.joint = JointStep(calls, functools.partial(run_calls, engine, held=None))


def list_announced_calls(
    trainer: Trainer, engine: PipelineEngine, model: PreTrainedModel, batches: list[dict], items: object
) -> list[ScheduledCall]:
    """Return the calls of the model that a step will make with these batches."""
    record = record_of(trainer)
    record.joint_logs.clear()
    weighed = replacing(runtime.current(), in_trainer=True)
    with engine.announcing() as calls, weighed, trainer.compute_loss_context_manager():
        for batch in batches:
            with replacing(record, step=StepRecord(syncs=batch is batches[-1])):
                factor = trainer.compute_loss(model, batch, num_items_in_batch=items)
            if float(factor) != 1.0:
                raise RuntimeError("hf_parallel: the losses of a gradient accumulation have unlike weights")
    return calls


def check_mirrored_trainer(trainer: Trainer) -> None:
    """Refuse training of which not half of the micro-batches can go the other way, or whose copies would not be equal.

    Raises:
        SpecError: the trainer has a loss, a precision or an optimizer of such a kind.
    """
    engine = find_engine_of(trainer)
    if engine is None or engine.mirror is None:
        return
    args, asked, works = trainer.args, f"pipeline_schedule={engine.config.pipeline_schedule}", "pipeline_schedule=1f1b"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if getattr(trainer.compute_loss, "func", None) is not losses.compute_loss or losses.is_own(trainer):
        refuse(asked, "both ends of the pipeline compute losses, and a script's own runs on one", works)
    if args.fp16:
        refuse(asked, "has not been compared with one process in fp16; fp16=True", "bf16=True")
    if optimizer in FUSED or optimizer.endswith(LAYERWISE):
        refuse(asked, f"optim={optimizer} updates weights in the backward pass, of one copy", "optim=adamw_torch")


def find_engine_of(trainer: Trainer) -> PipelineEngine | None:
    """Return the pipeline of the trainer's model, if it has one."""
    state = runtime.find_parallel_state(trainer.model)
    return None if state is None else state.pipeline


def find_reason_not_announced(trainer: Trainer, takes_own_losses: bool = False) -> str | None:
    """Return why the calls of the model that a step will make are not known from its batches."""
    # Has its class, or the script, put another method in the place of Trainer's?
    names = {name for name in _METHODS if getattr(type(trainer), name) is not getattr(Trainer, name)}
    if trl.does_only_offload_in_steps(trainer):
        names.discard("training_step")
    own = next((name for name in _METHODS if name in vars(trainer) or name in names), None)
    computes = getattr(trainer.compute_loss, "func", None) is losses.compute_loss
    if not computes or (losses.is_own(trainer) and not takes_own_losses):
        return "the loss is the script's"
    return None if own is None else f"{type(trainer).__name__} has its own {own}"


def find_reason_to_run_apart(trainer: Trainer, engine: PipelineEngine) -> str | None:
    """Return why the batches of a step cannot run as one schedule, whatever is in them."""
    from transformers import TrainerCallback

    config, reason = engine.config, find_reason_not_announced(trainer, takes_own_losses=engine.delayed is None)
    if reason is not None:
        return reason
    if config.pipeline_schedule not in (*JOINING_SCHEDULES, *DELAYED_SCHEDULES):
        return f"pipeline_schedule={config.pipeline_schedule} would keep the activations of all of them"
    if config.shares_batches:
        return f"batch_shares={config.batch_shares} weighs each of them"
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    kinds = [kind for kind in kinds if not kind.__module__.startswith("hf_parallel.")]
    watching = [kind for kind in kinds if kind.on_substep_end is not TrainerCallback.on_substep_end]
    if watching:
        return f"{watching[0].__name__} looks at gradients between them (on_substep_end)"
    known = losses.is_own(trainer) or engine.sums_over_tokens
    return None if known else "the loss of the model is not a sum over tokens"


# ---- `pipeline_fill=kfac`: what it cannot train


def check_trainer_for_fill(trainer: Trainer) -> None:
    """Refuse training of which the bubbles cannot take the curvature.

    Raises:
        SpecError: the trainer has a loss, a step, a precision or an optimizer of such a kind.
    """
    engine = find_engine_of(trainer)
    if engine is None or engine.fill is None:
        return
    args, asked, works = trainer.args, f"pipeline_fill={engine.config.pipeline_fill}", "pipeline_fill=none"
    optimizer = str(getattr(args.optim, "value", args.optim))
    reason = find_reason_not_announced(trainer)
    if reason is not None:
        refuse(asked, f"takes the curvature of the model's own loss, but {reason}", works)
    if args.fp16:
        refuse(asked, "a step that fp16 leaves out would spoil the curvature of several; fp16=True", "bf16=True")
    if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
        refuse(asked, "would see each forward pass twice; gradient_checkpointing=True", "gradient_checkpointing=False")
    if optimizer in FUSED or optimizer.endswith(LAYERWISE):
        refuse(asked, f"optim={optimizer} updates weights in the backward pass", "optim=adamw_torch")
    oldest = 2 * engine.fill.interval - 1
    report.say(
        f"{asked} is another algorithm than training in one process: gradients are preconditioned by curvature that "
        f"is up to {oldest} steps old (K-FAC in pipeline bubbles, arXiv 2211.14133); {works} has the numbers of one "
        "process"
    )
