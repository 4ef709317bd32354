"""What was found about a model and a spec, and how it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

_ORIGINS = {"plan": "model's plan", "inferred": "structure", "known": "known kind"}
_HEADINGS = ("module", "style", "from", "whole -> per rank", "stays whole")


@dataclass
class Split:
    """Modules of one pattern that tp treats alike. `per_rank`: of the first tp rank; no rank has more."""

    pattern: str
    modules: list[str]
    style: str
    origin: str
    whole: tuple[int, ...]
    per_rank: tuple[int, ...]
    stays_whole: tuple[str, ...]


@dataclass
class PipelineRank:
    """What one place along pp holds; without pp the whole model. `parameters` and `bytes`: of its fullest rank."""

    stages: list[int]
    layers: list[str]
    others: list[str]
    parameters: int
    bytes: int


@dataclass
class Report:
    """What `examine` found. What cannot be known because of a problem is left out."""

    model: str
    dtype: str
    axes: dict[str, int] = field(default_factory=dict)
    splits: list[Split] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    pipeline: list[PipelineRank] = field(default_factory=list)
    parameters_per_rank: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {"works": not self.problems, **dataclasses.asdict(self)}


def render(report: Report) -> str:
    """The report for people."""
    sizes = " x ".join(f"{axis}={size}" for axis, size in report.axes.items())
    lines = [f"{report.model} ({report.dtype}) on {_many(math.prod(report.axes.values()), 'process')}: {sizes}", ""]
    if report.splits:
        lines += [*_aligned([_HEADINGS, *map(_row, report.splits)]), ""]
    return "\n".join([*lines, *_aligned(list(_facts(report)))])


def _row(split: Split) -> tuple[str, ...]:
    count = f" ×{len(split.modules)}" if len(split.modules) > 1 else ""
    shape = str(list(split.whole))
    if split.per_rank != split.whole:
        shape += f" -> {list(split.per_rank)}"
    whole = ", ".join(split.stays_whole)
    return split.pattern + count, split.style, _ORIGINS.get(split.origin, split.origin), shape, whole


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield from report.facts.items()
    for place in report.pipeline:
        stored = f"{place.parameters:,} parameters, {shown_size(place.bytes)}"
        if place.stages:
            yield f"stage {' and '.join(map(str, place.stages))}", ", ".join([*place.layers, *place.others])
            yield "", f"fullest rank: {stored}"
        else:
            yield "fullest rank", stored
    yield from (("note", note) for note in report.notes)
    yield from (("stops it", problem) for problem in report.problems)
    if not report.problems:
        yield "works", "nothing stops it"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _many(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}es"


def shown_size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
