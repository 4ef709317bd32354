"""All rows of a batch through the stages, whatever is then done with the outputs: GPipe's order, by hand.

The last stage runs the script (a model's forward, or a whole loss with several models and calls); whenever that calls
a backbone it tells the other stages, which run their layers micro-batch by micro-batch. The result appears on every
rank as one autograd node, whose backward sends gradients back through the stages, call by call.

    last stage    script: model(batch) ──tell──┐  layers, head …  reference(batch) ──tell──┐  layers, head, loss
    the others    wait ────────────────────────┴─ layers ────────────────────────────────── ┴─ layers
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map

from hf_parallel.axes.pipeline.batches import (
    COUNTED,
    DetachedNode,
    collect_fresh_gradients,
    find_leaves,
    share_result,
    split_rows,
    tokens_of,
)
from hf_parallel.axes.pipeline.stage_runner import Session
from hf_parallel.model.calls import Batch
from hf_parallel.model.known_masks import share_known_mask
from hf_parallel.ranks import messages
from hf_parallel.ranks.local import get_autocast_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers.utils import ModelOutput

    from hf_parallel.axes.axis import CallBalance, HeldRun
    from hf_parallel.axes.pipeline.stage_runner import StageRunner
    from hf_parallel.axes.pipeline.stages import StageView


T = TypeVar("T")


@dataclass(frozen=True)
class FromBatch:
    """Stands for an entry of the batch, which every stage has."""

    key: str


@dataclass
class Call:
    """A call of a backbone, as the last stage describes it to the others."""

    model: int  # the how manyth pipelined model of the mesh
    kwargs: Batch
    grad: bool
    autocast: torch.dtype | None
    adapters: object  # which of them are on, if the model has any

    def alike(self, other: Call) -> bool:
        """Return whether the calls are equal but for the values of tensors that are not in the batch."""
        own, theirs = (self.model, self.grad, self.adapters), (other.model, other.grad, other.adapters)
        kinds = [
            tree_map(lambda value: torch.Tensor if torch.is_tensor(value) else value, call.kwargs)
            for call in (self, other)
        ]
        return own == theirs and kinds[0] == kinds[1]

    @property
    def has_tensors(self) -> bool:
        """Return whether the script made tensors of its own for the call."""
        return any(torch.is_tensor(value) for value in tree_leaves(self.kwargs))

    def arguments(self, batch: Batch, device: torch.device) -> Batch:
        """Return the arguments on a stage that has this batch."""

        def resolve(value: object) -> object:
            if isinstance(value, FromBatch):
                return batch[value.key]
            return value.to(device) if torch.is_tensor(value) else value

        return tree_map(resolve, self.kwargs)


@dataclass
class Pass:
    """A micro-batch on its way through the layers of one stage: what came in and what went out, for the backward."""

    hidden: torch.Tensor | None
    output: torch.Tensor | None = None
    handed_on: torch.Tensor | None = None  # on the last stage: the output as the head and the script's loss see it


@dataclass
class Made:
    """A call that was made: its passes, and on the last stage what it returned."""

    engine: StageRunner
    call: Call
    balance: CallBalance | None  # what routers choose, where a loss asks for it
    passes: list[dict[int, Pass]] = field(default_factory=list)
    output: ModelOutput | None = None  # on the last stage


@dataclass(eq=False)
class Serving(Session):
    """Every call runs through all stages at once; see the module's docstring."""

    batch: Batch
    made: list[Made] = field(default_factory=list)
    passing: bool = False  # are micro-batches under way? Then no stage waits to be told of anything

    def answer(self, engine: StageRunner, kwargs: Batch) -> ModelOutput:
        call = describe_call(engine, kwargs, self.batch)
        if call.grad and engine is not self.engine:
            raise NotImplementedError("hf_parallel: a loss in a pipeline trains one model; freeze the other")
        dist.broadcast_object_list([call], group=self.engine.control, group_src=self.engine.last_rank)
        return self.forward(call, self.batch)

    def forward(self, call: Call, batch: Batch) -> ModelOutput | None:
        """All micro-batches of a call through this rank's stages; the output on the last stage."""
        engine = self.engine.pipelines.engine(call.model)
        balance = engine.balance_of(call.kwargs)
        made = Made(engine, call, None if balance is None else balance())
        self.made.append(made)
        kwargs = call.arguments(batch, engine.mesh.device)
        config, count = engine.config, min(tokens_of(kwargs).shape[0], 2 * engine.config.pp_size)
        if config.ep_size > config.cp_size * config.tp_size or config.expert_capacity_factor is not None:
            # Data ranks whose tokens meet at experts all make as many passes.
            fewest = torch.tensor(count, device=engine.mesh.device)
            dist.all_reduce(fewest, dist.ReduceOp.MIN, group=engine.mesh.data_group)
            count = int(fewest)
        parts = split_rows(kwargs, count)
        known = share_known_mask(kwargs, tokens_of(kwargs))
        with torch.set_grad_enabled(call.grad), restore_described_state(engine, call), known:
            engine.services.before_run(engine.model.training, tokens_of(kwargs).shape)
            self.passing = True
            outputs, ends = [], itertools.accumulate(tokens_of(part).shape[0] for part in parts)
            for part, end in zip(parts, ends, strict=True):
                engine.rows = slice(end - tokens_of(part).shape[0], end)
                outputs.append(_forward_pass(made, part))
            engine.rows = None
            router_logits = None
            if made.balance is not None:
                router_logits = made.balance.close(engine.boundary(tokens_of(kwargs), "meta").shape[:2].numel())
            self.passing = False
        made.output = output = outputs[0]
        if output is not None:  # on the last stage
            handed_on = [passes[engine.last_index].handed_on for passes in made.passes]
            output["last_hidden_state"] = torch.cat(cast(list[torch.Tensor], handed_on))
            if router_logits is not None:
                output["router_logits"] = router_logits
        return made.output

    def backward(self, tensors: list[torch.Tensor], gradients: list, held: HeldRun | None) -> None:
        """Send the gradients of the results, known to every rank, back through the stages.

        Args:
            held: reduce nothing, and leave it to this run of several.
        """
        engine = self.engine
        passes = [done for made in self.made if made.call.grad for done in made.passes]
        # Another call's backward pass may have freed what this one needs. Ranks with a single micro-batch would reduce
        # the first unit's gradients before they gather the second one's weights, and others gather both first.
        for module in engine.stages.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        with collect_fresh_gradients(engine.trainable()) as fresh:
            for stage in engine.stages:
                _reduce_in(stage, False)
            if engine.last:
                pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            for made in self.made:
                if made.call.grad and made.balance is not None:
                    made.balance.weigh()
            for i, done in enumerate(passes):
                for view, stage in reversed(list(zip(engine.views, engine.stages, strict=True))):
                    _reduce_in(stage, held is None and i == len(passes) - 1)
                    _backward_pass(engine, view.index, done[view.index])
            if held is None:
                engine.services.reduce_stages()  # a stage that is one unit had its backward pass with the head's
            else:
                held.take()
        engine.accumulate(fresh, None, held)


