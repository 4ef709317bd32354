"""A view of all collectives of this process, whoever calls them: FSDP2, this package, a script.

    listen(listener)        begin(call)   before each
    ...                     end(call, work)   it has started
    unlisten(listener)      waiting(work), waited(work)   around each wait for one, also inside of c10d

c10d's Python functions end in methods of `ProcessGroup`, which are wrapped while anybody listens and put back after
the last one, in whatever order they stop.
Not seen: torch's functional collectives, which call it from C++ (DTensor's own; the flight recorder has those).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from hf_parallel.ask.replaced import Replaced
from hf_parallel.ask.session import of_process

#: Methods of ProcessGroup and what they do; torch 2.13 has renamed some, 2.15 has more.
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
    "gather_single": "gather",
    "gather_into_tensor": "gather",
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

_LISTENED = ("listeners hear of every collective: the monitor, the desync detector", "while anybody listens")
REPLACES = (
    *(Replaced(f"torch.distributed.distributed_c10d:ProcessGroup.{name}", *_LISTENED) for name in KINDS),
    Replaced(f"torch.distributed.distributed_c10d:Work.{_WAIT}", *_LISTENED),
)


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
        """Return the tensor this rank gives; the first one of several."""
        for value in self._args[1::-1] if len(self._args) > 1 else self._args:  # the second argument, then the first
            while isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, torch.Tensor):
                return value
        return None

    @property
    def peer(self) -> int | None:
        """Return the other rank of a message; None for collectives and for a message any rank may send."""
        return self._args[1] if self.name in _WITH_PEER and len(self._args) > 1 else None


class Listener:
    """A listener hears of every collective, in the thread that calls it, and must be quick."""

    def begin(self, call: Call) -> None:
        """Hear of a collective that is about to start."""

    def end(self, call: Call, work: dist.Work | None) -> None:
        """Hear of a collective that has started. Keeping `work` keeps its tensors."""

    def waiting(self, work: dist.Work) -> None:
        """Hear that somebody begins to wait for `work`."""

    def waited(self, work: dist.Work) -> None:
        """Hear that `work` is done, or on CUDA in the order of the stream."""


@dataclass
class Listening:
    """The listeners of this process, and what ProcessGroup has without them."""

    listeners: tuple[Listener, ...] = ()
    originals: dict[str, Callable] = field(default_factory=dict)


def listen(listener: Listener) -> None:
    """Let the listener hear of every collective of this process from now on."""
    now = of_process(Listening)
    now.listeners = (*now.listeners, listener)
    if not now.originals:
        for name in KINDS:
            if name in vars(dist.ProcessGroup):
                now.originals[name] = vars(dist.ProcessGroup)[name]  # itself: getattr would give an unbound function
                setattr(dist.ProcessGroup, name, _observe_method(name, getattr(dist.ProcessGroup, name)))
        now.originals[_WAIT] = vars(dist.Work)[_WAIT]
        wait_of_torch = dist.Work.wait

        @functools.wraps(wait_of_torch)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            listeners = of_process(Listening).listeners
            for listener in listeners:
                listener.waiting(work)
            result = wait_of_torch(work, *args, **kwargs)
            for listener in listeners:
                listener.waited(work)
            return result

        dist.Work.wait = wait  # type: ignore[method-assign,assignment]


def unlisten(listener: Listener) -> None:
    """Stop the listener; once nobody listens, ProcessGroup is as it was."""
    now = of_process(Listening)
    now.listeners = tuple(other for other in now.listeners if other is not listener)
    if not now.listeners:
        for name, original in now.originals.items():
            setattr(dist.Work if name == _WAIT else dist.ProcessGroup, name, original)
        now.originals.clear()


def _observe_method(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
        call, listeners = Call(name, group, args), of_process(Listening).listeners
        for listener in listeners:
            listener.begin(call)
        work = original(group, *args, **kwargs)
        for listener in listeners:
            listener.end(call, work)
        return work

    return method


# ---- Results that a checkpoint keeps of its first run, so that its second one need not compute or send them again
# Who computes something expensive asks `keep_or_compute` for it; a checkpoint around it says which kinds it keeps.

Result = TypeVar("Result")
#: Kinds of results: what attention over ranks gives, and what ranks have sent each other.
ATTENTION, COLLECTIVE = "attention", "collective"


@dataclass(eq=False)
class Store:
    """The results that one checkpoint has kept, in order. A layer may be recomputed several times."""

    kinds: frozenset[str]
    results: list[object] = field(default_factory=list)
    used: int | None = None  # how many of them a second run has taken; None in the first
    computing: int = 0  # how many results are being computed, one for another
    summed: int | None = None  # which result is made of what is computed now, and kept in its place


@dataclass(eq=False)
class Within:
    """A context in which results go to a store, or come from it."""

    store: Store
    recomputing: bool

    def __enter__(self) -> None:
        self.store.used = 0 if self.recomputing else None
        _stores.append(self.store)

    def __exit__(self, *error: object) -> None:
        _stores.remove(self.store)


#: The stores of the checkpoints around what runs now, the innermost last. No object of the session, whose making would
#: be part of what torch.compile traces: the next trace would find it made, and compile again.
_stores: list[Store] = []
#: What notes tensors of attention in the place of `Kept.of`, for the layers that run now: `activation_offload.py`.
_notes: list[Callable[[torch.Tensor], Noted]] = []


@contextlib.contextmanager
def note_attention_with(note: Callable[[torch.Tensor], Noted]) -> Iterator[None]:
    """Let checkpoints inside keep what attention gives as `note` returns it."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


