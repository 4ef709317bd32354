"""A pipeline behind `model(**batch)`: one call runs all micro-batches through all stages.

Every stage runs the model's own forward on its micro-batch as far as its last layer; there the first stage embeds the
tokens, the others take the activations they received, and all but the last leave. So masks, rotary embeddings and head
are Hugging Face's own code, and the last stage computes the model's own loss.

Two ways through the stages, chosen per call and both exact:

    scheduled   training with a loss that adds up over micro-batches, the model's own or the script's: one of torch's
                schedules; the last stage computes each micro-batch's loss as soon as it arrives
    served      everything else (evaluation; losses over whole batches; ragged tails): all forwards, then, where the
                result has a gradient, all backwards, as GPipe does; outputs appear on every rank
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.arguments import by_name
from hf_parallel.axes.axis import Batch, Building
from hf_parallel.axes.pipeline import unscheduled
from hf_parallel.axes.pipeline.axis import PipelinePart
from hf_parallel.axes.pipeline.batches import (
    by_positions,
    count_targets,
    fresh_gradients,
    split_rows,
    tokens_of,
    without_count,
)
from hf_parallel.axes.pipeline.outputs import PipelineLoss, refuse_partial_outputs, wants
from hf_parallel.axes.pipeline.recorder import Recorder
from hf_parallel.axes.pipeline.registry import pipelines_of
from hf_parallel.axes.pipeline.remote_modules import RemoteModules
from hf_parallel.axes.pipeline.scheduled import scheduled
from hf_parallel.axes.pipeline.schedules import can_be_cut, micro_batch_count, predicted_bubble
from hf_parallel.axes.pipeline.stages import StageView, boundary_dtype
from hf_parallel.axes.pipeline.stand_ins import LeaveAtExit
from hf_parallel.mesh import stored
from hf_parallel.model.anatomy import backbone_of, text_config
from hf_parallel.model.unread_logits import logits_are_unread, unread_logits

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from hf_parallel.axes.data.held_gradients import HeldGradients
    from hf_parallel.axes.data.held_gradients import Run as HeldRun
    from hf_parallel.axes.experts.stages import StageBalance
    from hf_parallel.axes.pipeline.torch_stage import TorchStage


T = TypeVar("T")
Handler = Callable[[Batch], Any]  # what the backbone returns, or a stage leaves with


class Stage(nn.Module):
    """What FSDP2 and torch's schedule see: a module that holds one stage's parts and runs what it is given."""

    def __init__(self, view: StageView) -> None:
        super().__init__()
        self.parts = nn.ModuleList(view.modules)
        self.work: Callable[[torch.Tensor | None, int], object] | None = None
        self.autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.has_run = False

    def __call__(self, hidden: torch.Tensor | None = None, micro_batch: torch.Tensor | int = 0) -> Any:
        """FSDP2's hooks would move indices to the GPU; to read one there waits for all that is queued."""
        arrived = None if hidden is not None and not hidden.is_floating_point() else hidden
        with self.autocast():  # around FSDP2's hooks too: it gathers weights in autocast's dtype
            return super().__call__(arrived, micro_batch=int(micro_batch))

    def forward(self, hidden: torch.Tensor | None, micro_batch: int) -> object:
        assert self.work is not None
        self.has_run = True
        return self.work(hidden, micro_batch)


