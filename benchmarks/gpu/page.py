"""One page of what the parts have found: tokens per second, waits, memory beside plan, and each verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from hf_parallel.check.report import FAILED

NAME = "gpu.md"
_GIB = 2**30


def write_page(folder: str, parts: Sequence[str], not_run: Mapping[str, str]) -> Path:
    """Write FOLDER/gpu.md from the parts' JSON files, and return its path.

    Args:
        not_run: parts that were left out, and why.
    """
    found = {part: json.loads(Path(folder, f"{part}.json").read_text()) for part in parts if part not in not_run}
    rows = {part: report["rows"] for part, report in found.items()}
    devices = sorted({row["found"] for some in rows.values() for row in some if row["what"] == "device"})
    lines = [f"# `make gpu` on {date.today()}", "", *devices, ""]
    lines += _section(
        "Speed", _SPEED, [_speed(row) for row in rows.get("speed", ()) if "tokens_per_s" in row["values"]]
    )
    lines += _section("Memory", _MEMORY, [_memory(row) for row in rows.get("memory", ()) if "dry" in row["values"]])
    waits = [[row["what"], row["found"]] for row in rows.get("syncs", ()) if "by_rank" in row["values"]]
    waits += [[row["what"], row["found"]] for row in rows.get("layouts", ()) if "waits_alone" in row["values"]]
    lines += _section("Waits of the host", ("layout", "a step"), waits)
    context = [
        [row["what"], row["found"], row["expected"]] for row in rows.get("context", ()) if row["part"] == "context"
    ]
    lines += _section("Long sequences", ("way, tokens", "a step", "of"), context)
    verdicts = [[part, report["verdict"], _seconds(report)] for part, report in found.items()]
    verdicts += [[part, f"NOT RUN: {why}", ""] for part, why in not_run.items()]
    lines += _section("Parts", ("part", "verdict", "time"), verdicts)
    wrong = [
        [row["part"], row["what"], row["found"]] for some in rows.values() for row in some if row["status"] == FAILED
    ]
    lines += _section("Failed", ("part", "what", "found"), wrong)
    path = Path(folder, NAME)
    path.write_text("\n".join(lines))
    return path


def _section(title: str, heads: Sequence[str], rows: Sequence[Iterable[str]]) -> list[str]:
    if not rows:
        return []
    table = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return [f"## {title}", "", *table, *(f"| {' | '.join(cells)} |" for cells in rows), ""]


_SPEED = (
    "Llama or Qwen3, layout, batch",
    "tokens/s",
    "MFU",
    "step",
    "planned without links",
    "kernels",
    "host",
    "idle",
)


def _speed(row: dict[str, Any]) -> list[str]:
    from benchmarks.gpu.speed import SENT

    found = row["values"]
    alone = sum(ms for kind, ms in found["planned_ms"].items() if not kind.endswith(SENT))
    shares = ["" if found[name] is None else f"{found[name]:.0%}" for name in ("mfu", "idle")]
    times = [f"{ms:.0f} ms" for ms in (found["wall_ms"], alone, found["host_ms"])]
    return [
        row["what"],
        f"{found['tokens_per_s']:,.0f}",
        shares[0],
        *times[:2],
        f"{found['kernels']:,}",
        times[2],
        shares[1],
    ]


_MEMORY = ("layout", "allocated", "reserved", "dry run", "planned", "off")


def _memory(row: dict[str, Any]) -> list[str]:
    found = row["values"]
    planned, measured = sum(found["planned"].values()), found["allocated"] or sum(found["seen"].values())
    sizes = (measured, found["reserved"], sum(found["dry"].values()), planned)
    return [row["what"], *(f"{size / _GIB:.2f} GiB" for size in sizes), f"{planned / measured - 1:+.1%}"]


def _seconds(report: dict[str, Any]) -> str:
    return next((row["found"] for row in report["rows"] if row["what"] == "time"), "")
