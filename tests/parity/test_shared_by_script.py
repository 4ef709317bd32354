"""Weights, modules and layers that a script puts into several places: one of each, as in one process."""

import pytest

import hf_parallel
from hf_parallel import SpecError
from tests import models
from tests.distributed import run, run_alone
from tests.loops import losses, rows
from tests.refusals import pattern_of_refusal
from tests.training import axes, check_numbers

STEPS = 3


def share(model, kind):
    layers = model.model.layers
    if kind == "head":
        model.lm_head.weight = model.model.embed_tokens.weight
    elif kind == "keys":
        for layer in layers:
            layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight
    elif kind == "square":  # columns of one, rows of the other
        layers[1].self_attn.o_proj.weight = layers[1].self_attn.q_proj.weight
    elif kind == "across":  # 7 layers on two stages: 4 and 3
        layers[4].mlp.down_proj.weight = layers[3].mlp.down_proj.weight
    elif kind == "norms":
        for layer in layers[1:]:
            layer.input_layernorm = layers[0].input_layernorm
    else:
        for i in (1, 3, 5):
            if kind == "weights":
                layers[i].mlp.down_proj.weight = layers[i - 1].mlp.down_proj.weight
            elif kind == "modules":
                layers[i].mlp = layers[i - 1].mlp
            elif kind == "layers":  # MobileLLM's (Liu et al., 2024, section 2.2.4)
                layers[i] = layers[i - 1]
    return model


def train(spec, kind):
    """The losses of a few steps, and the norm of each weight after them, by all its names."""
    model = share(models.build("llama", num_hidden_layers=7), kind).train()
    model = hf_parallel.parallelize(model, spec) if spec else model
    found = losses(model, [rows(3, 33).to(model.device)] * STEPS, rate=0.5)
    state = hf_parallel.full_state_dict(model)
    return found, {name: float(tensor.double().norm()) for name, tensor in state.items()}


EQUAL = {
    "head": ("tp=2", "pp=2", "dp_shard=2", "tp=2,dp_shard=2"),
    "keys": ("tp=2", "pp=2", "dp_shard=2"),
    "weights": ("tp=2", "pp=2", "dp_shard=2", "dp_shard=2,zero_stage=1", "tp=2,dp_shard=2"),
    "across": ("tp=2", "dp_shard=2", "cp=2"),
    "norms": ("tp=2", "dp_shard=2"),
    "modules": ("tp=2", "pp=2", "dp_shard=2", "pp=2,dp_shard=2", "dp_shard=2,activation_checkpointing=full"),
    "layers": ("pp=2", "dp_shard=2", "dp_shard=2,zero_stage=2", "cp=2"),
}


@pytest.mark.parametrize(("kind", "spec"), [(kind, spec) for kind, specs in EQUAL.items() for spec in specs])
def test_is_one_weight(kind, spec):
    (own, held), *others = run(train, axes(spec)["world"], spec, kind)
    alone, weights = run_alone(train, None, kind)
    check_numbers([own, *(found for found, _ in others)], alone)
    assert sorted(held) == sorted(weights)
    check_numbers([[held[name] for name in weights]], list(weights.values()))


@pytest.mark.parametrize(
    ("kind", "spec", "names"),
    [
        ("layers", "tp=2", ("one layer in several places",)),
        ("square", "tp=2", ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight")),
        ("across", "pp=2", ("model.layers.3.mlp.down_proj.weight", "model.layers.4.mlp.down_proj.weight")),
        ("norms", "pp=2", ("model.layers.0.input_layernorm.weight", "model.layers.4.input_layernorm.weight")),
    ],
)
def test_is_refused_where_ranks_would_need_two(kind, spec, names):
    axis = spec.partition("=")[0]
    run(_refuses, 2, spec, kind, pattern_of_refusal(f"{axis}_size=2", *names, works=f"{axis}_size=1"))


def _refuses(spec, kind, pattern):
    with pytest.raises(SpecError, match=pattern):
        train(spec, kind)
