"""`pipeline_schedule=pipedream_2bw` and `pipedream` under Trainer: batches of the next steps are read ahead.

    get_batch_samples(t)    returns the batches of step t, which were read before, and reads those of t + 1
    training_step           announces the calls of step t + 1 to the engine, and computes step t

Where a step has fewer micro-batches than there are stages, `pipedream` needs the batches of several steps ahead.

Nothing is announced past the end of an epoch, before the last step, or if a step's last batch may be ragged: there
the pipeline drains. A save forgets what is in flight, so that the run goes on as one that is resumed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.batches import count_rows
from hf_parallel.axes.pipeline.joint import JointStep
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.hooks import report
from hf_parallel.hooks.trainer import joint_steps
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trainer.evaluation import Weighed
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

_WORKS = "pipeline_schedule=1f1b"


@dataclass
class Step:
    """The batches of one optimizer step, and the count of their targets."""

    batches: list[Any] = field(default_factory=list)
    items: Any = None


@dataclass
class ReadAhead:
    """The batches that a Trainer has read: those of the step in progress, and of the one after it."""

    iterator: Iterator | None = None
    now: Step = field(default_factory=Step)
    coming: list[Step] = field(default_factory=list)


def check_trainer_for_delay(trainer: Trainer) -> None:
    """Refuse a Trainer that does not tell its batches ahead, or updates weights outside the optimizer's step.

    Raises:
        SpecError: the trainer has a loss, a step or an optimizer of such a kind.
    """
    engine = joint_steps.find_engine_of(trainer)
    if engine is None or engine.delayed is None:
        return
    asked, args = f"pipeline_schedule={engine.config.pipeline_schedule}", trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    reason = joint_steps.find_reason_to_run_apart(trainer, engine)
    if reason is not None:
        refuse(asked, f"reads batches ahead, but {reason}", _WORKS)
    if args.fp16:
        refuse(asked, "a step that fp16 leaves out would leave out gradients of older weights; fp16=True", "bf16=True")
    if name in joint_steps.FUSED or name.endswith(joint_steps.LAYERWISE):
        refuse(asked, f"optim={name} updates weights in the backward pass, of several versions", "optim=adamw_torch")
    engine.delayed.reads_ahead = True
    weights, paper = "weights that are one step old", "2006.09503"
    if engine.delayed.stashes:
        weights, paper = "the weights that each stage had when a micro-batch came to it, some steps old", "1806.03377"
    report.say(
        f"{asked} is another algorithm than training in one process: the gradients of each step are those of "
        f"{weights} (arXiv {paper}); {_WORKS} has the numbers of one process"
    )


def read_step(trainer: Trainer, iterator: Iterator, read: Callable[[], tuple[list, object]]) -> tuple[list, object]:
    """Return the batches of this step and the count of their targets; those of the next steps are read and kept."""
    engine = joint_steps.find_engine_of(trainer)
    if engine is None or engine.delayed is None:
        return read()
    record = record_of(trainer)
    ahead = record.read_ahead
    if ahead is None or ahead.iterator is not iterator:
        ahead = record.read_ahead = ReadAhead(iterator)
    coming: list[Step] = ahead.coming or [Step(*read())]
    ahead.now, ahead.coming = coming[0], coming[1:]
    stages, fewest = engine.config.pp_size, engine.config.pipeline_microbatches or 1
    most = 1
    if engine.delayed.stashes and ahead.now.batches:
        most = math.ceil((stages - 1) / (fewest * len(ahead.now.batches)))
    most = min(most, trainer.state.max_steps - trainer.state.global_step - 1)
    while len(ahead.coming) < most and (ahead.now, *ahead.coming)[-1].batches:
        ahead.coming.append(Step(*read()))
    return ahead.now.batches, ahead.now.items


def announce_steps(trainer: Trainer, model: PreTrainedModel, inputs: dict) -> None:
    """Announce the calls of a step before its first batch, if that was not done a step ago, and those of the next.

    Raises:
        SpecError: a batch that is not the last of an epoch cannot be cut into micro-batches.
    """
    ahead, engine = record_of(trainer).read_ahead, joint_steps.find_engine_of(trainer)
    if engine is None or engine.delayed is None or ahead is None:
        return
    delayed = engine.delayed
    if not ahead.now.batches or inputs is not ahead.now.batches[0]:
        return  # another batch of the step, or a step that is computed once more
    engine.joint = None
    if delayed.updates and delayed.updates[0].source is not ahead.now.batches:
        delayed.drop()  # the script has left an epoch before its end
    model.train()
    for step in (ahead.now, *ahead.coming):
        if any(update.source is step.batches for update in delayed.updates):
            continue
        if delayed.knows_enough():
            break
        if not step.batches or any(isinstance(batch, Weighed) for batch in step.batches):
            break  # the pipeline drains before such a step
        prepared = [trainer._prepare_inputs(dict(batch)) for batch in step.batches]
        if not engine.can_schedule_together(prepared):
            for batch in prepared:
                count_micro_batches(count_rows(batch), engine.config)
            refuse(
                f"pipeline_schedule={engine.config.pipeline_schedule}", "the model's loss needs whole batches", _WORKS
            )
        follows = delayed.takes(sum(count_micro_batches(count_rows(batch), engine.config) for batch in prepared))
        if engine.mesh.data_size > 1:  # data ranks may have unlike numbers of rows: their gradients are of one version
            follows = all(messages.gather_objects(follows, engine.mesh.host_group_of_training))
        if not follows:
            break
        delayed.add(step.batches, joint_steps.list_announced_calls(trainer, engine, model, prepared, step.items))
    if delayed.updates:
        engine.joint = JointStep(list(delayed.updates[0].calls), delayed.run)
