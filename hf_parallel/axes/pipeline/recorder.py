"""When did which stage really run? Spans of one step on every rank, put together into a timeline.

    recorder.watch(stage)                       # once for each of this rank's torch stages
    recorder.start(group)                       # a barrier: all ranks begin to count here
    schedule.step(...)
    with recorder.span("communication", stage=0, micro_batch=3):
        ...                                     # whatever else is to be seen
    timeline = recorder.gather(group)           # on every rank; then nothing is recorded until the next start
    recorder.draw(group, "step.svg", "1f1b")    # or this: the same, and rank 0 writes the picture

While nothing is recorded, a span costs one look at an attribute.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.axes.pipeline import picture
from hf_parallel.axes.pipeline.orders import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from hf_parallel.axes.pipeline.timeline import Span, Timeline, with_communication
from hf_parallel.collectives import objects

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
        parts = objects.gather(own, group)
        self._marks = []
        return with_communication(Timeline([span for part in parts for span in part], len(parts)))

    def draw(self, group: dist.ProcessGroup, path: str | Path, name: str, predicted: float | None = None) -> Timeline:
        """`gather`, and the picture of it, written by the pipeline's first rank."""
        timeline = self.gather(group)
        if dist.get_rank(group) == 0:
            picture.write(path, timeline, name, predicted, measured=timeline.bubble)
        return timeline

    def add(self, kind: str, stage: int, micro_batch: int, start: Mark, end: Mark) -> None:
        """Note a span between two marks."""
        self._marks.append((kind, stage, micro_batch, start, end))

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
