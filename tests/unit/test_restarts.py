"""Who has been started again, and what it takes to keep the rows per step."""

import os

import pytest

from hf_parallel.hooks.restarts import divide_rows, is_restart

AGENTS = ["a:10", "b:20"]


@pytest.mark.parametrize(
    ("name", "count", "agents", "expected"),
    [
        ("none", 0, ["b:20"], True),  # the node of rank 0 was lost, or another has joined
        ("none", 1, ["c:30"], False),  # two jobs of which neither has a name
        ("job", 1, ["c:30"], True),
        ("job", 0, ["c:30"], False),  # a new launch
        ("job", 1, [], False),  # another launcher
    ],
)
def test_restarts(monkeypatch, name, count, agents, expected):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    former = {"run": "x", "launch": name, "agents": AGENTS, "pid": -1}
    assert is_restart(former, count, agents) == expected
    assert not is_restart({**former, "pid": os.getpid()}, count, agents)
    assert not is_restart({}, count, agents)


@pytest.mark.parametrize(
    ("rows", "data_ranks", "batch", "expected"),
    [
        (8, 2, 2, (2, 2)),
        (8, 8, 2, (1, 1)),
        (32, 2, 4, (4, 4)),
        (24, 3, 3, (2, 4)),  # 8 rows each: not in threes
        (8, 3, 2, None),
        (None, 2, 2, None),
    ],
)
def test_rows_per_rank(rows, data_ranks, batch, expected):
    assert divide_rows(rows, data_ranks, batch) == expected