class PipelineEngine:
    """Runs one pipelined model. `loss_only`, `adapters` and `copies` are for the callers in `hooks/`."""

    def __init__(
        self,
        model: PreTrainedModel,
        views: list[StageView],
        building: Building,
        part: PipelinePart,
        remote_modules: RemoteModules,
    ) -> None:
        mesh = building.mesh
        self.model, self.views, self.mesh, self.config = model, views, mesh, part.config
        self.layers_per_stage, self.remote_modules = part.layers_per_stage, remote_modules
        self._layers = [layer for view in views for layer in view.layers]
        self.stages: Any = nn.ModuleList(Stage(view) for view in views)
        self.last_index = self.config.pipeline_stages - 1
        self.last_rank = self.config.rank_of_stage(self.last_index)
        self.group, place = mesh.group("pp"), mesh.index("pp")
        self.control = mesh.group_on_host("pp")  # for what stages tell each other, beside tensors
        self.first, self.last = place == 0, place == self.last_rank
        # In a V one rank holds both ends, and with them the one tied parameter.
        self.tied_group = mesh.first_and_last_stage_group() if part.tied and self.last_rank != 0 else None
        self.sums_over_tokens = part.sums_over_tokens
        # Under sequence parallelism stages exchange 1/tp of each sequence.
        flag = building.sequence_flag
        self.sequence_parts = mesh.size("tp") if flag is not None and flag.on else 1
        self.local_length = building.local_length
        self.loss_only = False  # evaluation that wants no logits need not send them
        self.loss_in_chunks = False  # may a micro-batch's loss be computed so?
        self.recorder = Recorder(mesh.device)
        self.items: torch.Tensor | None = None  # targets of the whole batch, while a script's loss sees parts of it
        self.handed_over: torch.Tensor | None = None  # from a stage to the next on the same rank
        self.balance: StageBalance | None = None  # counts what routers chose, where a loss asks for it
        self.adapters: Any = None  # reads and sets which adapters are on
        self.scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None  # by the factor that fp16 needs
        self.lowered_dtype: Callable[[], torch.dtype | None] = lambda: None  # of weights that data ranks gather
        self.before_run: Callable[[bool, torch.Size], None] = lambda training, tokens: None
        self.at_rest: Callable[[list], list] = list  # parameters, of those that are gathered the stored ones
        self.held: HeldGradients | None = None  # of a step's runs, where data ranks reduce them once per step
        self.pipelines = pipelines_of(mesh)
        self.number = self.pipelines.add(self)
        self._width = text_config(model).hidden_size
        self.schedules: dict[
            int, tuple[_PipelineSchedule, list[TorchStage]]
        ] = {}  # torch's, by number of micro-batches
        self._view: StageView | None = None
        self._on_call: Handler | None = None

    # ---- attaching ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the engine behind `model.forward` and cut the backbone's forward.

        Plain functions, called with the model as first argument or without: accelerate rebinds what it wraps.
        """
        backbone = backbone_of(self.model)
        self._model_forward, self._backbone_forward = self.model.forward, backbone.forward
        self._signature = inspect.signature(self._model_forward)
        self._backbone_signature = inspect.signature(self._backbone_forward)

        @functools.wraps(self._model_forward)
        def model_forward(*args: object, **kwargs: object) -> ModelOutput:
            return self.run(*(args[1:] if args and args[0] is self.model else args), **kwargs)

        @functools.wraps(self._backbone_forward)
        def backbone_forward(*args: object, **kwargs: object) -> ModelOutput:
            args = args[1:] if args and args[0] is backbone else args
            return self._cut_backbone(by_positions(by_name(self._backbone_signature, args, kwargs)))

        self.model.forward, backbone.forward = model_forward, backbone_forward

    def set_forward(self, forward: Callable) -> None:
        """What computes the model's outputs around its backbone from here on: the last stage's loss among them."""
        self._model_forward, self._signature = forward, inspect.signature(forward)

    @property
    def copies(self) -> set[int]:
        """ids of parameters that an earlier stage counts too: the last stage's copy of a tied embedding."""
        return {id(p) for p in self._tied_parameters()} if self.last and not self.first else set()

    def _tied_parameters(self) -> list[nn.Parameter]:
        if self.tied_group is None:
            return []
        return self.at_rest([self.model.get_input_embeddings().weight])

    # ---- one call ------------------------------------------------------------------------------------------------

    def run(self, *args: object, **kwargs: object) -> ModelOutput:
        """`model(**batch)` on every rank of the pipeline; returns the same values on all of them."""
        batch = by_name(self._signature, args, kwargs)
        if self.balance is None:  # nobody asks
            batch = without_count(by_positions(batch))
        refuse_partial_outputs(self.model.config, batch, self.balance is not None)
        if "use_cache" in self._signature.parameters:
            batch["use_cache"] = False
        if self.items is not None and self.sums_over_tokens and batch.get("labels") is not None:
            batch["num_items_in_batch"] = batch.get("num_items_in_batch", self.items)
        if self._view is not None:  # a script's loss, on the last stage, calls its model
            return self._model_forward(**batch)
        if self.pipelines.session is not None:  # or another one
            return self.pipelines.session.within(self, lambda: self._model_forward(**batch))
        rows = tokens_of(batch).shape[0]
        if self._schedulable(batch, rows):
            batch = {"num_items_in_batch": count_targets(batch), **batch}
            parts = split_rows(batch, micro_batch_count(rows, self.config))
            run = functools.partial(self._own_loss, parts)
            return PipelineLoss(loss=scheduled(self, len(parts), tokens_of(parts[0]), run))
        return unscheduled.served(self, batch, lambda: self._outputs(batch))[0]

    def _schedulable(self, batch: Batch, rows: int) -> bool:
        summed = self._trains(batch) and self.sums_over_tokens
        return summed and can_be_cut(rows, self.config) and self.balance_of(batch) is None

    def _trains(self, batch: Batch) -> bool:
        """Will this call's own loss go backward?"""
        return torch.is_grad_enabled() and self.model.training and batch.get("labels") is not None

    def balance_of(self, kwargs: Batch) -> StageBalance | None:
        """What counts what routers choose in all layers, if this call of the model or its backbone asks for it."""
        return self.balance if wants(self.model.config, kwargs, "output_router_logits") else None

    def _own_loss(self, parts: list[Batch], view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
        handler = functools.partial(self.run_backbone, hidden)
        with unread_logits(self.loss_in_chunks):
            return self.enter(view, handler, lambda: self._model_forward(**parts[i])["loss"])

    def _outputs(self, batch: Batch) -> ModelOutput:
        outputs = self._model_forward(**batch)
        if self._trains(batch) and self.balance_of(batch) is not None:
            return PipelineLoss(loss=outputs["loss"], aux_loss=outputs["aux_loss"])
        if (self.loss_only or logits_are_unread()) and outputs.get("loss") is not None:
            return type(outputs)(loss=outputs["loss"])
        # What is no tensor, such as a cache, is of this stage only.
        return type(outputs)(**{key: value for key, value in outputs.items() if torch.is_tensor(value)})

    @contextlib.contextmanager
    def recorded(self, path: str) -> Iterator[None]:
        """Draw the timeline of what runs in here, by the pipeline's first rank."""
        self.recorder.start(self.group)
        yield
        micro_batches = max(self.schedules, default=1)
        layers = tuple(self.layers_per_stage)
        predicted = predicted_bubble(self.config, layers, micro_batches) if self.schedules else None
        self.recorder.draw(self.group, path, self.config.pipeline_schedule, predicted)

    def tell(self, values: dict[str, object]) -> None:
        """Update `values` on every stage with those of the last. Collective, so not while a schedule runs."""
        told = [values]
        dist.broadcast_object_list(told, group=self.control, group_src=self.last_rank)
        values.update(told[0])

    # ---- one stage -----------------------------------------------------------------------------------------------

    def through(
        self, stage: Stage, work: Callable[[torch.Tensor | None, int], T], hidden: torch.Tensor | None = None
    ) -> T:
        """`work(hidden, 0)` inside a stage, so that FSDP2 gathers its weights."""
        stage.work = work
        try:
            return stage(hidden)
        finally:
            stage.work = None  # it holds the batch

    def enter(self, view: StageView, on_call: Handler | None, call: Callable[[], T]) -> T:
        """What `call` returns, or leaves the stage with, while the model shows one stage.

        Args:
            on_call: answers each call of the backbone.
        """
        former = self._view, self._on_call
        self._view, self._on_call = view, on_call
        try:
            with view.shown(instead_of=former[0]):
                return call()
        except LeaveAtExit as leave:
            return leave.carried
        finally:
            self._view, self._on_call = former

    def layers(self, view: StageView, hidden: torch.Tensor | None, kwargs: Batch) -> torch.Tensor:
        """One micro-batch through the layers of a stage before the last."""
        return self.enter(view, None, lambda: self.run_backbone(hidden, kwargs))

    def _cut_backbone(self, kwargs: Batch) -> ModelOutput:
        refuse_partial_outputs(self.model.config, kwargs, self.balance is not None)
        if "use_cache" in self._backbone_signature.parameters:
            kwargs["use_cache"] = False
        if self._on_call is not None:
            return self._on_call(kwargs)
        if self.pipelines.session is not None:
            session = self.pipelines.session
            return session.within(self, lambda: session.answer(self, kwargs))
        return unscheduled.served(self, kwargs, lambda: cast(Handler, self._on_call)(kwargs))[0]

    def run_backbone(self, hidden: torch.Tensor | None, kwargs: Batch) -> ModelOutput:
        """The layers of the stage that is shown, from what arrived at it.

        Raises:
            LeaveAtExit: with what leaves, on every stage but the last.
        """
        assert self._view is not None
        entry, kwargs = self._view.entry, without_count(kwargs)
        if entry is not None and hidden is not None:
            # The model sees the shape to make masks and positions of; the values come in at the entry.
            length = tokens_of(kwargs).shape[1]
            kwargs = {**kwargs, "input_ids": None, "inputs_embeds": _placeholder(hidden, length)}
            entry.hidden = hidden
        try:
            return self._backbone_forward(**kwargs)
        except LeaveAtExit as leave:
            expected = self._boundary_dtype()
            if self.lowered_dtype() is not None:  # FSDP2 would cast it when it arrives
                leave.carried = leave.carried.to(expected)
            if leave.carried.dtype != expected:  # it would arrive as garbage in the receiver's buffer
                raise RuntimeError(
                    f"hf_parallel: activations are {leave.carried.dtype}, weights {expected}: cannot cross stages"
                ) from leave
            raise
        finally:
            if entry is not None:
                entry.hidden = None

    def boundary(self, tokens: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """An empty tensor of the shape that travels between stages for a batch of these tokens."""
        rows, length = tokens.shape[:2]
        length = length if self.local_length is None else self.local_length(length)
        shape = rows, -(-length // self.sequence_parts), self._width
        return torch.empty(shape, dtype=self._boundary_dtype(), device=device)

    def _boundary_dtype(self) -> torch.dtype:
        return self.lowered_dtype() or boundary_dtype(self._layers)

    def take_over(self) -> torch.Tensor:
        """What a stage of this rank has left for the next one here."""
        assert self.handed_over is not None
        tensor, self.handed_over = self.handed_over, None
        return tensor

    @contextlib.contextmanager
    def as_described(self, call: unscheduled.Call) -> Iterator[None]:
        """Autocast and adapters as they were on the last stage when it made this call."""
        kind = self.mesh.device.type
        enabled = call.autocast is not None
        dtype = call.autocast or torch.get_autocast_dtype(kind)
        switched = contextlib.nullcontext() if self.adapters is None else self.adapters.as_in(call.adapters)
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False), switched:
            yield

    # ---- gradients ---------------------------------------------------------------------------------------------

    def trainable(self) -> list[nn.Parameter]:
        """This rank's parameters that get gradients, also while a call whose backward is to come has gathered them."""
        return self.at_rest([p for p in self.model.parameters() if p.requires_grad])

    def held_run(self) -> HeldRun | None:
        """The run that begins, if data ranks reduce nothing in it: one of several of a step."""
        return None if self.held is None else self.held.run()

    def accumulate(self, fresh: list, scale: torch.Tensor | None, held: HeldRun | None) -> None:
        """Add the fresh gradients, times the gradient of the loss, to the accumulated ones.

        Args:
            held: the run whose gradients are not reduced yet.
        """
        self._add(fresh, scale)
        if held is not None:
            with fresh_gradients(self.trainable()) as reduced:
                held.hand_over(scale)
            self._add(reduced, None)

    def _add(self, fresh: list, scale: torch.Tensor | None) -> None:
        tied = {id(p) for p in self._tied_parameters()}
        for parameter, gradient in fresh:
            if gradient is None:
                continue
            if scale is not None:
                gradient.mul_(scale)
            if id(parameter) in tied:  # both ends of the pipeline hold this parameter: its gradient is the sum
                dist.all_reduce(stored(gradient), group=self.tied_group)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        fresh.clear()


def _placeholder(hidden: torch.Tensor, length: int) -> torch.Tensor:
    """A tensor of the whole sequence's shape; where parts of it travel an expanded one, which takes no memory."""
    return hidden.detach() if hidden.shape[1] == length else hidden.detach()[:, :1].expand(-1, length, -1)
