"""From what each rank has measured to what is logged: one row of numbers per rank, gathered once per logging.

rows = gather(own_row(window, device), device)          # collective; the same on all ranks
figures(rows, config, ...)                              # {"perf/step_time_s": …}
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass

import torch
import torch.distributed as dist

from hf_parallel.monitor.meter import COMPUTE, DATA, REST, Window

GIB = 2**30
#: Axes as they are logged, and which of the mesh's they are.
AXES = {"tp": ("tp",), "dp": ("dp", "dp_shard", "dp_replicate", "data", "ep_shard"), "cp": ("cp",), "ep": ("ep",)}
PIPELINE = "pp"


@dataclass(frozen=True)
class RankRow:
    """What one rank has measured: seconds of a mean step, by what they go to; counts per step; bytes.

    `data`, `compute` and `rest` are without waits. `tp`, `dp`, `cp`, `ep`, `pp`: waits for ranks of that axis; `all`:
    for those of no single one. `memory_peak`: since the process began.
    """

    steps: float
    step: float
    data: float
    compute: float
    rest: float
    tp: float
    dp: float
    cp: float
    ep: float
    pp: float
    all: float
    tokens: float
    rows: float
    calls: float
    memory_peak: float
    memory_reserved: float

    @property
    def communication(self) -> float:
        """Seconds that the step waits for other ranks, but for those of other stages."""
        return self.tp + self.dp + self.cp + self.ep + self.all

    @property
    def looked(self) -> float:
        """Seconds of the steps that were looked into: what the parts are parts of."""
        return self.data + self.compute + self.rest + self.communication + self.pp

    def to_dict(self) -> dict[str, float]:
        """JSON-ready, with 4 significant digits but for counts of bytes."""
        return {name: significant(value) for name, value in asdict(self).items()}


def own_row(window: Window, device: torch.device) -> RankRow:
    """This rank's."""
    steps, looked = max(1, window.steps), max(1, window.looked)
    waits = window.waits()
    by_axis = {axis: sum(waits.pop(name, 0.0) for name in names) for axis, names in AXES.items()}
    pipeline = waits.pop(PIPELINE, 0.0)
    peak, reserved = memory(device)
    return RankRow(
        steps=window.steps,
        step=window.step_seconds / steps,
        data=window.own(DATA) / looked,
        compute=window.own(COMPUTE) / looked,
        rest=window.own(REST) / looked,
        **{axis: seconds / looked for axis, seconds in by_axis.items()},
        pp=pipeline / looked,
        all=sum(waits.values()) / looked,
        tokens=window.tokens / steps,
        rows=window.rows / steps,
        calls=window.calls / steps,
        memory_peak=peak,
        memory_reserved=reserved,
    )


def gather(own: RankRow, device: torch.device) -> list[RankRow]:
    """The rows of all ranks, in their order. Collective: one small gather."""
    values = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return [RankRow(*row) for row in torch.stack(found).tolist()]


def memory(device: torch.device) -> tuple[float, float]:
    """Bytes of tensors at the fullest moment so far, and those that torch's allocator holds now.

    On a CPU, where nobody counts tensors: of the whole process.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return module.max_memory_allocated(device), module.memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return peak, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak, peak


def figures(rows: list[RankRow], data_ranks: int, sizes: Mapping[str, int], full: bool) -> dict[str, float]:
    """What is logged. Shares are means over ranks, memory is that of the fullest rank.

    Args:
        sizes: of the axes, of which `full` shows those that are on.
    """
    world, seconds = len(rows), max(row.step for row in rows)
    copies = world / data_ranks  # ranks that read the same batch
    tokens, samples = (sum(getattr(row, what) for row in rows) / copies / seconds for what in ("tokens", "rows"))
    found = {"step_time_s": seconds}
    if tokens:
        found |= {"tokens_per_second": tokens, "tokens_per_second_per_device": tokens / world}
    found |= {
        "samples_per_second": samples,
        "compute_share": _share(rows, "compute"),
        "communication_share": _share(rows, "communication"),
        "bubble_share": _share(rows, PIPELINE),
        "data_wait_share": _share(rows, "data"),
        "other_share": _share(rows, "rest"),
    }
    if full:
        on = [axis for axis, names in AXES.items() if any(sizes.get(name, 1) > 1 for name in names)]
        on += [PIPELINE] if sizes.get(PIPELINE, 1) > 1 else []
        found |= {f"communication_share_{axis}": _share(rows, axis) for axis in on}
    found["memory_peak_gib"] = max(row.memory_peak for row in rows) / GIB
    found["memory_reserved_gib"] = max(row.memory_reserved for row in rows) / GIB
    return {f"perf/{name}": significant(value) for name, value in found.items()}


def _share(rows: list[RankRow], part: str) -> float:
    return sum(getattr(row, part) / row.looked for row in rows if row.looked) / len(rows)


def mfu(tokens_per_second_per_device: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation: those of a training step that are the model's own, over what the device can do."""
    return tokens_per_second_per_device * flops_per_token / peak


def significant(value: float) -> float:
    """Rounded to four digits; whole numbers stay."""
    if value == 0 or not math.isfinite(value) or value == int(value):
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
