"""The unchanged Trainer script gives on every layout the numbers it gives in one process.

One run per (model, accumulation, spec) checks loss and gradient norm of each step, evaluation, prediction, the set of
gradients and the saved folder. Label counts are uneven, and the last training and evaluation batches are ragged.
"""

import pytest

from tests.training import Script, spec_id

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
COLUMNS = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}


def cases():
    """Every model with every accumulation on every spec, marked with its cell of the support matrix."""
    for model, column in COLUMNS.items():
        for steps in (1, 2):
            for spec in SPECS:
                mark = pytest.mark.support(spec, column)
                yield pytest.param(model, steps, spec, marks=mark, id=f"{model}-accumulation{steps}-{spec_id(spec)}")


@pytest.mark.parametrize(("model", "accumulation", "spec"), list(cases()))
def test_same_numbers_as_one_process(runs, model, accumulation, spec):
    script = Script(model=model).with_accumulation(accumulation)
    runs.check(script, spec)
