"""The stages of one rank: what runs inside them, what travels between them, and their gradients."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.session import of_session
from hf_parallel.axes.axis import Building, CallBalance, HeldRun
from hf_parallel.axes.pipeline.batches import (
    COUNTED,
    collect_fresh_gradients,
    cut_into_buckets,
    tokens_of,
)
from hf_parallel.axes.pipeline.part import PipelinePart
from hf_parallel.axes.pipeline.schedules import predict_bubble
from hf_parallel.axes.pipeline.stages import (
    LeaveAtExit,
    RemoteModules,
    StageView,
    find_boundary_dtype,
    hold_modules,
)
from hf_parallel.axes.pipeline.torch_stage import Recorder
from hf_parallel.model.anatomy import get_text_config
from hf_parallel.model.calls import Batch
from hf_parallel.ranks import desync
from hf_parallel.ranks.mesh import ParallelMesh, find_stored_parameter, get_stored

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from hf_parallel.axes.pipeline.torch_stage import TorchStage


T = TypeVar("T")
Handler = Callable[[Batch], Any]  # answers a call of the backbone with its output, or with what leaves the stage


@dataclass
class Pipelines:
    """The pipelined models of one mesh.

    A script on the last stage may call several of them. It tells the other stages which by its number in `engines`,
    whose order is the same on all ranks.
    """

    engines: list[weakref.ref[StageRunner]] = field(default_factory=list)
    session: Session | None = None  # while a script runs on the last stage alone

    def engine(self, number: int) -> StageRunner:
        """Return the engine with this number."""
        engine = self.engines[number]()
        assert engine is not None  # an engine lives as long as its model
        return engine


@dataclass
class LoopScale:
    """The gradient scaler that a script has made itself, the last one if it has several."""

    scaler: weakref.ref[GradScaler] | None = None


class _OfMeshes(WeakKeyDictionary[ParallelMesh, Pipelines]):
    """The pipelined models of each mesh of the session."""


def pipelines_of(mesh: ParallelMesh) -> Pipelines:
    """Return the pipelined models of a mesh; the same object each time."""
    return of_session(_OfMeshes).setdefault(mesh, Pipelines())


@dataclass(eq=False)
class Session:
    """A script's run on the last stage. It answers the calls of backbones of pipelined models."""

    engine: StageRunner

    def run(self, script: Callable[[], T]) -> T:
        """Run `script()` inside the FSDP2 root of the last stage, where embedding, norm and head are whole."""
        with self.active():
            return self.run_in_last_stage(self.engine, script)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Tell models that a script runs on this stage alone."""
        pipelines = self.engine.pipelines
        former, pipelines.session = pipelines.session, self
        try:
            with desync.run_for_stages(self.engine.group):
                yield
        finally:
            pipelines.session = former

    def run_in_last_stage(self, engine: StageRunner, call: Callable[[], T]) -> T:
        """Run `call()` inside the last stage of `engine`: of the model that trains, or of one beside it."""
        view, handler = engine.views[-1], functools.partial(self.answer, engine)
        stage = engine.stages[-1]
        return engine.call_through_stage(stage, lambda hidden, i: engine.run_as_stage(view, handler, call))

    def answer(self, engine: StageRunner, kwargs: Batch) -> ModelOutput:
        """Return the output of the backbone for one call."""
        raise NotImplementedError


class Stage(nn.Module):
    """A module for FSDP2 and torch's schedule. It holds the modules of one stage and runs `work`."""

    def __init__(self, view: StageView) -> None:
        super().__init__()
        self.parts = nn.ModuleList(view.modules)
        self.work: Callable[[torch.Tensor | None, int], object] | None = None
        self.autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.has_run = False

    def __call__(self, hidden: torch.Tensor | None = None, micro_batch: torch.Tensor | int = 0) -> Any:
        """Hide the micro-batch's index from FSDP2's hooks, which move tensors to the GPU: reading it there waits."""
        arrived = None if hidden is not None and not hidden.is_floating_point() else hidden
        with self.autocast():  # around FSDP2's hooks too: it gathers weights in autocast's dtype
            return super().__call__(arrived, micro_batch=int(micro_batch))

    def forward(self, hidden: torch.Tensor | None, micro_batch: int) -> object:
        assert self.work is not None
        self.has_run = True
        return self.work(hidden, micro_batch)


