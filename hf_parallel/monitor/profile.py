"""A step of all ranks under torch.profiler: a trace, and a picture of where their time goes.

profile = Profile(mesh, axes, step)      # collective, as the end is: all ranks begin at one moment
...                                      # the step
lines = profile.finish("OUTPUT_DIR")     # profile_step_5.json.gz, profile_step_5.svg, by rank 0
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from hf_parallel.axes.pipeline.timeline import IDLE, QUIET, render_picture_head, render_text_at, time_axis
from hf_parallel.monitor import trace
from hf_parallel.monitor.meter import sum_lengths, unite_intervals
from hf_parallel.monitor.trace import Part
from hf_parallel.monitor.waits import ALL, HostClock, Waits
from hf_parallel.ranks import messages
from hf_parallel.ranks.devices import synchronize
from hf_parallel.ranks.groups import read_machine_id
from hf_parallel.ranks.mesh import ParallelMesh, compute_coordinates

# ---- A profiled step as a picture: for each rank what it computes, what it waits for and what it sends meanwhile.
# SVG
# A row per rank: compute above, communication below, full where the rank waits for it and pale where it computes
# meanwhile; what stays grey is idle. A path holds all boxes of a colour, so that a step of 10,000 stays small.


#: Of compute and of each axis; told apart in grey too.
COLOURS = {
    "compute": "#2f6fba",
    "tp": "#c8553d",
    "dp": "#d9a21b",
    "cp": "#3d8f6a",
    "ep": "#a05195",
    "pp": "#8d7bb5",
    ALL: "#66727f",
}
NAMES = {ALL: "all ranks", "pp": "pp (other stages)"}
_LEFT, _TOP, _PLOT, _SHARES, _ROW, _STEP = 210, 78, 860, 330, 32, 40  # pixels
_MOST_RANKS = 64


def render_profile(parts: list[Part], name: str) -> str:
    """Return the picture of all ranks as text, of the first 64 where there are more."""
    shown = parts[:_MOST_RANKS]
    more = f" · ranks 0 to {_MOST_RANKS - 1} of {len(parts)}" if len(parts) > _MOST_RANKS else ""
    duration = max(1.0, *(part.duration for part in shown))
    foot = _TOP + len(shown) * _STEP
    width, height = _LEFT + _PLOT + _SHARES, foot + 76
    caption = f"{duration / 1000:.4g} ms under torch.profiler, which makes it longer · shares of each rank{more}"
    lines = [
        *render_picture_head(width, height, 24, name, caption),
        *(line for rank, part in enumerate(shown) for line in _render_rank_row(rank, part, duration)),
        *time_axis(duration / 1000, _LEFT, foot, _PLOT, " ms"),
    ]
    used: dict[str, None] = {"compute": None}
    for part in shown:
        used |= dict.fromkeys([*part.exposed, *part.hidden])
    legend = [(COLOURS.get(axis, QUIET), 1.0, NAMES.get(axis, axis)) for axis in used]
    if any(any(part.hidden.values()) for part in shown):
        legend.append((QUIET, 0.4, "pale: behind compute"))
    x, y = float(_LEFT), foot + 52
    for colour, opacity, label in [*legend, (IDLE, 1.0, "idle")]:
        style = f'fill="{colour}" fill-opacity="{opacity}"'
        lines.append(f'<rect class="key" x="{x}" y="{y - 11}" width="14" height="14" rx="2" {style}/>')
        lines.append(render_text_at(x + 20, y, label))
        x += 44 + 6.8 * len(label)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _render_rank_row(rank: int, part: Part, duration: float) -> Iterator[str]:
    y, half = _TOP + rank * _STEP, _ROW / 2
    yield f'<g class="rank"><title>{escape(part.name)}</title>'
    yield render_text_at(_LEFT - 12, y + _ROW / 2 + 4, part.name, fill=QUIET, anchor="end")
    yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_ROW}" rx="2" fill="{IDLE}"/>'
    lanes = [("compute", "compute", part.busy, float(y), 1.0)]
    lanes += [(f"hidden {axis}", axis, spans, y + half, 0.4) for axis, spans in part.hidden.items()]
    lanes += [(f"exposed {axis}", axis, spans, y + half, 1.0) for axis, spans in part.exposed.items()]
    scale = _PLOT / duration
    for name, axis, spans, top, opacity in lanes:  # a path each: what is closer than half a pixel is one box
        boxes = unite_intervals(((begin * scale, end * scale) for begin, end in spans), gap=0.5)
        ends = [(_LEFT + begin, max(0.3, end - begin)) for begin, end in boxes]
        path = "".join(f"M{x:.1f} {top:g}h{wide:.1f}v{half:g}H{x:.1f}z" for x, wide in ends)
        colour = COLOURS.get(axis, QUIET)
        yield f'<path class="{escape(name)}" d="{path}" fill="{colour}" fill-opacity="{opacity}"/>'
    whole = max(part.duration, 1e-9)
    waits = {axis: sum_lengths(spans) / whole for axis, spans in part.exposed.items()}
    named = [f"{axis} {share:.0%}" for axis, share in waits.items() if share >= 0.005]
    shares = ", ".join([f"compute {sum_lengths(part.busy) / whole:.0%}", *named, f"idle {part.idle / whole:.0%}"])
    yield render_text_at(_LEFT + _PLOT + 12, y + _ROW / 2 + 4, shares, fill=QUIET, size=11)
    yield "</g>"


NAME = "profile_step_{}"
_LEAST_EVENTS = 1000  # of a rank, however many there are


class _WallClock(HostClock):
    """Nanoseconds since 1970, which is what torch.profiler tells."""

    mark = staticmethod(time.time_ns)


class Profile:
    """The profile of one step, from here to `finish`.

    Args:
        axes: of process groups, by name.
    """

    def __init__(self, mesh: ParallelMesh, axes: Mapping[str, str], step: int) -> None:
        self.mesh, self.axes, self.step = mesh, axes, step
        self._notes: list[trace.Wait] = []
        clock = _WallClock()
        clock.begin()
        self._waits = Waits(axes, clock, lambda *note: self._notes.append(trace.Wait(*note)))
        kinds = {ProfilerActivity.CPU} if mesh.device.type == "cpu" else supported_activities()
        self._profiler: profile | None = profile(activities=kinds)
        try:
            self._profiler.start()
        except RuntimeError:  # the script runs torch's profiler itself
            self._profiler = None
        if mesh.device.type == "cpu":  # on a GPU its kernels tell
            self._waits.start(mesh.device)
        synchronize(self.mesh.device)
        dist.barrier(mesh.host_group_of_training)
        self._begin, self._waits.open = time.time_ns(), True

    def finish(self, folder: str) -> list[str]:
        """End the step. On rank 0, return what is to be said of it. Collective over all ranks."""
        synchronize(self.mesh.device)
        end = time.time_ns()
        self._waits.stop()
        begins = messages.gather_objects((read_machine_id(), self._begin), self.mesh.host_group_of_training)
        window = min(begin for machine, begin in begins if machine == read_machine_id()), end
        most = max(_LEAST_EVENTS, trace.MOST_EVENTS // dist.get_world_size())
        events: dict[str, object] = {"traceEvents": []}
        if self._profiler is not None:
            self._profiler.stop()
            with tempfile.TemporaryDirectory() as scratch:
                path = os.path.join(scratch, "trace.json")
                self._profiler.export_chrome_trace(path)
                with open(path, encoding="utf-8", errors="replace") as file:
                    events = json.load(file, strict=False)
        part = trace.make_part_of(events, window, self._notes, self.axes, most)
        del events  # of a step they may be gigabytes
        sizes, coordinates = self.mesh.config.sizes, compute_coordinates(self.mesh.config, self.mesh.rank)
        on = [f"{axis}={at}" for axis, at in coordinates.items() if sizes[axis] > 1]
        part.name = f"rank {dist.get_rank()}" + (f" ({', '.join(on)})" if on else "")
        parts: list[trace.Part] | None = [part] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(part, parts, group=self.mesh.host_group_of_training)
        if parts is None:
            return []
        base, spec = os.path.join(folder, NAME.format(self.step)), self.mesh.config.to_spec()
        title = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        try:
            os.makedirs(folder, exist_ok=True)
            trace.write_trace(f"{base}.json.gz", parts, {"spec": spec, "step": self.step})
            Path(f"{base}.svg").write_text(render_profile(parts, f"step {self.step} of {title}"), encoding="utf-8")
        except OSError as error:
            return [f"{base} is not written: {error}; training goes on"]
        lines = [f"step {self.step}: {base}.svg, and {base}.json.gz for ui.perfetto.dev"]
        if not any(part.events for part in parts):
            lines.append("they have no operators: the script runs torch.profiler itself")
        return lines
