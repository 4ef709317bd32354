"""Adapters of weights (`target_parameters`): experts of mixture models, routers, and what dense layers hold."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_parallel import hooks
from hf_parallel.checkpoint.export import export
from tests.adapters import ATTENTION, lora
from tests.distributed import RankFailure, run, run_alone
from tests.training import Script, axes, layouts, load_model, none, weight_differences

pytest.importorskip("peft")

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER = "mlp.gate.weight"
DENSE = ("q_proj.weight", "v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")
ENDS = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("spec", layouts("LoRA", "dp_shard=2", "dp_replicate=2,dp_shard=2", "pp=2", "pp=2,dp_shard=2"))
def test_experts_and_router(runs, spec, model, accumulation):
    """Two wrappers around the experts of a layer, one around its router; linears have adapters of the usual kind."""
    script = Script(model=model, lora=lora(ATTENTION, target_parameters=(*EXPERTS, ROUTER)))
    runs.check(script.with_accumulation(accumulation), spec)
