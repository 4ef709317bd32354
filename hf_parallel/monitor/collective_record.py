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
import functools
import itertools
import os
import pickle
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.collectives.observed import END_COALESCING, Call, Listener
from hf_parallel.groups import takes_host_memory

if TYPE_CHECKING:
    from hf_parallel.monitor.hang_report import Facts


#: How many of each group are remembered, and how many of them are told in a report.
KEPT, TOLD = 64, 32
MESSAGES = ("send", "receive")


class Entry:
    """One collective. `number` counts those of its group from 1, messages between two ranks apart."""

    __slots__ = ("order", "number", "kind", "shape", "dtype", "peer", "module", "place", "backward", "work", "on_host")

    def __init__(self, order: int, number: int, call: Call) -> None:
        self.order, self.number, self.kind, self.peer = order, number, call.kind, call.peer
        tensor = call.tensor
        self.shape: torch.Size | None = None if tensor is None else tensor.shape
        self.dtype: torch.dtype | None = None if tensor is None else tensor.dtype
        self.module, self.place, self.backward = _in_progress()
        self.work: dist.Work | None = None
        self.on_host = True  # does its `Work` know when it is done?

    def done(self) -> bool:
        """Is it over, as far as is known here?"""
        if self.work is not None and self.work.is_completed():
            self.work = None
        return self.work is None


class CollectiveRecord(Listener):
    """Hears of this process's collectives; forgets all but the last.

    Args:
        axes: names of process groups and what to call them.
        model: whose modules are named.
    """

    def __init__(self, axes: Mapping[str, str], model: nn.Module) -> None:
        self.axes, self.model = dict(axes), model
        self.entries: defaultdict[str, deque[Entry]] = defaultdict(functools.partial(deque, maxlen=KEPT))
        self.ranks: dict[str, list[int]] = {}
        self._counts: dict[tuple[str, bool], int] = {}
        self._on_host: dict[tuple[str, str], bool] = {}
        self._order = itertools.count()
        self._open: deque[Entry] = deque(maxlen=KEPT)  # whose work is looked at
        self._waited_for: dict[int, dist.Work] = {}  # by thread: the work that it waits for
        self._starting: dict[int, Entry] = {}  # by call: threads beside the training have collectives too

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
        entry.on_host = self._runs_on_host(call)
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

    def _runs_on_host(self, call: Call) -> bool:
        """In a group of gloo and NCCL the tensor decides."""
        tensor = call.tensor
        key = call.group_name, "cpu" if tensor is None else tensor.device.type
        if key not in self._on_host:
            on_host = takes_host_memory(call.group)
            if on_host and tensor is not None and tensor.device.type != "cpu":
                on_host = call.group._get_backend(tensor.device).name() != "nccl"
            self._on_host[key] = on_host
        return self._on_host[key]

    def waiting(self, work: dist.Work) -> None:
        """Which one it is that a thread waits for."""
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
        """What is not done yet, first what is waited for and the oldest, and the last collectives of each group.

        `on_device`: the host itself does not wait in it; it goes on until it needs what is computed.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        unfinished = unfinished_on_device()
        groups, pending = {}, []
        for name, entries in list(self.entries.items()):
            told = [self._told(name, entry, names) for entry in list(entries)]
            groups[name] = {"axis": self._axis(name), "ranks": self.ranks[name], "last": told[-TOLD:]}
            for entry, facts in zip(list(entries), told, strict=False):
                if self._is_open(name, entry, unfinished):
                    facts |= {"group": name, "on_device": not entry.on_host}
                    pending.append((not self._is_waited_for(entry), entry.order, facts))
        return {"pending": [facts for *_, facts in sorted(pending, key=lambda found: found[:2])], "groups": groups}

    def _is_waited_for(self, entry: Entry) -> bool:
        return entry.work is not None and any(work is entry.work for work in list(self._waited_for.values()))

    def _is_open(self, name: str, entry: Entry, unfinished: Mapping[str, set[int]]) -> bool:
        if self._is_waited_for(entry):
            return True  # or it has failed
        starting = any(entry is other for other in list(self._starting.values()))
        if entry.on_host:
            return not entry.done() or starting
        return starting or (entry.kind not in MESSAGES and entry.number in unfinished.get(name, ()))

    def _axis(self, name: str) -> str:
        return self.axes.get(name) or ("all ranks" if len(self.ranks[name]) == dist.get_world_size() else "some ranks")

    def _told(self, name: str, entry: Entry, names: Mapping[int, str]) -> Facts:
        module = entry.module
        if isinstance(module, nn.Module):
            module = names.get(id(module)) or type(module).__name__
        peer = None if entry.peer is None else self.ranks[name][entry.peer]
        return {
            "number": entry.number,
            "operation": entry.kind,
            "axis": self._axis(name),
            "shape": None if entry.shape is None else list(entry.shape),
            "dtype": None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            "module": module,
            "place": None if entry.place is None else f"{os.path.basename(entry.place[0])}:{entry.place[1]}",
            "backward": entry.backward,
            "peer": peer,
        }


def unfinished_on_device() -> dict[str, set[int]]:
    """Group name -> numbers of its collectives that NCCL has not finished, as torch's flight recorder knows them."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    found: defaultdict[str, set[int]] = defaultdict(set)
    if dump is not None:
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
def _whose(file: str) -> str:
    """Asked for each frame: a name is looked at once, and code, whose hash takes long, never."""
    return _OF_FSDP if file.endswith(_FSDP) else _PASSED_ON if file.startswith(_LIBRARIES) else _OWN


def _in_progress() -> tuple[str | None, tuple[str, int] | None, bool]:
    """The innermost module that is being called, or the name that FSDP2 has for it; else the line that calls; is it a
    backward pass?"""
    frame, place = sys._getframe(3), None
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            return frame.f_locals["self"], None, False
        if code is _BACKWARD:
            return None, place, True
        whose = _whose(code.co_filename)
        if whose is _OF_FSDP and hasattr(frame.f_locals.get("self"), "_module_fqn"):
            return frame.f_locals["self"]._module_fqn or "root", None, _in_backward()
        if whose is _OWN and place is None:
            place = code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, place, _in_backward()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
