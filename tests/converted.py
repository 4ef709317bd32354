"""Tiny models whose checkpoints transformers converts while loading, and back while saving."""

from typing import Any

import torch
import transformers as hf
from transformers import PretrainedConfig, PreTrainedModel

from tests.models import SEED

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
TEXT = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
VISION = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
IMAGE = {"image_size": 28, "patch_size": 14}


def mixtral() -> PretrainedConfig:
    """Experts stacked, w1 and w3 joined in them."""
    return hf.MixtralConfig(**TEXT, num_local_experts=4)


def qwen3_moe() -> PretrainedConfig:
    """Experts stacked; no number of ranks divides them, and with four ranks one has none."""
    return hf.Qwen3MoeConfig(**TEXT, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)


def nomic_bert() -> PretrainedConfig:
    """Wqkv split in three, all names changed."""
    return hf.AutoConfig.for_model("nomic_bert", **SIZES)


def gte() -> PretrainedConfig:
    """qkv_proj and up_gate_proj split, with biases."""
    return hf.AutoConfig.for_model("gte", **SIZES)


def dinov2() -> PretrainedConfig:
    """A vision tower: weights_in split in two, its rows not divisible by what a layout has of ranks."""
    return hf.Dinov2Config(**VISION, **IMAGE, use_swiglu_ffn=True, mlp_ratio=3)


def llava() -> PretrainedConfig:
    """A CLIP tower and a Llama, prefixes changed and dropped."""
    vision = hf.CLIPVisionConfig(**VISION, **IMAGE, projection_dim=16)
    return hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_index=95)


def ernie() -> PretrainedConfig:
    """Experts split between text and vision, routers transposed, biases split."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16], "moe_num_shared_experts": 1}
    text = {**TEXT, **experts, "mlp_layer_types": ["dense", "sparse"], "rope_parameters": rope}
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 4, "patch_size": 4}
    return hf.AutoConfig.for_model("ernie4_5_vl_moe", text_config=text, vision_config=vision)


def kimi() -> PretrainedConfig:
    """wqkv of the vision tower split, and the rows of q and k permuted; experts in the DeepSeek-V3 under it."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    routing = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    text = {"model_type": "deepseek_v3", **TEXT, "num_key_value_heads": 4, **ranks, **experts, **routing}
    places = {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}
    return hf.AutoConfig.for_model("kimi_k25", text_config=text, vision_config={**VISION, **places})


CONFIGS = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "nomic_bert": nomic_bert,
    "gte": gte,
    "dinov2": dinov2,
    "llava": llava,
    "ernie": ernie,
    "kimi": kimi,
}


def auto_class(name: str) -> Any:
    """The Auto class that a script would use."""
    if name in ("mixtral", "qwen3_moe"):
        return hf.AutoModelForCausalLM
    return hf.AutoModelForImageTextToText if name in ("llava", "ernie", "kimi") else hf.AutoModel


def build(name: str) -> PreTrainedModel:
    """The model, every weight of it drawn: biases and norms that are all zeros or ones would hide a wrong slice."""
    torch.manual_seed(SEED)
    model = auto_class(name).from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model
