"""What the folder of a training holds: layout, logs, measurements, what was said, hangs, checkpoints, profiles.

Every file may lack, be cut off or of another version: what cannot be read is left out.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import TypeAlias

from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.monitor import record
from hf_parallel.spec import refuse

_MOST_RANKS = 1 << 20  # a larger number is no layout
LAYOUT, STATE, HANGS = "hf_parallel.json", "trainer_state.json", "hangs"

Line: TypeAlias = dict  # of a file that the run wrote


@dataclass(frozen=True)
class Checkpoint:
    """A saved model. `whole`: has it the manifest that is written last?"""

    name: str
    step: int
    bytes: int
    time: float
    whole: bool


@dataclass
class Facts:
    """Of one folder.

    Attributes:
        run: the first line of the newest run's record.
        layout: what rank 0 has written at the start.
        metrics: lines of the record, one for each logged step.
        notes: what the monitor has said.
        log: Trainer's `log_history`.
        hangs: sentence of the newest one, then places by rank.
        profiles: pictures of single steps.
    """

    folder: str
    run: Line = field(default_factory=dict)
    layout: Line = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    notes: list[Line] = field(default_factory=list)
    log: list[Line] = field(default_factory=list)
    runs: int = 0
    hangs: list[tuple[str, str]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)

    @property
    def config(self) -> ParallelConfig | None:
        """The layout; None if this version does not know its spec."""
        spec, world = self.run.get("spec") or self.layout.get("spec"), self.run.get("world_size")
        try:
            config = ParallelConfig.parse(spec) if isinstance(spec, str) else None
            if config is not None and isinstance(world, int):
                config = config.resolve(world)
        except SpecError:
            return None
        return config if config is not None and 0 < config.world_size <= _MOST_RANKS else None

    @property
    def plan(self) -> Line:
        """The planner's prediction, if there is one."""
        return mapping(self.run.get("plan"))

    @property
    def is_predicted(self) -> bool:
        """Does the planner know this hardware? Of CPUs it only counts what tensors take."""
        return bool(self.plan) and self.run.get("device") != "cpu"

    @property
    def warm(self) -> list[Line]:
        """The metrics without the first, which holds what happens once."""
        return self.metrics[1:] or self.metrics

    @property
    def ranks(self) -> list[dict[str, float]]:
        """What each rank has measured, a mean over all logs but the first."""
        logs = [rows for line in self.warm if (rows := _rows(line))]
        logs = [rows for rows in logs if len(rows) == len(logs[-1])]  # of the newest number of processes
        return [_mean([rows[rank] for rows in logs]) for rank in range(len(logs[-1]))] if logs else []

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of a logged number, in order."""
        found = {number(line.get("step")): number(line[key]) for line in self.log if key in line}
        return list(found), list(found.values())


def read_facts(folder: str) -> Facts:
    """All that can be read.

    Raises:
        SpecError: nothing of this package is there.
    """
    if not os.path.isdir(folder):
        refuse(folder, "is no folder", do="give the output_dir of a training")
    lines = _record(folder)
    facts = Facts(folder, layout=mapping(_json(os.path.join(folder, LAYOUT))))
    if not lines and not facts.layout:
        refuse(
            folder,
            f"holds neither {LAYOUT} nor {record.FILE}, which a training under a layout writes",
            do="give its output_dir",
        )
    runs = [line for line in lines if line.get("kind") == "run"]
    facts.runs, facts.run = len(runs), runs[-1] if runs else {}
    facts.metrics = _by_step([line for line in lines if line.get("kind") == "metrics"])
    facts.notes = [line for line in lines if line.get("kind") == "note"]
    facts.log = _history(folder) or _as_history(facts.metrics)
    facts.hangs = _hangs(os.path.join(folder, HANGS), _began(facts))
    facts.checkpoints = _checkpoints(folder)
    pictures = [*glob.glob(_within(folder, "profile_step_*.svg")), *glob.glob(_within(folder, "timeline_step_*.svg"))]
    facts.profiles = sorted(pictures, key=lambda path: (_number_in(path), path))
    return facts


# ---- files ----------------------------------------------------------------------------------------------------------


def _json(path: str) -> object:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def _record(folder: str) -> list[Line]:
    try:
        return record.read(folder)
    except (SpecError, OSError, UnicodeDecodeError):
        return []


def _history(folder: str) -> list[Line]:
    """Of the newest state: the folder's own is written at the end, those of checkpoints on the way."""
    places = [folder, *glob.glob(_within(folder, "checkpoint-*"))]
    states = [state for place in places if (state := mapping(_json(os.path.join(place, STATE))))]
    newest = max(states, key=lambda state: number(state.get("global_step"), 0), default={})
    log = newest.get("log_history")
    return [line for line in log if isinstance(line, dict) and "step" in line] if isinstance(log, list) else []


