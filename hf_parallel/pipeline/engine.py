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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.config import SpecError
from hf_parallel.mesh import ParallelMesh
from hf_parallel.pipeline.batches import Batch, count_targets, fresh_gradients, split_rows, tokens_of
from hf_parallel.pipeline.elsewhere import Elsewhere
from hf_parallel.pipeline.outputs import PipelineLoss, detached_node
from hf_parallel.pipeline.own_loss import counted
from hf_parallel.pipeline.recorder import Recorder
from hf_parallel.pipeline.schedules import build_schedule, micro_batch_count, predicted_bubble
from hf_parallel.pipeline.stages import LeaveAtExit, StageView, backbone_of, boundary_dtype, hidden_size
from hf_parallel.pipeline.whole import run_once, run_whole


class Stage(nn.Module):
    """What FSDP2 and torch's schedule see: a module that holds one stage's parts and runs what it is given."""

    def __init__(self, view: StageView) -> None:
        super().__init__()
        self.parts = nn.ModuleList(view.modules)
        self.work: Callable[[torch.Tensor | None, int], Any] | None = None

    def forward(self, hidden: torch.Tensor | None = None, micro_batch: torch.Tensor | int = 0) -> Any:
        assert self.work is not None
        return self.work(hidden, int(micro_batch))


class BackboneCalledError(NotImplementedError):
    """The backbone was called without the model around it, and not by the loss of a micro-batch."""


class PipelineEngine:
    """Runs one pipelined model. `loss_only`, `keep_outputs` and `copies` are for the callers in `hooks/`."""

    def __init__(
        self,
        model: Any,
        views: list[StageView],
        mesh: ParallelMesh,
        tied: bool,
        sums_over_tokens: bool,
        layers_per_stage: tuple[int, ...],
        elsewhere: Elsewhere,
        sequence_parts: int = 1,
    ) -> None:
        self.layers_per_stage, self.elsewhere = layers_per_stage, elsewhere
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
        self.recorder = Recorder(mesh.device)
        self._schedules: dict[tuple, Any] = {}
        self._arriving: Callable[..., torch.Tensor] | torch.Tensor | None = None
        self._view: StageView | None = None
        self._calls = 0  # of the model, by the loss of one micro-batch
        self.items: torch.Tensor | None = None  # targets of the whole batch, while a script's loss sees parts of it
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
        if self.items is not None and self.sums_over_tokens and batch.get("labels") is not None:
            batch["num_items_in_batch"] = batch.get("num_items_in_batch", self.items)
        if self._replay is not None:
            return self._replay(batch)
        if self._view is not None:  # a script's loss calls the model for one micro-batch
            return self._model_forward(**batch)
        rows = tokens_of(batch).shape[0]
        try:
            if self._schedulable(batch, rows):
                batch = {"num_items_in_batch": count_targets(batch), **batch}
                parts = split_rows(batch, micro_batch_count(rows, self.config))
                return PipelineLoss(loss=self._scheduled(parts, lambda part: self._model_forward(**part)["loss"]))
            outputs = run_whole(self, batch, rows)
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
        parts = split_rows(batch, micro_batch_count(tokens_of(batch).shape[0], self.config))
        try:
            with counted(self, batch):
                return self._scheduled(parts, loss_of)
        finally:
            for stage in self._stages():
                stage.work = None

    def run_once(self, batch: Batch, call: Callable[[], Any]) -> dict[str, Any]:
        """`call()`, which calls this model or its backbone once, on the last stage; its outputs on every rank."""
        try:
            return run_once(self, batch, call)
        finally:
            for stage in self._stages():
                stage.work = None

    @contextlib.contextmanager
    def recorded(self, path: str) -> Iterator[None]:
        """Draw the timeline of what runs in here, by the pipeline's first rank."""
        self.recorder.start(self.group)
        yield
        micro_batches = max((key[0] for key in self._schedules), default=1)
        layers = tuple(self.layers_per_stage)
        predicted = predicted_bubble(self.config, layers, micro_batches) if self._schedules else None
        self.recorder.draw(self.group, path, self.config.pipeline_schedule, predicted)

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
            raise BackboneCalledError(
                "hf_parallel: under pp_size > 1 the backbone by itself is called in a Trainer's compute_loss only, "
                "which must read num_items_in_batch; call the whole model"
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
        schedule = self._schedule_for(len(parts), tokens_of(parts[0]))
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
                modules, self.config, self.group, self.mesh.device, micro_batches, boundary, self.recorder
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
