"""Bubbles of a timeline: found where the formulas say they are, and filled by what fits."""

import pytest

from hf_parallel.axes.pipeline.gaps import Place, Task, find_gaps, place_tasks
from hf_parallel.axes.pipeline.timeline import compute_layer_costs, order, simulate


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_gaps_are_the_bubble(name):
    timeline = simulate(order(name, 4, 1, 8), *compute_layer_costs([1, 1, 1, 1]))
    gaps = [find_gaps(timeline, rank) for rank in range(4)]
    assert [len(own) for own in gaps] == [17] * 4
    assert sum(map(sum, gaps)) == pytest.approx(timeline.bubble * 4 * timeline.duration)
    assert [own[0] for own in gaps] == [0, 1, 2, 3]  # until the first forward arrives
    assert [own[-1] for own in gaps] == [0, 2, 4, 6]  # after the last backward


def test_first_fit():
    """Of two gaps of 0.9 s, twice: in order, not before the inputs are there, not after the deadline."""
    gaps = [[0.0, 1.0, 1.0]] * 2
    tasks = [
        Task("late", 0.5, Place(0, 2), 0),
        Task("early", 0.5, Place(0, 0), 0),
        Task("beside", 0.4, Place(0, 0), 0),
        Task("too long", 1.0, Place(0, 0), 1),
        Task("next step", 0.9, Place(0, 0), 1),
        Task("no room", 0.9, Place(0, 0), 0),
        Task("in what step 0 has left", 0.4, Place(2, 0), 2),
    ]
    assert place_tasks(gaps, tasks) == {
        "late": (0, 2),
        "early": (0, 1),
        "beside": (0, 1),
        "next step": (1, 1),
        "in what step 0 has left": (2, 2),
    }
