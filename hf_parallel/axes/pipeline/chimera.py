"""Two pipelines in opposite directions over the same ranks: Chimera (Li & Hoefler, SC'21, arXiv 2107.06925).

    rank                0        1        2        3
    down: 0, 2, 4 …     stage 0  stage 1  stage 2  stage 3      what the rank owns: the model that scripts see
    up: 1, 3, 5 …       stage 3  stage 2  stage 1  stage 0      its mirror: copies of what rank p - 1 - r owns

Half of the micro-batches go each way, so that one pipeline fills and drains in the bubbles of the other. Each
parameter has one owner, which is the rank that holds it under 1F1B. So the optimizer, the gradient norm, adapters and
checkpoints see it once, under its own name, and know nothing of mirrors:

    before a run     each owner sends its weights to their mirror
    after it         each mirror sends its gradients to their owner, which adds them to its own

That is the traffic of an all-reduce over the pair, after which both would have to hold the states of the optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.axes.pipeline.batches import collect_fresh_gradients, cut_into_buckets
from hf_parallel.axes.pipeline.joint import Fresh, Parts, Ran, ScheduledCall
from hf_parallel.axes.pipeline.stage_runner import (
    Sending,
    Stage,
    StageRunner,
    apply_autocast_per_stage,
    wait_for_sent,
)
from hf_parallel.axes.pipeline.stages import hold_modules, make_mirrored_view
from hf_parallel.axes.pipeline.timeline import (
    FORWARD,
    Action,
    compute_layer_costs,
    compute_mirrored_rank,
    make_mirrored_order,
    simulate,
)
from hf_parallel.ranks.mesh import get_stored, place_as

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.part import PipelinePart
    from hf_parallel.axes.pipeline.stages import StageView, Swap

RUN, SEND, RECEIVE = "run", "send", "receive"


class Event(NamedTuple):
    """A thing that a rank does: run an action, send its result to `peer`, or receive it from there."""

    kind: str
    action: Action
    peer: int = -1


@functools.lru_cache(maxsize=64)
def plan_events(ranks: int, micro_batches: int, rank: int) -> tuple[Event, ...]:
    """Return what a rank does in a run, in order.

    Messages stand where their sender has ended the action, by simulated time. So both ranks of a connection name them
    in the same order, which is all that NCCL needs.
    """
    found: list[tuple[float, int, Action, Event]] = []
    for span in simulate(make_mirrored_order(ranks, micro_batches), *compute_layer_costs([1] * ranks)).spans:
        action = Action(*span[1:4])
        if span.rank == rank:
            found.append((span.start, 1, action, Event(RUN, action)))
        target = action.stage + (1 if action.kind == FORWARD else -1)
        if not 0 <= target < ranks:
            continue
        peer = compute_mirrored_rank(target, action.micro_batch, ranks)
        if span.rank == rank:
            found.append((span.end, 0, action, Event(SEND, action, peer)))
        if peer == rank:
            found.append((span.end, 0, action, Event(RECEIVE, action, span.rank)))
    return tuple(event for *_, event in sorted(found, key=lambda one: one[:3]))


@dataclass(frozen=True)
class Sent:
    """A tensor of a stage, as its owner describes it. `mesh`, `placements`, `whole`: of a DTensor, else None."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    is_parameter: bool
    trained: bool
    mesh: tuple[str, ...] | None = None
    placements: Any = None
    whole: tuple[torch.Size, tuple[int, ...]] | None = None


#: The tensors of a stage, and which of its adapters are on.
StageDescription = tuple[list[Sent], object]


