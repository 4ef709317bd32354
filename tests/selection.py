"""Which cases a plain `make test` runs, of tests whose cases would take longer than they may.

    smoke      one case of every test, and in every file each axis and each pair of axes that its cases have
    covering   of a test, what shows a value or a pair of values that no case before has, while its seconds last

Cases come in the order of a hash of their names, and a choice looks at nothing outside its file: which cases run does
not change when a case is added elsewhere, or when only some files are run.

At each commit CI runs half of the long files, and all files that take at most three seconds (`--half commit`). The
commit's own name says which half, so a commit is always tested by the same files, and a few commits by all files.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tests import distributed

#: Seconds of a core per case of each test, as `pytest --record-seconds` measures them.
SECONDS = Path(__file__).parent / "results" / "seconds.json"
#: What the cases of one test may take in a plain run, beyond its first and what shows the axes of its file.
PER_TEST = 0.7
#: A plain run takes every case of these: each is a command of a page.
EVERY_CASE = {"tests/processes/test_docs.py::test_command"}
#: What all cases of a plain run may take together: 24 minutes of two workers on the machine of the measurements.
PER_RUN = 2870.0
#: A test of which one case takes longer runs under `--all` alone.
LONGEST_CASE = 7.0
#: What half of the files may take, and what a file takes at most that is in both halves.
PER_HALF, IN_BOTH_HALVES = 1500.0, 3.0
#: What one test and all of them may take under `--quick`.
QUICK_TEST, QUICK_RUN = 0.5, 45.0
#: A test that refers to one of these starts processes.
STARTERS = (subprocess, multiprocessing, distributed, distributed.run, distributed.run_alone)
#: Fixtures that start processes.
STARTING_FIXTURES = {"distributed", "runs", "trl_runs"}
#: Of a case that nobody has measured, by folder: forked ranks and a reference, or arithmetic.
UNMEASURED, OF_ARITHMETIC = 3.0, {"unit": 0.05, "planner": 0.2}

_AXIS = re.compile(r"\b(dp_replicate|dp_shard|pp|tp|cp|ep)(?:_size)?=(-?\d+)")
_SETTING = re.compile(r"\b([a-z_]+)=([\w.]+)")


@dataclass(frozen=True)
class Case:
    """One item of pytest: its name, its test (the name without parameters), the values it runs with."""

    name: str
    test: str
    values: frozenset[str] = frozenset()

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]

    @property
    def axes(self) -> set[tuple[str, ...]]:
        """The axes that are on, and pairs of them; one that is on alone too, as nothing of the others is then made."""
        on = sorted(value for value in self.values if value in AXES)
        return {*combinations(on, 1), *combinations(on, 2), *((axis, "alone") for axis in on if len(on) == 1)}

    @property
    def place(self) -> bytes:
        """Where it stands among others."""
        return hashlib.sha256(self.name.encode()).digest()


AXES = ("dp_replicate", "dp_shard", "pp", "tp", "cp", "ep")


def values(parameters: dict[str, Any], specs: Iterable[str] = ()) -> frozenset[str]:
    """What a case runs with: axes that are on, settings of its spec, and its other parameters."""
    found: set[str] = set()
    for name, value in [*parameters.items(), *(("spec", spec) for spec in specs)]:
        text = str(value)
        if isinstance(value, str) and _AXIS.search(text):
            found |= {axis for axis, size in _AXIS.findall(text) if size != "1"}
            found |= {f"{key}={setting}" for key, setting in _SETTING.findall(text) if not _AXIS.match(f"{key}=1")}
        else:
            found.add(f"{name}={re.sub(r' at 0x[0-9a-f]+', '', text)}")
    return frozenset(found)


def choose(cases: Iterable[Case], seconds: dict[str, float], per_test: float = PER_TEST) -> set[str]:
    """Names of the cases that a plain run takes."""
    files: dict[str, dict[str, list[Case]]] = {}
    for case in sorted(cases, key=lambda case: case.place):
        if cost(case.test, seconds) > LONGEST_CASE:
            continue
        files.setdefault(case.file, {}).setdefault(case.test, []).append(case)
    return {case.name for tests in files.values() for case in _of_file(tests, seconds, per_test)}


def _of_file(tests: dict[str, list[Case]], seconds: dict[str, float], per_test: float) -> list[Case]:
    shown: set[tuple[str, ...]] = set()
    taken: list[Case] = []
    for test, cases in tests.items():
        first = max(cases, key=lambda case: len(case.axes - shown))  # of equals the one whose place is first
        taken += _of_test(first, cases, cost(test, seconds), per_test)
        shown.update(*(case.axes for case in taken))
    for case in sorted((case for cases in tests.values() for case in cases), key=lambda case: case.place):
        if not case.axes <= shown:
            taken.append(case)
            shown |= case.axes
    return taken


def _of_test(first: Case, cases: list[Case], each: float, per_test: float) -> list[Case]:
    """All if there is time; else the first, then what shows new values, then what shows new pairs of them."""
    if len(cases) * each <= per_test or first.test in EVERY_CASE:
        return cases
    taken, shown = [first], _together(first, 1) | _together(first, 2)
    for number in (1, 2):
        for case in cases:
            if not _together(case, number) <= shown and (len(taken) + 1) * each <= per_test:
                taken.append(case)
                shown |= _together(case, 1) | _together(case, 2)
    return taken


def choose_half(files: dict[str, float], half: int) -> set[str]:
    """Return the files of half 0 or 1, given the seconds of each file; the hash of its name puts it into a half."""
    halves = {file: hashlib.sha256(file.encode()).digest()[5] % 2 for file in files}
    return {file for file, seconds in files.items() if seconds <= IN_BOTH_HALVES or halves[file] == half}


def half_of_commit(root: Path) -> int:
    """Return the half that the commit of a checkout runs; 0 where there is no git."""
    if shutil.which("git") is None:
        return 0
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return int(asked.stdout.strip() or "0", 16) % 2 if asked.returncode == 0 else 0


def _together(case: Case, number: int) -> set[tuple[str, ...]]:
    return set(combinations(sorted(case.values), number))


def recorded() -> dict[str, float]:
    """Seconds per case of each test that was measured."""
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def is_there(test: str) -> bool:
    """Does its file still define a test?"""
    file, _, name = test.partition("::")
    path = SECONDS.parents[2] / file
    return path.is_file() and f"def {name.rpartition('::')[2]}(" in path.read_text()


def cost(test: str, seconds: dict[str, float]) -> float:
    """Seconds of one case of a test."""
    folder = test.split("/")[1] if test.count("/") > 1 else ""
    return seconds.get(test, OF_ARITHMETIC.get(folder, UNMEASURED))


def starts_processes(function: Callable[..., Any], seen: set[int] | None = None) -> bool:
    """Does a function of the tests fork, or start a command, itself or through others of the tests?"""
    seen = set() if seen is None else seen
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return False
    seen.add(id(code))
    for name in _names(code):
        value = function.__globals__.get(name)
        if value in STARTERS or (value is os and "fork" in _names(code)):
            return True
        own = getattr(value, "__module__", None) or ""
        if callable(value) and own.startswith("tests.") and starts_processes(value, seen):
            return True
    return False


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def shown_axes(cases: Iterable[Case]) -> list[str]:
    """A line per file: how many of its cases have an axis on, alone, or a pair of axes."""
    files: dict[str, Counter[str]] = {}
    for case in cases:
        files.setdefault(case.file, Counter()).update("×".join(axes) for axes in case.axes if axes[-1] != "alone")
        files[case.file].update(f"{axes[0]} alone" for axes in case.axes if axes[-1] == "alone")
    return [
        f"{file}: " + ", ".join(f"{axes} {number}" for axes, number in sorted(counted.items()))
        for file, counted in sorted(files.items())
        if counted
    ]
