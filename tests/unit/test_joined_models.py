"""Which models keep their outputs when documents are joined to one row: tried on small copies of them."""

import pytest
import torch
import transformers
from packaging import version
from transformers import AutoConfig, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM, T5Config
from transformers.models.auto import modeling_auto

from hf_parallel.model.shrink import LARGEST, build_random, find_reason_not_told_apart, make_small_copy
from tests import sweep

#: Some of their layers, masks or positions run on from one document into the next.
RUNS_ON = [
    *("opt", "bloom", "mpt", "xglm", "biogpt", "roberta", "bert", "openai-gpt", "mamba", "mamba2"),
    *("falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"),
    *("minimax", "olmo_hybrid", "qwen3_next", "lfm2_moe", "gpt_oss"),
]
KEEPS = [
    "llama",
    "gpt2",
    "ctrl",
    "mixtral",
    "gemma2",
    "qwen3_moe",
    "gptj",
    "deepseek_v3",
    "modernbert-decoder",
    "phi3",
]
#: Falcon tells its mask the positions since transformers 5.24.
(KEEPS if version.parse(transformers.__version__) >= version.parse("5.24") else RUNS_ON).append("falcon")


def built(name: str) -> torch.nn.Module:
    config = sweep.small_config(AutoConfig.for_model(name), "causal")
    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return build_random(found[0] if isinstance(found, tuple) else found, config)


@pytest.mark.parametrize("name", RUNS_ON)
def test_models_that_run_on_are_named(name):
    model = built(name)
    why = find_reason_not_told_apart(make_small_copy(model))
    assert why is not None
    assert type(model).__name__ in why


@pytest.mark.parametrize("name", KEEPS)
def test_models_that_tell_documents_apart(name):
    assert find_reason_not_told_apart(make_small_copy(built(name))) is None


def test_convolutions_of_some_layers_are_in_the_copy():
    """LFM2's convolutions: a small copy has layers of each kind that the model has."""
    kinds = ["full_attention"] * 5 + ["conv"] * 7
    config = AutoConfig.for_model("lfm2", layer_types=kinds, num_hidden_layers=12, hidden_size=64, vocab_size=515)
    assert set(make_small_copy(built_of(config)).config.layer_types) == {"conv", "full_attention"}
    assert "apart" in find_reason_not_told_apart(make_small_copy(built_of(config)))


def built_of(config) -> torch.nn.Module:
    with torch.device("meta"):
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def test_encoder_and_decoder_are_named():
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(T5Config())
    assert "T5ForConditionalGeneration" in find_reason_not_told_apart(make_small_copy(model))


def test_a_large_model_is_copied_small():
    """Only its config and class are read; its vocabulary stays where a script's loss may depend on it."""
    config = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = torch.get_rng_state()
    copy = make_small_copy(model, keep=("vocab_size",))
    assert sum(p.numel() for p in copy.parameters()) < LARGEST / 4
    assert copy.config.vocab_size == config.vocab_size
    assert (copy.config.num_hidden_layers, copy.dtype) == (4, torch.float32)
    assert model.config.hidden_size == 8192
    assert torch.equal(torch.get_rng_state(), state)
    assert find_reason_not_told_apart(copy) is None
