"""A flushed schedule as a list of actions per rank, with other work in the gaps between them.

torch's schedules have no place for other work: they wait for a message as soon as the action before it has ended. Here
a rank asks for its next message, does what was placed in the gap, and then waits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from hf_parallel.axes.pipeline.batches import collect_fresh_gradients
from hf_parallel.axes.pipeline.joint import Parts, Ran, ScheduledCall
from hf_parallel.axes.pipeline.timeline import BACKWARD, FORWARD, Action, order

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_parallel.axes.pipeline.fill_kfac import KfacFill
    from hf_parallel.axes.pipeline.stage_runner import StageRunner


class FilledRun:
    """A run of a schedule with one stage per rank."""

    def __init__(self, engine: StageRunner, fill: KfacFill, calls: list[ScheduledCall]) -> None:
        self.engine, self.fill, self.parts = engine, fill, Parts(calls)
        self.view, self.stage = engine.views[0], engine.stages[0]
        self.place, self.ranks = engine.group.rank(), engine.group.size()
        # Messages of the two directions must not wait for each other.
        self.groups = {FORWARD: engine.group, BACKWARD: engine.mesh.second_stage_group}
        self.alive: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # what arrived, what left
        self.losses: list[torch.Tensor] = []
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []

    def run(self, autocast: Callable[[], torch.autocast]) -> Ran:
        """Run all micro-batches forward and backward."""
        engine, count = self.engine, len(self.parts)
        engine.services.before_run(True, self.parts.calls[0].tokens)
        engine.latest_count = count
        actions = order(engine.config.pipeline_schedule, self.ranks, 1, count)[self.place]
        with collect_fresh_gradients(engine.trainable()) as fresh:
            self.stage.work, self.stage.autocast = functools.partial(self.parts.run, self.view), autocast
            try:
                for position, action in enumerate(actions):
                    arrived, work = None, None
                    source = self.place + (-1 if action.kind == FORWARD else 1)
                    if 0 <= source < self.ranks:  # ask for the message that the action needs
                        like = self.parts.boundaries[action.micro_batch]
                        arrived = torch.empty(like.shape, dtype=like.dtype, device=engine.mesh.device)
                        work = dist.irecv(arrived, group=self.groups[action.kind], group_src=source)
                    self.fill.fill(count, position)
                    if work is not None:
                        work.wait()
                    self._compute(action, arrived)
            finally:
                self.stage.work = None
            self.fill.fill(count, len(actions))
        for work, _ in self.sent:
            work.wait()
        losses = self.parts.losses(self.losses, engine.mesh.device)
        dist.broadcast(losses, group=engine.group, group_src=engine.last_rank)
        return Ran(list(losses.unbind()), fresh, None)

    def _compute(self, action: Action, arrived: torch.Tensor | None) -> None:
        kind, _, i, _ = action
        way = 1 if kind == FORWARD else -1
        span = self.engine.recorder.span(kind, self.view.index, i)
        with self.parts.around(i), self.fill.timed(kind), span:
            if kind == FORWARD:
                hidden = None if arrived is None else arrived.requires_grad_()
                self.fill.number = i
                output = self.stage(hidden, i)
                self.alive[i] = hidden, output
                if self.place == self.ranks - 1:
                    self.losses.append(output.detach())
            else:
                hidden, output = self.alive.pop(i)
                if output.requires_grad:
                    torch.autograd.backward(output, arrived)
        if not 0 <= self.place + way < self.ranks:
            return
        leaving = output.detach()
        if kind == BACKWARD:
            hidden = cast(torch.Tensor, hidden)
            leaving = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        leaving = leaving.contiguous()
        work = dist.isend(leaving, group=self.groups[kind], group_dst=self.place + way)
        self.sent.append((cast(dist.Work, work), leaving))
