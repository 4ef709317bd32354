"""(g) Rows over cp ranks: seconds of a step by each variant, of one process, and of torch's own `context_parallel`."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.context import TORCHS
from benchmarks.gpu.setting import Setting
from hf_parallel.check.report import NOTE, SKIPPED, Row

NEEDS_GPU = ("rings by flash kernels of CUDA", "torch's context_parallel")
_WAYS = ("ring", "allgather", "ulysses")
_SIZES = {"length": 65536, "steps": 3, "hidden": 2048, "layers": 4}
_SMALL = {"length": 257, "steps": 2, "hidden": 128, "layers": 2}


def rows(setting: Setting) -> Iterator[Row]:
    """One for each way, in turns on two ranks."""
    if not setting.can("cp=2", 2):
        yield Row("context", "cp=2", "needs NCCL, which does not run here", status=SKIPPED)
        return
    sizes = _SMALL if setting.small else _SIZES
    device = "cuda" if setting.devices else "cpu"
    found = setting.on_ranks("benchmarks.context:timed", 2, device=device, ways=_WAYS, **sizes)
    seconds = {name: _slowest(found, name) for name in found[0]}
    if setting.devices:
        with contextlib.suppress(RuntimeError):  # it has said why, and the last row says that it failed
            found = setting.on_ranks("benchmarks.context:timed", 2, device=device, ways=(TORCHS,), **sizes)
            seconds[TORCHS] = _slowest(found, TORCHS)
    for name, value in seconds.items():
        ratios = (f"{value / seconds[other]:.2f} of {other}" for other in ("one process", "allgather"))
        yield Row("context", f"{name}, {sizes['length']}", f"{value * 1e3:.4g} ms", ", ".join(ratios), status=NOTE)
    if TORCHS not in seconds:
        yield Row("context", TORCHS, _why_not(setting), status=SKIPPED)


def _slowest(found: list[dict[str, Any]], name: str) -> float:
    """Median over steps of the slowest rank's seconds; one process is timed on one rank."""
    ranks = [rank[name] for rank in found if rank[name]]
    return statistics.median(max(step[0] for step in steps) for steps in zip(*ranks, strict=True))


def _why_not(setting: Setting) -> str:
    return "it failed here, which is said above" if setting.devices else "needs GPUs: it has no way on a CPU"
