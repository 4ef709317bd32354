"""PipeDream-2BW (Narayanan et al., 2021, arXiv 2006.09503, section 3.1): no flush between optimizer steps.

    W(t+1) = W(t) - lr f'(W(t-1))

The gradients of a step are those of weights that are one step old, and each rank holds two versions of its weights. So
the batches of the next step enter while those of this one leave. Whoever trains must have read them by then:

    step t      backward passes of t, forward passes of t + 1 behind them      loss, norm and gradients of t
    step t+1    the rest of t + 1, which began on the weights before step t's update, and t + 2 behind it

Where no next step is known (the end of the data, a batch of another size) a step drains; the one after it begins on
the newest weights, and its gradients are not delayed.

All stages run 1F1B without an end: stage r has p - 1 - r forwards ahead, then a forward and a backward in turn. Stage
0 is the last to have all backwards of a step, and the step ends with it. The others go on until then: stage r for as
long as 2 r forwards take, if a backward takes as long as two. So nobody waits in the all-reduce of the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.pipeline.engine import autocast_per_stage
from hf_parallel.axes.pipeline.joint import Parts, Ran, ScheduledCall
from hf_parallel.axes.pipeline.timeline import BACKWARD, FORWARD

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.engine import PipelineEngine


class Update:
    """The calls of one optimizer step, on the weights that were newest when they were read.

    Attributes:
        source: the batches that they were read from.
        leaves: id of a parameter -> its version, a leaf on the memory that the parameter had.
        losses: of micro-batches, on the last stage.
        alive: micro-batch -> what arrived and what left, until its backward pass.
    """

    def __init__(
        self, source: object, calls: list[ScheduledCall], model: nn.Module, trained: list[nn.Parameter]
    ) -> None:
        self.source, self.calls, self.parts = source, calls, Parts(calls)
        self.leaves = {id(parameter): nn.Parameter(parameter.data) for parameter in trained}
        self._held = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self.leaves
        ]
        self.losses: list[torch.Tensor] = []
        self.alive: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """In here the modules hold the leaves of this version: graphs lead to these."""
        for module, name, parameter in self._held:
            module._parameters[name] = self.leaves[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in self._held:
                module._parameters[name] = parameter


class DelayedPipeline:
    """Runs the steps of one model: the one in progress, and the beginning of the next."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine, self.view = engine, engine.views[0]
        self.place, self.ranks = engine.group.rank(), engine.group.size()
        # Messages of the two directions must not wait for each other.
        self.groups = {FORWARD: engine.group, BACKWARD: engine.mesh.second_stage_group}
        self.reads_ahead = False  # has a Trainer said that it will?
        self.updates: list[Update] = []
        self.drop()

    # ---- what is known of the steps to come ------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget all that is in flight: the next step begins on the newest weights."""
        self.updates.clear()
        self._done, self._received = {FORWARD: 0, BACKWARD: 0}, {FORWARD: 0, BACKWARD: 0}
        self._arrived: dict[str, list[torch.Tensor]] = {FORWARD: [], BACKWARD: []}

    def takes(self, count: int) -> bool:
        """Can a step of so many micro-batches follow the one in progress?"""
        return not self.updates or len(self.updates[-1]) == count

    def add(self, source: object, calls: list[ScheduledCall]) -> None:
        """Announce a step, on the weights as they are now."""
        self.updates.append(Update(source, calls, self.engine.model, self.engine.trainable()))

    # ---- one step --------------------------------------------------------------------------------------------------

    def run(self, calls: list[ScheduledCall]) -> Ran:
        """Run the step in progress, and as much of the next one as its drain has room for."""
        engine, update = self.engine, self.updates[0]
        engine.services.before_run(True, calls[0].tokens)
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        with autocast_per_stage(engine) as autocast:
            while (kind := self._next_kind()) is not None:
                self._compute(kind, autocast)
        self._take_the_rest()
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        losses = update.parts.losses(update.losses, engine.mesh.device)
        dist.broadcast(losses, group=engine.group, group_src=engine.last_rank)
        fresh = [(parameter, update.leaves[id(parameter)].grad) for parameter in engine.trainable()]
        self._end_step(update)
        return Ran(list(losses.unbind()), fresh, None)

    def _end_step(self, update: Update) -> None:
        self.updates.pop(0)
        if not self.updates:
            self.drop()
            return
        for counts in (self._done, self._received):
            counts[FORWARD] -= len(update)
            counts[BACKWARD] -= len(update)
        for parameter in self.engine.trainable():
            _move(parameter)

    def _goal(self, place: int) -> tuple[int, int]:
        """How many forwards and backwards a stage has run at the end of the step, counted from its first one."""
        count = len(self.updates[0])
        if len(self.updates) == 1:
            return count, count
        slots, rest = divmod(2 * place, 3)  # a forward and a backward are a slot of three
        return count + self.ranks - 1 - place + slots + (rest > 0), count + slots

    def _next_kind(self) -> str | None:
        """What this stage runs now: no more forwards ahead than 1F1B has."""
        forwards, backwards = self._done[FORWARD], self._done[BACKWARD]
        goal = self._goal(self.place)
        if (forwards, backwards) == goal:
            return None
        known = sum(map(len, self.updates))
        return FORWARD if forwards < known and forwards - backwards < self.ranks - self.place else BACKWARD

    def _compute(self, kind: str, autocast: Callable[[], torch.autocast]) -> None:
        number, has_source = self._done[kind], self.place > 0 if kind == FORWARD else self.place < self.ranks - 1
        update, i = self._locate(number)
        arrived = self._take(kind) if has_source else None
        with update.shown(), update.parts.around(i), self.engine.recorder.span(kind, self.view.index, number):
            if kind == FORWARD:
                self._forward(update, i, arrived, autocast)
            else:
                self._backward(update, i, arrived)
        self._done[kind] += 1

    def _locate(self, number: int) -> tuple[Update, int]:
        first = len(self.updates[0])
        return (self.updates[0], number) if number < first else (self.updates[1], number - first)

    def _forward(
        self, update: Update, i: int, arrived: torch.Tensor | None, autocast: Callable[[], torch.autocast]
    ) -> None:
        hidden = None if arrived is None else arrived.requires_grad_()
        with autocast(), torch.enable_grad():
            output = update.parts.run(self.view, hidden, i)
        update.alive[i] = hidden, output
        if self.place == self.ranks - 1:
            update.losses.append(output.detach())
        else:
            self._send(output.detach(), FORWARD)

    def _backward(self, update: Update, i: int, gradient: torch.Tensor | None) -> None:
        hidden, output = update.alive.pop(i)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if hidden is not None:
            self._send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, BACKWARD)

    # ---- messages between neighbours -------------------------------------------------------------------------------

    def _take(self, kind: str) -> torch.Tensor:
        return self._arrived[kind].pop(0) if self._arrived[kind] else self._receive(kind)

    def _receive(self, kind: str) -> torch.Tensor:
        update, i = self._locate(self._received[kind])
        self._received[kind] += 1
        like = update.parts.boundaries[i]
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.engine.mesh.device)
        source = self.place + (-1 if kind == FORWARD else 1)
        dist.recv(tensor, group=self.groups[kind], group_src=source)
        return tensor

    def _send(self, tensor: torch.Tensor, kind: str) -> None:
        tensor = tensor.contiguous()
        target = self.place + (1 if kind == FORWARD else -1)
        self._sent.append((dist.isend(tensor, group=self.groups[kind], group_dst=target), tensor))

    def _take_the_rest(self) -> None:
        """Receive what neighbours have sent for the next step: an evaluation may use the wire now."""
        for kind, source, part in ((FORWARD, self.place - 1, 0), (BACKWARD, self.place + 1, 1)):
            while 0 <= source < self.ranks and self._received[kind] < self._goal(source)[part]:
                self._arrived[kind].append(self._receive(kind))


def _move(parameter: nn.Parameter) -> None:
    """Give a parameter memory of its own: the optimizer writes there, what is in flight keeps the former."""
    local = getattr(parameter, "_local_tensor", None)
    if local is None:
        parameter.data = parameter.data.clone()
    else:  # the memory of a DTensor does not follow its `data`
        parameter._local_tensor = local.clone()  # type: ignore[attr-defined]
