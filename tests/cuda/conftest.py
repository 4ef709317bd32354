"""Fixtures of the tests on pretended CUDA devices, and their selection."""

import pytest

from tests.cuda.build import why_unavailable


def pytest_collection_modifyitems(items):
    """Skip with a reason where the device cannot be made."""
    reason = why_unavailable()
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
