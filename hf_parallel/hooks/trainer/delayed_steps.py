"""`pipeline_schedule=pipedream_2bw` under Trainer: the batches of the next step are read before this one trains.

    get_batch_samples(t)    returns the batches of step t, which were read with step t - 1, and reads those of t + 1
    training_step           announces the calls of step t + 1 to the engine, and computes step t

Nothing is announced past the end of an epoch, before the last step, and of batches whose last may be ragged: there the
pipeline drains. A save forgets what is in flight, so that the run goes on as one that is resumed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.batches import row_count
from hf_parallel.axes.pipeline.joint import JointStep
from hf_parallel.axes.pipeline.schedules import micro_batch_count
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer import joint_steps
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trainer.evaluation import WeighedBatch
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

    from hf_parallel.axes.pipeline.delayed import DelayedPipeline
    from hf_parallel.axes.pipeline.engine import PipelineEngine

_WORKS = "pipeline_schedule=1f1b"


@dataclass
class Step:
    """The batches of one optimizer step, and the count of their targets."""

    batches: list[Any] = field(default_factory=list)
    items: Any = None


@dataclass
class ReadAhead:
    """What a Trainer has read: the step in progress, and the one after it."""

    iterator: Iterator | None = None
    now: Step = field(default_factory=Step)
    coming: Step = field(default_factory=Step)


def check_trainer(trainer: Trainer) -> None:
    """Refuse what does not tell its batches ahead, or updates weights otherwise than in the optimizer's step.

    Raises:
        SpecError: the trainer has a loss, a step or an optimizer of such a kind.
    """
    state, engine = runtime.parallel_state(trainer.model), joint_steps.engine_of(trainer)
    if state is None or engine is None or engine.delayed is None:
        return
    asked, args = f"pipeline_schedule={engine.config.pipeline_schedule}", trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    reason = joint_steps.why_apart(trainer, engine)
    if reason is not None:
        refuse(asked, f"reads batches ahead, but {reason}", _WORKS)
    if args.fp16:
        refuse(asked, "a step that fp16 leaves out would leave out gradients of older weights; fp16=True", "bf16=True")
    if name in joint_steps.FUSED or name.endswith(joint_steps.LAYERWISE):
        refuse(asked, f"optim={name} updates weights in the backward pass, of two versions", "optim=adamw_torch")
    if not engine.delayed.reads_ahead:  # else another Trainer of this model has noted it
        state.notes.append(f"{asked} holds weights and gradients twice, which the memory above counts once")
    engine.delayed.reads_ahead = True
    report.say(
        f"{asked} is another algorithm than training in one process: the gradients of each step are those of weights "
        f"that are one step old (arXiv 2006.09503); {_WORKS} has the numbers of one process"
    )


def delayed_of(trainer: Trainer) -> DelayedPipeline | None:
    """The pipeline that does not drain between steps, if the trainer's model has one."""
    engine = joint_steps.engine_of(trainer)
    return None if engine is None else engine.delayed


def read_step(trainer: Trainer, iterator: Iterator, read: Callable[[], tuple[list, object]]) -> tuple[list, object]:
    """The batches of this step and the count of their targets; those of the next step are read and kept."""
    if delayed_of(trainer) is None:
        return read()
    record = record_of(trainer)
    ahead = record.read_ahead
    if ahead is None or ahead.iterator is not iterator:
        ahead = record.read_ahead = ReadAhead(iterator, coming=Step(*read()))
    ahead.now = ahead.coming
    is_last = trainer.state.global_step + 1 >= trainer.state.max_steps
    ahead.coming = Step() if is_last or not ahead.now.batches else Step(*read())
    return ahead.now.batches, ahead.now.items


def announce_steps(trainer: Trainer, model: PreTrainedModel, inputs: dict) -> None:
    """Before the first batch of a step: announce its calls, if that was not done a step ago, and those of the next."""
    ahead, engine = record_of(trainer).read_ahead, joint_steps.engine_of(trainer)
    if engine is None or engine.delayed is None or ahead is None:
        return
    delayed = engine.delayed
    if not ahead.now.batches or inputs is not ahead.now.batches[0]:
        return  # another batch of the step, or a step that is computed once more
    engine.joint = None
    if delayed.updates and delayed.updates[0].source is not ahead.now.batches:
        delayed.drop()  # the script has left an epoch before its end
    model.train()
    for step in (ahead.now, ahead.coming):
        if any(update.source is step.batches for update in delayed.updates):
            continue
        prepared = _prepared(trainer, engine, step)
        if prepared is None:
            break
        follows = delayed.takes(_micro_batches(engine, prepared))
        if engine.mesh.data_size > 1:  # data ranks may have unlike numbers of rows: their gradients are of one version
            follows = all(messages.gather(follows, engine.mesh.host_group))
        if not follows:
            break
        delayed.add(step.batches, joint_steps.announced(trainer, engine, model, prepared, step.items))
    if delayed.updates:
        engine.joint = JointStep(list(delayed.updates[0].calls), delayed.run)


def _prepared(trainer: Trainer, engine: PipelineEngine, step: Step) -> list[dict] | None:
    """The batches of a step as the model gets them; None where the pipeline is to drain before it.

    Raises:
        SpecError: a batch that is not the last of an epoch cannot be cut into micro-batches.
    """
    if not step.batches or any(isinstance(batch, WeighedBatch) for batch in step.batches):
        return None
    prepared = [trainer._prepare_inputs(dict(batch)) for batch in step.batches]
    if not engine.can_schedule_together(prepared):
        for batch in prepared:
            micro_batch_count(row_count(batch), engine.config)
        refuse(f"pipeline_schedule={engine.config.pipeline_schedule}", "the model's loss needs whole batches", _WORKS)
    return prepared


def _micro_batches(engine: PipelineEngine, batches: list[dict]) -> int:
    return sum(micro_batch_count(row_count(batch), engine.config) for batch in batches)
