"""Whole experts on different ranks under schedules whose backward has two parts."""

import pytest

from tests.training import Script

LAYOUT = "pp=2,dp_shard=2,ep=2"


@pytest.mark.parametrize(
    "spec",
    [
        f"{LAYOUT},pipeline_schedule=zbv_zero_bubble",
        f"{LAYOUT},pipeline_schedule=dualpipe_v",
        f"{LAYOUT},pipeline_schedule=interleaved_zero_bubble",
    ],
)
@pytest.mark.parametrize("model", ["mixtral", "deepseek_moe"])
def test_split_backward(runs, model, spec):
    """All ranks whose tokens meet run the same passes in the same order."""
    runs.check(Script(model=model).with_accumulation(2), spec)
