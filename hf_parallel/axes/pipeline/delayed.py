"""Pipelines without a flush between optimizer steps: PipeDream and PipeDream-2BW.

The batches of the next step enter while those of this one leave. The training loop must have read them by then:

    step t      backward passes of t, forward passes of t + 1 behind them      loss, norm and gradients of t
    step t+1    the rest of t + 1, which began on the weights before step t's update, and t + 2 behind it

A stage may have several versions of its weights: a backward pass needs the version of its forward pass. Schedules
differ in the version that a forward pass takes:

    pipedream_2bw   the one that was newest when its step was announced: all micro-batches of a step have the same, one
                    step old. W(t+1) = W(t) - lr f'(W(t-1)) (Narayanan et al., 2021, arXiv 2006.09503, section 3.1)
    pipedream       the newest (weight stashing: Harlap et al., 2018, arXiv 1806.03377, section 3.3): micro-batch i of
                    m runs on stage s of p on weights that are ceil((a - i) / m) steps old, and on the newest from
                    i = a on, where a = p - 1 - s + ceil(2 s / 3) forwards of later steps have run when a step ends.

Where no next step is known (the end of the data, a batch of another size) a step drains; the one after it begins on
the newest weights, and its gradients are not delayed.

All stages run 1F1B without an end: stage r has p - 1 - r forwards ahead, then a forward and a backward in turn. Stage
0 is the last to have all backwards of a step, and the step ends with it. The others go on until then: stage r for as
long as 2 r forwards take, if a backward takes as long as two. So nobody waits in the all-reduce of the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.pipeline.joint import Parts, Ran, ScheduledCall
from hf_parallel.axes.pipeline.stage_runner import (
    Sending,
    StageRunner,
    apply_autocast_per_stage,
    wait_for_sent,
)
from hf_parallel.axes.pipeline.timeline import BACKWARD, FORWARD, count_ahead_of_step


class Version:
    """A stage's weights at one moment: leaves on the memory that its parameters had then."""

    def __init__(self, engine: StageRunner) -> None:
        self._leaves = {id(parameter): nn.Parameter(parameter.data) for parameter in engine.trainable()}
        self._held = [
            (module, name, parameter)
            for module in engine.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._leaves
        ]

    @contextlib.contextmanager
    def shown(self, gradients: dict[int, torch.Tensor | None] | None = None) -> Iterator[None]:
        """Let the modules hold the leaves of this version: graphs that are made inside lead to these.

        Args:
            gradients: backward passes inside add to these, by id of the parameter: a step may have several versions.
        """
        sums, leaves = ({}, {}) if gradients is None else (gradients, self._leaves)
        for module, name, parameter in self._held:
            module._parameters[name] = self._leaves[id(parameter)]
        for key, leaf in leaves.items():
            leaf.grad = sums.get(key)
        try:
            yield
        finally:
            for key, leaf in leaves.items():
                sums[key], leaf.grad = leaf.grad, None
            for module, name, parameter in self._held:
                module._parameters[name] = parameter


