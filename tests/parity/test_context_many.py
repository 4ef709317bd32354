"""What takes long, and runs under `--all` alone: sixteen ranks on all axes, rows that do not fit one process."""

import pytest

from benchmarks import context
from tests.training import Script

LIMIT, LENGTH = 190, 12001  # MiB above what a process has before there is a model; tokens of a row


@pytest.fixture(autouse=True)
def _asked_for(request):
    if not request.config.getoption("--all"):
        pytest.skip("takes a minute: pytest --all")


def test_all_axes_at_sixteen_ranks(runs):
    runs.check(Script(uneven_lengths=True), "tp=2,pp=2,cp=2,dp_shard=2")


def test_a_row_that_does_not_fit_one_process():
    """Two steps under RLIMIT_DATA; 1e-6: other orders of sums."""
    whole, failed, shared = context.memory(LENGTH, 4, LIMIT).values()
    assert "can't allocate memory" in failed
    assert max(abs(a / b - 1) for a, b in zip(shared, whole, strict=True)) < 1e-6
