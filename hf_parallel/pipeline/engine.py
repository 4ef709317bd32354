"""A pipeline behind `model(**batch)`: one call runs all micro-batches through all stages.

Every stage runs the model's own forward on its micro-batch as far as its last layer; there the first stage embeds the
tokens, the others take the activations they received, and all but the last leave. So masks, rotary embeddings and head
are Hugging Face's own code, and the last stage computes the model's own loss.

Two ways through the stages, chosen per call and both exact:

    scheduled   training with a loss that adds up over micro-batches, the model's own or the script's: one of torch's
                schedules; the last stage computes each micro-batch's loss as soon as it arrives
    whole       everything else (evaluation; losses over whole batches; ragged tails): all forwards, then, where the
                script's loss has a gradient, all backwards, as GPipe does; outputs appear on every rank
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_parallel.config import SpecError
from hf_parallel.mesh import ParallelMesh
from hf_parallel.pipeline.outputs import PipelineLoss, broadcast_outputs, detached_node
from hf_parallel.pipeline.schedules import build_schedule, micro_batch_count
from hf_parallel.pipeline.stages import LeaveAtExit, StageView, backbone_of, boundary_dtype, hidden_size

Batch = dict[str, Any]


class Stage(nn.Module):
    """What FSDP2 and torch's schedule see: a module that holds one stage's parts and runs what it is given."""

    def __init__(self, view: StageView) -> None:
        super().__init__()
        self.parts = nn.ModuleList(view.modules)
        self.work: Callable[[torch.Tensor | None, int], Any] | None = None

    def forward(self, hidden: torch.Tensor | None = None, micro_batch: torch.Tensor | int = 0) -> Any:
        assert self.work is not None
        return self.work(hidden, int(micro_batch))


@dataclass
class Pass:
    """One micro-batch through the layers of one stage: what came in and what went out, for the backward."""

    hidden: torch.Tensor | None
    output: torch.Tensor | None = None
    handed_on: torch.Tensor | None = None  # on the last stage: the output as the head and the script's loss see it


class PipelineEngine:
    """Runs one pipelined model. `loss_only`, `keep_outputs` and `copies` are for the callers in `hooks/`."""

    def __init__(
        self,
        model: Any,
        views: list[StageView],
        mesh: ParallelMesh,
        tied: bool,
        sums_over_tokens: bool,
        sequence_parts: int = 1,
    ) -> None:
        self.model, self.views, self.mesh, self.config = model, views, mesh, mesh.config
        self.layers = [layer for view in views for layer in view.layers]
        self.stages = nn.ModuleList(Stage(view) for view in views)
        self.group, self.first, self.last = mesh.group("pp"), mesh.is_first_stage, mesh.is_last_stage
        self.last_index = self.config.pipeline_stages - 1
        self.last_rank = self.config.rank_of_stage(self.last_index)
        # In a V one rank holds both ends, and with them the one tied parameter.
        self.tied_group = mesh.first_and_last_stage_group() if tied and self.last_rank != 0 else None
        self.sums_over_tokens = sums_over_tokens
        self.sequence_parts = sequence_parts  # under sequence parallelism stages exchange 1/tp of each sequence
        self.loss_only = False  # evaluation that wants no logits need not send them
        self.keep_outputs = False  # a script that reads more than the loss in training needs all outputs
        self._schedules: dict[tuple, Any] = {}
        self._arriving: Callable[..., torch.Tensor] | torch.Tensor | None = None
        self._view: StageView | None = None
        self._calls = 0  # of the model, by the loss of one micro-batch
        self._watch: Callable[[Batch, Any], None] | None = None
        self._replay: Callable[[Batch], Any] | None = None
        self._handed_over: torch.Tensor | None = None  # from a stage to the next on the same rank

    # ---- attaching ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the engine behind `model.forward` and cut the backbone's forward.

        Plain functions, called with the model as first argument or without: accelerate rebinds what it wraps.
        """
        backbone = backbone_of(self.model)
        self._model_forward, self._backbone_forward = self.model.forward, backbone.forward
        self._signature = inspect.signature(self._model_forward)
        self._backbone_names = list(inspect.signature(self._backbone_forward).parameters)

        @functools.wraps(self._model_forward)
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(*(args[1:] if args and args[0] is self.model else args), **kwargs)

        @functools.wraps(self._backbone_forward)
        def backbone_forward(*args: Any, **kwargs: Any) -> Any:
            return self._cut_backbone(*args, **kwargs)

        self.model.forward, backbone.forward = model_forward, backbone_forward

    @property
    def copies(self) -> set[int]:
        """ids of parameters that an earlier stage counts too: the last stage's copy of a tied embedding."""
        return {id(p) for p in self._tied_parameters()} if self.last and not self.first else set()

    def _tied_parameters(self) -> list[nn.Parameter]:
        if self.tied_group is None:
            return []
        return [self.model.get_input_embeddings().weight]

    # ---- one call ------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """`model(**batch)` on every rank of the pipeline; returns the same values on all of them."""
        batch: Batch = {**self._signature.bind_partial(*args).arguments, **kwargs}
        self._refuse_partial_outputs(batch)
        if "use_cache" in self._signature.parameters:
            batch["use_cache"] = False
        if self._replay is not None:
            return self._replay(batch)
        if self._view is not None:  # a script's loss calls the model for one micro-batch
            return self._model_forward(**batch)
        rows = _tokens(batch).shape[0]
        try:
            if self._schedulable(batch, rows):
                batch = {"num_items_in_batch": _count_targets(batch), **batch}
                parts = split_rows(batch, micro_batch_count(rows, self.config))
                return PipelineLoss(loss=self._scheduled(parts, lambda part: self._model_forward(**part)["loss"]))
            outputs = self._whole(batch, rows)
            if self._watch is not None:
                self._watch(batch, outputs)
            return outputs
        finally:
            for stage in self._stages():
                stage.work = None  # it holds the batch

    def run_loss(self, batch: Batch, loss_of: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """The script's own loss, one micro-batch at a time: `loss_of(part)` calls this model once.

        It runs on every stage as far as the model's layers go; only the last stage sees the end of it.
        """
        try:
            return self._scheduled(split_rows(batch, micro_batch_count(_tokens(batch).shape[0], self.config)), loss_of)
        finally:
            for stage in self._stages():
                stage.work = None

    def tell(self, values: dict[str, Any]) -> None:
        """Update `values` on every stage with those of the last. Collective, so not while a schedule runs."""
        if self._view is not None:
            raise NotImplementedError("hf_parallel: log from outside compute_loss, which runs per micro-batch here")
        told: list[Any] = [values]
        dist.broadcast_object_list(told, group=self.group, group_src=self.last_rank)
        values.update(told[0])

    def _refuse_partial_outputs(self, batch: Batch) -> None:
        """What each stage would have only a part of."""
        for key in ("output_hidden_states", "output_attentions"):
            if batch.get(key) or getattr(self.model.config, key, False):
                raise NotImplementedError(f"hf_parallel: {key}=True needs all layers on one rank; pp_size=1 works")
        if batch.get("past_key_values") is not None:
            raise NotImplementedError("hf_parallel: a pipelined model keeps no key/value cache; pass use_cache=False")
        if batch.get("return_dict") is False:
            raise NotImplementedError("hf_parallel: a pipelined model returns named outputs; drop return_dict=False")

    def _schedulable(self, batch: Batch, rows: int) -> bool:
        training = torch.is_grad_enabled() and self.model.training and not self.keep_outputs
        own_loss = batch.get("labels") is not None and self.sums_over_tokens
        return training and own_loss and self._divides(rows)

    def _divides(self, rows: int) -> bool:
        """A short last batch that the schedule cannot cut runs whole: exact, only less overlapped."""
        try:
            return micro_batch_count(rows, self.config) > 0
        except SpecError:
            return False

    def _stages(self) -> list[Stage]:
        return cast(list[Stage], list(self.stages))

    def _enter(self, view: StageView, arriving: Any, call: Callable[[], Any]) -> Any:
        """What `call` returns on the last stage; on the others what leaves its one call of the model."""
        self._arriving, self._view, self._calls = arriving, view, 0
        try:
            with view.shown():
                output = call()
        except LeaveAtExit as leave:
            return leave.hidden
        finally:
            self._arriving, self._view = None, None
        if view.index != self.last_index:
            raise RuntimeError("hf_parallel: the loss did not call the model in this step, as it did in its first one")
        return output

    def _cut_backbone(self, *args: Any, **kwargs: Any) -> Any:
        if self._view is None:
            raise NotImplementedError(
                "hf_parallel: under pp_size > 1 the backbone cannot be called by itself; call the whole model"
            )
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError(
                "hf_parallel: the loss called the model more than once in a step, as it did not in its first one; "
                "the stages before have moved on"
            )
        if callable(self._arriving):
            return self._arriving(*args, **kwargs)
        return self._run_backbone(self._arriving, *args, **kwargs)

    def _run_backbone(self, hidden: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        assert self._view is not None
        entry = self._view.entry
        if entry is not None and hidden is not None:
            # The model sees the shape to make masks and positions of; the values come in at the entry.
            kwargs = {**self._named(args, kwargs), "input_ids": None, "inputs_embeds": self._placeholder(hidden)}
            args, entry.hidden = (), hidden
        try:
            return self._backbone_forward(*args, **kwargs)
        except LeaveAtExit as leave:
            expected = boundary_dtype(self.layers)
            if leave.hidden.dtype != expected:  # it would arrive as garbage in the receiver's buffer
                raise RuntimeError(
                    f"hf_parallel: activations are {leave.hidden.dtype}, weights {expected}: cannot cross stages"
                ) from leave
            raise
        finally:
            if entry is not None:
                entry.hidden = None

    def _placeholder(self, hidden: torch.Tensor) -> torch.Tensor:
        """A tensor of the whole sequence's shape; with parts of it expanded, which takes no memory."""
        if self.sequence_parts == 1:
            return hidden.detach()
        return hidden.detach()[:, :1].expand(-1, hidden.shape[1] * self.sequence_parts, -1)

    def _boundary(self, tokens: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """An empty tensor of the shape that travels between stages for a batch of these tokens."""
        rows, length = tokens.shape[:2]
        shape = rows, -(-length // self.sequence_parts), hidden_size(self.model)
        return torch.empty(shape, dtype=boundary_dtype(self.layers), device=device)

    def _named(self, args: tuple, kwargs: Batch) -> Batch:
        return {**dict(zip(self._backbone_names, args, strict=False)), **kwargs}

    # ---- scheduled ---------------------------------------------------------------------------------------------

    def _scheduled(self, parts: list[Batch], loss_of: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """Run all forward and backward passes now; the returned loss hands the gradients over in its backward."""
        schedule = self._schedule_for(len(parts), _tokens(parts[0]))
        losses: list[torch.Tensor] = []
        index = torch.arange(len(parts))
        with self._autocast_per_stage() as autocast, fresh_gradients(self._trainable()) as fresh:

            def work(view: StageView, hidden: torch.Tensor | None, i: int) -> Any:
                with autocast():
                    return self._enter(view, hidden, lambda: loss_of(parts[i]))

            for view, stage in zip(self.views, self._stages(), strict=True):
                stage.work = functools.partial(work, view)
            schedule.step(index, target=index, losses=losses, return_outputs=False, micro_batch=index)
        loss = torch.stack([part.detach().float() for part in losses]).sum() if losses else torch.zeros(())
        loss = loss.to(self.mesh.device)
        dist.broadcast(loss, group=self.group, group_src=self.last_rank)
        return detached_node([loss], lambda gradients: self._accumulate(fresh, gradients[0]))[0]

    def _schedule_for(self, micro_batches: int, tokens: torch.Tensor) -> Any:
        boundary = self._boundary(tokens, "meta").requires_grad_()
        key = (micro_batches, *boundary.shape, boundary.dtype)
        if key not in self._schedules:
            modules: dict[int, nn.Module] = {v.index: s for v, s in zip(self.views, self._stages(), strict=True)}
            self._schedules[key] = build_schedule(
                modules, self.config, self.group, self.mesh.device, micro_batches, boundary
            )
        return self._schedules[key]

    @contextlib.contextmanager
    def _autocast_per_stage(self) -> Iterator[Callable[[], Any]]:
        """The schedule runs backward passes too, which must not be autocast: leave it, enter it for each forward."""
        kind = self.mesh.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            # Without the cache: cast copies of gathered weights must not outlive the micro-batch.
            yield lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)

    # ---- whole -------------------------------------------------------------------------------------------------

    def _whole(self, batch: Batch, rows: int) -> Any:
        """All rows through the stages; the model's outputs on every rank."""
        grad = torch.is_grad_enabled()
        parameters = self._trainable()  # taken now: during the forward FSDP2 registers gathered ones in their place
        tape: list[dict[int, Pass]] = []
        outputs = self._forward_whole(batch, min(rows, 2 * self.config.pp_size), tape)
        outputs, tensors = broadcast_outputs(outputs, self.group, self.last_rank, self.mesh.device, self.loss_only)
        values = [tensor.detach() for tensor in tensors]
        if grad:
            values = detached_node(
                values, lambda gradients: self._backward_whole(parameters, tape, tensors, gradients)
            )
        return outputs(values)

    def _forward_whole(self, batch: Batch, count: int, tape: list[dict[int, Pass]]) -> Any:
        """Each micro-batch through this rank's stages in turn; the last stage waits until it has them all."""
        for part in split_rows(batch, count):
            tape.append({})
            for view, stage in zip(self.views, self._stages(), strict=True):
                hidden = None if view.index == 0 else self._receive(view.index, part)
                tape[-1][view.index] = Pass(hidden)
                if view.index != self.last_index:
                    stage.work = lambda hidden, i, view=view, part=part: self._enter(
                        view, hidden, lambda: self._model_forward(**part)
                    )
                    tape[-1][view.index].output = output = stage(hidden)
                    self._send(output.detach(), view.index + 1)
        if not self.last:
            return None
        return self._last_stage(batch, [passes[self.last_index] for passes in tape])

    def _last_stage(self, batch: Batch, passes: list[Pass]) -> Any:
        """The model's forward, once for all rows: only its backbone runs micro-batch by micro-batch."""

        def backbone(*args: Any, **kwargs: Any) -> Any:
            results = []
            for done, part in zip(passes, split_rows(self._named(args, kwargs), len(passes)), strict=True):
                results.append(self._run_backbone(done.hidden, **part))
                done.output = results[-1]["last_hidden_state"]
                # Cut here, so that the backward of the layers too goes micro-batch by micro-batch.
                done.handed_on = done.output.detach().requires_grad_(done.output.requires_grad)
            results[0]["last_hidden_state"] = torch.cat([cast(torch.Tensor, done.handed_on) for done in passes])
            return results[0]

        view, stage = self.views[-1], self._stages()[-1]
        stage.work = lambda hidden, i: self._enter(view, backbone, lambda: self._model_forward(**batch))
        return stage()

    def _receive(self, index: int, batch: Batch) -> torch.Tensor:
        """What stage `index` works on, from the stage before it."""
        source = self.config.rank_of_stage(index - 1)
        if source == self.group.rank():
            assert self._handed_over is not None
            hidden, self._handed_over = self._handed_over, None
        else:
            hidden = self._boundary(_tokens(batch), self.mesh.device)
            dist.recv(hidden, group=self.group, group_src=source)
        return hidden.requires_grad_(torch.is_grad_enabled())

    def _send(self, tensor: torch.Tensor, index: int) -> None:
        """Hand a stage's output, or its input's gradient, to stage `index`."""
        target = self.config.rank_of_stage(index)
        if target == self.group.rank():
            self._handed_over = tensor
        else:
            dist.send(tensor.contiguous(), group=self.group, group_dst=target)

    def _backward_whole(
        self, parameters: list, tape: list[dict[int, Pass]], tensors: list[torch.Tensor], gradients: list
    ) -> None:
        """Send the gradient of the outputs, known to every rank, back through the stages."""
        with fresh_gradients(parameters) as fresh:
            for stage in self._stages():
                self._reduce_in(stage, False)
            if self.last:
                pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            for i, passes in enumerate(tape):
                for view, stage in reversed(list(zip(self.views, self._stages(), strict=True))):
                    self._reduce_in(stage, i == len(tape) - 1)
                    self._backward_pass(view.index, passes[view.index])
        self._accumulate(fresh, None)

    def _backward_pass(self, index: int, done: Pass) -> None:
        assert done.output is not None
        if done.handed_on is not None:
            gradient = done.handed_on.grad
        else:
            gradient = self._receive_gradient(index, done.output)
        if done.output.requires_grad and gradient is not None:
            torch.autograd.backward(done.output, gradient)
        if done.hidden is not None:
            hidden = done.hidden
            self._send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, index - 1)

    def _receive_gradient(self, index: int, output: torch.Tensor) -> torch.Tensor:
        source = self.config.rank_of_stage(index + 1)
        if source == self.group.rank():
            assert self._handed_over is not None
            gradient, self._handed_over = self._handed_over, None
            return gradient
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self.group, group_src=source)
        return gradient

    def _reduce_in(self, stage: Any, last: bool) -> None:
        """FSDP2 reduces a stage's gradients, and frees its weights, after the last micro-batch only.

        So the number of collectives does not depend on the number of rows, which data ranks may differ in.
        """
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(last)
            stage.set_reshard_after_backward(last)
            stage.set_is_last_backward(last)

    # ---- does a script's loss add up? ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[tuple[Batch, Any]]]:
        """Keep what the model is called with, and returns, in here."""
        calls: list[tuple[Batch, Any]] = []
        self._watch = lambda batch, outputs: calls.append((batch, outputs))
        try:
            yield calls
        finally:
            self._watch = None

    def adds_up(self, batch: Batch, calls: list, loss: torch.Tensor, loss_of: Callable[[Batch], Any]) -> bool:
        """Is `loss` the sum of the losses of micro-batches? Computed from parts of the outputs, without the model."""
        if len(calls) != 1 or _tokens(calls[0][0]).shape != _tokens(batch).shape:
            return False
        called, outputs = calls[0]
        parts = split_rows(batch, micro_batch_count(_tokens(batch).shape[0], self.config))
        total = torch.zeros_like(loss, dtype=torch.float32)
        with torch.no_grad():
            for part, seen, given in zip(
                parts, split_rows({**outputs}, len(parts)), split_rows(called, len(parts)), strict=True
            ):
                self._replay = lambda batch, seen=seen, given=given: type(outputs)(**self._with_loss(seen, given))
                try:
                    total += loss_of(part).float()
                finally:
                    self._replay = None
        # Means over micro-batches, or over pairs of rows, are off by far more than bf16 rounds.
        return torch.allclose(total, loss.detach().float(), rtol=1e-2 if loss.dtype != torch.float32 else 1e-5)

    def _with_loss(self, outputs: Batch, batch: Batch) -> Batch:
        """The model's own loss of these rows, where the script reads it."""
        if outputs.get("loss") is None or not self.sums_over_tokens:
            return outputs
        known = {"num_items_in_batch": batch.get("num_items_in_batch"), "shift_labels": batch.get("shift_labels")}
        vocabulary = outputs["logits"].shape[-1]
        loss = self.model.loss_function(outputs["logits"], batch["labels"], vocabulary, **known)
        return {**outputs, "loss": loss}

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _accumulate(self, fresh: list, scale: torch.Tensor | None) -> None:
        """Add the fresh gradients, times the gradient of the loss, to the accumulated ones."""
        tied = {id(p) for p in self._tied_parameters()}
        for parameter, gradient in fresh:
            if gradient is None:
                continue
            if scale is not None:
                gradient.mul_(scale)
            if id(parameter) in tied:  # both ends of the pipeline hold this parameter: its gradient is the sum
                dist.all_reduce(_local(gradient), group=self.tied_group)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        fresh.clear()


@contextlib.contextmanager
def fresh_gradients(parameters: list[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, torch.Tensor | None]]]:
    """Collect the gradients of what runs inside, apart from those already accumulated."""
    before = [parameter.grad for parameter in parameters]
    fresh: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    for parameter in parameters:
        parameter.grad = None
    yield fresh
    for parameter, gradient in zip(parameters, before, strict=True):
        fresh.append((parameter, parameter.grad))
        parameter.grad = gradient


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut every tensor that has one entry per row into `parts` along dim 0; share everything else."""
    if parts == 1:
        return [batch]
    rows = _rows(batch)
    cut = {
        key: value.tensor_split(parts)
        for key, value in batch.items()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == rows
    }
    return [{key: cut[key][i] if key in cut else value for key, value in batch.items()} for i in range(parts)]


def _rows(batch: Batch) -> int:
    named = next((batch[key] for key in ("input_ids", "inputs_embeds", "logits") if batch.get(key) is not None), None)
    if named is None:
        raise ValueError("hf_parallel: a pipelined model needs input_ids or inputs_embeds in the batch")
    return named.shape[0]


def _tokens(batch: Batch) -> torch.Tensor:
    for key in ("input_ids", "inputs_embeds"):
        if torch.is_tensor(batch.get(key)):
            return batch[key]
    raise ValueError("hf_parallel: a pipelined model needs input_ids or inputs_embeds in the batch")


def _count_targets(batch: Batch) -> torch.Tensor:
    """How many tokens the causal loss averages over: labels are shifted by one, -100 does not count."""
    labels = batch["shift_labels"] if batch.get("shift_labels") is not None else batch["labels"][..., 1:]
    return (labels != -100).sum()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
