"""Fixtures of the whole suite, and the recorder behind the README's support matrix."""

import json
from pathlib import Path

import pytest

import tests.distributed
from tests import support_matrix, training

RESULTS = Path(__file__).parent / "results" / "support.json"


@pytest.fixture(scope="session")
def distributed():
    """`run(fn, world_size, *args)`: call a function on forked ranks; see `tests/distributed.py`."""
    return tests.distributed.run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Trainer scripts, run once per session in one process and once per layout; see `tests/training.py`."""
    return training.Runs(tmp_path_factory.mktemp("runs"))


def pytest_addoption(parser):
    """`--record-support` rewrites the results the README's support matrix is made from."""
    parser.addoption("--record-support", action="store_true", help="write tests/results/support.json")


def pytest_configure(config):
    """Register the marker, and the recorder if it is wanted."""
    config.addinivalue_line("markers", "support(spec, column): the cell of the support matrix this test stands for")
    if config.getoption("--record-support"):
        config.pluginmanager.register(Recorder(), "support-recorder")


class Recorder:
    """Collects outcomes by (spec, column); a cell fails when one of its tests fails, errors included."""

    def __init__(self):
        self.cells: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Note the outcome of each phase of a marked test."""
        report = yield
        marker = item.get_closest_marker("support")
        if marker is not None and (report.failed or (report.when == "call" and report.passed)):
            spec, column = marker.args
            row = self.cells.setdefault(spec, {})
            if row.get(column) != "failed":
                row[column] = report.outcome
        return report

    def pytest_sessionfinish(self):
        """Write the results file."""
        RESULTS.parent.mkdir(exist_ok=True)
        results = {"versions": support_matrix.versions(), "cells": self.cells}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
