"""Schedules that do not drain between steps, to the planner: less bubble, and more versions of the weights."""

import pytest

from hf_parallel.planner import predict
from tests.planner.test_predict import CALL

SIZES = {"pp": 4, "tp": 2}


def predicted(schedule: str):
    layout = {**SIZES, "schedule": schedule}
    how = {"engine": "hf_parallel", "optimizer": "sgd", "gpus": 8, "global_batch": 4}
    return predict(**{**CALL, **how, "layout": layout})


@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipedream"])
def test_less_bubble_and_more_versions(schedule):
    flushed, ours = predicted("1f1b"), predicted(schedule)
    assert ours.breakdown.time["bubble"] < 0.5 * flushed.breakdown.time["bubble"]
    held, plain = (prediction.breakdown.memory["weights"] for prediction in (ours, flushed))
    assert held == pytest.approx(2 * plain)
