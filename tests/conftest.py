"""Fixtures of the whole suite, and the recorder behind the README's support matrix."""

import hashlib
import json
from pathlib import Path

import pytest

import tests.distributed
from tests import support_matrix, training

RESULTS = Path(__file__).parent / "results" / "support.json"
#: Of the combinations of each test in these files `make test` runs every n-th, `make test-all` all.
EVERY = {
    "test_dry_run.py": 2,
    "test_elastic.py": 3,
    "test_experts.py": 40,
    "test_families.py": 4,
    "test_idioms.py": 3,
    "test_killed_saves.py": 2,
    "test_lora.py": 4,
    "test_lora_grid.py": 11,
    "test_lora_weights.py": 3,
    "test_loading.py": 2,
    "test_new_heads.py": 3,
    "test_analytic.py": 2,
    "test_pipeline.py": 2,
    "test_resume.py": 2,
    "test_sentence_transformers.py": 2,
    "test_scripts.py": 11,
    "test_trl_layouts.py": 3,
    "test_trainer.py": 2,
    "test_variants.py": 2,
}


@pytest.fixture(scope="session")
def distributed():
    """`run(fn, world_size, *args)`: call a function on forked ranks; see `tests/distributed.py`."""
    return tests.distributed.run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Trainer scripts, run once per session in one process and once per layout; see `tests/training.py`."""
    return training.Runs(tmp_path_factory.mktemp("runs"))


def pytest_addoption(parser):
    """`--all` runs every combination; `--record-support` and `--add-support` too, for the README's support matrix."""
    parser.addoption("--all", action="store_true", help="run every combination of models, layouts and settings")
    parser.addoption("--record-support", action="store_true", help="write tests/results/support.json")
    parser.addoption("--add-support", action="store_true", help="the same for a part of the tests: keep other cells")


def pytest_configure(config):
    """Register the marker, and the recorder if it is wanted."""
    config.addinivalue_line(
        "markers", "support(spec, column, outcome='passed'): the cell of the support matrix this test stands for"
    )
    if config.getoption("--record-support") or config.getoption("--add-support"):
        config.pluginmanager.register(Recorder(config.getoption("--add-support")), "support-recorder")


def pytest_collection_modifyitems(config, items):
    """Leave out combinations whose parts other tests show, unless all are asked for, or some by name."""
    chosen = any(config.getoption(option) for option in ("--all", "--record-support", "--add-support", "keyword"))
    if chosen or any("::" in argument for argument in config.args):
        return
    functions: dict = {}
    for item in items:
        functions.setdefault((item.path, item.originalname), []).append(item)
    chosen = {item for group in functions.values() for item in _some(group, EVERY.get(group[0].path.name, 1))}
    kept, left_out = [item for item in items if item in chosen], [item for item in items if item not in chosen]
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _some(items, step):
    """About one in `step` of a test's cases, at least one; which, does not change when others are added."""
    ranked = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    return [item for place, item in enumerate(ranked) if place == 0 or _number(item) % step == 0]


def _number(item):
    return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:8], "big")


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
            spec, column = marker.args
            row = self.cells.setdefault(support_matrix.layout(spec), {})
            if row.get(column) != "failed":
                row[column] = "failed" if report.failed else marker.kwargs.get("outcome", "passed")
        return report

    def pytest_sessionfinish(self):
        """Write the results file."""
        RESULTS.parent.mkdir(exist_ok=True)
        results = {"versions": support_matrix.versions(), "cells": self.cells}
        if self.adds and RESULTS.exists():
            results = support_matrix.added(json.loads(RESULTS.read_text()), results)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
