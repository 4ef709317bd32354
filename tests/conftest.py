"""Fixtures of the whole suite, and the recorder behind the README's support matrix."""

import json
import re
import resource
from collections import Counter
from pathlib import Path

import pytest
import torch

import tests.distributed
from hf_parallel.axes.data import zero
from tests import selection, support_matrix, training

RESULTS = Path(__file__).parent / "results" / "support.json"
#: Seconds that a plain run of these files is chosen to take; a quick run tells whether they are too many.
CHOSEN = pytest.StashKey[float]()


@pytest.fixture(scope="session", autouse=True)
def replicas_by_layer():
    """Tests have tiny models, which replicas reduce at once; those of users are mostly too large for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "BUCKET", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def uncalibrated(tmp_path_factory):
    """What somebody has measured on this machine changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_PARALLEL_CALIBRATION", str(tmp_path_factory.getbasetemp() / "no_calibration.json"))
        yield


@pytest.fixture(scope="session")
def distributed():
    """`run(fn, world_size, *args)`: call a function on forked ranks; see `tests/distributed.py`."""
    return tests.distributed.run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Trainer scripts, run once per session in one process and once per layout; see `tests/training.py`."""
    return training.Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def trl_runs(tmp_path_factory):
    """TRL's own scripts, in the same way; see `tests/trl_scripts.py`. Tests that take it skip where TRL is missing."""
    from tests import trl_scripts

    return trl_scripts.TrlRuns(tmp_path_factory.mktemp("trl"))


def pytest_addoption(parser):
    """`--all` runs every combination; `--record-support` and `--add-support` too, for the README's support matrix."""
    parser.addoption("--all", action="store_true", help="run every combination of models, layouts and settings")
    parser.addoption(
        "--half", choices=("0", "1", "commit"), help="run half of the files, by their names or the commit"
    )
    parser.addoption("--quick", action="store_true", help="run a minute of tests that start no process")
    parser.addoption("--record-support", action="store_true", help="write tests/results/support.json")
    parser.addoption("--add-support", action="store_true", help="the same for a part of the tests: keep other cells")
    parser.addoption("--record-seconds", action="store_true", help="write what the cases of each test take")
    parser.addoption("--axes", action="store_true", help="with --collect-only: list which axes each file shows")


def pytest_configure(config):
    """Register the marker, and the recorder if it is wanted."""
    keep_forking_possible()
    config.addinivalue_line(
        "markers", "support([spec,] row, outcome='passed'): the cell of the support matrix this test stands for"
    )
    if config.getoption("--record-support") or config.getoption("--add-support"):
        config.pluginmanager.register(Recorder(config.getoption("--add-support")), "support-recorder")
    config.option.loadscopereorder = False  # files come as sorted here, not by how many tests they have
    if config.getoption("--half") == "commit":
        config.option.half = str(selection.half_of_commit(config.rootpath))
    if config.getoption("--record-seconds"):
        config.pluginmanager.register(SecondsRecorder(writes=not hasattr(config, "workerinput")), "seconds-recorder")


def keep_forking_possible():
    """Let this process run backward passes of dry runs, and still fork, where torch has CUDA and the machine no GPU.

    Fake tensors then make torch believe in a device, for which the first backward pass starts a thread; forked ranks
    could not run one any more.
    """
    if torch.version.cuda and not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).sum().backward()  # starts what threads there will be: none so far
        torch.autograd.set_multithreading_enabled(False)


def pytest_make_parametrize_id(val, argname):
    """A layout by a name that `-k` can select, in every test: `tp=2,pp=2` is `tp2_pp2`."""
    if argname in ("spec", "source") and isinstance(val, str) and re.fullmatch(r"\w+=[^,=]+(,\w+=[^,=]+)*", val):
        return training.spec_id(val)
    return None


def pytest_collection_modifyitems(config, items):
    """Leave out combinations whose parts other tests show, unless all are asked for, or some by name."""
    unknown = {found[1] for item in items if (found := support_matrix.cell(item)) is not None} - support_matrix.ROWS
    if unknown:  # else the matrix could not be written once all of it has run
        raise pytest.UsageError(f"rows {sorted(unknown)} are not in TABLES of tests/support_matrix.py")
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
    _choose(config, items)
    if config.getoption("dist", "no") == "loadfile" or hasattr(config, "workerinput"):
        _put_long_files_first(items)


def _choose(config, items):
    chosen = any(config.getoption(option) for option in ("--all", "--record-support", "--add-support", "keyword"))
    if chosen or any("::" in argument for argument in config.args):
        return
    seconds, cases = selection.recorded(), [_case(item) for item in items]
    names = selection.choose(cases, seconds)
    if (half := config.getoption("--half")) is not None:
        names = _halve([case for case in cases if case.name in names], seconds, int(half))
    config.stash[CHOSEN] = sum(selection.cost(case.test, seconds) for case in cases if case.name in names)
    _keep(config, items, _quick(items) if config.getoption("--quick") else names)


