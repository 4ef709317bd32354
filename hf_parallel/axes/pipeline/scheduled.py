"""One step under one of torch's schedules: all forward and backward passes of all micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.pipeline.batches import fresh_gradients
from hf_parallel.axes.pipeline.outputs import detached_node
from hf_parallel.axes.pipeline.schedules import build_schedule
from hf_parallel.axes.pipeline.stages import StageView
from hf_parallel.axes.pipeline.unscheduled import free

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from hf_parallel.axes.pipeline.outputs import Gradients
    from hf_parallel.axes.pipeline.stage_runner import StageRunner

Run = Callable[[StageView, torch.Tensor | None, int], torch.Tensor]


def scheduled(engine: StageRunner, count: int, tokens: torch.Tensor, run: Run) -> torch.Tensor:
    """The loss of a batch; the gradients are known by then, its backward hands them over.

    Args:
        count: of micro-batches.
        tokens: of one of them.
        run: one micro-batch on one stage, from what arrived there: what leaves it, on the last stage the loss.
    """
    schedule, index = _schedule_for(engine, count, tokens), torch.arange(count)
    free(engine)
    engine.services.before_run(engine.model.training, tokens.shape)
    held = engine.held_run()
    for stage in engine.schedules[count][1]:
        stage.reduces = held is None
    scale_loss = engine.services.scale_loss
    scale = None if scale_loss is None else scale_loss(torch.ones((), device=engine.mesh.device))
    losses: list[torch.Tensor] = []
    with _autocast_per_stage(engine) as autocast, fresh_gradients(engine.trainable()) as fresh:

        def work(view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
            output = run(view, hidden, i)
            return output if scale is None or view.index != engine.last_index else output * scale

        try:
            for view, stage in zip(engine.views, engine.stages, strict=True):
                stage.work, stage.autocast = functools.partial(work, view), autocast
            schedule.step(index, target=index, losses=losses, return_outputs=False, micro_batch=index)
        except RuntimeError as error:
            raise _unwrapped(error) from None
        finally:
            for stage in engine.stages:
                stage.work, stage.autocast = None, contextlib.nullcontext
        if held is not None:
            held.take()
    own = [part.detach().float() for part in losses]
    loss = torch.stack(own).sum() if own else torch.zeros((), device=engine.mesh.device)
    loss = loss if scale is None else loss / scale
    dist.broadcast(loss, group=engine.group, group_src=engine.last_rank)

    def hand_over(gradients: Gradients) -> None:
        engine.accumulate(fresh, _over(gradients[0], scale), held)

    return detached_node([loss], hand_over)[0]


def _unwrapped(error: RuntimeError) -> BaseException:
    """What has failed in a stage, as it fails in one process: torch's schedule raises an error of its own for it."""
    is_wrapper = str(error).lstrip().startswith(("[Stage", "Failed to run stage"))
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error


def _schedule_for(engine: StageRunner, micro_batches: int, tokens: torch.Tensor) -> _PipelineSchedule:
    """The schedule for this number of micro-batches, told the shape of what travels in this step."""
    boundary = engine.boundary(tokens, "meta").requires_grad_()
    if micro_batches not in engine.schedules:
        modules: dict[int, nn.Module] = {v.index: s for v, s in zip(engine.views, engine.stages, strict=True)}
        connected, device = bool(engine.schedules), engine.mesh.device
        engine.schedules[micro_batches] = build_schedule(
            modules, engine.config, engine.group, device, micro_batches, boundary, engine.recorder, connected
        )
    schedule, stages = engine.schedules[micro_batches]
    for stage in stages:
        stage.boundary = boundary
    return schedule


@contextlib.contextmanager
def _autocast_per_stage(engine: StageRunner) -> Iterator[Callable[[], torch.autocast]]:
    """The schedule runs backward passes too, which must not be autocast: leave it, enter it for each forward."""
    kind = engine.mesh.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        # Without the cache: cast copies of gathered weights must not outlive the micro-batch.
        yield lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def _over(gradient: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or scale is None else gradient / scale