class StageRunner:
    """The stages of a pipelined model that one rank holds.

    `PipelineEngine.attach` sets the two forward methods: the model's, which may already pad sequences, and its
    backbone's.
    """

    _model_forward: Callable[..., Any]
    _backbone_forward: Callable[..., Any]

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
        owner, name, _ = views[0].swaps[0]
        self._all_layers = list(getattr(owner, name))  # of other stages: what stands there
        self.stages: Any = nn.ModuleList(Stage(view) for view in views)
        self.last_index = self.config.pipeline_stages - 1
        self.last_rank = self.config.rank_of_stage(self.last_index)
        self.group, place = mesh.group("pp"), mesh.index("pp")
        self.control = mesh.group_on_host("pp")  # for objects that stages send each other
        self.first, self.last = place == 0, place == self.last_rank
        # In a V one rank holds both ends, and with them the one tied parameter.
        self.tied_group = mesh.first_and_last_stage_group() if part.tied and self.last_rank != 0 else None
        self.sums_over_tokens = part.sums_over_tokens
        # Under sequence parallelism stages exchange 1/tp of each sequence.
        flag = building.sequence_flag
        self.sequence_parts = mesh.size("tp") if flag is not None and flag.on else 1
        self.local_length = building.local_length
        self.services = building.services
        self.loss_only = False  # evaluation that wants no logits need not send them
        self.keeps_gathered = False  # while the model generates
        self.trains_somewhere = False  # does a stage have a parameter that trains? As of the latest served call
        self.recorder = Recorder(mesh.device)
        self.items: torch.Tensor | None = None  # the whole batch's number of targets, while a script's loss sees parts
        self.handed_over: torch.Tensor | None = None  # from a stage to the next on the same rank
        self.rows: slice | None = None  # of the batch, while a micro-batch of it passes outside of a schedule
        self.pipelines = pipelines_of(mesh)
        self.number = len(self.pipelines.engines)
        self.pipelines.engines.append(weakref.ref(self))
        self._width = get_text_config(model).hidden_size
        #: torch's schedules by number of micro-batches.
        self.schedules: dict[int, tuple[_PipelineSchedule, list[TorchStage]]] = {}
        self.latest_count = 0  # micro-batches of the latest run of a schedule
        self.late: list[nn.Parameter] = []  # parameters that a script put into the model later, on all stages
        self._view: StageView | None = None
        self._on_call: Handler | None = None

    def check_layers(self) -> None:
        """Raise an error if a script has added, removed or replaced layers: stages run those they were cut from.

        Raises:
            NotImplementedError: in the next forward pass, on every rank.
        """
        owner, name, _ = self.views[0].swaps[0]
        if list(getattr(owner, name)) != self._all_layers:
            raise NotImplementedError(
                f"hf_parallel: pp_size={self.config.pp_size}: the {name} of {type(owner).__name__} are others than "
                "those that were cut into stages; pp_size=1 works, and so do layers that change before the model is "
                "parallel"
            )

    @property
    def copies(self) -> set[int]:
        """Return the ids of the last stage's copy of a tied embedding, which the first stage counts already."""
        return {id(p) for p in self._find_tied_parameters()} if self.last and not self.first else set()

    def _find_tied_parameters(self) -> list[nn.Parameter]:
        if self.tied_group is None:
            return []
        return [find_stored_parameter(self.model.get_input_embeddings().weight)]

    def compute_loss_scale(self) -> torch.Tensor | None:
        """Return the factor by which fp16 needs losses to be larger inside a schedule, or None."""
        scale_loss, scaler = self.services.scale_loss, of_session(LoopScale).scaler
        if scale_loss is None and scaler is not None and (found := scaler()) is not None:
            scale_loss = found.scale
        return None if scale_loss is None else scale_loss(torch.ones((), device=self.mesh.device))

    def balance_of(self, kwargs: Batch) -> Callable[[], CallBalance] | None:
        """Return what counts routers' choices in a call if it, or by default the model's config, asks for them."""
        asked = kwargs.get("output_router_logits")
        asked = getattr(self.model.config, "output_router_logits", False) if asked is None else asked
        return self.services.balance if asked else None

    @contextlib.contextmanager
    def recorded(self, path: str) -> Iterator[None]:
        """Record what runs inside the `with`; the pipeline's first rank draws its timeline."""
        self.recorder.start(self.group)
        yield
        layers, count = tuple(self.layers_per_stage), self.latest_count
        predicted = predict_bubble(self.config, layers, count) if count else None
        self.recorder.draw(self.group, path, self.config.pipeline_schedule, predicted)

    def tell(self, values: dict[str, object]) -> None:
        """Update `values` on every stage with the last stage's. Collective: never call it while a schedule runs."""
        told = [values]
        dist.broadcast_object_list(told, group=self.control, group_src=self.last_rank)
        values.update(told[0])

    # ---- one stage -----------------------------------------------------------------------------------------------

    def call_through_stage(
        self, stage: Stage, work: Callable[[torch.Tensor | None, int], T], hidden: torch.Tensor | None = None
    ) -> T:
        """Return `work(hidden, 0)`, run inside a stage so that FSDP2 gathers its weights."""
        stage.work = work
        try:
            return stage(hidden)
        finally:
            stage.work = None  # it holds the batch

    def run_as_stage(self, view: StageView, on_call: Handler | None, call: Callable[[], T]) -> T:
        """Run `call` while the model's backbone runs as one stage. Return its result, or what leaves the stage.

        Args:
            view: the stage.
            on_call: answers each call of the backbone.
        """
        former = self._view, self._on_call
        self._view, self._on_call = view, on_call
        try:
            return call()
        except LeaveAtExit as leave:
            return leave.carried
        finally:
            self._view, self._on_call = former

    def run_backbone(self, hidden: torch.Tensor | None, kwargs: Batch) -> ModelOutput:
        """Run the layers of the entered stage on `hidden`, its input.

        Raises:
            LeaveAtExit: on every stage but the last, with the stage's output.
        """
        assert self._view is not None
        entry, kwargs = self._view.entry, {key: value for key, value in kwargs.items() if key != COUNTED}
        if entry is not None and hidden is not None:
            # The model makes masks and positions from the shape; the values are put in at the entry.
            length, shown = tokens_of(kwargs).shape[1], hidden.detach()
            if hidden.shape[1] != length:  # parts of the sequence travel: an expanded tensor takes no memory
                shown = shown[:, :1].expand(-1, length, -1)
            kwargs = {**kwargs, "input_ids": None, "inputs_embeds": shown}
            entry.hidden = hidden
        try:
            with hold_modules(self._view.swaps):  # only here: a script that calls one of these modules gets an error
                return self._backbone_forward(**kwargs)
        except LeaveAtExit as leave:
            lowered = self.services.lowered_dtype()
            expected = lowered or find_boundary_dtype(self._layers)
            if lowered is not None:  # FSDP2 would cast it when it arrives
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
        """Return an empty tensor of the shape that travels between stages for these tokens [rows, length]."""
        rows, length = tokens.shape[:2]
        length = length if self.local_length is None else self.local_length(length)
        shape = rows, -(-length // self.sequence_parts), self._width
        dtype = self.services.lowered_dtype() or find_boundary_dtype(self._layers)
        return torch.empty(shape, dtype=dtype, device=device)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def refuse_penalty(self, leaves: list[torch.Tensor], modules: Iterable[nn.Module]) -> None:
        """Refuse a loss that a script computes from weights, as for the distance to former ones.

        Args:
            leaves: of the loss.
            modules: whose weights it can only have taken for a penalty.

        Raises:
            NotImplementedError: each stage would add the part of its own weights.
        """
        own = {id(parameter) for module in modules for parameter in module.parameters()}
        own -= set(map(id, self.late))  # all stages have those
        if any(id(leaf) in own for leaf in leaves):
            raise NotImplementedError(
                "hf_parallel: the script's loss has a penalty of weights in it, of which each stage of "
                f"pp_size={self.mesh.size('pp')} has its own alone: p.grad.add_(…) before the optimizer's step works, "
                "and so does a decay in the optimizer (docs/idioms.md)"
            )

    def trainable(self) -> list[nn.Parameter]:
        """Return this rank's stored parameters that get gradients, also while gathered ones are in their place."""
        return [find_stored_parameter(p) for p in self.model.parameters() if p.requires_grad]

    def accumulate(self, fresh: list, scale: torch.Tensor | None, held: HeldRun | None) -> None:
        """Add the fresh gradients, times the gradient of the loss, to the accumulated ones.

        Args:
            fresh: (parameter, gradient) of one run of the schedule.
            scale: the gradient of the loss.
            held: has the gradients of the run that data ranks have not reduced yet.
        """
        if self.config.sharing_size == 1 and self.mesh.data_size > 1:  # FSDP2 is not there to do it
            average_over_data_ranks(fresh, self.mesh.data_group, self.mesh.data_size)
        self.services.gradients_scaled(scale)
        self._add(fresh, scale)
        if held is not None:
            with collect_fresh_gradients(self.trainable()) as reduced:
                held.hand_over(scale)
            self._add(reduced, None)

    def _add(self, fresh: list, scale: torch.Tensor | None) -> None:
        tied = {id(p) for p in self._find_tied_parameters()}
        for parameter, gradient in fresh:
            if gradient is None:
                continue
            if scale is not None:
                gradient.mul_(scale)
            if id(parameter) in tied:  # both ends of the pipeline hold this parameter: its gradient is the sum
                dist.all_reduce(get_stored(gradient), group=self.tied_group)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        fresh.clear()


@contextlib.contextmanager
def apply_autocast_per_stage(engine: StageRunner) -> Iterator[Callable[[], torch.autocast]]:
    """Switch autocast off for a schedule, whose backward passes must not have it. Yield it for forward passes."""
    kind = engine.mesh.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        # Without the cache: cast copies of gathered weights must not outlive the micro-batch.
        yield lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def average_over_data_ranks(
    fresh: list[tuple[nn.Parameter, torch.Tensor | None]], group: dist.ProcessGroup, size: int
) -> None:
    """Average gradients over data ranks, a bucket at a time, in fp32."""
    for bucket in cut_into_buckets([get_stored(gradient) for _, gradient in fresh if gradient is not None]):
        sums = [gradient.float().div_(size) for gradient in bucket]
        for work in [dist.all_reduce(total, group=group, async_op=True) for total in sums]:
            cast(dist.Work, work).wait()
        for gradient, total in zip(bucket, sums, strict=True):
            gradient.copy_(total)


#: A message to another rank, and its tensor.
Sending = tuple["dist.Work | None", torch.Tensor]


def wait_for_sent(sending: list[Sending], ranks: int | None = None) -> None:
    """Wait for all messages. With `ranks`, wait only for the oldest, so that at most 2 (ranks + 1) are on their way.

    That many are under way in 1F1B over so many ranks, which waits until each neighbour has taken the message before.
    """
    while len(sending) > (0 if ranks is None else 2 * (ranks + 1)):
        work, _ = sending.pop(0)
        if work is not None:
            work.wait()
