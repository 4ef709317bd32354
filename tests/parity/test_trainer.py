"""The unchanged Trainer script gives on every layout the numbers it gives in one process.

One run per (model, accumulation, spec) checks loss and gradient norm of each step, evaluation, prediction, the set of
gradients and the saved folder. Label counts are uneven, and the last training and evaluation batches are ragged.
"""

import pytest

from tests.training import Script, over

SPECS = (
    "dp_shard=2",
    "dp_replicate=2",
    "tp=2",
    "pp=2",
    "dp_replicate=2,dp_shard=2",
    "tp=2,pp=2",
    "tp=2,dp_shard=2",
    "pp=2,dp_shard=2",
    "tp=2,pp=2,dp_shard=2",
)
MICRO_BATCHES = [pytest.param(steps, id=f"accumulation{steps}") for steps in (1, 2)]


@over("{model}", *SPECS, model=("llama", "qwen3", "mistral"), accumulation=MICRO_BATCHES)
def test_same_numbers_as_one_process(runs, model, accumulation, spec):
    script = Script(model=model).with_accumulation(accumulation)
    runs.check(script, spec)
