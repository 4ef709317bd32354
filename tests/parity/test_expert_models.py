"""Every kind of mixture that the pages name: one step has the loss and all gradients of one process, or is refused."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.plans import examine
from hf_parallel.plans.resolve import read_model, resolve
from tests import sweep
from tests.distributed import run, run_alone
from tests.training import none

#: By model type; what differs from what the sweep's rules make of a config.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "olmoe": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gpt_oss": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "granitemoe": {},
    "llama4_text": {},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
#: All on the same two processes.
SPECS = ("tp=2", "pp=2", "dp_shard=2,ep=2", "tp=2,ep=2")
DENSE = "Llama4TextExperts computes every expert for every token, so none travels; ep_size=1 works"


def tiny(name: str) -> tuple[Any, Any]:
    """The class of a model type and the config of a tiny one."""
    config = sweep.small_config(AutoConfig.for_model(name), "causal")
    for key, value in MODELS.get(name, {}).items():
        setattr(config, key, value)
    return AutoModelForCausalLM._model_mapping[type(config)], config


def all_specs(name: str, specs: tuple[str, ...]) -> list[sweep.Numbers]:
    cls, config = tiny(name)
    batch = sweep.batch_for("causal", cls, config, 15)
    return [sweep.step(cls, config, batch, spec or None) for spec in specs]


def check(name: str, specs: tuple[str, ...]) -> None:
    """15 tokens, some of them padding: no two ranks hold as many."""
    (alone,), ranks = run_alone(all_specs, name, ("",)), run(all_specs, 2, name, specs)
    found = []
    for number, spec in enumerate(specs):
        found += [f"{spec}: {text}" for text in sweep.differences(alone, [rank[number] for rank in ranks])]
    none(found)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama4_text"])
def test_one_step(name):
    check(name, SPECS)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("afmoe", "tp=2"),  # registers a gate behind the linear that writes, as wide as it
        ("beam", "tp=2"),  # a bias per head of such a gate
        ("flint", "tp=2"),  # its plan leaves attention out, which has sinks
        ("inkling_text", "dp_shard=2"),  # an embedding with a norm in it
    ],
)
def test_kinds_that_the_sweep_found(name, spec):
    check(name, (spec,))


def test_dense_experts():
    """Whose tokens are sorted by expert, and stay so when ranks' parts of sequences are put together."""
    check("llama4_text", ("tp=2", "pp=2"))


def test_dense_experts_do_not_travel():
    cls, config = tiny("llama4_text")
    with pytest.raises(SpecError, match=DENSE):
        resolve(asked := ParallelConfig.parse("dp_shard=2,ep=2"), read_model(sweep.build_random(cls, config), asked))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "tp=2,dp_shard=2,ep=2",
            "0-1 on ranks 0 2, 2-3 on ranks 1 3; a rank stores 1/2 of each",
        ),
        (
            "dp_replicate=2,dp_shard=4,ep=4",
            "0-0 on ranks 0 4, 1-1 on ranks 1 5, 2-2 on ranks 2 6, ",
        ),
        ("pp=2,tp=2", "4 in each of 4 layers, on every rank"),
    ],
)
def test_where_experts_live(spec, said):
    cls, config = tiny("mixtral")
    assert said in examine(sweep.build_random(cls, config), ParallelConfig.parse(spec)).facts["experts"]
