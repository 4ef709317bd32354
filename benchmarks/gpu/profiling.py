"""A step's wall time, host time, kernels and idle share, by torch's profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_WARM, _TIMED = 3, 5


def measure(step: Callable[[], None]) -> dict[str, Any]:
    """Medians of several steps, and what one of them runs. On a CPU `kernels` are operations of torch."""
    for _ in range(_WARM):
        step()
    walls, hosts = [], []
    for _ in range(_TIMED):
        _wait()
        began = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - began)
        _wait()
        walls.append(time.perf_counter() - began)
    on_gpu, spans = torch.accelerator.is_available(), _spans(step)
    wall = statistics.median(walls)
    idle = max(0.0, 1 - _length(_joined([span for _, span in spans])) / 1e9 / wall) if on_gpu else None
    counted = "kernels" if on_gpu else "operations of torch"
    times = {"wall_ms": wall * 1e3, "host_ms": statistics.median(hosts) * 1e3}
    return {**times, "kernels": len(spans), "counted": counted, "idle": idle}


def overlapped(step: Callable[[], None]) -> dict[str, float]:
    """Of the time in NCCL's kernels, the share behind others."""
    for _ in range(_WARM):
        step()
    spans = _spans(step)
    sent = _joined([span for name, span in spans if "nccl" in name.lower()])
    computed = _joined([span for name, span in spans if "nccl" not in name.lower()])
    both = _length(sent) + _length(computed) - _length(_joined(sent + computed))
    return {"communication_ms": _length(sent) / 1e6, "hidden": both / _length(sent) if sent else 0.0}


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _spans(step: Callable[[], None]) -> list[tuple[str, tuple[int, int]]]:
    """Name, begin and end in nanoseconds of each kernel of a step; of each operation, on a CPU."""
    on_gpu = torch.accelerator.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    _wait()
    with profile(activities=kinds) as profiler:
        step()
        _wait()
    events = profiler.profiler.kineto_results.events()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    chosen = [event for event in events if event.device_type() == wanted and event.duration_ns() > 0]
    if not on_gpu:
        chosen = [event for event in chosen if event.name().startswith("aten::")]
    return [(event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())) for event in chosen]


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
