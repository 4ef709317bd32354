"""Marks in time: seconds of the host, or events of a device that nobody waits for."""

from __future__ import annotations

import threading
import time
from typing import Any, TypeAlias

import torch

#: What messages among all ranks are called, where these are not those of one axis.
ALL = "all"

Mark: TypeAlias = Any  # a number of seconds, or an event: each clock reads its own


class HostClock:
    """The clock of a process that computes on the CPU itself."""

    mark = staticmethod(time.perf_counter)

    _thread: int | None = None

    def begin(self) -> None:
        """A step begins, in the thread that computes it."""
        self._thread = threading.get_ident()

    def is_here(self, axis: str) -> bool:
        """Does what runs now let the computation wait? Threads beside it have groups of their own."""
        return threading.get_ident() == self._thread

    def is_past(self, mark: float) -> bool:
        """Can this mark be read?"""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Between two marks."""
        return end - begin

    def release(self, *marks: float) -> None:
        """They are not asked for again."""


class DeviceClock:
    """The clock of a stream: a mark is an event, read when the device is past it. No call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.Event] = []
        self._stream: torch.Stream | None = None
        self._thread: int | None = None

    def begin(self) -> None:
        """A step begins, in the stream that computes it."""
        self._stream = torch.accelerator.current_stream(self.device)
        self._thread = threading.get_ident()

    def is_here(self, axis: str) -> bool:
        """Collectives in streams of their own let nobody wait: the wait for them does.

        Backward passes have threads of their own; so have those beside the training, which talk to all ranks.
        """
        if axis == ALL and threading.get_ident() != self._thread:
            return False
        return torch.accelerator.current_stream(self.device) == self._stream

    def mark(self) -> Mark:
        """An event where the stream is now."""
        event = self._free.pop() if self._free else torch.Event(device=self.device, enable_timing=True)
        event.record(self._stream)
        return event

    def is_past(self, mark: Mark) -> bool:
        """Is the device past it?"""
        return mark.query()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks that the device is past."""
        return begin.elapsed_time(end) / 1000

    def release(self, *marks: Mark) -> None:
        """They are recorded anew: an event costs more to make than to record."""
        self._free.extend(marks)


Clock = HostClock | DeviceClock
