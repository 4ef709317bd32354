"""A pipeline behind `model(**batch)`: one call runs all micro-batches through all stages.

Every stage runs the model's own forward on its micro-batch as far as its last layer; there the first stage embeds the
tokens, the others take the activations they received, and all but the last leave. So masks, rotary embeddings and head
are Hugging Face's own code, and the last stage computes the model's own loss.

Two ways through the stages, chosen per call and both exact:

    scheduled   training with a loss that adds up over micro-batches, the model's own or the script's: one of torch's
                schedules; the last stage computes each micro-batch's loss as soon as it arrives
    served      everything else (evaluation; losses over whole batches; ragged tails): all forwards, then, where the
                result has a gradient, all backwards, as GPipe does; outputs appear on every rank
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.pipeline import unscheduled
from hf_parallel.axes.pipeline.batches import (
    COUNTED,
    DetachedNode,
    PipelineLoss,
    collect_fresh_gradients,
    count_causal_targets,
    count_rows,
    drop_mask_of_packs,
    refuse_cache,
    refuse_partial_outputs,
    split_rows,
    tokens_of,
)
from hf_parallel.axes.pipeline.fill_kfac import FilledRun
from hf_parallel.axes.pipeline.joint import JointStep, Parts, Ran, Run, ScheduledCall
from hf_parallel.axes.pipeline.schedules import build_schedule, can_be_cut, can_run_micro_batches, count_micro_batches
from hf_parallel.axes.pipeline.stage_runner import Handler, StageRunner, apply_autocast_per_stage
from hf_parallel.axes.pipeline.stages import StageView
from hf_parallel.axes.pipeline.unscheduled import free
from hf_parallel.model.anatomy import get_backbone_of
from hf_parallel.model.calls import Batch, are_logits_unread, bind_by_name, note_unread_logits
from hf_parallel.model.known_masks import share_known_mask

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from hf_parallel.axes.axis import HeldRun
    from hf_parallel.axes.pipeline.batches import Gradients
    from hf_parallel.axes.pipeline.chimera import Mirror
    from hf_parallel.axes.pipeline.delayed import DelayedPipeline
    from hf_parallel.axes.pipeline.energy import StageClocks
    from hf_parallel.axes.pipeline.fill_kfac import KfacFill


# ---- One step under one of torch's schedules: all forward and backward passes of all micro-batches ------------------


def run_scheduled(engine: PipelineEngine, count: int, tokens: torch.Tensor, run: Run) -> torch.Tensor:
    """Run a training call under the schedule; return its loss.

    The schedule has run the backward passes, too. The backward pass of the returned loss only adds their gradients.

    Args:
        count: the number of micro-batches.
        tokens: the tokens [rows, length] of one micro-batch.
        run: computes one micro-batch on one stage from its input: the stage's output, on the last stage the loss.

    Raises:
        RuntimeError: the call is not the one that was announced.
    """
    call = ScheduledCall(count, tokens.shape, engine.boundary(tokens, "meta").requires_grad_(), run)
    if engine.announced is not None:
        engine.announced.append(call)
        return torch.ones(())  # shows what the script multiplies a loss by
    held, step = None, engine.joint
    if step is None:
        held = engine.services.begin_held_run()
        ran = run_calls(engine, [call], held) if engine.delayed is None else engine.delayed.run_alone(call)
        loss, is_last = ran.losses[0], True
    else:
        if not step.calls or step.calls[0].tokens != call.tokens:
            raise RuntimeError(
                f"hf_parallel: micro-batches of {tuple(call.tokens)} tokens are not those that were read for this "
                "step: the script changed a batch after it was read; pipeline_schedule=gpipe reads none ahead"
            )
        if step.ran is None:
            step.ran = step.run(list(step.calls))
        step.calls.pop(0)
        ran, is_last = step.ran, not step.calls
        loss = ran.losses.pop(0)
        engine.joint = None if is_last else step

    def hand_over(gradients: Gradients) -> None:
        gradient = gradients[0]
        if is_last:
            unscaled = gradient if gradient is None or ran.scale is None else gradient / ran.scale
            engine.accumulate(ran.fresh, unscaled, held)

    return DetachedNode.apply(torch.zeros((), requires_grad=True), hand_over, loss)[0]


def run_calls(engine: PipelineEngine, calls: list[ScheduledCall], held: HeldRun | None) -> Ran:
    """Run the micro-batches of all calls in one schedule.

    Args:
        held: takes the gradients of this run, if data ranks do not reduce them yet.
    """
    engine.check_layers()
    if engine.fill is not None:
        with apply_autocast_per_stage(engine) as autocast:
            return FilledRun(engine, engine.fill, calls).run(autocast)
    if engine.mirror is not None:
        return engine.mirror.run(calls)
    parts = Parts(calls)
    count, index = len(parts), torch.arange(len(parts))
    if count not in engine.schedules:
        modules: dict[int, nn.Module] = {v.index: s for v, s in zip(engine.views, engine.stages, strict=True)}
        given = modules, engine.config, engine.group, engine.mesh.device, count, parts.boundaries[0], engine.recorder
        engine.schedules[count] = build_schedule(*given, connected=bool(engine.schedules))
        if engine.energy is not None:
            engine.energy.watch(engine.schedules[count][1][0])
    schedule, torch_stages = engine.schedules[count]
    engine.latest_count = count
    for one in torch_stages:
        one.boundaries, one.around = parts.boundaries, parts.around  # the shapes that travel in this step
    free(engine)
    engine.services.before_run(engine.model.training, calls[0].tokens)
    for one in torch_stages:
        one.reduces = held is None
    scale = engine.compute_loss_scale()
    losses: list[torch.Tensor] = []
    with apply_autocast_per_stage(engine) as autocast, collect_fresh_gradients(engine.trainable()) as fresh:

        def work(view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
            output = parts.run(view, hidden, i)
            return output if scale is None or view.index != engine.last_index else output * scale

        try:
            for view, stage in zip(engine.views, engine.stages, strict=True):
                stage.work, stage.autocast = functools.partial(work, view), autocast
            schedule.step(index, target=index, losses=losses, return_outputs=False, micro_batch=index)
        except RuntimeError as error:  # raise the stage's own error, as in one process: torch wraps it
            is_wrapper = str(error).lstrip().startswith(("[Stage", "Failed to run stage"))
            raise (error.__cause__ if is_wrapper and error.__cause__ is not None else error) from None
        finally:
            for stage in engine.stages:
                stage.work, stage.autocast = None, contextlib.nullcontext
        if held is not None:
            held.take()
    if engine.energy is not None:
        engine.energy.end_run()
    of_calls = parts.losses(losses, engine.mesh.device)
    of_calls = of_calls if scale is None else of_calls / scale
    dist.broadcast(of_calls, group=engine.group, group_src=engine.last_rank)
    return Ran(list(of_calls.unbind()), fresh, scale)


class PipelineEngine(StageRunner):
    """Runs a pipelined model behind its `forward`, under a schedule or served."""

    announced: list[ScheduledCall] | None = None  # while calls are announced
    joint: JointStep | None = None  # the step in progress, if its calls run together
    delayed: DelayedPipeline | None = None  # under schedules that do not drain between steps
    mirror: Mirror | None = None  # a copy of the mirrored stage, for the other half of the micro-batches
    fill: KfacFill | None = None  # what runs in bubbles
    energy: StageClocks | None = None  # lowers clocks where there is time

    # ---- attaching ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the engine behind `model.forward` and cut the backbone's forward.

        Both are plain functions, called with or without the model as first argument: accelerate rebinds them.
        """
        backbone = get_backbone_of(self.model)
        self._model_forward, self._backbone_forward = self.model.forward, backbone.forward
        self._signature = inspect.signature(self._model_forward)
        self._backbone_signature = inspect.signature(self._backbone_forward)

        @functools.wraps(self._model_forward)
        def model_forward(*args: object, **kwargs: object) -> ModelOutput:
            return self.run(*(args[1:] if args and args[0] is self.model else args), **kwargs)

        @functools.wraps(self._backbone_forward)
        def backbone_forward(*args: object, **kwargs: object) -> ModelOutput:
            args = args[1:] if args and args[0] is backbone else args
            kwargs = drop_mask_of_packs(bind_by_name(self._backbone_signature, args, kwargs))
            refuse_partial_outputs(self.model.config, kwargs, self.services.balance is not None)
            if "use_cache" in self._backbone_signature.parameters:
                kwargs["use_cache"] = False
            if self._on_call is not None:
                return self._on_call(kwargs)
            session = self.pipelines.session
            if session is not None:
                return session.run_in_last_stage(self, lambda: session.answer(self, kwargs))
            return unscheduled.serve_script(self, kwargs, lambda: cast(Handler, self._on_call)(kwargs))[0]

        self.model.forward, backbone.forward = model_forward, backbone_forward

    def set_forward(self, forward: Callable) -> None:
        """Replace the function that computes the model's outputs around its backbone, the loss among them."""
        self._model_forward, self._signature = forward, inspect.signature(forward)

    # ---- one call ------------------------------------------------------------------------------------------------

    def run(self, *args: object, **kwargs: object) -> ModelOutput:
        """Compute `model(**batch)` on every rank of the pipeline; return the same values on all of them."""
        batch = bind_by_name(self._signature, args, kwargs)
        if self.services.balance is None:  # nothing reads the count
            batch = {key: value for key, value in drop_mask_of_packs(batch).items() if key != COUNTED}
        refuse_partial_outputs(self.model.config, batch, self.services.balance is not None)
        if batch.get("use_cache"):
            refuse_cache()
        if "use_cache" in self._signature.parameters:
            batch["use_cache"] = False
        if self.items is not None and self.sums_over_tokens and batch.get("labels") is not None:
            batch["num_items_in_batch"] = batch.get("num_items_in_batch", self.items)
        if self._view is not None:  # a script's loss, on the last stage, calls its model
            return self._model_forward(**batch)
        if self.pipelines.session is not None:  # or another one
            return self.pipelines.session.run_in_last_stage(self, lambda: self._model_forward(**batch))
        batch = self._fill_batch(batch)
        rows = tokens_of(batch).shape[0]
        if self.delayed is not None and not self.delayed.reads_ahead and self._is_training(batch):
            raise NotImplementedError(
                f"hf_parallel: pipeline_schedule={self.config.pipeline_schedule} needs the batches of the next step "
                "ahead, which only Trainer tells; pipeline_schedule=1f1b works"
            )
        is_schedulable = self._may_be_scheduled(batch) and can_be_cut(rows, self.config)
        if self.fill is not None and self._is_training(batch):
            self.fill.check_call(is_schedulable)
        if is_schedulable:
            batch = {"num_items_in_batch": count_causal_targets(batch), **batch}
            parts = split_rows(batch, count_micro_batches(rows, self.config))
            run: Run = functools.partial(self._has_own_loss, parts)
            run = run if self.fill is None else self.fill.watched(run, parts)
            # An announced call has its mask already: to read it again would wait for the device.
            with contextlib.nullcontext() if self.joint is not None else share_known_mask(batch, tokens_of(batch)):
                return PipelineLoss(loss=run_scheduled(self, len(parts), tokens_of(parts[0]), run))
        assert self.announced is None
        return unscheduled.serve_script(self, batch, lambda: self._outputs(batch))[0]

    @contextlib.contextmanager
    def announcing(self) -> Iterator[list[ScheduledCall]]:
        """Collect the training calls that are made inside the `with`, and compute none of them. Yield their list."""
        self.announced = []
        try:
            yield self.announced
        finally:
            self.announced = None

    def can_schedule_together(self, batches: list[Batch]) -> bool:
        """Return whether training calls with these batches can run as one schedule."""
        counts = []
        for batch in map(self._fill_batch, batches):
            rows = count_rows(batch)
            if not self._may_be_scheduled(batch) or not can_be_cut(rows, self.config):
                return False
            counts.append(count_micro_batches(rows, self.config))
        return can_run_micro_batches(self.config, sum(counts))

    def _may_be_scheduled(self, batch: Batch) -> bool:
        return self._is_training(batch) and self.sums_over_tokens and self.balance_of(batch) is None

    def _fill_batch(self, batch: Batch) -> Batch:
        """Repeat the last row of a batch, without targets, until the schedule can cut it.

        All data ranks must go the same way through the stages, or they would gather weights in different orders. A row
        without targets adds nothing to a loss per token. Joined examples, one row on all ranks, stay as they are.
        """
        rows = tokens_of(batch).shape[0]
        fits = (self.config.sharing_size == 1 and self.fill is None) or can_be_cut(rows, self.config)
        if fits or "cu_seq_lens_q" in batch or not self._may_be_scheduled(batch):
            return batch
        added = next(n for n in itertools.count(1) if can_be_cut(rows + n, self.config))
        filled = dict(batch)
        for key, value in batch.items():
            if torch.is_tensor(value) and value.dim() and value.shape[0] == rows:
                more = value[-1:].expand(added, *value.shape[1:])
                more = torch.full_like(more, -100) if key in ("labels", "shift_labels") else more
                filled[key] = torch.cat([value, more])
        return filled

    def _is_training(self, batch: Batch) -> bool:
        """Return whether the loss of this call will have a backward pass."""
        return torch.is_grad_enabled() and self.model.training and batch.get("labels") is not None

    def _has_own_loss(self, parts: list[Batch], view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
        handler = functools.partial(self.run_backbone, hidden)
        with note_unread_logits(self.services.loss_in_chunks):
            return self.run_as_stage(view, handler, lambda: self._model_forward(**parts[i])["loss"])

    def _outputs(self, batch: Batch) -> ModelOutput:
        outputs = self._model_forward(**batch)
        if self._is_training(batch) and self.balance_of(batch) is not None:
            return PipelineLoss(loss=outputs["loss"], aux_loss=outputs["aux_loss"])
        if (self.loss_only or are_logits_unread()) and outputs.get("loss") is not None:
            return type(outputs)(loss=outputs["loss"])
        # Values that are no tensors, such as a cache, are those of this stage alone: leave them out.
        return type(outputs)(**{key: value for key, value in outputs.items() if torch.is_tensor(value)})
