"""`pipeline_schedule=chimera` to the planner: less bubble, the weights twice, and more traffic."""

import pytest

from hf_parallel.ask.spec import SpecError
from hf_parallel.axes.pipeline import timeline
from hf_parallel.planner import predict
from tests.planner.test_predict import CALL


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_schedule(ranks, rounds):
    """Units of p micro-batches have p - 2 slots of bubble (section 3.1 of the paper); no rank holds more than p."""
    count = ranks * rounds
    order = timeline.order("chimera", ranks, 1, count)
    found = timeline.simulate(order, *timeline.compute_layer_costs([1] * ranks))
    assert found.bubble == pytest.approx((ranks - 2) / (1.5 * count + ranks - 2), abs=0.04)
    assert rounds > 2 or ranks > 4 or found.bubble == pytest.approx((ranks - 2) / (1.5 * count + ranks - 2))
    assert max(timeline.count_peak_live(order)) <= ranks
    for rank, actions in order.items():
        assert {action.stage for action in actions} == {rank, ranks - 1 - rank}
    done = {action for actions in order.values() for action in actions}
    assert len(done) == 2 * ranks * count == sum(map(len, order.values()))


@pytest.mark.parametrize(("ranks", "count", "works"), [(3, 4, 2), (4, 5, 6), (4, 2, 4)])
def test_numbers_that_do_not_halve(ranks, count, works):
    with pytest.raises(SpecError, match=f"{works} works"):
        timeline.order("chimera", ranks, 1, count)


def predicted(schedule: str, **more):
    layout = {"pp": 4, "tp": 2, "schedule": schedule}
    how = {"engine": "hf_parallel", "gpus": 8, "global_batch": 4, **more}
    return predict(**{**CALL, **how, "layout": layout})


def test_less_bubble_twice_the_weights_and_their_traffic():
    ours, plain = predicted("chimera").breakdown, predicted("1f1b").breakdown
    assert ours.time["bubble"] < 0.6 * plain.time["bubble"]
    assert 1.6 * plain.memory["weights"] < ours.memory["weights"] <= 2 * plain.memory["weights"]  # ends are heavier
    assert ours.memory["optimizer"] <= plain.memory["optimizer"]
    assert ours.time["gradients' reduction"] > 0  # weights to mirrors, gradients to owners
    assert "gradients' reduction" not in plain.time
