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
from dataclasses import dataclass, field
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
from hf_parallel.ranks.devices import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.pipelining.stage import _RecvInfo


class TorchStage(PipelineStage):
    """A stage whose messages have the shapes of `boundaries`, which may change between steps."""

    boundaries: list[torch.Tensor]  # on the meta device, one for each micro-batch
    connected: bool  # have these ranks exchanged messages before?
    reduces = True  # gradients over data ranks, at the end of a schedule
    around: Callable[[int], contextlib.AbstractContextManager]  # in which a micro-batch is computed
    recorder: Recorder  # of the spans of all that a schedule asks the stage to compute

    # ---- computing -------------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.span(FORWARD, self.stage_index, fwd_chunk_id), self.around(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        kind = BACKWARD if full_backward else BACKWARD_INPUT
        # A checkpointed layer computes its forward again.
        with self.recorder.span(kind, self.stage_index, bwd_chunk_id), self.around(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward and not self.is_first:
            # Zeros where there is no gradient: the stage before waits for a message.
            known, like = self.bwd_cache[bwd_chunk_id], self.boundaries[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(like, device=self.device, requires_grad=False) if one is None else one
                for one in known
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.span(BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id), self.around(bwd_chunk_id):
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

    _validate_fwd_outputs = _validate_stage_tensors  # the check of torch 2.11

    def clear_runtime_states(self) -> None:
        """Buffers and their gradients are gone by the end of a step; torch 2.11 would look for them."""
        if hasattr(self, "fwd_cache"):
            self.fwd_cache.clear()
            self.output_chunks.clear()
        else:  # torch 2.15 has no such cache
            super().clear_runtime_states()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Leave out torch's reduction if another run of the step adds to what this one has left, or has done so."""
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Begin what `perform_reduce_grad` does; in torch 2.15 schedules of several stages per rank call this."""
        if self.reduces:
            super().start_gradient_reduction()  # type: ignore[misc]

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait for what `start_gradient_reduction` has begun."""
        if self.reduces:
            super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]

    # ---- messages --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._set_buffers(self.args_recv_info[fwd_chunk_id], self.boundaries[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._set_buffers(self.grad_recv_info[bwd_chunk_id], self.boundaries[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> object:
        infos = self.args_recv_info[fwd_chunk_id]
        for info in infos:
            assert info.buffer is not None
            info.buffer.requires_grad_(self.has_backward and torch.is_grad_enabled())
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._set_buffers(infos, None)
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> object:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._set_buffers(self.grad_recv_info[bwd_chunk_id], None)
        return received

    def _set_buffers(self, infos: Iterable[_RecvInfo], like: torch.Tensor | None) -> None:
        """Make a buffer like this one for what comes from another stage; None: forget what has come.

        torch 2.15 makes the buffer itself, when it is about to receive, and forgets it. It is told the shape.
        """
        for info in infos:
            # What comes from the script rather than from another stage has a class of its own in torch 2.11.
            if getattr(info, "is_root_arg", not hasattr(info, "buffer")):
                continue
            if hasattr(info, "allocate_buffer"):
                if like is not None:
                    known: Any = type(info.tensor_meta)
                    info.tensor_meta = known.from_tensor(like)
            else:
                buffer = None if like is None else torch.empty_like(like, device=self.device, requires_grad=False)
                info.buffer = buffer


# ---- When did which stage really run? Spans of one step on every rank, put together into a timeline -----------------
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


@dataclass(eq=False)
class Recorder:
    """Times on the CPU's clock, or on an accelerator between events in the current stream: no span waits for one."""

    device: torch.device
    active: bool = False
    marks: list[tuple[str, int, int, Mark, Mark]] = field(default_factory=list)
    _zero: Any = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin to record, at the same time on all ranks of the pipeline (as near as a barrier brings them)."""
        synchronize(self.device)
        dist.barrier(group)
        self.marks, self._zero, self.active = [], self.mark(), True

    def span(self, kind: str, stage: int, micro_batch: int) -> contextlib.AbstractContextManager:
        """Return a context whose inside is recorded as one span."""
        return _Open(self, kind, stage, micro_batch) if self.active else _NOTHING

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
        synchronize(self.device)
        rank, zero, on_host = dist.get_rank(group), self._zero, self.device.type == "cpu"
        own = []
        for kind, stage, i, *ends in cast(list[tuple[Any, ...]], self.marks):
            start, end = (mark - zero if on_host else zero.elapsed_time(mark) / 1000 for mark in ends)
            own.append(Span(rank, kind, stage, i, start, end))
        parts = messages.gather_objects(own, group)
        self.marks = []
        return with_communication(Timeline([span for part in parts for span in part], len(parts)))

    def draw(self, group: dist.ProcessGroup, path: str | Path, name: str, predicted: float | None = None) -> Timeline:
        """`gather`, and the picture of it, written by the pipeline's first rank."""
        timeline = self.gather(group)
        if dist.get_rank(group) == 0:
            picture.write_timeline_picture(path, timeline, name, predicted, measured=timeline.bubble)
        return timeline

    def seconds_between(self, marks: tuple[Mark, Mark]) -> float:
        """Return the seconds from one mark to another; waits for the device."""
        start, end = marks
        if isinstance(start, float) or isinstance(end, float):
            return cast(float, end) - cast(float, start)
        synchronize(self.device)
        return start.elapsed_time(end) / 1000


@dataclass(eq=False)
class _Open:
    """A span that has begun; a class, because a generator would cost more than small stages take."""

    recorder: Recorder
    kind: str
    stage: int
    micro_batch: int

    def __enter__(self) -> None:
        self.begin = self.recorder.mark()

    def __exit__(self, *error: object) -> None:
        end = self.recorder.mark()
        self.recorder.marks.append((self.kind, self.stage, self.micro_batch, self.begin, end))