def serve_script(engine: StageRunner, batch: Batch, script: Callable[[], object]) -> tuple[ModelOutput, list[Made]]:
    """Return on every rank what `script` returns on the last stage, and the calls it made. Collective."""
    engine.check_layers()
    grad, held = torch.is_grad_enabled(), engine.services.begin_held_run()
    free(engine)  # of a call whose backward has not come: weights may have changed since
    session, control, source = Serving(engine, batch), engine.control, engine.last_rank
    if grad:  # the last stage alone describes calls, and may have no parameter that trains
        trains = torch.tensor(any(p.requires_grad for p in engine.model.parameters()), dtype=torch.int32)
        dist.all_reduce(trains, dist.ReduceOp.MAX, group=control)
        engine.trains_somewhere = bool(trains)
    result: object = None
    told: list[Call | messages.Failed | None] = [None]
    if engine.last:
        with messages.tell_error(control, source, lambda: not session.passing):
            result = session.run(script)
            if grad:
                layers = (layer for view in engine.views for layer in view.layers)
                engine.refuse_penalty(find_leaves(tree_leaves(result))[0], layers)
        dist.broadcast_object_list(told, group=control, group_src=source)  # lets the others go
    while not engine.last:  # run layers until the script has ended
        dist.broadcast_object_list(told, group=control, group_src=source)
        if told[0] is None:
            break
        if isinstance(told[0], messages.Failed):
            told[0].stop()
        session.forward(told[0], batch)
    rebuilt, tensors = share_result(result, engine.group, control, source, engine.mesh.device)
    values = [tensor.detach() for tensor in tensors]
    for other in {id(made.engine): made.engine for made in session.made}.values():
        if other is not engine:
            free(other)
    if grad:
        anchor = torch.zeros((), requires_grad=True)
        values = list(
            DetachedNode.apply(anchor, lambda gradients: session.backward(tensors, gradients, held), *values)
        )
    else:
        free(engine)
    return rebuilt(values), session.made


