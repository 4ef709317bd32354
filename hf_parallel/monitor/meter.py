"""The time that steps of this rank take, and what they do meanwhile.

    meter.begin("trainer")                # a step begins
    with meter.phase(DATA): ...           # its batches are read
    with meter.phase(COMPUTE): ...        # forward and backward of a micro-batch
    meter.end("trainer")                  # the optimizer's step is done
    window = meter.take()                 # the steps since the last call, in seconds

Waits for other ranks are taken out of the phase they fall in. What is in no phase (clipping, the optimizer, callbacks)
is the rest of the step.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field

import torch
import torch.distributed as dist

from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.monitor.waits import Clock, DeviceClock, HostClock, Mark, Waits

#: Of the keys under which a Trainer logs what is measured.
PREFIX = "perf/"

# ---- Sets of moments: sorted intervals that do not touch, as (begin, end) in whatever unit --------------------------


Interval = tuple[float, float]


def unite_intervals(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Join intervals, so that each moment counts once; pauses of up to `gap` are part of it."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def intersect_intervals(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the time that both hold; each of them a union."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the time that the first holds and the second does not; each of them a union."""
    bounds = [-float("inf"), *(moment for interval in other for moment in interval), float("inf")]
    return intersect_intervals(one, list(zip(bounds[::2], bounds[1::2], strict=True)))


def sum_lengths(intervals: list[Interval]) -> float:
    """Return the length of all of them together."""
    return sum(end - begin for begin, end in intervals)


STEP, DATA, COMPUTE, REST = "step", "data", "compute", "rest"
#: Of how many steps one is looked into by `basic`: marks of each collective cost the host some time.
EVERY = 4

_Spans = list[tuple[tuple[str, str], Mark, Mark]]  # phase and axis ("" for the phase itself), begin, end


@dataclass
class Window:
    """Steps between two readings. `seconds` by (phase, axis) of the `looked` steps that were looked into, which took
    `looked_seconds`; `tokens`, `rows` and `calls` of this rank's batches."""

    steps: int = 0
    step_seconds: float = 0.0
    looked: int = 0
    looked_seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    calls: int = 0
    seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def waits(self) -> dict[str, float]:
        """Return seconds of waiting by axis."""
        found: defaultdict[str, float] = defaultdict(float)
        for (_, axis), seconds in self.seconds.items():
            if axis:
                found[axis] += seconds
        return dict(found)

    def own(self, phase: str) -> float:
        """Return seconds of a phase without its waits."""
        waits = sum(s for (where, axis), s in self.seconds.items() if where == phase and axis)
        if phase == REST:
            return self.looked_seconds - waits - self.seconds[DATA, ""] - self.seconds[COMPUTE, ""]
        return self.seconds[phase, ""] - waits


@dataclass
class _Step:
    begin: Mark
    looks: bool
    spans: _Spans = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    calls: int = 0


class Meter:
    """The meter of this process. One step is open at a time, by whoever has begun it."""

    def __init__(self, axes: Mapping[str, str], device: torch.device, full: bool) -> None:
        self.clock: Clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self.waits = Waits(axes, self.clock, self._note)
        self.owner: str | None = None
        self._every = 1 if full else EVERY
        self._phase = REST
        self._step: _Step | None = None
        self._ended: deque[tuple[_Step, Mark]] = deque()  # not read yet, with the mark of their end
        self._window = Window()
        self._count = 0
        self.waits.start(device)

    def begin(self, owner: str) -> None:
        """Start a step. A step that was never ended is discarded."""
        self.clock.begin()
        looks = self._count % self._every == 0
        self.owner, self._phase = owner, REST
        self._step = _Step(self.clock.mark(), looks)
        self.waits.open = looks

    def end(self, owner: str) -> None:
        """End the step, if this owner has begun it."""
        step = self._step
        if step is None or self.owner != owner:
            return
        self._step, self.owner, self.waits.open = None, None, False
        self._count += 1
        self._ended.append((step, self.clock.mark()))
        self._read()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count time for this phase; inside of another phase it stays that one's."""
        step = self._step
        if step is None or not step.looks or self._phase != REST:
            yield
            return
        begin, self._phase = self.clock.mark(), name
        try:
            yield
        finally:
            self._phase = REST
            step.spans.append(((name, ""), begin, self.clock.mark()))

    def count(self, tokens: int, rows: int) -> None:
        """Count tokens and sequences of one more call of the model in the open step."""
        if self._step is not None:
            self._step.tokens += tokens
            self._step.rows += rows
            self._step.calls += 1

    def _note(self, axis: str, begin: Mark, end: Mark) -> None:
        step = self._step
        if step is not None:
            step.spans.append(((self._phase, axis), begin, end))

    def _read(self) -> None:
        """Read the ended steps that the device is past."""
        while self._ended and self.clock.is_past(self._ended[0][1]):
            step, end = self._ended.popleft()
            window, seconds = self._window, self.clock.seconds(step.begin, end)
            window.steps += 1
            window.step_seconds += seconds
            window.tokens, window.rows = window.tokens + step.tokens, window.rows + step.rows
            window.calls += step.calls
            if step.looks:
                window.looked += 1
                window.looked_seconds += seconds
            for key, begin, until in step.spans:
                window.seconds[key] += self.clock.seconds(begin, until)
                self.clock.release(begin, until)
            self.clock.release(step.begin, end)

    def take(self) -> Window:
        """Return the steps since the last call."""
        self._read()
        taken, self._window = self._window, Window()
        self._count = 0
        return taken

    def give_back(self, window: Window) -> None:
        """Give back what was just taken: another rank's device is not past a step yet."""
        self._window = window

    def stop(self) -> None:
        """Measure no more."""
        self.waits.stop()


