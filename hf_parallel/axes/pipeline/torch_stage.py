"""torch's stage, with memory for what it receives only while a micro-batch is on its way.

torch gives each schedule a buffer per micro-batch for the shapes it was built for, and lets all stages vote, through
the accelerator, on whether these are known. Here what travels has the shape of its micro-batch in the step that runs,
so one schedule serves all lengths; a buffer is made when its message is about to be received, and belongs to autograd
from then on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from hf_parallel.axes.pipeline import timeline as picture
from hf_parallel.axes.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Span,
    Timeline,
    with_communication,
)
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.pipelining.stage import _RecvInfo


class TorchStage(PipelineStage):
    """A stage whose messages have the shapes of `boundaries`, which may change between steps."""

    boundaries: list[torch.Tensor]  # on the meta device, one for each micro-batch
    connected: bool  # have these ranks exchanged messages before?
    reduces = True  # gradients over data ranks, at the end of a schedule
    around: Callable[[int], contextlib.AbstractContextManager]  # in which a micro-batch is computed

    # ---- computing -------------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around(bwd_chunk_id):  # a checkpointed layer computes its forward again
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.around(bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._describing():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._describing():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _describing(self) -> Iterator[None]:
        """Let torch's buffers take no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        """All shapes are known: the vote serves to connect the ranks in order, which is done once."""
        return None if self.connected else super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (
            torch.ones((), dtype=torch.int32) if self.connected else super()._warmup_backward_result(*args, **kwargs)
        )

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """torch 2.11 tries all connections first; in a V one is to this rank itself, which gloo does not have."""
        if self.connected:
            return []
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _validate_stage_tensors(self, *args: object, **kwargs: object) -> None:
        """Skip a check of every message against the shape of the first step (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""

    def _validate_fwd_outputs(self, *args: object, **kwargs: object) -> None:
        """Skip the check of torch 2.11."""

    def clear_runtime_states(self) -> None:
        """Buffers and their gradients are gone by the end of a step; torch 2.11 would look for them."""
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Another run of the step is to add to what this one has left, or has done so."""
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)

    # ---- messages --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> object:
        infos = self.args_recv_info[fwd_chunk_id]
        for info in infos:
            assert info.buffer is not None
            info.buffer.requires_grad_(self.has_backward and torch.is_grad_enabled())
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _forget_received(infos)
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> object:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _forget_received(self.grad_recv_info[bwd_chunk_id])
        return received

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._fill_gradients(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> object:
        self._fill_gradients(mb_index)
        return super().get_local_bwd_output(mb_index)

    def _make_buffers(self, infos: Iterable[_RecvInfo], chunk: int) -> None:
        for info in infos:
            if not _is_root(info):
                info.buffer = torch.empty_like(self.boundaries[chunk], device=self.device, requires_grad=False)

    def _fill_gradients(self, chunk: int) -> None:
        """Put zeros where there is no gradient: the stage before waits for a message."""
        if self.has_backward and not self.is_first and chunk in self.bwd_cache:
            known, like = self.bwd_cache[chunk], self.boundaries[chunk]
            self.bwd_cache[chunk] = tuple(
                torch.zeros_like(like, device=self.device, requires_grad=False) if one is None else one
                for one in known
            )


def _is_root(info: _RecvInfo) -> bool:
    """Does it come from the script rather than from another stage? torch 2.11 has a class of its own for that."""
    return getattr(info, "is_root_arg", not hasattr(info, "buffer"))


def _forget_received(infos: Iterable[_RecvInfo]) -> None:
    for info in infos:
        if not _is_root(info):
            info.buffer = None


# ---- When did which stage really run? Spans of one step on every rank, put together into a timeline -----------------
#     recorder.watch(stage)                       # once for each of this rank's torch stages
#     recorder.start(group)                       # a barrier: all ranks begin to count here
#     schedule.step(...)
#     with recorder.span("communication", stage=0, micro_batch=3):
#         ...                                     # whatever else is to be seen
#     timeline = recorder.gather(group)           # on every rank; then nothing is recorded until the next start
#     recorder.draw(group, "step.svg", "1f1b")    # or this: the same, and rank 0 writes the picture
#
# While nothing is recorded, a span costs one look at an attribute.


#: Seconds on the host, or on a device an event that is read at the end.
Mark = float | torch.Event
_NOTHING = contextlib.nullcontext()


class Recorder:
    """Times on the CPU's clock, or on an accelerator between events in the current stream: no span waits for one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.active = device, False
        self._marks: list[tuple[str, int, int, Mark, Mark]] = []
        self._zero: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to record, at the same time on all ranks of the pipeline (as near as a barrier brings them)."""
        self._synchronize()
        dist.barrier(group)
        self._marks, self._zero, self.active = [], self.mark(), True

    def span(self, kind: str, stage: int, micro_batch: int) -> contextlib.AbstractContextManager:
        """A context: what runs inside is one span."""
        return _Open(self, kind, stage, micro_batch) if self.active else _NOTHING

    def watch(self, stage: Any) -> None:
        """Make a span of everything that torch's schedules ask this stage to compute."""
        whole, half = stage.backward_one_chunk, stage.backward_weight_one_chunk
        forward, index = stage.forward_one_chunk, stage.stage_index

        def forward_one_chunk(micro_batch: int, *args: object, **kwargs: object) -> object:
            with self.span(FORWARD, index, micro_batch):
                return forward(micro_batch, *args, **kwargs)

        def backward_one_chunk(micro_batch: int, *args: object, full_backward: bool = True, **kwargs: object) -> None:
            with self.span(BACKWARD if full_backward else BACKWARD_INPUT, index, micro_batch):
                whole(micro_batch, *args, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(micro_batch: int, *args: object, **kwargs: object) -> None:
            with self.span(BACKWARD_WEIGHT, index, micro_batch):
                half(micro_batch, *args, **kwargs)

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
        stage.backward_weight_one_chunk = backward_weight_one_chunk

    def mark(self) -> Mark:
        """Now."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def gather(self, group: dist.ProcessGroup) -> Timeline:
        """End the recording and put the spans of all ranks together, in seconds after the start."""
        self.active = False
        self._synchronize()
        rank = dist.get_rank(group)
        own = [
            Span(rank, kind, stage, i, self._seconds(start), self._seconds(end))
            for kind, stage, i, start, end in self._marks
        ]
        parts = messages.gather_objects(own, group)
        self._marks = []
        return with_communication(Timeline([span for part in parts for span in part], len(parts)))

    def draw(self, group: dist.ProcessGroup, path: str | Path, name: str, predicted: float | None = None) -> Timeline:
        """`gather`, and the picture of it, written by the pipeline's first rank."""
        timeline = self.gather(group)
        if dist.get_rank(group) == 0:
            picture.write_timeline_picture(path, timeline, name, predicted, measured=timeline.bubble)
        return timeline

    def add(self, kind: str, stage: int, micro_batch: int, start: Mark, end: Mark) -> None:
        """Note a span between two marks."""
        self._marks.append((kind, stage, micro_batch, start, end))

    def seconds_between(self, marks: tuple[Mark, Mark]) -> float:
        """Return the seconds from one mark to another; waits for the device."""
        start, end = marks
        if isinstance(start, float) or isinstance(end, float):
            return cast(float, end) - cast(float, start)
        self._synchronize()
        return start.elapsed_time(end) / 1000

    def _seconds(self, mark: Any) -> float:
        return mark - self._zero if self.device.type == "cpu" else self._zero.elapsed_time(mark) / 1000

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class _Open:
    """A span that has begun; a class, because a generator would cost more than small stages take."""

    def __init__(self, recorder: Recorder, kind: str, stage: int, micro_batch: int) -> None:
        self.recorder, self.what = recorder, (kind, stage, micro_batch)

    def __enter__(self) -> None:
        self.begin = self.recorder.mark()

    def __exit__(self, *error: object) -> None:
        self.recorder.add(*self.what, self.begin, self.recorder.mark())
