"""A pipeline behind `model(**batch)`: one call runs all micro-batches through all stages.

Every stage runs the model's own forward on its micro-batch as far as the backbone; there the first stage embeds the
tokens, the others take the activations they received, and all but the last leave at their last layer. So masks, rotary
embeddings and head are Hugging Face's own code, and the last stage computes the model's own loss.

Two ways through the stages, chosen per call and both exact:

    scheduled   training with the model's own token-mean loss: torch's 1F1B or GPipe, micro-batch losses sum up
    whole       everything else (evaluation; losses computed from logits; ragged tails): outputs appear on every rank,
                in training as an autograd node, so whatever the script does with them has its gradient
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.mesh import ParallelMesh
from hf_parallel.pipeline.outputs import PipelineLoss, broadcast_outputs, detached_node
from hf_parallel.pipeline.schedules import build_schedule, micro_batch_count
from hf_parallel.pipeline.stages import Entry, LeaveAtExit, backbone_of, boundary_dtype, hidden_size

Batch = dict[str, Any]


class Stage(nn.Module):
    """What FSDP2 and torch's schedule see: a module that holds the model's local part and runs what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.work: Callable[[torch.Tensor | None, int], Any] | None = None

    def forward(self, hidden: torch.Tensor | None = None, micro_batch: torch.Tensor | int = 0) -> Any:
        assert self.work is not None
        return self.work(hidden, int(micro_batch))