# ---- From what each rank has measured to what is logged: one row of numbers per rank, gathered once per logging
# rows = gather(own_row(window, device), device)          # collective; the same on all ranks
# figures(rows, config, ...)                              # {"perf/step_time_s": …}


GIB = 2**30
#: Axes as they are logged, and which of the mesh's they are.
AXES = {
    "tp": ("tp", *TP_AXES),
    "dp": ("dp", "dp_shard", "dp_replicate", "data", "ep_shard"),
    "cp": ("cp",),
    "ep": ("ep",),
}
PIPELINE = "pp"


@dataclass(frozen=True)
class RankRow:
    """The measurements of one rank: seconds of a mean step, by what they go to; counts per step; bytes.

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
        """Return seconds that the step waits for other ranks, but for those of other stages."""
        return self.tp + self.dp + self.cp + self.ep + self.all

    @property
    def looked(self) -> float:
        """Return seconds of the steps that were looked into, of which the parts are parts."""
        return self.data + self.compute + self.rest + self.communication + self.pp

    def to_dict(self) -> dict[str, float]:
        """JSON-ready, with 4 significant digits but for counts of bytes."""
        return {name: round_to_significant(value) for name, value in asdict(self).items()}


def make_own_row(window: Window, device: torch.device) -> RankRow:
    """Return the measurements of this rank."""
    steps, looked = max(1, window.steps), max(1, window.looked)
    waits = window.waits()
    by_axis = {axis: sum(waits.pop(name, 0.0) for name in names) for axis, names in AXES.items()}
    pipeline = waits.pop(PIPELINE, 0.0)
    peak, reserved = measure_memory(device)
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


def gather_rows(own: RankRow, device: torch.device) -> list[RankRow]:
    """Return the rows of all ranks, in their order. Collective: one small gather."""
    values = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return [RankRow(*row) for row in torch.stack(found).tolist()]


def measure_memory(device: torch.device) -> tuple[float, float]:
    """Return bytes of tensors at the fullest moment so far, and those that torch's allocator holds now.

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


def compute_figures(rows: list[RankRow], data_ranks: int, sizes: Mapping[str, int], full: bool) -> dict[str, float]:
    """Return what is logged. Shares are means over ranks, memory is that of the fullest rank.

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
        "compute_share": _compute_share(rows, "compute"),
        "communication_share": _compute_share(rows, "communication"),
        "bubble_share": _compute_share(rows, PIPELINE),
        "data_wait_share": _compute_share(rows, "data"),
        "other_share": _compute_share(rows, "rest"),
    }
    if full:
        on = [axis for axis, names in AXES.items() if any(sizes.get(name, 1) > 1 for name in names)]
        on += [PIPELINE] if sizes.get(PIPELINE, 1) > 1 else []
        found |= {f"communication_share_{axis}": _compute_share(rows, axis) for axis in on}
    found["memory_peak_gib"] = max(row.memory_peak for row in rows) / GIB
    found["memory_reserved_gib"] = max(row.memory_reserved for row in rows) / GIB
    return {f"{PREFIX}{name}": round_to_significant(value) for name, value in found.items()}


def _compute_share(rows: list[RankRow], part: str) -> float:
    return sum(getattr(row, part) / row.looked for row in rows if row.looked) / len(rows)


def compute_mfu(tokens_per_second_per_device: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation: those of a training step that are the model's own, over what the device can do."""
    return tokens_per_second_per_device * flops_per_token / peak


def round_to_significant(value: float) -> float:
    """Round to four digits; whole numbers stay."""
    if value == 0 or not math.isfinite(value) or value == int(value):
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
