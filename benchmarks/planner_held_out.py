"""How good is the planner on rows that it was not fitted on? Each series of published rows, predicted without it.

    python -m benchmarks.planner_held_out published_layouts.json published_layouts_2.csv              # 5 minutes
    python -m benchmarks.planner_held_out published_layouts.json published_layouts_2.csv --fit-memory # on all rows

For each series the efficiencies of its type of GPU (15, of `planner_fit.PRIOR`) and the four numbers of memory outside
of tensors are fitted on the rows of all other series. Types without an efficiency of their own keep the catalogue's,
which no row of theirs has moved.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published
from benchmarks.planner_fit import TYPES, fit, gpu_family, predicted_seconds
from hf_parallel.planner import find_gpu
from hf_parallel.planner.hardware import HEADROOM
from hf_parallel.planner.layout import HABITS
from hf_parallel.planner.memory import CONTEXT_GIB, FRAGMENTATION, GIB, find_fullest

PRECISIONS = ("bf16", "fp16", "fp8")
#: So near the first are layouts that a user would try as well: half of all step times are predicted less exactly.
NEAR = 0.03
_MOST_FITTED = 60  # of a series: more take longer, and say the same
#: How strongly the start of a fit pulls. With less, leaving out a series trades one number for another.
_PULL = 3.0
#: GiB outside of tensors, and the part of activations, temporaries and gathered weights that torch's allocator holds
#: beyond need: where a fit starts, and the range of each.
MEMORY = {
    "context": (1.0, 0.4, 1.5),
    "communicator": (1.0, 0.0, 2.0),
    "bucket": (1.0, 0.0, 3.0),
    "held": (0.3, 0.0, 0.6),
}
NOW = {"context": CONTEXT_GIB, "held": FRAGMENTATION}
NOW |= {"communicator": HABITS["standard"].communicator_gib, "bucket": HABITS["standard"].bucket_gib}


@dataclasses.dataclass(frozen=True)
class Room:
    """What a row's prediction is made of, in GiB, so that other numbers outside of tensors can be tried."""

    row: published.Row
    tensors: float
    passing: float
    axes: int
    buckets: bool
    capacity: float

    def figures(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return allocated, reserved, shown by a monitor, and needed."""
        outside = numbers["context"] + self.axes * numbers["communicator"] + self.buckets * numbers["bucket"]
        needed = self.tensors + outside
        shown = max(needed, min(needed + numbers["held"] * self.passing, self.capacity))
        reserved = shown - outside
        return {"allocated_gib": self.tensors, "reserved_gib": reserved, "memory_gib": shown, "needed": needed}

    def error(self, numbers: dict[str, float]) -> float:
        """Return the relative error of the figure that the row states."""
        return self.figures(numbers)[published.memory_figure(self.row)] / self.row["memory_gib"] - 1

    def fits(self, numbers: dict[str, float], headroom: float = HEADROOM) -> bool:
        """Say whether the row's layout fits, with so many percent to spare."""
        return self.figures(numbers)["needed"] <= self.capacity * (1 - headroom / 100)


def read_room(row: published.Row) -> Room:
    """Predict a row's memory."""
    found = published.call(row)
    layout, rank = found.layout, find_fullest(list(found.breakdown.ranks))
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
    buckets = layout.zero_stage in (1, 2) and layout.dp > 1 and found.job.habits.bucket_gib > 0
    passing = sum(rank.kinds[kind] for kind in ("activations", "temporaries", "gathered"))
    return Room(row, rank.tensors / GIB, passing / GIB, axes, buckets, found.cluster.gpu.memory_gib)


def fit_memory(measured: list[Room], ran_or_not: list[Room], seed: int = 0) -> dict[str, float]:
    """Return the four numbers with the smallest errors of measured rows and the fewest wrong answers about others.

    Where a fit starts pulls, as the prior of the efficiencies does.
    """
    rng, found = random.Random(seed), {name: values[0] for name, values in MEMORY.items()}
    sizes = Counter(room.row["series"] for room in (*measured, *ran_or_not))

    def loss(numbers: dict[str, float]) -> float:
        total = sum(sizes[r.row["series"]] ** -0.6 * min(0.5, abs(r.error(numbers))) for r in measured)
        wrong = (r for r in ran_or_not if r.fits(numbers, headroom=0) == bool(r.row.get("oom")))
        total += sum(sizes[r.row["series"]] ** -0.6 * 0.3 for r in wrong)
        away = (((numbers[name] - start) / (high - low)) ** 2 for name, (start, low, high) in MEMORY.items())
        return total + _PULL * sum(away)

    best = loss(found)
    for _ in range(600):
        name = rng.choice(list(MEMORY))
        _, low, high = MEMORY[name]
        tried = {**found, name: min(high, max(low, found[name] + rng.gauss(0, 0.15) * (high - low)))}
        if (value := loss(tried)) < best:
            best, found = value, tried
    return found


def held_out(rows: list[published.Row]) -> None:
    """Print the errors of each series, everything fitted on the others."""
    timed = [row for row in published.with_step_times(rows) if not row.get("experts")]
    measured = [read_room(row) for row in published.of_memory(rows) if not row.get("experts")]
    asked = [read_room(row) for row in published.of_fitting(rows) if not row.get("experts")]
    print("| series | step time: rows | median, p90 | memory: rows | median, p90 | fits with headroom |", end="")
    print(" without | sweeps | median rho | regret: median, largest | of those within 3 % |\n" + "| --- " * 11 + "|")
    everything: list[tuple[published.Row, float]] = []
    for name in sorted({room.row["series"] for room in (*measured, *asked)} | {row["series"] for row in timed}):
        mine = [row for row in timed if row["series"] == name]
        errors = _time_errors(mine, timed)
        everything += errors
        numbers = fit_memory(*([r for r in rooms if r.row["series"] != name] for rooms in (measured, asked)))
        shown = [_series_cells(errors), _memory_cells([r for r in measured if r.row["series"] == name], numbers)]
        shown += [_fit_cells([r for r in asked if r.row["series"] == name], numbers), _order_cells(errors)]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    print(f"| all | {_series_cells(everything)} | | | | | {_order_cells(everything)} |")


def _time_errors(mine: list[published.Row], every: list[published.Row]) -> list[tuple[published.Row, float]]:
    """Return errors of a series' rows, with efficiencies fitted on those of other series where they are of its GPU."""
    found = [(row, published.call(row).step_time_s / row["step_time_s"] - 1) for row in mine]
    fitted = [row for row in every if any(name in str(row["precision"]).lower() for name in PRECISIONS)]
    for gpu in TYPES:
        family = {id(row) for row in gpu_family(mine, gpu)}
        others = [row for row in gpu_family(fitted, gpu) if row["series"] not in {row["series"] for row in mine}]
        if family and others:
            efficiency = dataclasses.replace(find_gpu(gpu).efficiency, **fit(gpu, _some_of_each(others)))
            again = lambda row, efficiency=efficiency: predicted_seconds(row, efficiency) / row["step_time_s"] - 1  # noqa: E731
            found = [(row, again(row) if id(row) in family else error) for row, error in found]
    return found


def _some_of_each(rows: list[published.Row]) -> list[published.Row]:
    """Return `_MOST_FITTED` rows of each series at most, by chance."""
    rows = random.Random(0).sample(rows, len(rows))
    order = {id(row): sum(r["series"] == row["series"] for r in rows[:place]) for place, row in enumerate(rows)}
    return [row for row in rows if order[id(row)] < _MOST_FITTED]


def _two(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"{statistics.median(sizes):.1%}, {sizes[math.ceil(0.9 * len(sizes)) - 1]:.1%}" if sizes else ""


def _series_cells(errors: list[tuple[published.Row, float]]) -> str:
    return f"{len(errors) or ''} | {_two([error for _, error in errors])}"


def _memory_cells(rooms: list[Room], numbers: dict[str, float]) -> str:
    kinds = [published.memory_figure(room.row) for room in rooms]
    said = {"allocated_gib": "allocated", "reserved_gib": "reserved", "memory_gib": "monitor"}
    what = ", ".join(f"{count} {said[kind]}" for kind, count in Counter(kinds).items())
    return f"{what} | {_two([room.error(numbers) for room in rooms])}"


def _fit_cells(rooms: list[Room], numbers: dict[str, float]) -> str:
    if not rooms:
        return " | "
    failed = [room for room in rooms if room.row.get("oom")]
    cells = []
    for headroom in (HEADROOM, 0.0):
        missed = sum(room.fits(numbers, headroom) for room in failed)
        refused = sum(not room.fits(numbers, headroom) for room in rooms if not room.row.get("oom"))
        right = 1 - (missed + refused) / len(rooms)
        cells.append(f"{right:.1%} of {len(rooms)}: {missed} of {len(failed)} that failed, {refused} that ran")
    return " | ".join(cells)


def _order_cells(errors: list[tuple[published.Row, float]]) -> str:
    seconds = {id(row): row["step_time_s"] * (1 + error) for row, error in errors}
    groups = published.groups_of_ranking([row for row, _ in errors])
    if not groups:
        return " | | | "
    rho = statistics.median(published.ranking(group, lambda row: seconds[id(row)])[0] for group in groups)
    regrets = ([published.regret(g, lambda row: seconds[id(row)], within) for g in groups] for within in (0.0, NEAR))
    shown = " | ".join(f"{statistics.median(each):.1%}, {max(each):.1%}" for each in regrets)
    return f"{len(groups)} | {rho:.2f} | {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="files of published layouts, JSON or CSV")
    parser.add_argument("--fit-memory", action="store_true", help="print the four numbers fitted on all rows")
    args = parser.parse_args()
    rows = [row for path in args.rows for row in published.read(path)]
    if args.fit_memory:
        rooms = [[read_room(row) for row in chosen(rows)] for chosen in (published.of_memory, published.of_fitting)]
        found = fit_memory(*([room for room in each if not room.row.get("experts")] for each in rooms))
        print(f"now {NOW}\nfitted {found}")
        for name in sorted({room.row["series"] for each in rooms for room in each}):
            for numbers in (NOW, found):
                mine = ([room for room in each if room.row["series"] == name] for each in rooms)
                print(f"{name:<28}", *(f"{cells(r, numbers):<48}" for cells, r in zip(_CELLS, mine, strict=True)))
    else:
        held_out(rows)


_CELLS = (_memory_cells, _fit_cells)

if __name__ == "__main__":
    main()