def free(engine: StageRunner) -> None:
    """Without a backward pass nothing else frees gathered weights, and `parameters()` would show plain tensors.

    After all that was asked, not after each pass through a stage: data ranks with fewer rows make fewer passes.
    """
    for module in engine.stages.modules() if not engine.keeps_gathered else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def describe_call(engine: StageRunner, kwargs: Batch, batch: Batch, values: bool = True) -> Call:
    """Return a call of `engine`'s backbone in a form for other stages; without `values`, in a form to compare."""
    entries = {id(value): FromBatch(key) for key, value in batch.items() if torch.is_tensor(value)}

    def name(value: object) -> object:
        if not torch.is_tensor(value) or id(value) in entries:
            return entries.get(id(value), value)
        return value.detach().cpu() if values else value

    kwargs = {key: value for key, value in kwargs.items() if key != "num_items_in_batch"}  # passed on for the loss
    trains = engine.trains_somewhere or any(p.requires_grad for p in engine.model.parameters())
    grad = torch.is_grad_enabled() and trains
    adapters = None if engine.services.adapters is None else engine.services.adapters.read()
    return Call(engine.number, tree_map(name, kwargs), grad, get_autocast_dtype(engine.mesh.device), adapters)


@contextlib.contextmanager
def restore_described_state(engine: StageRunner, call: Call) -> Iterator[None]:
    """Autocast and adapters as they were on the last stage when it made this call."""
    kind = engine.mesh.device.type
    enabled = call.autocast is not None
    dtype = call.autocast or torch.get_autocast_dtype(kind)
    adapters = engine.services.adapters
    switched = contextlib.nullcontext() if adapters is None else adapters.as_in(call.adapters)
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False), switched:
        yield


# ---- one micro-batch ------------------------------------------------------------------------------------------------


def _forward_pass(made: Made, part: Batch) -> ModelOutput | None:
    """Run a micro-batch through this rank's stages; return what leaves the model's last layer, if here."""
    engine, balance, passes, left = made.engine, made.balance, dict[int, Pass](), list["ModelOutput"]()
    made.passes.append(passes)

    def run_layers(view: StageView, hidden: torch.Tensor | None, micro_batch: int = 0) -> torch.Tensor:
        with contextlib.nullcontext([]) if balance is None else balance.listening() as logits:
            if view.index == engine.last_index:
                left.append(engine.run_backbone(hidden, part))
                output = cast(torch.Tensor, left[0]["last_hidden_state"])
            else:
                output = engine.run_as_stage(view, None, lambda: engine.run_backbone(hidden, part))
        if balance is None:
            return output
        # The output takes the gradient of what the routers of these layers chose along.
        return balance.attach(output, logits, part, part.get(COUNTED, part.get("attention_mask")))

    for view, stage in zip(engine.views, engine.stages, strict=True):
        hidden = None
        if view.index > 0:
            hidden = _receive_from_stage(engine, view.index - 1, engine.boundary(tokens_of(part), "meta"))
            hidden.requires_grad_(torch.is_grad_enabled())
        passes[view.index] = done = Pass(hidden)
        if view.index == engine.last_index:
            done.output = run_layers(view, hidden)
            # Cut here, so that the backward of the layers too goes micro-batch by micro-batch.
            done.handed_on = done.output.detach().requires_grad_(done.output.requires_grad)
        else:
            done.output = engine.call_through_stage(stage, functools.partial(run_layers, view), hidden)
            _send_to_stage(engine, done.output.detach(), view.index + 1)
    return left[0] if left else None


def _receive_from_stage(engine: StageRunner, index: int, like: torch.Tensor) -> torch.Tensor:
    """Receive what stage `index` hands over: a tensor like this one."""
    source = engine.config.rank_of_stage(index)
    if source == engine.group.rank():
        assert engine.handed_over is not None
        tensor, engine.handed_over = engine.handed_over, None
        return tensor
    tensor = torch.empty(like.shape, dtype=like.dtype, device=engine.mesh.device)
    dist.recv(tensor, group=engine.group, group_src=source)
    return tensor


def _send_to_stage(engine: StageRunner, tensor: torch.Tensor, index: int) -> None:
    """Hand a stage's output, or its input's gradient, to stage `index`."""
    target = engine.config.rank_of_stage(index)
    if target == engine.group.rank():
        engine.handed_over = tensor
    else:
        dist.send(tensor.contiguous(), group=engine.group, group_dst=target)


def _backward_pass(engine: StageRunner, index: int, done: Pass) -> None:
    assert done.output is not None
    handed_on = done.handed_on
    gradient = _receive_from_stage(engine, index + 1, done.output) if handed_on is None else handed_on.grad
    if done.output.requires_grad and gradient is not None:
        torch.autograd.backward(done.output, gradient)
    if done.hidden is not None:
        hidden = done.hidden
        _send_to_stage(engine, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, index - 1)


def _reduce_in(stage: nn.Module, last: bool) -> None:
    """FSDP2 reduces a stage's gradients, and frees its weights, after the last micro-batch only.

    So the number of collectives does not depend on the number of rows, which data ranks may differ in.
    """
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last)
        stage.set_reshard_after_backward(last)
        stage.set_is_last_backward(last)