class Mirror:
    """A rank's copy of the stage that the rank mirrored in the pipeline owns, and the runs of both stages."""

    def __init__(self, engine: StageRunner, part: PipelinePart) -> None:
        self.engine, self.part = engine, part
        self.place, self.ranks = engine.group.rank(), engine.group.size()
        self.partner = self.ranks - 1 - self.place
        # Messages of the two directions must not wait for each other: to higher ranks, and to lower ones.
        self.groups = engine.group, engine.mesh.second_stage_group
        self.theirs: StageDescription | None = None  # where it is known without a message: in a dry run
        self.stamps: tuple[int, int] | None = None  # what was known of both stages when the copy was made
        self.copies: list[tuple[list[tuple[nn.Module, str]], torch.Tensor]] = []  # where each stands, and its values

    # ---- a run -----------------------------------------------------------------------------------------------------

    def run(self, calls: list[ScheduledCall]) -> Ran:
        """Run the micro-batches of all calls, half of them each way."""
        engine, parts = self.engine, Parts(calls)
        own = self._refresh()
        engine.services.before_run(True, calls[0].tokens)
        engine.latest_count = len(parts)
        scale = engine.compute_loss_scale()
        with apply_autocast_per_stage(engine) as autocast, collect_fresh_gradients(engine.trainable()) as fresh:
            empty = []  # outside a run the mirrored modules have no values, as all modules of other stages
            for module, leaf, value in [(*place, value) for places, value in self.copies for place in places]:
                held: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
                empty.append((held, leaf, held[leaf]))
                held[leaf] = value
            ways: list[tuple[StageView, Stage, list[Swap]]] = [
                (engine.views[0], engine.stages[0], []),
                (self.mirrored, self.stage, self.outside),
            ]
            for view, stage, _ in ways:
                stage.work, stage.autocast = functools.partial(parts.run, view), autocast
            try:
                losses = self._run_events(parts, ways, scale)
            finally:
                for _, stage, _ in ways:
                    stage.work, stage.autocast = None, contextlib.nullcontext
                for held, leaf, former in empty:
                    held[leaf] = former
        self._hand_over(fresh, [tensor for one, tensor in own if one.trained])
        of_calls = parts.losses(losses, engine.mesh.device)
        dist.all_reduce(of_calls, group=engine.group)  # both ends of the pipeline have computed some
        return Ran(list(of_calls.unbind()), fresh, scale)

    def _run_events(
        self,
        parts: Parts,
        ways: list[tuple[StageView, Stage, list[Swap]]],
        scale: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return the loss of each micro-batch; zeros where another rank has it."""
        engine, last, device = self.engine, self.engine.last_index, self.engine.mesh.device
        alive: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # what arrived, what left
        arriving: dict[Action, tuple[dist.Work | None, torch.Tensor]] = {}
        leaving: dict[Action, torch.Tensor] = {}
        sent: list[Sending] = []
        losses = [torch.zeros((), device=device) for _ in range(len(parts))]
        for what, action, peer in plan_events(self.ranks, len(parts), self.place):
            kind, index, i, _ = action
            if what == SEND:
                tensor = leaving.pop(action)
                wait_for_sent(sent, self.ranks)
                sent.append((dist.isend(tensor, group=self.groups[peer < self.place], group_dst=peer), tensor))
                continue
            if what == RECEIVE:
                like = parts.boundaries[i]
                tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
                group = self.groups[peer > self.place]
                arriving[action] = dist.irecv(tensor, group=group, group_src=peer), tensor
                continue
            work, arrived = arriving.pop(Action(kind, index + (-1 if kind == FORWARD else 1), i), (None, None))
            if work is not None:
                work.wait()
            view, stage, outside = ways[i % 2]
            with parts.around(i), engine.recorder.span(kind, view.index, i), hold_modules(outside):
                if kind == FORWARD:
                    hidden = None if arrived is None else arrived.requires_grad_()
                    output = stage(hidden, i)
                    alive[i] = hidden, output
                else:
                    hidden, output = alive.pop(i)
                    if output.requires_grad:
                        scaled = output * scale if index == last and scale is not None else output
                        torch.autograd.backward(scaled, arrived)
            if kind == FORWARD and index == last:
                losses[i] = output.detach().float()
            elif kind == FORWARD:
                leaving[action] = output.detach().contiguous()
            elif hidden is not None:
                leaving[action] = (torch.zeros_like(hidden) if hidden.grad is None else hidden.grad).contiguous()
        wait_for_sent(sent)
        return losses

    # ---- the copy --------------------------------------------------------------------------------------------------

    def _refresh(self) -> list[tuple[Sent, torch.Tensor]]:
        """Send the weights that train to their mirror; all of the stage where anything else has changed.

        Returns:
            the tensors of this rank's stage, each once.
        """
        own, adapters = self._own_tensors(), self.engine.services.adapters
        state = None if adapters is None else adapters.read()
        stored = [(one, tensor, get_stored(tensor)) for one, tensor in own]
        # Where values lie, tensors without memory can tell, too.
        places = [(local.untyped_storage()._cdata, int(local.storage_offset())) for *_, local in stored]
        changed = [(one, id(t), place, t._version) for (one, t, _), place in zip(stored, places, strict=True)]
        frozen = [entry if not entry[0].trained else entry[:2] for entry in changed]
        modules = [id(module) for module in self.engine.remote_modules.modules.values()]
        stamps = self._exchange_numbers(torch.tensor([hash((*map(str, frozen), str(state), *modules))]))
        if stamps != self.stamps:
            self._build(([one for one, _ in own], state))
        self.stage.train(self.engine.model.training)
        # Mirrored layers are checkpointed as scripts have asked this rank's own layers to be.
        own_layers, layers = (
            [layer for layer in stage.modules() if hasattr(layer, "gradient_checkpointing")]
            for stage in (self.engine.stages[0], self.stage)
        )
        is_on = any(layer.gradient_checkpointing for layer in own_layers)
        functions = [vars(layer).get("_gradient_checkpointing_func") for layer in own_layers]
        for layer in layers:
            layer.gradient_checkpointing = is_on
            if functions[0] is not None:
                layer._gradient_checkpointing_func = functions[0]
        give = [get_stored(tensor.detach()) for one, tensor in own if one.trained or stamps != self.stamps]
        take = [get_stored(v.detach()) for _, v in self.copies if v.requires_grad or stamps != self.stamps]
        self._exchange(give, take)
        self.stamps = stamps
        return own

    def describe_stage(self) -> StageDescription:
        """Return what a partner must know to make a copy of this rank's stage."""
        adapters = self.engine.services.adapters
        return [one for one, _ in self._own_tensors()], None if adapters is None else adapters.read()

    def _own_tensors(self) -> list[tuple[Sent, torch.Tensor]]:
        """Return the parameters and buffers of this rank's stage, each once."""
        inside = {id(module) for module in self.engine.stages[0].modules()}
        found: dict[int, tuple[list[str], torch.Tensor, bool]] = {}
        for name, module in self.engine.model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers) if id(module) in inside else ():
                for leaf, tensor in held.items():
                    if tensor is not None:
                        entry = found.setdefault(id(tensor), ([], tensor, held is module._parameters))
                        entry[0].append(f"{name}.{leaf}")
        described = []
        for names, tensor, is_parameter in found.values():
            placed = (
                (tensor.device_mesh.mesh_dim_names, tensor.placements, (tensor.shape, tensor.stride()))
                if isinstance(tensor, DTensor)
                else ()
            )
            part = get_stored(tensor.detach())
            trained = is_parameter and tensor.requires_grad
            described.append((Sent(tuple(names), part.shape, part.dtype, is_parameter, trained, *placed), tensor))
        return described

    def _build(self, own: StageDescription) -> None:
        """Make room for the partner's stage, and views that run it."""
        engine, remote = self.engine, self.engine.remote_modules
        if self.theirs is None:
            packed = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
            arrived = torch.empty(self._exchange_numbers(torch.tensor([packed.numel()]))[1], dtype=torch.uint8)
            self._exchange([packed], [arrived], engine.control)
            theirs, their_state = pickle.loads(arrived.numpy().tobytes())
        else:
            theirs, their_state = self.theirs
        tops = [module for module in remote.modules.values() if isinstance(module, nn.Module)]
        aside = {id(part) for top in tops for part in top.modules()}
        placed = [parameter for parameter in engine.model.parameters() if isinstance(parameter, DTensor)]
        meshes = {parameter.device_mesh.mesh_dim_names: parameter.device_mesh for parameter in placed}
        self.copies = []
        with remote.shown(engine.model):
            modules = dict(engine.model.named_modules(remove_duplicate=False))
        for one in theirs:
            paths = [name.rpartition(".") for name in one.names]
            places = [(modules[path], leaf) for path, _, leaf in paths if id(modules.get(path)) in aside]
            assert places, f"no module of another stage has {one.names}"
            value: torch.Tensor = torch.empty(one.shape, dtype=one.dtype, device=engine.mesh.device)
            if one.mesh is not None and one.whole is not None:
                (shape, stride), mesh = one.whole, meshes[one.mesh]
                value = DTensor.from_local(value, mesh, one.placements, run_check=False, shape=shape, stride=stride)
            value = nn.Parameter(value, requires_grad=one.trained) if one.is_parameter else value
            self.copies.append((places, value))
        self.mirrored, self.outside = make_mirrored_view(engine.model, self.part, self.partner, remote)
        self.stage = Stage(self.mirrored)
        if engine.services.adapters is not None:
            engine.services.adapters.set_in(self.stage, their_state)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _hand_over(self, fresh: Fresh, own: list[torch.Tensor]) -> None:
        """Send the mirror's gradients to their owner, and add to `fresh` what the mirror of `own` has found."""
        trained = [value for _, value in self.copies if value.requires_grad]
        gradients = [value.grad for value in trained]
        for value in trained:
            value.grad = None
        places = {id(parameter): number for number, (parameter, _) in enumerate(fresh)}
        given = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
        taken = torch.zeros(len(own), dtype=torch.uint8)
        self._exchange([given], [taken], self.engine.control)
        give = [get_stored(gradient) for gradient in gradients if gradient is not None]
        wanted = [parameter for parameter, is_there in zip(own, taken.tolist(), strict=True) if is_there]
        nothing: list[torch.Tensor] = []
        for giving, taking in itertools.zip_longest(
            cut_into_buckets(give), cut_into_buckets(wanted), fillvalue=nothing
        ):
            arrived = [torch.empty_like(get_stored(parameter.detach())) for parameter in taking]
            self._exchange(giving, arrived)
            for parameter, part in zip(taking, arrived, strict=True):
                number = places[id(parameter)]
                gradient = fresh[number][1]
                if gradient is not None:
                    get_stored(gradient).add_(part)
                    continue
                whole = place_as(parameter, part) if isinstance(parameter, DTensor) else part
                fresh[number] = cast(nn.Parameter, parameter), whole

    # ---- messages between the two ranks of a pair ------------------------------------------------------------------

    def _exchange(
        self, give: list[torch.Tensor], take: list[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        """Send tensors to the partner and receive into others."""
        group = group or self.engine.group
        ops = [dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=self.partner) for t in give if t.numel()]
        into = [t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format) for t in take]
        ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=self.partner) for t in into if t.numel()]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for tensor, arrived in zip(take, into, strict=True):
            if arrived is not tensor:
                tensor.copy_(arrived)

    def _exchange_numbers(self, number: torch.Tensor) -> tuple[int, int]:
        """Return the number of this rank and that of its partner."""
        theirs = torch.empty_like(number)
        self._exchange([number], [theirs], self.engine.control)
        return int(number), int(theirs)
