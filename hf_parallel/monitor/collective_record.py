"""The last collectives of this rank: number in their group, operation, axis, shape, and the module that they serve.

    record = CollectiveRecord({group_name: "dp_shard"}, model)
    listen(record); train(); unlisten(record)
    record.facts()                        # what is not done yet, and the last of each group, ready for JSON

A record costs a few microseconds: the shape and the module are references, and become text only when somebody asks.
Whether a collective is done its `Work` knows on gloo, or who waits for it. On NCCL, where keeping it would keep
tensors of the GPU, the flight recorder of torch knows, which counts as this does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ranks import observed
from hf_parallel.ranks.desync import LIBRARIES, is_waiting_for_others
from hf_parallel.ranks.groups import can_send_host_memory
from hf_parallel.ranks.observed import END_COALESCING, Call, Listener

if TYPE_CHECKING:
    from hf_parallel.monitor.hang_report import Facts


# ---- A process that C++ ends still says where it was: gloo ends one (`std::terminate`) to which a message is too
# long
# `abort` raises SIGABRT in the thread that calls it, while Python goes on in the others. So the handler may run
# Python, and wait for a thread that writes and sends; then whoever was there before handles the signal, and the
# process ends.


@contextlib.contextmanager
def call_before_abort(say: Callable[[], None]) -> Iterator[None]:
    """Call `say` before this process is ended by SIGABRT."""
    try:
        set_handler = ctypes.CDLL(None).signal
    except (OSError, AttributeError):  # not a system that has it there
        yield
        return
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    process, former = os.getpid(), ctypes.c_void_p()

    def handle(number: int) -> None:
        with contextlib.suppress(BaseException):
            if os.getpid() == process:
                say()
        set_handler(number, former)
        os.kill(os.getpid(), number)  # once this handler has returned, and in whatever thread

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    former = ctypes.c_void_p(set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p)))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, former)


#: How many of each group are remembered, and how many of them are told in a report.
KEPT, TOLD = 64, 32
_LAST: Callable[[], deque[Any]] = functools.partial(deque, maxlen=KEPT)
MESSAGES = ("send", "receive")


class Entry:
    """A collective. `number` counts those of its group from 1, messages between two ranks apart."""

    __slots__ = ("order", "number", "kind", "shape", "dtype", "peer", "module", "place", "backward", "work", "on_host")

    def __init__(self, order: int, number: int, call: Call) -> None:
        self.order, self.number, self.kind, self.peer = order, number, call.kind, call.peer
        tensor = call.tensor
        self.shape: torch.Size | None = None if tensor is None else tensor.shape
        self.dtype: torch.dtype | None = None if tensor is None else tensor.dtype
        self.module, self.place, self.backward = _find_call_in_progress()
        self.work: dist.Work | None = None
        self.on_host = True  # does its `Work` know when it is done?

    def done(self) -> bool:
        """Return whether the collective is over, as far as is known here."""
        if self.work is not None and self.work.is_completed():
            self.work = None
        return self.work is None


@dataclass(eq=False)
class CollectiveRecord(Listener):
    """Hears of this process's collectives; forgets all but the last.

    Args:
        axes: names of process groups and what to call them.
        model: whose modules are named.
    """

    axes: Mapping[str, str]
    model: nn.Module
    entries: defaultdict[str, deque[Entry]] = field(default_factory=lambda: defaultdict(_LAST))
    ranks: dict[str, list[int]] = field(default_factory=dict)
    _counts: dict[tuple[str, bool], int] = field(default_factory=dict)
    _on_host: dict[tuple[str, str], bool] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _open: deque[Entry] = field(default_factory=_LAST)  # whose work is looked at
    _waited_for: dict[int, dist.Work] = field(default_factory=dict)  # by thread: the work that it waits for
    _starting: dict[int, Entry] = field(default_factory=dict)  # by call: other threads have collectives too

    # ---- of every collective ---------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Note it: what never returns is seen as well."""
        if call.kind == END_COALESCING:
            return  # it only starts calls that are noted
        name = call.group_name
        if name not in self.ranks:
            self.ranks[name] = dist.get_process_group_ranks(call.group)
        key = (name, call.kind in MESSAGES)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        self._starting[id(call)] = entry = Entry(next(self._order), number, call)
        tensor = call.tensor
        place = call.group_name, "cpu" if tensor is None else tensor.device.type
        if place not in self._on_host:
            on_host = can_send_host_memory(call.group)
            if on_host and tensor is not None and tensor.device.type != "cpu":  # a group of gloo and NCCL
                on_host = not call.group._get_backend(tensor.device).name().startswith("nccl")  # "nccl2" in torch 2.15
            self._on_host[place] = on_host
        entry.on_host = self._on_host[place]
        self.entries[name].append(entry)

    def end(self, call: Call, work: dist.Work | None) -> None:
        """It has been started."""
        entry = self._starting.pop(id(call), None)
        if entry is None or work is None:
            return
        if entry.on_host:
            entry.work = work
            while self._open and self._open[0].done():
                self._open.popleft()
            self._open.append(entry)
        elif call.kind not in MESSAGES:
            group: Any = call.group
            entry.number = group._get_sequence_number_for_group()  # the flight recorder's, with those from C++

    def waiting(self, work: dist.Work) -> None:
        """Note the collective that a thread waits for."""
        self._waited_for[threading.get_ident()] = work

    def waited(self, work: dist.Work) -> None:
        """It is done; some of gloo's do not say so themselves."""
        self._waited_for.pop(threading.get_ident(), None)
        for entry in reversed(self._open):  # most wait for the last one
            if entry.work is work:
                entry.work = None
                return

    # ---- of a report -----------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return what is not done, first what is waited for and the oldest, and the last collectives of each group.

        `on_device`: the host itself does not wait in it; it goes on until it needs what is computed.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        unfinished = list_unfinished_on_device()
        groups, pending = {}, []
        for name, entries in list(self.entries.items()):
            ranks = self.ranks[name]
            told: list[Facts] = []
            axis = self.axes.get(name) or ("all ranks" if len(ranks) == dist.get_world_size() else "some ranks")
            for entry in list(entries):
                module = entry.module
                if isinstance(module, nn.Module):
                    module = names.get(id(module)) or type(module).__name__
                facts = {
                    "number": entry.number,
                    "operation": entry.kind,
                    "axis": axis,
                    "shape": None if entry.shape is None else list(entry.shape),
                    "dtype": None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
                    "module": module,
                    "place": None if entry.place is None else f"{os.path.basename(entry.place[0])}:{entry.place[1]}",
                    "backward": entry.backward,
                    "peer": None if entry.peer is None else ranks[entry.peer],
                }
                told.append(facts)
                waits = entry.work is not None and any(work is entry.work for work in list(self._waited_for.values()))
                starting = any(entry is other for other in list(self._starting.values()))
                if entry.on_host:
                    is_open = waits or starting or not entry.done()  # one that is waited for may have failed
                else:
                    sent = entry.kind not in MESSAGES and entry.number in unfinished.get(name, ())
                    is_open = waits or starting or sent
                if is_open:
                    facts |= {"group": name, "on_device": not entry.on_host}
                    pending.append((not waits, entry.order, facts))
            groups[name] = {"axis": axis, "ranks": ranks, "last": told[-TOLD:]}
        return {"pending": [facts for *_, facts in sorted(pending, key=lambda found: found[:2])], "groups": groups}


