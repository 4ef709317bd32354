"""Mixtures of experts on every axis: split inside over tp, or shared out over ep with tokens that travel."""

import pytest

from tests.training import Script, layouts

MODELS = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE", "deepseek_moe": "DeepSeek-V3"}


def each(*names, specs):
    """Parametrise over models and specs, each with its cell of the support matrix."""
    return pytest.mark.parametrize(
        ("model", "spec"),
        [
            pytest.param(name, *spec.values, marks=spec.marks, id=f"{name}-{spec.id}")
            for name in names
            for spec in layouts(MODELS[name], *specs)
        ],
    )


@each(*MODELS, specs=("tp=2", "tp=2,dp_shard=2", "tp=2,pp=2", "tp=2,sequence_parallel=false"))
def test_split_inside(runs, model, spec):
    """Each rank has a part of the width of every expert."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@each(
    *MODELS,
    specs=(
        "dp_shard=2,ep=2",
        "dp_shard=4,ep=4",
        "dp_shard=4,ep=2",
        "tp=2,ep=2",
        "tp=2,ep=2,sequence_parallel=false",
        "tp=2,dp_shard=2,ep=2",
        "tp=2,dp_shard=2,ep=4",
        "pp=2,dp_shard=2,ep=2",
        "tp=2,pp=2,ep=2",
        "dp_replicate=2,dp_shard=2,ep=2",
    ),
)
def test_shared_out(runs, model, spec):
    """Each rank has whole experts; of micro-batches the data ranks' last are ragged."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@each(*MODELS, specs=("tp=2,pp=2,dp_shard=2,ep=2", "tp=2,pp=2,dp_shard=2,ep=4", "dp_shard=8,ep=4"))
def test_on_eight_ranks(runs, model, spec):
    runs.check(Script(model=model), spec)