def _halve(cases, seconds, half) -> set[str]:
    """Names of the cases of one half of the files."""
    files = Counter()
    for case in cases:
        files[case.file] += selection.cost(case.test, seconds)
    kept = selection.choose_half(files, half)
    return {case.name for case in cases if case.file in kept}


def _put_long_files_first(items):
    """Sort files by what their cases take: the worker that ends first waits for the other's last file."""
    seconds, files = selection.recorded(), Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        files[test.partition("::")[0]] += selection.cost(test, seconds)
    items.sort(key=lambda item: -files[item.nodeid.partition("::")[0]])


def _keep(config, items, names):
    left_out = [item for item in items if item.nodeid not in names]
    items[:] = [item for item in items if item.nodeid in names]
    config.hook.pytest_deselected(items=left_out)


def _quick(items) -> set[str]:
    """Names of the cases of a quick run: short ones that start no process, of each test first one."""
    seconds, left, chosen = selection.recorded(), selection.QUICK_RUN, set()
    ranked, number = [], Counter()
    for case in sorted((_case(item) for item in items if not _starts_processes(item)), key=lambda case: case.place):
        ranked.append((number[case.test], case))
        number[case.test] += 1
    for _, case in sorted(ranked, key=lambda pair: pair[0]):
        cost = selection.cost(case.test, seconds)
        if cost <= min(selection.QUICK_TEST, left):
            left -= cost
            chosen.add(case.name)
    return chosen


def _starts_processes(item) -> bool:
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    named = selection.STARTING_FIXTURES & set(item.fixturenames)
    return bool(named) or any(map(selection.starts_processes, [item.function, *fixtures]))


def _case(item) -> selection.Case:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    specs = [marker.args[0] for marker in item.iter_markers("support") if len(marker.args) == 2]
    return selection.Case(item.nodeid, item.nodeid.partition("[")[0], selection.values(parameters, specs))


def pytest_terminal_summary(terminalreporter, config):
    """What a plain run is expected to take; with `--axes` how many cases of each file show an axis or a pair."""
    if CHOSEN in config.stash and not config.getoption("--quick"):
        if (half := config.getoption("--half")) is not None:
            other = f"`make test HALF={1 - int(half)}` runs the other"
            terminalreporter.write_line(f"half {half} of the long files was run; {other}")
        terminalreporter.write_line(f"about {config.stash[CHOSEN]:.0f} s of work, half as long with two workers")
    if config.getoption("--axes"):
        terminalreporter.write_line("\n".join(selection.shown_axes(map(_case, terminalreporter._session.items))))


class Recorder:
    """Collects outcomes by (layout, column); a cell fails when one of its tests fails, errors included."""

    def __init__(self, adds: bool = False):
        self.cells: dict[str, dict[str, str]] = {}
        self.adds = adds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Note the outcome of each phase of a marked test."""
        report = yield
        marker = item.get_closest_marker("support")
        if marker is not None and (report.failed or (report.when == "call" and report.passed)):
            layout, row = support_matrix.cell(item)
            rows = self.cells.setdefault(layout, {})
            if rows.get(row) != "failed":
                rows[row] = "failed" if report.failed else marker.kwargs.get("outcome", "passed")
        return report

    def pytest_sessionfinish(self):
        """Write the results file."""
        RESULTS.parent.mkdir(exist_ok=True)
        commits = {row: support_matrix.commit() for column in self.cells.values() for row in column}
        results = {"versions": support_matrix.versions(), "commits": commits, "cells": self.cells}
        if self.adds and RESULTS.exists():
            results = support_matrix.added(json.loads(RESULTS.read_text()), results)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


class SecondsRecorder:
    """Writes the mean over a test's cases, set-up included, for `tests/selection.py`; of tests that ran only.

    Counted are seconds of a core, of this process and of those that it started and waited for: they are nearly the
    same on a machine that does something else too. Waiting is free, as the other worker then has both cores.
    """

    def __init__(self, writes: bool):
        self.seconds, self.cases = Counter(), Counter()
        self.writes, self.before = writes, core_seconds()

    def pytest_runtest_logstart(self):
        """What lies between two tests is of neither."""
        self.before = core_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Note in the report of a phase, which goes to the process that writes, what the phase took."""
        report = yield
        now = core_seconds()
        report.core_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report):
        """Of each phase; with several workers they all report here."""
        test = report.nodeid.partition("[")[0]
        self.seconds[test] += report.core_seconds
        self.cases[test] += report.when == "call"

    def pytest_sessionfinish(self):
        """Tests that did not run keep what was measured before, while their files have them."""
        if not self.writes:
            return
        means = {test: round(self.seconds[test] / cases, 2) for test, cases in self.cases.items() if cases}
        every = {**selection.recorded(), **means}
        there = {test: every[test] for test in sorted(every) if selection.is_there(test)}
        selection.SECONDS.write_text(json.dumps(there, indent=0) + "\n")


def core_seconds() -> float:
    """Seconds that cores have worked for this process and for its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