def list_unfinished_on_device() -> dict[str, set[int]]:
    """Group name -> numbers of its collectives that NCCL has not finished, as torch's flight recorder knows them."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    known: Any = torch._C._distributed_c10d
    dumps = [known._dump_nccl_trace] if hasattr(known, "_dump_nccl_trace") else []
    if hasattr(dist, "ProcessGroupNCCL2") and hasattr(known, "_dump_fr_trace"):
        # torch 2.15 keeps the records of its new backend apart.
        dumps.append(functools.partial(known._dump_fr_trace, backend="nccl2"))
    for dump in dumps:
        with contextlib.suppress(Exception):  # it is only there while NCCL is, and its form is torch's own
            for entry in pickle.loads(dump(True, False, False)).get("entries", []):
                if entry["state"] != "completed" and not entry.get("is_p2p"):
                    found[str(entry["process_group"][0])].add(entry["collective_seq_id"])
    return found


# ---- the module in progress ----------------------------------------------------------------------------------------

_CALL = nn.Module._call_impl.__code__
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


#: Where FSDP2 gathers and reduces for a module whose name it knows; where collectives are passed on, as nobody's line.
_FSDP = os.path.join("_fully_shard", "_fsdp_param_group.py")
_LIBRARIES = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
_OWN, _PASSED_ON, _OF_FSDP = "own", "passed on", "of FSDP2"


@functools.cache
def _classify_file(file: str) -> str:
    """Asked for each frame: a name is looked at once, and code, whose hash takes long, never."""
    return _OF_FSDP if file.endswith(_FSDP) else _PASSED_ON if file.startswith(_LIBRARIES) else _OWN


def _find_call_in_progress() -> tuple[str | None, tuple[str, int] | None, bool]:
    """Return the innermost module being called, else the line that calls, and whether this is a backward pass."""
    frame, place = sys._getframe(3), None
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            return frame.f_locals["self"], None, False
        if code is _BACKWARD:
            return None, place, True
        whose = _classify_file(code.co_filename)
        if whose is _OF_FSDP and hasattr(frame.f_locals.get("self"), "_module_fqn"):
            return frame.f_locals["self"]._module_fqn or "root", None, torch._C._current_graph_task_id() != -1
        if whose is _OWN and place is None:
            place = code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, place, torch._C._current_graph_task_id() != -1


# ---- Where a rank stands: in which code its thread is, whether it waits for others, and whether its process lives


_LOADER = os.path.join(os.path.dirname(torch.__file__), "utils", "data")
_DISTRIBUTED, _OBSERVED = os.path.join(os.path.dirname(torch.__file__), "distributed"), observed.__file__
_CALLBACKS = os.path.join("transformers", "trainer_callback.py")


def read_stacks() -> dict[str, list[str]]:
    """Return the stack of every thread that runs Python, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident})": "".join(traceback.format_stack(frame)).splitlines()
        for ident, frame in sys._current_frames().items()
    }


