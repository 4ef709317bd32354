"""One place where all collectives of this process can be seen, whoever calls them: FSDP2, this package, a script.

    listen(listener)        begin(call)   before each
    ...                     end(call, work)   it has started
    unlisten(listener)      waiting(work), waited(work)   around each wait for one, also inside of c10d

c10d's Python functions end in methods of `ProcessGroup`, which are wrapped while anybody listens and put back after
the last one, in whatever order they stop.
Not seen: torch's functional collectives, which call it from C++ (DTensor's own; the flight recorder has those).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


#: Methods of ProcessGroup and what they do; torch 2.13 has renamed some.
KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
    "recv_anysource": "receive",
    "_end_coalescing": "end_coalescing",
}
#: The end of several calls that start as one: no collective of its own, but its work is what is waited for.
END_COALESCING = "end_coalescing"
_WITH_PEER = ("send", "recv")
_WAIT = "wait"  # of a Work


class Call:
    """A collective: what it does, in which group, with which tensor; `peer` of a message, as a rank of the group.

    Its tensor is only looked up for who asks.
    """

    __slots__ = ("name", "kind", "group", "group_name", "_args")

    def __init__(self, name: str, group: dist.ProcessGroup, args: tuple) -> None:
        self.name, self.kind, self._args = name, KINDS[name], args
        self.group, self.group_name = group, group.group_name  # C++ makes a string of it each time

    @property
    def tensor(self) -> torch.Tensor | None:
        """What this rank gives; the first one of several."""
        return _input(self._args)

    @property
    def peer(self) -> int | None:
        """None also of what any rank may send."""
        return self._args[1] if self.name in _WITH_PEER and len(self._args) > 1 else None


class Listener:
    """Hears of every collective, in the thread that calls it, and must be quick."""

    def begin(self, call: Call) -> None:
        """It is about to be started."""

    def end(self, call: Call, work: dist.Work | None) -> None:
        """It has been started. Keeping `work` keeps its tensors."""

    def waiting(self, work: dist.Work) -> None:
        """Somebody begins to wait for it."""

    def waited(self, work: dist.Work) -> None:
        """It is done, or on CUDA in the order of the stream."""


_listeners: tuple[Listener, ...] = ()
_originals: dict[str, Callable] = {}


def listen(listener: Listener) -> None:
    """From here on the listener hears of every collective of this process."""
    global _listeners
    _listeners = (*_listeners, listener)
    if not _originals:
        for name in KINDS:
            if name in vars(dist.ProcessGroup):
                _originals[name] = vars(dist.ProcessGroup)[name]  # itself: getattr would give an unbound function
                setattr(dist.ProcessGroup, name, _observed(name, getattr(dist.ProcessGroup, name)))
        _originals[_WAIT] = vars(dist.Work)[_WAIT]
        dist.Work.wait = _observed_wait(dist.Work.wait)  # type: ignore[method-assign]


def unlisten(listener: Listener) -> None:
    """No more; once nobody listens ProcessGroup is as it was."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)
    if not _listeners:
        for name, original in _originals.items():
            setattr(dist.Work if name == _WAIT else dist.ProcessGroup, name, original)
        _originals.clear()


def _observed(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
        call, listeners = Call(name, group, args), _listeners
        for listener in listeners:
            listener.begin(call)
        work = original(group, *args, **kwargs)
        for listener in listeners:
            listener.end(call, work)
        return work

    return method


def _observed_wait(original: Callable) -> Callable:
    @functools.wraps(original)
    def wait(work: dist.Work, *args: object, **kwargs: object) -> object:
        listeners = _listeners
        for listener in listeners:
            listener.waiting(work)
        result = original(work, *args, **kwargs)
        for listener in listeners:
            listener.waited(work)
        return result

    return wait


def _input(args: tuple) -> torch.Tensor | None:
    """What a rank gives: the second of (output, input), else the first of a list of tensors."""
    for value in args[1::-1] if len(args) > 1 else args:  # the second argument, then the first
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor):
            return value
    return None