@dataclass(eq=False)
class Update:
    """The calls of one optimizer step.

    Attributes:
        source: the batches that they were read from.
        parts: their micro-batches.
        version: the weights of all its micro-batches; None if each takes the newest.
        gradients: id of a parameter -> the sum over the backward passes that have run.
        losses: of micro-batches, on the last stage.
        alive: micro-batch -> its weights, what arrived and what left, until its backward pass.
    """

    source: object
    calls: list[ScheduledCall]
    parts: Parts
    version: Version | None
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    alive: dict[int, tuple[Version, torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.parts)


class DelayedPipeline:
    """Runs the steps of one model: the one in progress, and the beginning of those after it."""

    def __init__(self, engine: StageRunner) -> None:
        self.engine, self.view = engine, engine.views[0]
        self.place, self.ranks = engine.group.rank(), engine.group.size()
        # Messages of the two directions must not wait for each other.
        self.groups = {FORWARD: engine.group, BACKWARD: engine.mesh.second_stage_group}
        self.reads_ahead = False  # has a Trainer said that it will?
        self.stashes = engine.config.pipeline_schedule == "pipedream"  # do forward passes take the newest weights?
        self.updates: list[Update] = []
        self.drop()

    # ---- what is known of the steps to come ------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget all that is in flight: the next step begins on the newest weights."""
        self.updates.clear()
        self._newest: Version | None = None
        self._done, self._received = {FORWARD: 0, BACKWARD: 0}, {FORWARD: 0, BACKWARD: 0}
        self._arrived: dict[str, list[torch.Tensor]] = {FORWARD: [], BACKWARD: []}

    def takes(self, count: int) -> bool:
        """Return whether a step of this many micro-batches can follow the one in progress."""
        return not self.updates or len(self.updates[-1]) == count

    def knows_enough(self) -> bool:
        """Return whether there are enough micro-batches to fill the drain of the step in progress."""
        return bool(self.updates) and sum(map(len, self.updates[1:])) >= self.ranks - 1

    def add(self, source: object, calls: list[ScheduledCall]) -> None:
        """Announce a step."""
        version = None if self.stashes else Version(self.engine)
        self.updates.append(Update(source, calls, Parts(calls), version))

    def run_alone(self, call: ScheduledCall) -> Ran:
        """Drop what is in flight, and run a step that was not announced to its end, on the newest weights."""
        alone = DelayedPipeline(self.engine)
        alone.add(None, [call])
        return alone.run([call])

    # ---- one step --------------------------------------------------------------------------------------------------

    def run(self, calls: list[ScheduledCall]) -> Ran:
        """Run the step in progress, and as much of the next ones as its drain has room for."""
        engine, update = self.engine, self.updates[0]
        self._newest = Version(engine) if self.stashes else None
        engine.latest_count = len(update)
        engine.services.before_run(True, calls[0].tokens)
        self._sent: list[Sending] = []
        done, goal, known = self._done, self._count_goal(self.place), sum(map(len, self.updates))
        with apply_autocast_per_stage(engine) as autocast:
            while (done[FORWARD], done[BACKWARD]) != goal:
                ahead = done[FORWARD] - done[BACKWARD]  # no more forwards than 1F1B has
                is_forward = done[FORWARD] < known and ahead < self.ranks - self.place
                self._compute(FORWARD if is_forward else BACKWARD, autocast)
        # Receive what neighbours have sent for the next steps: an evaluation may use the wire now.
        for kind, source, part in ((FORWARD, self.place - 1, 0), (BACKWARD, self.place + 1, 1)):
            while 0 <= source < self.ranks and self._received[kind] < self._count_goal(source)[part]:
                self._arrived[kind].append(self._receive(kind))
        wait_for_sent(self._sent)
        losses = update.parts.losses(update.losses, engine.mesh.device)
        dist.broadcast(losses, group=engine.group, group_src=engine.last_rank)
        fresh = [(parameter, update.gradients.get(id(parameter))) for parameter in engine.trainable()]
        self.updates.pop(0)
        self._newest = None
        if not self.updates:
            self.drop()
        for counts in (self._done, self._received) if self.updates else ():
            counts[FORWARD] -= len(update)
            counts[BACKWARD] -= len(update)
        if any(coming.alive or coming.version is not None for coming in self.updates):
            # The optimizer writes to new memory; what is in flight keeps the old one.
            for parameter in engine.trainable():
                local = getattr(parameter, "_local_tensor", None)
                if local is None:
                    parameter.data = parameter.data.clone()
                else:  # the memory of a DTensor does not follow its `data`
                    parameter._local_tensor = local.clone()  # type: ignore[attr-defined]
        return Ran(list(losses.unbind()), fresh, None)

    def _count_goal(self, place: int) -> tuple[int, int]:
        """Return how many forwards and backwards a stage has run at the end of the step."""
        count, known = len(self.updates[0]), sum(map(len, self.updates))
        forwards, backwards = count_ahead_of_step(place, self.ranks)
        return min(known, count + forwards), min(known, count + backwards)

    def _compute(self, kind: str, autocast: Callable[[], torch.autocast]) -> None:
        """Run the next forward or backward of this stage, and send what leaves it."""
        number, way = self._done[kind], 1 if kind == FORWARD else -1
        step, i = divmod(number, len(self.updates[0]))  # all steps have as many
        update, arrived, leaving = self.updates[step], None, None
        if 0 <= self.place - way < self.ranks:
            arrived = self._arrived[kind].pop(0) if self._arrived[kind] else self._receive(kind)
        with update.parts.around(i), self.engine.recorder.span(kind, self.view.index, number):
            if kind == FORWARD:
                hidden, version = None if arrived is None else arrived.requires_grad_(), update.version or self._newest
                assert version is not None
                with version.shown(), autocast(), torch.enable_grad():
                    output = update.parts.run(self.view, hidden, i)
                update.alive[i] = version, hidden, output
                leaving = output.detach()
                if self.place == self.ranks - 1:
                    update.losses.append(leaving)
            else:
                version, hidden, output = update.alive.pop(i)
                if output.requires_grad:
                    with version.shown(update.gradients):  # checkpointed layers run again
                        torch.autograd.backward(output, arrived)
                if hidden is not None:
                    leaving = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            if leaving is not None and 0 <= self.place + way < self.ranks:
                leaving = leaving.contiguous()
                wait_for_sent(self._sent, self.ranks)
                work = dist.isend(leaving, group=self.groups[kind], group_dst=self.place + way)
                self._sent.append((work, leaving))
        self._done[kind] += 1

    def _receive(self, kind: str) -> torch.Tensor:
        """Receive the input of the next forward or backward pass that has not received it yet."""
        step, i = divmod(self._received[kind], len(self.updates[0]))
        self._received[kind] += 1
        like = self.updates[step].parts.boundaries[i]
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.engine.mesh.device)
        source = self.place + (-1 if kind == FORWARD else 1)
        dist.recv(tensor, group=self.groups[kind], group_src=source)
        return tensor
