"""Layouts on the pretended device beside one process; only where it is loaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import pretended_cuda as native
import torch

from hf_parallel.axes import compile
from tests import distributed
from tests.cuda import steps
from tests.cuda.layouts import Layout
from tests.cuda.steps import Counted, Run


@dataclass
class Row:
    """A layout beside one process."""

    layout: Layout
    gap: float = float("nan")
    norm_gap: float = float("nan")
    nan: bool = False
    waits: int = 0
    alone: int = 0
    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    launches: tuple[int, int] = (0, 0)
    sent: int = 0
    error: str = ""

    @property
    def wrong(self) -> list[str]:
        """What a test fails with."""
        if self.error:
            return [self.error]
        found = [f"stream: {fault}" for fault in self.faults]
        if self.nan:
            found.append("a loss or a norm is NaN: something was read before it had arrived")
        elif not (self.gap <= self.layout.gap and self.norm_gap <= 10 * self.layout.gap):
            found.append(
                f"losses are off by {self.gap:.1e}, norms by {self.norm_gap:.1e}, {self.layout.gap:.0e} is allowed"
            )
        if self.waits > self.alone + self.layout.waits:
            found.append(f"{self.waits} waits, one process {self.alone}, {self.layout.waits} more are allowed")
            found += self.lines
        return found


def compare(layout: Layout, references: dict[Any, Run], planted: tuple[str, str] | None = None) -> Row:
    """Run a layout, and one process unless `references` has it."""
    row = Row(layout)
    try:
        key = steps.reference_key(layout)
        if key not in references:
            references[key] = distributed.run_alone(train, layout, None, timeout=200)
        alone = references[key]
        with tempfile.TemporaryDirectory() as folder:
            spec = layout.spec.replace("FOLDER", folder)
            ranks = distributed.run(train, layout.ranks, layout, spec, planted, timeout=200)
    except distributed.RankFailure as error:
        row.error = f"{error.kind}: {error}"[-3000:]
        return row
    first = ranks[0]
    if first.tokens != alone.tokens:
        row.error = f"generated {first.tokens}, one process {alone.tokens}"
    numbers = torch.tensor([*first.losses, first.norm])
    row.nan = bool(numbers.isnan().any())
    row.gap, row.norm_gap = steps.gaps(layout, first, alone)
    busiest = max(ranks, key=lambda run: sum(run.waits.values()))
    row.waits, row.alone = sum(busiest.waits.values()), sum(alone.waits.values())
    row.lines = [f"{count:4d} {line}" for line, count in sorted(busiest.waits.items(), key=lambda one: -one[1])]
    row.faults = sorted({fault for run in ranks for fault in run.faults})
    row.launches, row.sent = (max(run.launches for run in ranks), alone.launches), max(run.sent for run in ranks)
    return row


def train(layout: Layout, spec: str | None, planted: tuple[str, str] | None = None) -> Run:
    """Train for a few steps on the pretended device, which has no Triton; `spec` is None in one process."""
    compile.BACKEND = "aot_eager"
    return steps.train(layout, spec, counter=_Counter(planted))


class _Counter:
    """Counts waits, launches and bytes while it is entered, and faults of streams all the time."""

    def __init__(self, planted: tuple[str, str] | None) -> None:
        self._begun = self._ended = (0, 0)
        if planted is not None:
            native.plant(*planted)

    def __enter__(self) -> None:
        native.count_waits(True)
        self._begun = native.launches(), native.sent()

    def __exit__(self, *error: Any) -> None:
        native.count_waits(False)
        self._ended = native.launches(), native.sent()

    @property
    def counted(self) -> Counted:
        """What was counted until now."""
        launches, sent = (ended - begun for ended, begun in zip(self._ended, self._begun, strict=True))
        return Counted(dict(native.waits()), launches, sent, dict(native.faults()))
