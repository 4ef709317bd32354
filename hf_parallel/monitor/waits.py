"""Where a rank waits for others: seen at the one place that all collectives go through, torch's process groups.

Ours, FSDP2's and the pipeline's messages are all calls of a `ProcessGroup`, and what they leave running is waited for
by `Work.wait`, on a GPU also by `wait_event` of FSDP2's streams. While somebody watches, these methods note when they
begin and end, for groups whose axis is known. Not seen: collectives inside compiled graphs, which no Python calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

#: What ranks call together, by torch's names of all versions that this package takes.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_end_coalescing",
)
#: Code whose streams carry the messages of data ranks.
_DATA_STREAMS = ("/fsdp/", "/axes/data/")

Note = Callable[[str, Any, Any], None]


class Waits:
    """Tells `note` of each wait of the computation: axis, begin, end.

    Args:
        axes: names of process groups and their axis.
        clock: of what computes.
        note: only called while `open`.
    """

    def __init__(self, axes: Mapping[str, str], clock: Any, note: Note) -> None:
        self.axes, self.clock, self.note = dict(axes), clock, note
        self.open = False
        self._pending: dict[int, str | None] = {}  # id of a Work -> its axis, until somebody waits for it
        self._former: list[tuple[Any, str, Any]] = []

    def start(self, device: torch.device) -> None:
        """Watch from here on."""
        for name in COLLECTIVES:
            if hasattr(ProcessGroup, name):
                self._replace(ProcessGroup, name, self._collective)
        self._replace(Work, "wait", self._wait)
        if device.type != "cpu":
            self._replace(type(torch.get_device_module(device).current_stream()), "wait_event", self._wait_event)

    def stop(self) -> None:
        """Nobody watches any more; torch's own methods are back."""
        for owner, name, original in reversed(self._former):
            if original is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, original)
        self._former, self.open = [], False

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._former.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))

    def _collective(self, original: Callable) -> Callable:
        """Its call lasts as long as the computation waits for it; what goes on afterwards is waited for later."""
        mark, is_here, pending = self.clock.mark, self.clock.is_here, self._pending

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.open:
                return original(group, *args, **kwargs)
            axis = self.axes.get(group.group_name)
            if axis is None or not is_here(axis):
                work = original(group, *args, **kwargs)
            else:
                begin = mark()
                work = original(group, *args, **kwargs)
                self.note(axis, begin, mark())
            if work is not None:
                pending[id(work)] = axis  # also None: the id of another one may come again
            return work

        return call

    def _wait(self, original: Callable) -> Callable:
        mark, is_here, pending = self.clock.mark, self.clock.is_here, self._pending

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            axis = pending.pop(id(work), None)
            if axis is None or not self.open or not is_here(axis):
                return original(work, *args, **kwargs)
            begin = mark()
            result = original(work, *args, **kwargs)
            self.note(axis, begin, mark())
            return result

        return wait

    def _wait_event(self, original: Callable) -> Callable:
        mark, is_here = self.clock.mark, self.clock.is_here

        def wait_event(stream: Any, event: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if not self.open or not any(place in caller for place in _DATA_STREAMS) or not is_here("dp"):
                return original(stream, event)
            begin = mark()
            result = original(stream, event)
            self.note("dp", begin, mark())
            return result

        return wait_event
