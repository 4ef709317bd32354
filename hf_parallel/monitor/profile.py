"""One step of all ranks under torch.profiler: a trace of all of them, and a picture of where their time goes.

profile = Profile(mesh, axes, step)      # collective, as the end is: all ranks begin at one moment
...                                      # the step
lines = profile.finish("OUTPUT_DIR")     # profile_step_5.json.gz, profile_step_5.svg, by rank 0
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from hf_parallel.collectives import objects
from hf_parallel.groups import machine_id
from hf_parallel.mesh import ParallelMesh, coordinates
from hf_parallel.monitor import profile_picture, trace
from hf_parallel.monitor.clock import HostClock
from hf_parallel.monitor.waits import Waits

NAME = "profile_step_{}"
_LEAST_EVENTS = 1000  # of a rank, however many there are


class _WallClock(HostClock):
    """Nanoseconds since 1970, which is what torch.profiler tells."""

    mark = staticmethod(time.time_ns)


class Profile:
    """Of one step, from here to `finish`.

    Args:
        axes: of process groups, by name.
    """

    def __init__(self, mesh: ParallelMesh, axes: Mapping[str, str], step: int) -> None:
        self.mesh, self.axes, self.step = mesh, axes, step
        self._notes: list[trace.Wait] = []
        clock = _WallClock()
        clock.begin()
        self._waits = Waits(axes, clock, lambda *note: self._notes.append(trace.Wait(*note)))
        self._profiler = self._started()
        if mesh.device.type == "cpu":  # on a GPU its kernels tell
            self._waits.start(mesh.device)
        self._synchronize()
        dist.barrier(mesh.host_group)
        self._begin, self._waits.open = time.time_ns(), True

    def _started(self) -> profile | None:
        """torch's profiler; None where the script runs it itself."""
        kinds = {ProfilerActivity.CPU} if self.mesh.device.type == "cpu" else supported_activities()
        profiler = profile(activities=kinds)
        try:
            profiler.start()
        except RuntimeError:
            return None
        return profiler

    def finish(self, folder: str) -> list[str]:
        """The step is over. What is to be said of it, on rank 0. Collective over all ranks."""
        self._synchronize()
        end = time.time_ns()
        self._waits.stop()
        window = self._earliest(), end
        part = trace.part_of(self._exported(), window, self._notes, self.axes, self._most())
        part.name = f"rank {dist.get_rank()}{self._place()}"
        parts: list[trace.Part] | None = [part] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(part, parts, group=self.mesh.host_group)
        return [] if parts is None else self._written(folder, parts)

    def _earliest(self) -> int:
        """When the first rank of this machine, whose clock they share, left the barrier: a busy one wakes up later."""
        begins = objects.gather((machine_id(), self._begin), self.mesh.host_group)
        return min(begin for machine, begin in begins if machine == machine_id())

    def _most(self) -> int:
        return max(_LEAST_EVENTS, trace.MOST_EVENTS // dist.get_world_size())

    def _exported(self) -> dict[str, object]:
        if self._profiler is None:
            return {"traceEvents": []}
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return json.load(file, strict=False)

    def _place(self) -> str:
        """Its coordinates along the axes that are on."""
        config = self.mesh.config
        on = [f"{axis}={at}" for axis, at in coordinates(config, self.mesh.rank).items() if config.sizes[axis] > 1]
        return f" ({', '.join(on)})" if on else ""

    def _written(self, folder: str, parts: list[trace.Part]) -> list[str]:
        base = os.path.join(folder, NAME.format(self.step))
        config = self.mesh.config
        on = ",".join(f"{axis}={size}" for axis, size in config.sizes.items() if size > 1)
        try:
            os.makedirs(folder, exist_ok=True)
            trace.write(f"{base}.json.gz", parts, {"spec": config.to_spec(), "step": self.step})
            profile_picture.write(f"{base}.svg", parts, f"step {self.step} of {on}")
        except OSError as error:
            return [f"{base} is not written: {error}; training goes on"]
        lines = [f"step {self.step}: {base}.svg, and {base}.json.gz for ui.perfetto.dev"]
        if not any(part.events for part in parts):
            lines.append("they have no operators: the script runs torch.profiler itself")
        return lines

    def _synchronize(self) -> None:
        if self.mesh.device.type != "cpu":
            torch.accelerator.synchronize(self.mesh.device)