def does_keep(kind: str) -> bool:
    """Return whether a checkpoint around this keeps results of this kind."""
    return bool(_stores) and kind in _stores[-1].kinds


def keep_or_compute(compute: Callable[[], Result], kind: str) -> Result:
    """Return the result that the checkpoint around this has kept, or compute it, which the checkpoint then keeps."""
    if not does_keep(kind) or _stores[-1].computing:
        return compute()
    store = _stores[-1]
    if store.used is not None:
        store.used += 1
        note = store.results[store.used - 1]
        if is_unchanged(note):
            return give_back(note)
    store.computing += 1
    try:
        result = compute()
    finally:
        store.computing -= 1
    if store.used is None:
        if _notes and kind == ATTENTION:
            store.results.append(tree_map(lambda one: _notes[-1](one) if torch.is_tensor(one) else one, result))
        else:
            store.results.append(note_result(result))
    return result


@contextlib.contextmanager
def sum_next() -> Iterator[None]:
    """Mark what is computed here as read only by the next kept result, so a second run needs no value of it."""
    store = _stores[-1] if does_keep(COLLECTIVE) else None
    if store is not None:
        store.summed = len(store.results)
    try:
        yield
    finally:
        if store is not None:
            store.summed = None


class Noted:
    """A stand-in for a tensor of a result that a checkpoint keeps."""

    @property
    def unchanged(self) -> bool:
        """Return whether its numbers are those of the first run."""
        raise NotImplementedError

    def again(self) -> torch.Tensor:
        """Return the tensor; no view, which autograd would guard."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kept(Noted):
    """The memory of a tensor without its graph, and whether it has been changed in place since."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """In the middle of an operation too, where a plain alias would count its own changes."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return cls(tensor.detach(), tensor._version)

    @property
    def unchanged(self) -> bool:
        """Return whether its numbers are those of the first run: models may add in place to what a layer gives."""
        return self.tensor._version == self.version

    def again(self) -> torch.Tensor:
        """Return the tensor; no view, which autograd would guard."""
        return torch.ops.aten._unsafe_view(self.tensor, self.tensor.shape)


@dataclass(frozen=True)
class Summed(Noted):
    """A part of a sum that is kept: zeros without memory stand for it, as long as that sum is as it was."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    store: Store
    place: int

    @property
    def unchanged(self) -> bool:
        """Return whether the sum will be given back, rather than computed again."""
        return is_unchanged(self.store.results[self.place])

    def again(self) -> torch.Tensor:
        """Return a stand-in."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def note_result(result: object, store: Store | None = None) -> object:
    """Return a result to keep, with `Noted` in place of tensors.

    Args:
        store: the store of a checkpoint that is told which results nobody reads again.
    """
    if store is None or store.summed is None:
        return tree_map(lambda one: Kept.of(one) if torch.is_tensor(one) else one, result)
    place = store.summed
    return tree_map(
        lambda one: Summed(one.shape, one.dtype, one.device, store, place) if torch.is_tensor(one) else one, result
    )


def is_unchanged(note: object) -> bool:
    """Return whether no tensor of a kept result was changed in place."""
    return all(one.unchanged for one in tree_leaves(note) if isinstance(one, Noted))


def give_back(note: object) -> Any:
    """Return the result that was kept."""
    return tree_map(lambda one: one.again() if isinstance(one, Noted) else one, note)