def _as_history(metrics: list[Line]) -> list[Line]:
    """Where nothing was saved: without the loss."""
    return [{"step": line.get("step"), **mapping(line.get("perf"))} for line in metrics]


def _by_step(metrics: list[Line]) -> list[Line]:
    """In order; of a step that was trained twice the later one."""
    found = {number(line.get("step")): line for line in metrics}
    return [found[step] for step in sorted(step for step in found if math.isfinite(step))]


def _began(facts: Facts) -> float:
    """When the newest run did: it writes its layout at its first batch, and its first line when it logs."""
    path = os.path.join(facts.folder, LAYOUT)
    times = [number(facts.run.get("time"), 0.0)] if facts.run else []
    return min([*times, *([os.stat(path).st_mtime] if os.path.isfile(path) else [])], default=0.0)


def _hangs(folder: str, since: float) -> list[tuple[str, str]]:
    """What was found out since, then where each rank was: by its own words, or by those of the rank that told."""

    def _json_of_run(path: str) -> object:
        return _json(path) if os.path.isfile(path) and os.stat(path).st_mtime >= since else None

    report = mapping(_json_of_run(os.path.join(folder, "report.json")))
    found = [("", report["sentence"])] if isinstance(report.get("sentence"), str) else []
    ranks = {f"rank {rank}": mapping(own) for rank, own in mapping(report.get("ranks")).items()}
    for path in glob.glob(_within(folder, "rank_*.json")):
        if own := mapping(_json_of_run(path)):
            ranks[f"rank {_number_in(path)}"] = own
    return found + [(name, _place(ranks[name])) for name in sorted(ranks, key=lambda name: (_number_in(name), name))]


def _place(own: Line) -> str:
    """In words: the error or the place, and the collective that it waits in."""
    words = [str(own[key]) for key in ("absent", "error", "place") if own.get(key)]
    pending = own.get("pending")
    first = mapping(pending[0]) if isinstance(pending, list) and pending else {}
    inside = ", ".join(str(first[key]) for key in ("axis", "module") if first.get(key))
    if first.get("operation"):
        words.append(f"{first['operation']} number {first.get('number')} ({inside})")
    return "; ".join(words)


def _checkpoints(folder: str) -> list[Checkpoint]:
    found = []
    for path in glob.glob(_within(folder, "checkpoint-*")):
        if os.path.isdir(path):
            files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
            sizes = [os.stat(file) for file in files if os.path.isfile(file)]
            when = max([os.stat(path).st_mtime, *(size.st_mtime for size in sizes)])
            whole = os.path.isfile(os.path.join(path, "manifest.json"))
            total = sum(size.st_size for size in sizes)
            found.append(Checkpoint(os.path.basename(path), _number_in(path), total, when, whole))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.name))


def _within(folder: str, pattern: str) -> str:
    return os.path.join(glob.escape(folder), pattern)


def _number_in(path: str) -> int:
    """The last one of its name."""
    numbers = re.findall(r"\d+", os.path.basename(path))
    return int(numbers[-1]) if numbers else 0


# ---- values ---------------------------------------------------------------------------------------------------------


def mapping(value: object) -> Line:
    """Itself, if it is one."""
    return value if isinstance(value, dict) else {}


def number(value: object, otherwise: float = math.nan) -> float:
    """A float; `otherwise` of what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    return float(value)


def numbers(value: object) -> dict[str, float]:
    """The entries of a mapping that are finite numbers."""
    return {str(k): found for k, v in mapping(value).items() if math.isfinite(found := number(v))}


def _rows(line: Line) -> list[dict[str, float]]:
    rows = line.get("ranks")
    return [numbers(row) for row in rows] if isinstance(rows, list) else []


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in rows[0]}
