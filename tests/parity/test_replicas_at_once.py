"""Replicas of few gradients reduce them at once; other tests reduce layer by layer, see `tests/conftest.py`."""

from functools import partial

import pytest

from hf_parallel.axes.data import zero
from tests.distributed import run
from tests.training import Script, Tolerance, axes, differences, none, train_rank

#: Bytes of gradients up to which users' replicas reduce at once.
BUCKET = 25 * 1024**2


def train_at_once(*arguments):
    """`train_rank` as a user's process has it."""
    zero.BUCKET = BUCKET
    return train_rank(*arguments)


@pytest.mark.parametrize("overrides", [False, True], ids=["models_loss", "scripts_loss"])
@pytest.mark.parametrize("spec", ["dp_replicate=2", "pp=2,dp_replicate=2", "tp=2,dp_replicate=2"])
def test_numbers_of_one_process(runs, spec, overrides):
    """With accumulation, and a last batch that leaves a data rank without an example."""
    script = Script(overrides=overrides).with_accumulation(2)
    call = partial(train_at_once, spec, script, runs.initial(script.model), runs._folder())
    ranks = run(call, axes(spec)["world"], init=False)
    none(differences(ranks, runs.reference(script), Tolerance()))
