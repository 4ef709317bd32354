"""Where a rank waits for others: each collective, and each wait for one, by the axis of its group.

Ours, FSDP2's and the pipeline's messages are all heard of by a listener; on a GPU the computation also waits in
`wait_event` of FSDP2's streams. While somebody watches, it is noted when they begin and end, for groups
whose axis is known. Not seen: collectives inside compiled graphs, which no Python calls.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hf_parallel.ask.replaced import Replaced
from hf_parallel.ranks.observed import Call, Listener, listen, unlisten

if TYPE_CHECKING:
    from torch import distributed as dist


# ---- Marks in time: seconds of the host, or events of a device that nobody waits for ----------------------------

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
        """Return whether what runs now lets the computation wait. Threads beside it have groups of their own."""
        return threading.get_ident() == self._thread

    def is_past(self, mark: float) -> bool:
        """Return whether this mark can be read."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Between two marks."""
        return end - begin

    def release(self, *marks: float) -> None:
        """They are not asked for again."""


@dataclass(eq=False)
class DeviceClock:
    """The clock of a stream: a mark is an event, read when the device is past it. No call waits for the device."""

    device: torch.device
    _free: list[torch.Event] = field(default_factory=list)
    _stream: torch.Stream | None = None
    _thread: int | None = None

    def begin(self) -> None:
        """A step begins, in the stream that computes it."""
        self._stream = torch.accelerator.current_stream(self.device)
        self._thread = threading.get_ident()

    def is_here(self, axis: str) -> bool:
        """Return whether what runs now lets the computation wait. A collective in a stream of its own does not.

        Backward passes have threads of their own; so have those beside the training, which talk to all ranks.
        """
        if axis == ALL and threading.get_ident() != self._thread:
            return False
        return torch.accelerator.current_stream(self.device) == self._stream

    def mark(self) -> Mark:
        """Return an event where the stream is now."""
        event = self._free.pop() if self._free else torch.Event(device=self.device, enable_timing=True)
        event.record(self._stream)
        return event

    def is_past(self, mark: Mark) -> bool:
        """Return whether the device is past it."""
        return mark.query()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks that the device is past."""
        return begin.elapsed_time(end) / 1000

    def release(self, *marks: Mark) -> None:
        """They are recorded anew: an event costs more to make than to record."""
        self._free.extend(marks)


Clock = HostClock | DeviceClock


# ---- Waits --------------------------------------------------------------------------------------------------------

#: Code whose streams carry the messages of data ranks.
_DATA_STREAMS = ("/fsdp/", "/axes/data/")
_WAIT_EVENT = "wait_event"
REPLACES = (
    Replaced(
        f"torch.cuda.streams:Stream.{_WAIT_EVENT}",
        "on a GPU the computation waits for others inside of it (of another kind of device: its own Stream)",
        "while a monitor or a profile measures waits",
    ),
)

Note = Callable[[str, Mark, Mark], None]


@dataclass(eq=False)
class Waits(Listener):
    """Tells `note` of each wait of the computation: axis, begin, end.

    Args:
        axes: names of process groups and their axis.
        clock: of what computes.
        note: only called while `open`.
    """

    axes: Mapping[str, str]
    clock: Clock
    note: Note
    open: bool = False
    _pending: dict[int, str | None] = field(default_factory=dict)  # id of a Work -> its axis, until it is waited for
    _now: object = None  # the call or the work that the computation waits for, since `_begin`
    _begin: Mark = None
    _axis: str = ""
    _stream: tuple[type, Callable] | None = None  # the class of streams, and its own `wait_event`

    def start(self, device: torch.device) -> None:
        """Watch from here on."""
        listen(self)
        if device.type != "cpu":
            kind = type(torch.get_device_module(device).current_stream())
            self._stream = kind, vars(kind).get(_WAIT_EVENT)
            setattr(kind, _WAIT_EVENT, self._wait_event(getattr(kind, _WAIT_EVENT)))

    def stop(self) -> None:
        """Nobody watches any more; torch's own methods are back."""
        unlisten(self)
        self.open = False
        if self._stream is None:
            return
        kind, original = self._stream
        self._stream = None
        if original is None:
            delattr(kind, _WAIT_EVENT)  # it was inherited
        else:
            setattr(kind, _WAIT_EVENT, original)

    # ---- what is heard: a call lasts as long as it is waited for, what goes on is waited for later ----------------

    def begin(self, call: Call) -> None:
        """It may wait for others."""
        if self.open and (axis := self.axes.get(call.group_name)) is not None and self.clock.is_here(axis):
            self._now, self._axis, self._begin = call, axis, self.clock.mark()

    def end(self, call: Call, work: dist.Work | None) -> None:
        """It has returned."""
        if not self.open:
            return
        if self._now is call:
            self._now = None
            self.note(self._axis, self._begin, self.clock.mark())
        if work is not None:  # also of no axis: the id of another one may come again
            self._pending[id(work)] = self.axes.get(call.group_name)

    def waiting(self, work: dist.Work) -> None:
        """For what was started before."""
        axis = self._pending.pop(id(work), None)
        if axis is not None and self.open and self.clock.is_here(axis):
            self._now, self._axis, self._begin = work, axis, self.clock.mark()

    def waited(self, work: dist.Work) -> None:
        """It is done."""
        if self._now is work:
            self._now = None
            self.note(self._axis, self._begin, self.clock.mark())

    # ---- of streams ------------------------------------------------------------------------------------------------

    def _wait_event(self, original: Callable) -> Callable:
        mark, is_here = self.clock.mark, self.clock.is_here

        @functools.wraps(original)
        def wait_event(stream: torch.Stream, event: torch.Event) -> object:
            caller = sys._getframe(1).f_code.co_filename
            if not self.open or not any(place in caller for place in _DATA_STREAMS) or not is_here("dp"):
                return original(stream, event)
            begin = mark()
            result = original(stream, event)
            self.note("dp", begin, mark())
            return result

        return wait_event
