"""A step's wall time, host time, kernels and idle share, by torch's profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM, TIMED = 3, 5


class Meter:
    """Around each step that is measured; the step that is `profiled` is not timed."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.hosts: list[float] = []
        self.spans: list[tuple[str, tuple[int, int]]] = []
        self._profiler: Any = None
        self._began = 0.0

    def begin(self, profiled: bool = False) -> None:
        """Before a step."""
        _wait()
        if profiled:
            self._profiler = profile(activities=_activities())
            self._profiler.start()
        self._began = time.perf_counter()

    def end(self) -> None:
        """After it: the host is through when this is called, the device when it has been waited for."""
        host = time.perf_counter() - self._began
        _wait()
        if self._profiler is not None:
            self._profiler.stop()
            self.spans, self._profiler = _spans(self._profiler), None
        else:
            self.hosts.append(host)
            self.walls.append(time.perf_counter() - self._began)

    def numbers(self) -> dict[str, Any]:
        """Medians, and what a step runs. On a CPU `kernels` are operations of torch."""
        on_gpu, wall = torch.accelerator.is_available(), statistics.median(self.walls)
        busy = _length(_joined([span for _, span in self.spans])) / 1e9
        times = {"wall_ms": wall * 1e3, "host_ms": statistics.median(self.hosts) * 1e3}
        times["idle"] = max(0.0, 1 - busy / wall) if on_gpu else None
        times["kernel_ms"] = _by_kind(self.spans) if on_gpu else {}
        return {**times, "kernels": len(self.spans), "counted": "kernels" if on_gpu else "operations of torch"}


def measure(step: Callable[[], None]) -> dict[str, Any]:
    """Steps by themselves."""
    for _ in range(WARM):
        step()
    meter = Meter()
    for number in range(TIMED + 1):
        meter.begin(profiled=number == TIMED)
        step()
        meter.end()
    return meter.numbers()


def overlapped(step: Callable[[], None]) -> dict[str, float]:
    """Of the time in NCCL's kernels, the share behind others."""
    for _ in range(WARM):
        step()
    meter = Meter()
    meter.begin(profiled=True)
    step()
    meter.end()
    spans = meter.spans
    sent = _joined([span for name, span in spans if "nccl" in name.lower()])
    computed = _joined([span for name, span in spans if "nccl" not in name.lower()])
    both = _length(sent) + _length(computed) - _length(_joined(sent + computed))
    return {"communication_ms": _length(sent) / 1e6, "hidden": both / _length(sent) if sent else 0.0}


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _activities() -> list[ProfilerActivity]:
    seen = torch.profiler.supported_activities()  # without CUPTI no kernel is seen, and each event would warn
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ProfilerActivity.CUDA in seen else [])]


def _spans(profiler: Any) -> list[tuple[str, tuple[int, int]]]:
    """Name, begin and end in nanoseconds of each kernel; of each operation, on a CPU."""
    on_gpu = torch.accelerator.is_available()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = profiler.profiler.kineto_results.events()
    chosen = [event for event in events if event.device_type() == wanted and event.duration_ns() > 0]
    chosen = [event for event in chosen if not event.is_user_annotation()]  # ranges, shown on the GPU's line too
    if not on_gpu:
        chosen = [event for event in chosen if event.name().startswith("aten::")]
    return [(event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())) for event in chosen]


#: Parts of kernels' names, by what the planner calls their work.
_KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "optimizer": ("adam", "multi_tensor"),
}


def _by_kind(spans: list[tuple[str, tuple[int, int]]]) -> dict[str, float]:
    """Milliseconds of kernels by what they do."""
    found = dict.fromkeys([*_KINDS, "element-wise"], 0.0)
    for name, (begin, end) in spans:
        parts = ((kind, part) for kind, parts in _KINDS.items() for part in parts)
        found[next((kind for kind, part in parts if part in name.lower()), "element-wise")] += (end - begin) / 1e6
    return found


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time without overlaps."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
