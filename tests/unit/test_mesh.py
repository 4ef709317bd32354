"""Coordinates and data ranks of eight processes, against tables written by hand. No process group."""

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ranks.mesh import compute_coordinates, compute_data_rank, list_axis_ranks


def resolved(spec: str, world: int = 8) -> ParallelConfig:
    return ParallelConfig.parse(spec).resolve(world)


# rank 0 .. 7 -> coordinates along the named axes; every other axis is at 0
PLACES = {
    "tp=2,pp=2,dp_shard=2": {
        "pp": [0, 0, 0, 0, 1, 1, 1, 1],
        "dp_shard": [0, 0, 1, 1, 0, 0, 1, 1],
        "tp": [0, 1, 0, 1, 0, 1, 0, 1],
    },
    "dp_replicate=2,dp_shard=2,tp=2": {
        "dp_replicate": [0, 0, 0, 0, 1, 1, 1, 1],
        "dp_shard": [0, 0, 1, 1, 0, 0, 1, 1],
        "tp": [0, 1, 0, 1, 0, 1, 0, 1],
    },
    "dp_replicate=2,pp=2,dp_shard=2": {
        "dp_replicate": [0, 0, 0, 0, 1, 1, 1, 1],
        "pp": [0, 0, 1, 1, 0, 0, 1, 1],
        "dp_shard": [0, 1, 0, 1, 0, 1, 0, 1],
    },
    "pp=4,tp=2": {"pp": [0, 0, 1, 1, 2, 2, 3, 3], "tp": [0, 1, 0, 1, 0, 1, 0, 1]},
    "dp_shard=8": {"dp_shard": [0, 1, 2, 3, 4, 5, 6, 7]},
    "tp=8": {"tp": [0, 1, 2, 3, 4, 5, 6, 7]},
}

# rank 0 .. 7 -> which share of the data it reads
SHARES = {
    "tp=2,pp=2,dp_shard=2": [0, 0, 1, 1, 0, 0, 1, 1],
    "dp_replicate=2,dp_shard=2,tp=2": [0, 0, 1, 1, 2, 2, 3, 3],
    "dp_replicate=2,pp=2,dp_shard=2": [0, 1, 0, 1, 2, 3, 2, 3],
    "dp_replicate=2,pp=2,tp=2": [0, 0, 0, 0, 1, 1, 1, 1],
    "pp=4,tp=2": [0, 0, 0, 0, 0, 0, 0, 0],
    "pp=4,dp_shard=2": [0, 1, 0, 1, 0, 1, 0, 1],
    "dp_shard=8": [0, 1, 2, 3, 4, 5, 6, 7],
}

# (spec, axis) -> the groups that talk along it
GROUPS = {
    ("tp=2,pp=2,dp_shard=2", "tp"): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("tp=2,pp=2,dp_shard=2", "pp"): [[0, 4], [1, 5], [2, 6], [3, 7]],
    ("tp=2,pp=2,dp_shard=2", "dp_shard"): [[0, 2], [1, 3], [4, 6], [5, 7]],
    ("dp_replicate=2,dp_shard=2,tp=2", "dp_replicate"): [[0, 4], [1, 5], [2, 6], [3, 7]],
    ("pp=4,tp=2", "pp"): [[0, 2, 4, 6], [1, 3, 5, 7]],
    ("pp=4,tp=2", "dp_shard"): [[rank] for rank in range(8)],
}


@pytest.mark.parametrize("spec", PLACES)
def test_coordinates(spec):
    config = resolved(spec)
    for rank in range(8):
        named = {axis: column[rank] for axis, column in PLACES[spec].items()}
        expected = {**dict.fromkeys(("dp_replicate", "pp", "dp_shard", "cp", "tp"), 0), **named}
        assert compute_coordinates(config, rank) == expected


def test_axes_run_from_slow_links_to_fast_links():
    config = resolved("dp_replicate=2,pp=3,dp_shard=5,tp=7", 210)
    assert tuple(config.sizes.values()) == (2, 3, 5, 1, 7)
    assert list(compute_coordinates(config, 0)) == ["dp_replicate", "pp", "dp_shard", "cp", "tp"]


@pytest.mark.parametrize("spec", SHARES)
def test_data_rank(spec):
    config = resolved(spec)
    assert [compute_data_rank(config, rank) for rank in range(8)] == SHARES[spec]
    assert set(SHARES[spec]) == set(range(config.data_parallel_size))


@pytest.mark.parametrize(("spec", "axis"), GROUPS)
def test_groups_along_an_axis(spec, axis):
    assert sorted(list_axis_ranks(resolved(spec), axis)) == GROUPS[spec, axis]


def test_the_picture_in_the_docstring_is_right():
    config = resolved("pp=2,dp_shard=2,tp=2")
    assert [compute_data_rank(config, rank) for rank in (0, 1, 4, 5)] == [0] * 4
    assert [compute_data_rank(config, rank) for rank in (2, 3, 6, 7)] == [1] * 4


def test_experts_see_the_ranks_in_another_way():
    """The picture of sixteen ranks: ep is innermost, ep_shard is what is left of dp_shard, cp and tp."""
    config = ParallelConfig.parse("pp=2,dp_shard=4,tp=2,ep=4")
    assert config.ep_shard_size * config.ep_size == config.dp_shard_size * config.cp_size * config.tp_size
    assert list_axis_ranks(config, "ep") == [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert list_axis_ranks(config, "ep_shard") == [[n, n + 4] for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert list_axis_ranks(config, "dp_shard")[0] == [0, 2, 4, 6]
