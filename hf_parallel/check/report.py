"""The findings of a check: rows of one table, and one line of verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_parallel.ranks.groups import format_spans

OK, SLOW, NOTE, SKIPPED, FAILED = "ok", "SLOW", "note", "skipped", "FAILED"
_HEADINGS = ("part", "what", "found", "expected", "")
_WIDEST = 64  # of a column that others follow


@dataclass
class Row:
    """A line of the table. `values`: its numbers, for programs."""

    part: str
    what: str
    found: str
    expected: str = ""
    status: str = OK
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Report:
    """All rows. `stopped`: why the check did not come to its end. `not_run`: what could not be tried here."""

    ranks: int = 1
    rows: list[Row] = field(default_factory=list)
    stopped: str | None = None
    name: str = "hf-parallel check"
    counts: str = "rank"
    not_run: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether there is anything that training would fail at."""
        return self.stopped is not None or any(row.status == FAILED for row in self.rows)

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        wrong = [f"{row.part} {row.what}" for row in self.rows if row.status == FAILED]
        slow = [f"{row.part} {row.what}" for row in self.rows if row.status == SLOW]
        named = wrong or slow
        some = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        ranks = f"{self.ranks} {self.counts}{'s' * (self.ranks != 1)}"
        if self.stopped is not None:
            return f"FAILED on {ranks}: {self.stopped}"
        if wrong:
            return f"FAILED on {ranks}: {some}"
        exact = sum(row.part == "parity" and row.status == OK for row in self.rows)
        numbers = f"; {exact} layouts as in one process" if exact else ""
        numbers += f"; NOT RUN: {', '.join(self.not_run)}" if self.not_run else ""
        if slow:
            return f"works on {ranks}{numbers}, but slower than half of what the planner expects: {some}"
        return f"works on {ranks}{numbers}"

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        about = {"works": not self.failed, "verdict": self.verdict, "ranks": self.ranks}
        return {**about, "not_run": list(self.not_run), "rows": rows}

    def write(self, path: str) -> None:
        """Write the report as a JSON file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    def render(self) -> str:
        """Return the table and the verdict as text."""
        cells = [_HEADINGS, *((row.part, row.what, row.found, row.expected, row.status) for row in self.rows)]
        rows = [(status, *rest) for *rest, status in cells]
        columns = list(zip(*rows, strict=True))
        widths = [max((len(cell) for cell in column if len(cell) <= _WIDEST), default=0) for column in columns]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([*lines, "", f"{self.name}: {self.verdict}"])


def format_ranks(ranks: list[int]) -> str:
    """`0-3 8`, shortened where there are many."""
    shown = format_spans(ranks)
    return " ".join(shown[:8]) + (" …" if len(shown) > 8 else "")
