"""Adapters of weights (`target_parameters`): experts of mixture models, routers, and what dense layers hold."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_parallel.checkpoint.export import export_checkpoint
from tests.adapters import ATTENTION, logits_while_merging, lora
from tests.distributed import RankFailure, run, run_alone
from tests.training import Script, activate, axes, load_model, none, over, weight_differences

pytest.importorskip("peft")

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER = "mlp.gate.weight"
DENSE = ("q_proj.weight", "v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")
ENDS = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
@over("LoRA", "dp_shard=2", "dp_replicate=2,dp_shard=2", "pp=2", "pp=2,dp_shard=2")
def test_experts_and_router(runs, spec, model, accumulation):
    """Two wrappers around the experts of a layer, one around its router; linears have adapters of the usual kind."""
    script = Script(model=model, lora=lora(ATTENTION, target_parameters=(*EXPERTS, ROUTER)))
    runs.check(script.with_accumulation(accumulation), spec)


@pytest.mark.support("LoRA")
@pytest.mark.parametrize(
    ("model", "spec"),
    [("llama", "tp=2"), ("llama", "tp=2,tp_overlap=true"), ("qwen3", "tp=2,dp_shard=2"), ("qwen3", "tp=2,pp=2")],
)
def test_weights_of_dense_layers(runs, model, spec):
    """Of columns, rows, embedding and head, each rank adds its part; q and v read one input."""
    script = Script(model=model, lora=lora((), target_parameters=DENSE + ENDS)).with_accumulation(2)
    runs.check(script, spec)


PACKED = {
    "gpt2": ("attn.c_attn.weight", "attn.c_proj.weight", "wte.weight"),
    "phi3": ("qkv_proj.weight", "o_proj.weight"),
    "llama": ("k_proj.weight", "v_proj.weight"),
}


@pytest.mark.parametrize(("model", "spec"), [("gpt2", "tp=2"), ("phi3", "tp=2"), ("llama", "tp=4")])
def test_stored_in_another_order(runs, model, spec):
    """Packed projections, weights kept as [in, out], and heads that ranks share."""
    runs.check(Script(model=model, lora=lora((), target_parameters=PACKED[model])), spec)


def test_second_adapter_of_experts(runs):
    """Put in beside the first and trained; the first stays as it is."""
    adapters = {"lora": lora((), target_parameters=EXPERTS), "second_adapter": True}
    script = Script(model="mixtral", **adapters, arguments=(("gradient_checkpointing", True),))
    runs.check(script, "pp=2,dp_shard=2")


def merged(spec, model, initial, out, targets):
    """Logits with the adapter, without it, merged, taken out again, and merged for good; folders of both."""
    activate(spec)
    adapted = load_model(Script(model=model, lora=lora((), target_parameters=targets)), initial, 0).eval()
    adapted.save_pretrained(f"{out}/adapter")
    with adapted.disable_adapter(), torch.no_grad():
        without = adapted(input_ids=torch.arange(16).reshape(2, 8)).logits.clone()
    return logits_while_merging(adapted, f"{out}/merged"), without


@pytest.mark.parametrize(
    ("model", "spec", "targets"),
    [
        ("mixtral", "dp_shard=2,pp=2", (*EXPERTS, ROUTER)),
        ("qwen3_moe", "dp_replicate=2,dp_shard=2", EXPERTS),
        ("gpt_oss", "tp=2", EXPERTS),
        ("llama4", "tp=2", tuple(name.replace("mlp", "feed_forward") for name in EXPERTS)),
        ("qwen3_moe", "tp=2", EXPERTS),
        ("llama", "dp_shard=2,tp=2", DENSE + ENDS),
        ("gpt2", "tp=2", PACKED["gpt2"]),
    ],
)
def test_saved_merged_exported(runs, tmp_path, model, spec, targets):
    """The adapter's folder loads in plain peft; merging there, here and by `hf-parallel export` is the same."""
    initial, one, many = runs.initial(model), str(tmp_path / "one"), str(tmp_path / "many")
    results, without = run_alone(merged, None, model, initial, one, targets)
    assert (results[0] - without).abs().max() > 1e-2
    ranks = run(partial(merged, spec, model, initial, many, targets), axes(spec)["world"], init=False)
    for found, off in ranks:
        assert (off - without).abs().max() < 1e-4
        # of a tied embedding the head is changed too when it is merged, in one process as here
        assert all((ours - theirs).abs().max() < 1e-4 for ours, theirs in zip(found, results, strict=True))
    none(weight_differences(f"{many}/merged", f"{one}/merged", 1e-6))
    assert (run_alone(logits_of, initial, f"{many}/adapter") - results[0]).abs().max() < 1e-4
    run_alone(export_checkpoint, f"{many}/adapter", str(tmp_path / "exported"), None, True, initial)
    none(weight_differences(str(tmp_path / "exported"), f"{one}/merged", 1e-6))


def logits_of(base, folder):
    """Of a few tokens, by plain transformers and peft."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    return model(input_ids=torch.arange(16).reshape(2, 8)).logits.detach()


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2"])
def test_goes_on_from_a_folder(runs, spec):
    """Adapters of experts that one process saved train on."""
    first = Script(model="mixtral", lora=lora((), target_parameters=EXPERTS))
    runs.check(Script(model="mixtral", lora=(("folder", runs.reference(first).folder),)), spec)


def test_weights_that_start_from_values_of_the_base(runs):
    with pytest.raises(RankFailure, match="init_lora_weights='pissa'.* works"):
        runs.parallel(Script(lora=lora((), target_parameters=DENSE, init_lora_weights="pissa")), "tp=2")