class PipelineEngine:
    """Runs one pipelined model. `loss_only`, `keep_outputs` and `copies` are for the callers in `hooks/`."""

    def __init__(
        self,
        model: Any,
        layers: list[nn.Module],
        entry: Entry | None,
        mesh: ParallelMesh,
        tied: bool,
        sums_over_tokens: bool,
        sequence_parts: int = 1,
    ) -> None:
        self.model, self.layers, self.entry, self.mesh, self.config = model, layers, entry, mesh, mesh.config
        self.group, self.first, self.last = mesh.group("pp"), mesh.is_first_stage, mesh.is_last_stage
        self.tied_group = mesh.first_and_last_stage_group() if tied else None
        self.sums_over_tokens = sums_over_tokens
        self.sequence_parts = sequence_parts  # under sequence parallelism stages exchange 1/tp of each sequence
        self.loss_only = False  # evaluation that wants no logits need not send them
        self.keep_outputs = False  # a script that reads more than the loss in training needs all outputs
        self.stage = Stage(model)
        self._schedules: dict[tuple, Any] = {}
        self._arriving: Callable[..., torch.Tensor] | torch.Tensor | None = None
        self._inside = False

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
        rows = _tokens(batch).shape[0]
        try:
            if self._schedulable(batch, rows):
                return self._scheduled(batch, micro_batch_count(rows, self.config))
            return self._whole(batch, rows)
        finally:
            self.stage.work = None  # it holds the batch

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
        return training and own_loss and rows >= self.config.pp_size and not self._ragged(rows)

    def _ragged(self, rows: int) -> bool:
        """A short last batch that `pipeline_microbatches` does not divide runs whole: exact, only less overlapped."""
        asked = self.config.pipeline_microbatches
        return asked is not None and rows % asked != 0

    def _enter(self, arriving: Any, batch: Batch) -> Any:
        """The model's forward on this stage, with `arriving` in place of the embedded tokens."""
        self._arriving, self._inside = arriving, True
        try:
            return self._model_forward(**batch)
        except LeaveAtExit as leave:
            return leave.hidden
        finally:
            self._arriving, self._inside = None, False

    def _cut_backbone(self, *args: Any, **kwargs: Any) -> Any:
        if not self._inside:
            raise NotImplementedError(
                "hf_parallel: under pp_size > 1 the backbone cannot be called by itself; call the whole model"
            )
        if callable(self._arriving):
            return self._arriving(*args, **kwargs)
        return self._run_backbone(self._arriving, *args, **kwargs)

    def _run_backbone(self, hidden: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if self.entry is not None and hidden is not None:
            # The model sees the shape to make masks and positions of; the values come in at the entry.
            kwargs = {**self._named(args, kwargs), "input_ids": None, "inputs_embeds": self._placeholder(hidden)}
            args, self.entry.hidden = (), hidden
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
            if self.entry is not None:
                self.entry.hidden = None

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

    def _scheduled(self, batch: Batch, micro_batches: int) -> PipelineLoss:
        """Run all forward and backward passes now; the returned loss hands the gradients over in its backward."""
        batch = {"num_items_in_batch": _count_targets(batch), **batch}
        parts = split_rows(batch, micro_batches)
        schedule = self._schedule_for(micro_batches, _tokens(parts[0]))
        losses: list[torch.Tensor] = []
        index = torch.arange(micro_batches)
        with self._autocast_per_stage() as autocast, fresh_gradients(self._trainable()) as fresh:

            def work(hidden: torch.Tensor | None, i: int) -> Any:
                with autocast():
                    output = self._enter(hidden, parts[i])
                return output["loss"] if self.last else output

            self.stage.work = work
            schedule.step(index, target=index, losses=losses, return_outputs=False, micro_batch=index)
        loss = torch.stack([part.detach().float() for part in losses]).sum() if losses else torch.zeros(())
        loss = loss.to(self.mesh.device)
        dist.broadcast(loss, group=self.group, group_src=self.config.pp_size - 1)
        return PipelineLoss(loss=detached_node([loss], lambda gradients: self._accumulate(fresh, gradients[0]))[0])

    def _schedule_for(self, micro_batches: int, tokens: torch.Tensor) -> Any:
        boundary = self._boundary(tokens, "meta").requires_grad_()
        key = (micro_batches, *boundary.shape, boundary.dtype)
        if key not in self._schedules:
            self._schedules[key] = build_schedule(
                self.stage, self.config, self.group, self.mesh.device, micro_batches, boundary
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
        chunks = 1 if grad else min(rows, 2 * self.config.pp_size)
        parameters = self._trainable()  # taken now: during the forward FSDP2 registers gathered ones in their place
        tape: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        outputs = None
        if self.last:
            outputs = self._last_stage(batch, chunks, tape)
        else:
            self._earlier_stage(batch, chunks, tape)
        outputs, tensors = broadcast_outputs(outputs, self.group, self.mesh.device, self.loss_only)
        values = [tensor.detach() for tensor in tensors]
        if grad:
            values = detached_node(
                values, lambda gradients: self._backward_whole(parameters, tape, tensors, gradients)
            )
        return outputs(values)

    def _last_stage(self, batch: Batch, chunks: int, tape: list) -> Any:
        def backbone(*args: Any, **kwargs: Any) -> Any:
            parts = split_rows(self._named(args, kwargs), chunks)
            results = []
            for part in parts:
                hidden = self._receive(part)
                tape.append((hidden, hidden))
                results.append(self._run_backbone(hidden, **part))
            results[0]["last_hidden_state"] = torch.cat([r["last_hidden_state"] for r in results])
            return results[0]

        self.stage.work = lambda hidden, i: self._enter(backbone, batch)
        return self.stage()

    def _earlier_stage(self, batch: Batch, chunks: int, tape: list) -> None:
        for part in split_rows(batch, chunks):
            hidden = None if self.first else self._receive(part)
            self.stage.work = lambda hidden, i, part=part: self._enter(hidden, part)
            output = self.stage(hidden)
            dist.send(output.detach().contiguous(), group=self.group, group_dst=self.group.rank() + 1)
            tape.append((hidden, output))

    def _receive(self, batch: Batch) -> torch.Tensor:
        hidden = self._boundary(_tokens(batch), self.mesh.device)
        dist.recv(hidden, group=self.group, group_src=self.group.rank() - 1)
        return hidden.requires_grad_(torch.is_grad_enabled())

    def _backward_whole(self, parameters: list, tape: list, tensors: list[torch.Tensor], gradients: list) -> None:
        """Send the gradient of the outputs, known to every rank, back through the stages."""
        (hidden, output), rank = tape[0], self.group.rank()
        with fresh_gradients(parameters) as fresh:
            if self.last:
                pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            else:
                gradient = torch.empty_like(output)
                dist.recv(gradient, group=self.group, group_src=rank + 1)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            if not self.first:
                gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
                dist.send(gradient.contiguous(), group=self.group, group_dst=rank - 1)
        self._accumulate(fresh, None)

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
    rows = _tokens(batch).shape[0]
    cut = {
        key: value.tensor_split(parts)
        for key, value in batch.items()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == rows
    }
    return [{key: cut[key][i] if key in cut else value for key, value in batch.items()} for i in range(parts)]


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
