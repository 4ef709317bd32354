"""What the planner counts of a model: against the model itself and against torch's own count of operations."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    Qwen3MoeConfig,
    T5Config,
)

from hf_parallel.ask.config import SpecError
from hf_parallel.model.anatomy import build_on_meta
from hf_parallel.planner import shape_of
from hf_parallel.planner.shape import _read_attention
from tests.models import DECODER, without
from tests.refusals import pattern_of_refusal

LENGTH = 32
SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MLA |= {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
CONFIGS = {
    "llama": LlamaConfig(**DECODER, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**DECODER, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "phi3, packed": Phi3Config(**DECODER, pad_token_id=0),
    "gemma2, wide heads": Gemma2Config(**DECODER, head_dim=32, sliding_window=16),
    "neox": GPTNeoXConfig(**without("num_key_value_heads")),
    "falcon, one key head": FalconConfig(**SMALL),
    "bloom": BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4),
    "mpt": MptConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4),
    "opt": OPTConfig(**SMALL, ffn_dim=128, max_position_embeddings=64, word_embed_proj_dim=64),
    "t5": T5Config(vocab_size=256, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16),
    "mixtral": MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2),
    "qwen3 moe": Qwen3MoeConfig(
        **DECODER, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    ),
    "deepseek v3": DeepseekV3Config(
        **without("num_key_value_heads"), **MLA, num_key_value_heads=4, num_experts_per_tok=2
    ),
    "bert": BertConfig(**without("num_key_value_heads")),
}
DENSE = [name for name in CONFIGS if name not in ("mixtral", "qwen3 moe", "deepseek v3", "bert")]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name):
    shape, model = shape_of(CONFIGS[name]), build_on_meta(CONFIGS[name])
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert min(shape.other_parameters, *(block.others for block in shape.blocks)) >= 0


@pytest.mark.parametrize("name", DENSE)
def test_flops_are_those_torch_counts(name):
    """With eager attention, whose products over a mask are whole; torch counts no element-wise work."""
    config = CONFIGS[name]
    model = type(build_on_meta(config))._from_config(config, attn_implementation="eager").eval()
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    windows = [part.window for block in shape_of(config).blocks for part in block.attentions]
    counted = shape_of(config).forward_flops(LENGTH, full_attention=True) * LENGTH
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.001), windows


def test_a_token_meets_its_share_of_the_experts():
    config = CONFIGS["mixtral"]
    block = shape_of(config).blocks[0]
    one = 3 * config.hidden_size * config.intermediate_size
    assert block.expert_parameters == 4 * one
    assert sum(m.flops for m in block.matrices if m.split == "expert") == 2 * 2 * one
    assert (block.inner, block.gated, block.top_k) == (2 * config.intermediate_size, True, 2)


def test_layers_that_are_alike_share_a_block():
    blocks = shape_of(CONFIGS["deepseek v3"]).blocks
    assert len(blocks) == 4
    assert len(set(map(id, blocks))) == 2  # a dense layer, then experts
    assert blocks[0].attentions[0].qk_width == 24
    assert blocks[0].attentions[0].v_width == 16


def test_numbers_and_config_describe_the_same_model():
    wide = {**DECODER, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 1000}
    counted = shape_of(LlamaConfig(**wide, tie_word_embeddings=False))
    numbers = {"layers": 4, "hidden": 512, "heads": 4, "kv_heads": 2, "ffn_hidden": 1024, "vocab": 1000}
    given = shape_of({**numbers, "tied": False})
    assert given.parameters == counted.parameters
    assert given.forward_flops(64) == counted.forward_flops(64)


def test_parameters_decide_what_numbers_leave_open():
    """Llama-1.34B of the Ultra-Scale Playbook has ffn_hidden = 4 hidden and yet a gate, and is tied."""
    numbers = {"layers": 16, "hidden": 2048, "heads": 32, "ffn_hidden": 8192, "vocab": 131072}
    assert shape_of(numbers).blocks[0].gated is False
    known = shape_of({**numbers, "params": 1.34e9})
    assert (known.blocks[0].gated, known.tied) == (True, True)
    assert shape_of({"hidden": 14400, "params": 194e9, "vocab": 250880}).layers == 77


def test_no_model():
    with pytest.raises(SpecError, match="hidden is missing"):
        shape_of({"layers": 2})
    with pytest.raises(SpecError, match="layers is missing"):
        shape_of({"hidden": 64})


def test_attention_that_does_not_say_how_many_heads_it_has_is_refused():
    config = SimpleNamespace(hidden_size=64)
    with pytest.raises(SpecError, match=pattern_of_refusal("SimpleNamespace", "encoder.attn", works="numbers")):
        _read_attention("encoder.attn", torch.nn.Linear(64, 64), config)
