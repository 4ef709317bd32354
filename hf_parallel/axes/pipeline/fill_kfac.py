"""K-FAC in the bubbles of a pipeline: PipeFisher (Osawa et al., 2023, arXiv 2211.14133).

A linear layer y = W a has the gradient dW = sum of e aᵀ over tokens, e = the gradient of a token's loss at y. K-FAC
(Martens & Grosse, 2015, arXiv 1503.05671, section 3) takes the curvature of W for the Kronecker product of

    A = mean of a aᵀ over tokens        G = mean of e eᵀ over targets        (a bias: a 1 more in a)

and hands the optimizer G⁻¹ dW A⁻¹, both factors damped (section 6.3). The sums over a micro-batch and the Cholesky
inverses are units of work that run while a rank waits. Each unit gets its place once, by first fit, from the simulated
schedule and the times that actions and units took in the first step. Places do not change numbers:

    step t (every `kfac_interval` = k)    a and e of all micro-batches are kept until they are in A and G
    end of step t + (k - 1) // 2          A and G are whole, and averaged over data ranks
    end of step t + k                     the inverses are there, and precondition steps t + k to t + 2 k - 1

What no bubble had room for runs at these ends. The first step waits for its own curvature. So does the first one after
a save: a run that is resumed there has the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.pipeline.batches import collect_fresh_gradients, count_causal_targets, tokens_of
from hf_parallel.axes.pipeline.gaps import Place, Task, find_gaps, place_tasks
from hf_parallel.axes.pipeline.joint import Parts, Ran, ScheduledCall
from hf_parallel.axes.pipeline.timeline import BACKWARD, FILL, FORWARD, Action, order, simulate
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.joint import Run
    from hf_parallel.axes.pipeline.stage_runner import StageRunner
    from hf_parallel.axes.pipeline.stages import StageView
    from hf_parallel.axes.pipeline.torch_stage import Mark
    from hf_parallel.model.calls import Batch

INPUTS, GRADIENTS, INVERT_INPUTS, INVERT_GRADIENTS = "inputs", "gradients", "invert inputs", "invert gradients"


class Unit(NamedTuple):
    """A piece of work: one factor of a layer, summed over a micro-batch or inverted (micro-batch -1)."""

    kind: str
    layer: int
    micro_batch: int = -1


class FilledLinear:
    """A linear layer whose gradient is preconditioned."""

    def __init__(self, name: str, module: nn.Linear | Conv1D) -> None:
        self.name, self.module, self.transposed = name, module, isinstance(module, Conv1D)
        self.weight, bias = module.weight, module.bias
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.dtype = torch.promote_types(self.weight.dtype, torch.float32)
        outputs, inputs = reversed(self.weight.shape) if self.transposed else self.weight.shape
        self.sizes = {INPUTS: inputs + (self.bias is not None), GRADIENTS: outputs}

    def precondition(self, inputs: torch.Tensor, gradients: torch.Tensor) -> None:
        """Replace the gradient dW by G⁻¹ dW A⁻¹.

        Args:
            inputs: A⁻¹ [in, in], gradients: G⁻¹ [out, out]; `in` counts the bias.
        """
        weight = cast(torch.Tensor, self.weight.grad)
        weight = weight.t() if self.transposed else weight
        bias = None if self.bias is None else cast(torch.Tensor, self.bias.grad)
        whole = weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)
        whole = gradients @ whole.to(self.dtype) @ inputs
        if bias is not None:
            bias.copy_(whole[:, -1])
            whole = whole[:, :-1]
        weight.copy_(whole)


@dataclass
class Curvature:
    """The factors of all layers of a rank, from the micro-batches of one optimizer step.

    Attributes:
        sums: kind and layer -> the sum over tokens; once `is_reduced` over all data ranks.
        counts: [tokens, targets] that were summed over.
        seen: layers that were called.
        waiting: units whose inputs are there, with what they compute.
        inverses: kind and layer -> the inverse of the damped mean.
    """

    sums: dict[tuple[str, int], torch.Tensor]
    counts: torch.Tensor
    waiting: dict[Unit, list[Callable[[], None]]] = field(default_factory=dict)
    inverses: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    is_reduced: bool = False
    reducing: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)

    def wait_for_reduction(self) -> None:
        """Put the sums over all data ranks in the places of this rank's."""
        for work, flat, parts in self.reducing:
            work.wait()
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))
        self.reducing.clear()