def is_waiting(thread: int) -> bool:
    """Return whether it is in code in which a process waits for others."""
    frame = sys._current_frames().get(thread)
    return frame is not None and is_waiting_for_others(frame)


def place_of_thread(thread: int, phase: str) -> str:
    """In words, such as: in the data loader (`my_dataset.py:41`).

    Args:
        phase: what the training was at when it last said so, where its code does not tell.
    """
    frame = sys._current_frames().get(thread)
    return f"in {phase}" if frame is None else _format_place(list(traceback.walk_stack(frame)), phase)


def place_of_error(error: BaseException) -> tuple[str, bool]:
    """Where it was raised, in the same words; was it by a collective, or by the wait for one?"""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    return _format_place(frames, ""), frames[0][0].f_code.co_filename.startswith((_DISTRIBUTED, _OBSERVED))


def _format_place(frames: list[tuple[FrameType, int]], phase: str) -> str:
    """Return the place of frames, from inside out, with the lines that they are at."""
    files = [frame.f_code.co_filename for frame, _ in frames]
    own = next((found for found in frames if not found[0].f_code.co_filename.startswith(LIBRARIES)), frames[0])
    line = f"`{os.path.basename(own[0].f_code.co_filename)}:{own[1]}`"
    if any(name.startswith(_LOADER) for name in files):
        return f"in the data loader ({line})"
    outer = next((i for i, name in enumerate(files) if name.endswith(_CALLBACKS)), 0)
    if outer:
        return f"in a callback ({line}, {frames[outer - 1][0].f_code.co_name})"
    return f"in {phase} ({line})" if phase else f"at {line}"


def state_of_process(pid: int) -> str:
    """Return the state of a process of this machine: gone, stopped (SIGSTOP), traced (by a debugger) or alive."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]  # its name may hold anything
    except OSError:
        return "alive" if os.path.exists(f"/proc/{pid}") or not os.path.isdir("/proc/self") else "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "traced"}.get(letter, "alive")
