"""torch.profiler's traces of all ranks, put together: what each rank computes, sends and waits for, on one clock.

    part = part_of(trace, window, waits, axes, most)     # on each rank: the events of one step, and what they come to
    write(path, parts)                                   # all ranks as one Chrome trace, a process of it for each rank

Times are microseconds after the first rank of a machine has left a barrier of all. On a CPU operators compute, and
what a rank waits for is known from its own notes; on a GPU kernels do both, and collectives have own streams.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_parallel.monitor.meter import AXES, Interval, intersect_intervals, sum_lengths, unite_intervals, without
from hf_parallel.monitor.waits import ALL

#: Events of a merged trace, of all ranks together: about 20 MB, which viewers still open.
MOST_EVENTS = 400_000
#: Pauses between operators on a CPU up to which it computes all the same: the host gets the next one ready.
_GAP_US = 200.0
#: By how much two clocks of one process may differ.
_SKEW_US = 50.0
_SENT = ("c10d::", "gloo:", "nccl:", "record_param_comms")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_KEPT = ("Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size")


class Wait(NamedTuple):
    """This rank's computation waited for others of `axis`, in nanoseconds since 1970."""

    axis: str
    begin: int
    end: int


class Event(NamedTuple):
    """A box of the trace. `track`: the thread or stream it ran in."""

    track: str
    name: str
    begin: float
    duration: float
    args: dict[str, object]


@dataclass
class Part:
    """The part of one rank. `exposed`: waits by axis; `hidden`: what was sent meanwhile, behind what it computed."""

    duration: float
    busy: list[Interval] = field(default_factory=list)
    exposed: dict[str, list[Interval]] = field(default_factory=dict)
    hidden: dict[str, list[Interval]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    name: str = ""
    left_out: int = 0  # events shorter than those that are kept

    @property
    def idle(self) -> float:
        """Time in which it neither computes nor waits for others."""
        return self.duration - sum_lengths(
            unite_intervals(i for spans in (self.busy, *self.exposed.values()) for i in spans)
        )


def make_part_of(
    trace: Mapping, window: tuple[int, int], waits: list[Wait], axes: Mapping[str, str], most: int
) -> Part:
    """Return what a rank did in a step.

    Args:
        trace: as torch.profiler exports it.
        window: the step's begin and end, in nanoseconds since 1970.
        axes: of process groups, by name.
        most: events to keep, the longest ones.
    """
    offset = (trace.get("baseTimeNanoseconds", 0) - window[0]) / 1000
    events = [{**e, "ts": e["ts"] + offset} for e in trace["traceEvents"] if e.get("ph") == "X" and "cat" in e]
    part = Part((window[1] - window[0]) / 1000)
    step = [(0.0, part.duration)]
    own = [(wait.axis, (wait.begin - window[0]) / 1000, (wait.end - window[0]) / 1000) for wait in waits]
    if any(event["cat"] == "kernel" for event in events):
        computed, sent = list[Interval](), list[tuple[str, float, float]]()
        for event in events:
            if "ccl" in event["name"].lower() and event["cat"] in _KERNELS:  # NCCL, RCCL, oneCCL and HCCL
                sent.append((_find_axis_of(event, axes), *_make_span(event)))
            elif event["cat"] in _KERNELS:
                computed.append(_make_span(event))
        part.busy = intersect_intervals(unite_intervals(computed), step)
        flights = _group_by_axis(step, sent)
        part.exposed = {axis: without(spans, part.busy) for axis, spans in flights.items()}
    else:
        operators = [_make_span(e) for e in events if e["cat"] == "cpu_op" and not e["name"].startswith(_SENT)]
        part.exposed = _group_by_axis(step, own)
        waiting = unite_intervals(interval for spans in part.exposed.values() for interval in spans)
        part.busy = without(intersect_intervals(unite_intervals(operators, _GAP_US), step), waiting)
        sent = [
            (axis, *_make_span(e))
            for e in events
            if e["name"].startswith("gloo:") and (axis := _find_axis_at(own, e["ts"]))
        ]
        flights = _group_by_axis(step, sent)
    part.hidden = {axis: intersect_intervals(spans, part.busy) for axis, spans in flights.items()}
    kept = sorted((e for e in events if e["cat"] != "Trace"), key=lambda e: -e["dur"])
    part.left_out = max(0, len(kept) - most)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "thread_name"}
    for event in kept[:most]:
        told = {name: value for name, value in event.get("args", {}).items() if name in _KEPT}
        if "Process Group Name" in event.get("args", {}):
            told["axis"] = _find_axis_of(event, axes)
        track = threads.get((event["pid"], event["tid"]), f"{event['pid']} {event['tid']}")
        part.events.append(Event(track, event["name"], round(event["ts"], 3), round(event["dur"], 3), told))
    return part


def _find_axis_at(waits: list[tuple[str, float, float]], moment: float) -> str | None:
    """Return the axis of the call that began what began here: notes begin in order."""
    place = bisect.bisect(waits, moment + _SKEW_US, key=lambda wait: wait[1]) - 1
    return waits[place][0] if place >= 0 and waits[place][2] >= moment - _SKEW_US else None


def _find_axis_of(event: dict, axes: Mapping[str, str]) -> str:
    return axes.get(str(event.get("args", {}).get("Process Group Name", "")), ALL)


def _make_span(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _group_by_axis(step: list[Interval], spans: Iterable[tuple[str, float, float]]) -> dict[str, list[Interval]]:
    """By the axes of the logs: shards and replicas are both dp."""
    shown = {name: axis for axis, names in AXES.items() for name in names}
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for axis, begin, end in spans:
        found[shown.get(axis, axis)].append((begin, end))
    return {axis: intersect_intervals(unite_intervals(own), step) for axis, own in sorted(found.items())}


# ---- all ranks ------------------------------------------------------------------------------------------------------


def write_trace(path: str, parts: list[Part], about: Mapping[str, object]) -> None:
    """Write one trace of all ranks, compressed; Perfetto and chrome://tracing open it as it is.

    Args:
        about: what else it says, for `otherData`.
    """
    left_out = {f"rank {rank}": part.left_out for rank, part in enumerate(parts) if part.left_out}
    more = {"shorter events left out": left_out} if left_out else {}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        other = json.dumps({**about, **more})
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n')
        first = True
        for rank, part in enumerate(parts):
            for event in _make_chrome_events(rank, part):
                file.write(("" if first else ",\n") + json.dumps(event))
                first = False
        file.write("\n]}\n")


def _make_chrome_events(rank: int, part: Part) -> Iterator[dict[str, object]]:
    # The lanes above those of torch
    lanes = [("compute", "compute", part.busy)]
    lanes += [(f"{axis}, exposed", axis, spans) for axis, spans in part.exposed.items()]
    lanes += [(f"{axis}, behind compute", axis, spans) for axis, spans in part.hidden.items()]
    events = [
        Event(track, name, round(begin, 3), round(end - begin, 3), {})
        for track, name, spans in lanes
        for begin, end in spans
    ]
    tracks: dict[str, int] = {}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": part.name or f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for track, name, begin, duration, args in (*events, *part.events):
        if track not in tracks:
            tracks[track] = len(tracks)
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tracks[track], "args": {"name": track}}
            index = {"sort_index": tracks[track]}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tracks[track], "args": index}
        box = {"ph": "X", "name": name, "pid": rank, "tid": tracks[track], "ts": begin, "dur": duration}
        yield {**box, "args": args} if args else box