class KfacFill:
    """Computes, inverts and applies the curvature of one rank's linear layers.

    The training loop calls `begin_step` before the first batch of an optimizer step and `end_step` after the last one.
    """

    def __init__(self, engine: StageRunner) -> None:
        config = engine.config
        self.engine, self.place, self.ranks = engine, engine.group.rank(), engine.group.size()
        self.damping, self.interval = config.damping, config.curvature_interval
        self.layers: list[FilledLinear] = []
        self.in_step = False
        self.times: dict[object, list[tuple[Mark, Mark]]] | None = {}  # of actions and units; None: they are known
        self.seconds: dict[object, float] = {}
        self._stage_seconds: list[tuple[float, float]] = []
        self._placements: dict[int, dict[Place, list[Unit]]] = {}
        self._micro_batch: tuple[torch.Tensor, torch.Tensor] | None = None
        self.number = 0  # of the micro-batch whose forward pass runs
        self.drop()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget all curvature: the next step waits for its own."""
        for curvature in (getattr(self, "gathering", None), getattr(self, "inverting", None)):
            if curvature is not None:
                curvature.wait_for_reduction()  # no rank may leave a collective out
        self.gathering: Curvature | None = None
        self.inverting: Curvature | None = None
        self.inverses: dict[tuple[str, int], torch.Tensor] = {}
        self.age = 0  # steps since `gathering` began

    def begin_step(self) -> None:
        """Begin an optimizer step; every `interval` steps its curvature is taken."""
        if not self.layers:  # the trained linear layers between embedding and head
            layers = [layer for view in self.engine.views for layer in view.layers]
            inside = {id(module) for layer in layers for module in layer.modules()}
            for name, module in self.engine.model.named_modules():
                if id(module) in inside and isinstance(module, nn.Linear | Conv1D) and module.weight.requires_grad:
                    module.register_forward_hook(functools.partial(self._keep, len(self.layers)))
                    self.layers.append(FilledLinear(name, module))
        self.in_step = True
        if self.gathering is not None:
            self.gathering.wait_for_reduction()
            self.age = (self.age + 1) % self.interval
        if self.age == 0:
            device = self.engine.mesh.device
            sums = {
                (kind, index): torch.zeros(size, size, dtype=linear.dtype, device=device)
                for index, linear in enumerate(self.layers)
                for kind, size in linear.sizes.items()
            }
            made = Curvature(sums, torch.zeros(2, dtype=torch.float64, device=device))
            self.inverting, self.gathering = self.gathering, made
            if self.inverting is not None:
                self._prepare_inversion(self.inverting)
        elif self.age == (self.interval - 1) // 2 + 1:
            self._prepare_inversion(cast(Curvature, self.gathering))

    def end_step(self) -> str | None:
        """Precondition the gradients of the step. Return a line to say once, about how much fits into bubbles.

        Collective over the pipeline, and over data ranks.
        """
        gathering, line = cast(Curvature, self.gathering), None
        if not self.inverses and self.inverting is None:
            self._finish_sums(gathering)
            gathering.wait_for_reduction()
            self._prepare_inversion(gathering)
            self._run_units(gathering, list(gathering.waiting))
            self.inverses = gathering.inverses
        elif self.age == (self.interval - 1) // 2:
            self._finish_sums(gathering)
        if self.inverting is not None:
            self._run_units(self.inverting, list(self.inverting.waiting))
            self.inverses, self.inverting = self.inverting.inverses, None
        for index, layer in enumerate(self.layers):
            if layer.weight.grad is None:  # nothing that the loss depends on
                continue
            layer.precondition(self.inverses[INPUTS, index], self.inverses[GRADIENTS, index])
        if self.times is not None:  # place all units by the times of the first step
            times, self.times = self.times, None
            recorder, control, count = self.engine.recorder, self.engine.control, self.engine.latest_count
            self.seconds = {what: min(map(recorder.seconds_between, marks)) for what, marks in times.items()}
            own = self.seconds[FORWARD], self.seconds[BACKWARD]
            self._stage_seconds = messages.gather_objects(own, control)
            placed = {unit for units in self._place_units(count).values() for unit in units}
            tasks = self._list_tasks(count)
            fits = sum(task.seconds for task in tasks if task.key in placed), sum(task.seconds for task in tasks)
            share = min(fit / whole if whole else 1.0 for fit, whole in messages.gather_objects(fits, control))
            more = max(whole - fit for fit, whole in messages.gather_objects(fits, control))
            line = f"{share:.0%} of the curvature fits into bubbles; {more:.3g} s more every {self.interval} steps"
        self.in_step = False
        return line

    def check_call(self, is_schedulable: bool) -> None:
        """Reject a training call that no schedule runs, or that belongs to no step.

        Raises:
            NotImplementedError: its curvature would be left out.
        """
        if not self.in_step:
            why = "takes the curvature of whole optimizer steps, which only Trainer tells"
        elif not is_schedulable:
            why = "needs batches that the schedule can cut into rows"
        else:
            return
        raise NotImplementedError(f"hf_parallel: pipeline_fill=kfac {why}; pipeline_fill=none works")

    # ---- curvature -----------------------------------------------------------------------------------------------

    def watched(self, run: Run, parts: list[Batch]) -> Run:
        """Return `run`, which computes a micro-batch of `parts` on one stage; its layers keep what they see."""

        def watching(view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
            part, tokens = parts[i], tokens_of(parts[i])
            items = part.get("num_items_in_batch")
            if self.age or not self.in_step or self.gathering is None or items is None:
                return run(view, hidden, i)
            mask, targets = part.get("attention_mask"), (part["labels"] != -100).any(1, keepdim=True)
            if mask is not None and mask.dim() != 2:
                raise NotImplementedError(
                    f"hf_parallel: pipeline_fill=kfac takes an attention_mask [rows, tokens], not one of {mask.dim()} "
                    "dims; pipeline_fill=none works"
                )
            mask = torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask
            weights = mask * targets  # rows that only fill a batch have no targets
            self.gathering.counts += torch.stack([weights.sum(), count_causal_targets(part)])
            self._micro_batch = weights, torch.as_tensor(items, device=tokens.device)
            try:
                return run(view, hidden, i)
            finally:
                self._micro_batch = None

        return watching

    def _keep(self, index: int, module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if self._micro_batch is None or not output.requires_grad:
            return
        curvature, number = cast(Curvature, self.gathering), self.number
        weights, items = self._micro_batch
        rows = args[0].detach()
        curvature.seen.add(index)
        if rows.shape[:-1].numel() != weights.numel():
            name = self.layers[index].name
            raise RuntimeError(
                f"hf_parallel: {name} has {rows.shape[:-1].numel()} tokens, the batch {weights.numel()}: "
                "pipeline_fill=kfac takes layers of all tokens of a batch; pipeline_fill=none works"
            )
        curvature.waiting.setdefault(Unit(INPUTS, index, number), []).append(
            functools.partial(self._add_inputs, curvature, index, rows, weights)
        )
        output.register_hook(
            lambda gradient: curvature.waiting.setdefault(Unit(GRADIENTS, index, number), []).append(
                functools.partial(self._add_gradients, curvature, index, gradient, items)
            )
        )

    def _add_inputs(self, curvature: Curvature, index: int, rows: torch.Tensor, weights: torch.Tensor) -> None:
        layer = self.layers[index]
        rows = rows.flatten(0, -2).to(layer.dtype)
        if layer.bias is not None:
            rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        curvature.sums[INPUTS, index].addmm_(rows.t(), rows * weights.reshape(-1, 1))

    def _add_gradients(self, curvature: Curvature, index: int, gradient: torch.Tensor, items: torch.Tensor) -> None:
        """Add e eᵀ of a micro-batch, whose loss was a sum over targets divided by `items`."""
        rows = gradient.flatten(0, -2).to(self.layers[index].dtype) * items
        curvature.sums[GRADIENTS, index].addmm_(rows.t(), rows)

    def _finish_sums(self, curvature: Curvature) -> None:
        """Run the sums that are left, and begin to add up those of all data ranks."""
        if curvature.is_reduced:
            return
        self._run_units(curvature, list(curvature.waiting))
        curvature.is_reduced = True
        trained = [index for index, layer in enumerate(self.layers) if layer.weight.grad is not None]
        unseen = [self.layers[index].name for index in trained if index not in curvature.seen]
        if unseen:
            raise RuntimeError(
                f"hf_parallel: {unseen[0]} has a gradient, but was not called as a module: its input is not known to "
                "pipeline_fill=kfac; pipeline_fill=none works"
            )
        mesh = self.engine.mesh
        if mesh.data_size == 1:
            return
        for dtype in sorted({total.dtype for total in curvature.sums.values()} | {torch.float64}, key=str):
            parts = [total for total in (*curvature.sums.values(), curvature.counts) if total.dtype == dtype]
            flat = torch.cat([part.flatten() for part in parts])
            work = cast(dist.Work, dist.all_reduce(flat, group=mesh.data_group, async_op=True))
            curvature.reducing.append((work, flat, parts))

    def _prepare_inversion(self, curvature: Curvature) -> None:
        """Let the inversions wait for gaps."""
        if curvature.inverses:
            return
        for index in range(len(self.layers)):
            for kind, unit in ((INPUTS, INVERT_INPUTS), (GRADIENTS, INVERT_GRADIENTS)):
                invert = functools.partial(self._invert, curvature, kind, index)
                curvature.waiting.setdefault(Unit(unit, index), []).append(invert)

    def _invert(self, curvature: Curvature, kind: str, index: int) -> None:
        """Invert a factor with its part of the damping, which goes by the ratio of both factors' mean traces."""
        counts = curvature.counts.to(curvature.sums[kind, index].dtype).clamp(min=1)
        own = curvature.sums[kind, index] / counts[0 if kind == INPUTS else 1]
        other_kind, other_count = (GRADIENTS, counts[1]) if kind == INPUTS else (INPUTS, counts[0])
        other = curvature.sums[other_kind, index].diagonal().mean() / other_count
        mean = own.diagonal().mean()
        # Without a trace (a factor of zeros, such as behind LoRA's B before its first step) there is no ratio.
        ratio = torch.where((mean > 0) & (other > 0), (mean / other).sqrt(), torch.ones_like(mean))
        own.diagonal().add_(ratio * math.sqrt(self.damping))
        curvature.inverses[kind, index] = torch.cholesky_inverse(torch.linalg.cholesky_ex(own).L)

    # ---- gaps ----------------------------------------------------------------------------------------------------

    def fill(self, count: int, action: int) -> None:
        """Run the units placed in the gap before an action or, after the last action, in the gap at the end.

        Args:
            count: the number of micro-batches in the schedule.
        """
        if not self._stage_seconds or not self.in_step or self.gathering is None:
            return
        placed = self._place_units(count)
        for curvature, step in ((self.inverting, self.interval), (self.gathering, self.age)):
            if curvature is not None:
                self._run_units(curvature, placed.get(Place(step, action), []))

    def _run_units(self, curvature: Curvature, units: list[Unit]) -> None:
        recorder, stage = self.engine.recorder, self.engine.views[0].index
        for unit in units:
            for work in curvature.waiting.pop(unit, ()):
                span = recorder.span(FILL, stage, max(0, unit.micro_batch))
                with self.timed((unit.kind, unit.layer)), span:
                    work()

    @contextlib.contextmanager
    def timed(self, what: object) -> Iterator[None]:
        """Note how long something takes, in the first step."""
        if self.times is None or not self.in_step:
            yield
            return
        start = self.engine.recorder.mark()
        yield
        self.times.setdefault(what, []).append((start, self.engine.recorder.mark()))

    def _place_units(self, count: int) -> dict[Place, list[Unit]]:
        """Return the units of each gap, for this number of micro-batches."""
        if count not in self._placements:
            forward, backward = zip(*self._stage_seconds, strict=True)
            half = [seconds / 2 for seconds in backward]
            timeline = simulate(order(self.engine.config.pipeline_schedule, self.ranks, 1, count), forward, half, half)
            gaps = [find_gaps(timeline, self.place)] * self.interval
            found: dict[Place, list[Unit]] = {}
            for unit, place in place_tasks(gaps, self._list_tasks(count)).items():
                found.setdefault(place, []).append(cast(Unit, unit))
            self._placements[count] = found
        return self._placements[count]

    def _list_tasks(self, count: int) -> list[Task]:
        """Return all units of an interval, in the order in which their inputs arrive."""
        tasks, last_sum = [], (self.interval - 1) // 2
        kinds = {FORWARD: INPUTS, BACKWARD: GRADIENTS}
        actions = order(self.engine.config.pipeline_schedule, self.ranks, 1, count)[self.place]
        for position, action in enumerate(actions):
            for layer in range(len(self.layers)):
                kind = kinds[action.kind]
                unit, ready = Unit(kind, layer, action.micro_batch), Place(0, position + 1)
                tasks.append(Task(unit, self.seconds.get((kind, layer), 0.0), ready, last_sum))
        for layer in range(len(self.layers)):
            for kind in (INVERT_INPUTS, INVERT_GRADIENTS):
                ready = Place(last_sum + 1, 0)
                tasks.append(Task(Unit(kind, layer), self.seconds.get((kind, layer), 0.0), ready, self.interval))
        return tasks


# ---- A run of a flushed schedule as a list of actions per rank, with other work in the gaps between them
# torch's schedules have no place for other work: they wait for a message as soon as the action before it has ended.
# Here a rank asks for its next message, does what was placed in the gap, and then waits.


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
