"""Tiny models: fp32, on CPU, every number drawn under a seed. Their data: `tests/rows.py`.

Weights are drawn with a spread of 0.1, not the usual 0.02: losses then move visibly in three steps, and an error of
one axis is not hidden behind logits that are all nearly zero.
"""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BloomConfig,
    CLIPConfig,
    CLIPVisionConfig,
    CohereConfig,
    DebertaConfig,
    DebertaV2Config,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MBartConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    StableLmConfig,
    T5Config,
    ViTConfig,
    XGLMConfig,
)

from tests.rows import CLASSES, IMAGE_SIZE, IMAGE_TOKEN, PATCHES, VOCABULARY

SEED = 7

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "use_cache": False,
}

#: Names of a key/value cache among outputs, before and from transformers 5.24 on.
CACHES = ("past_key_values", "cache")

#: The numbers of Llama 3 8B (Dubey et al., 2024, table 3), as the planner takes them, and as a config has them.
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}
LLAMA_8B_CONFIG = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def without(*keys: str) -> dict[str, Any]:
    """DECODER less the keys that a family does not know or spells in another way."""
    return {key: value for key, value in DECODER.items() if key not in keys}


def llama(**changes: Any) -> LlamaConfig:
    """Llama with grouped-query attention: 4 heads, 2 key/value heads."""
    return LlamaConfig(**{**DECODER, "tie_word_embeddings": False, **changes})


def deep(**changes: Any) -> LlamaConfig:
    """Llama of ten layers, which four or eight stages cannot share evenly."""
    return llama(**{"num_hidden_layers": 10, **changes})


def qwen3(**changes: Any) -> Qwen3Config:
    """Qwen3: q/k norms, tied embeddings, heads wider than hidden / heads."""
    return Qwen3Config(**{**DECODER, "tie_word_embeddings": True, "head_dim": 32, **changes})


def mistral(**changes: Any) -> MistralConfig:
    """Mistral with a sliding window shorter than the rows, so the mask of every stage matters."""
    return MistralConfig(**{**DECODER, "tie_word_embeddings": False, "sliding_window": 8, **changes})


def mixtral(**changes: Any) -> MixtralConfig:
    """Mixtral: four experts of a layer in one weight, two of them for each token."""
    own = {"num_local_experts": 4, "intermediate_size": 48, "sliding_window": None}
    return MixtralConfig(**{**DECODER, **own, "tie_word_embeddings": False, **changes})


def mixtral_balanced(**changes: Any) -> MixtralConfig:
    """Mixtral with a loss for unbalanced experts that is a good part of the whole."""
    ignored = {"keys_to_ignore_at_inference": [*CACHES, "aux_loss", "router_logits"]}
    return mixtral(**{"output_router_logits": True, "router_aux_loss_coef": 0.5, **ignored, **changes})


def mixtral_idle(**changes: Any) -> MixtralConfig:
    """Mixtral of which two experts in three are idle: one expert per token, and `build` prefers the first two."""
    return mixtral(**{"num_local_experts": 8, "num_experts_per_tok": 1, **changes})


def mixtral_narrow(**changes: Any) -> MixtralConfig:
    """Mixtral whose experts grouped products take, and not the half of one, nor one in 16 bits."""
    return mixtral(**{"intermediate_size": 12, **changes})


def qwen3_moe(**changes: Any) -> Qwen3MoeConfig:
    """Qwen3-MoE: q/k norms, narrow experts in every other layer."""
    own = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeConfig(**{**DECODER, **own, "decoder_sparse_step": 2, "tie_word_embeddings": False, **changes})


def deepseek_moe(**changes: Any) -> DeepseekV3Config:
    """DeepSeek-V3: latent attention, groups of experts chosen by sigmoids, a shared expert, a dense layer."""
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    return deepseek_v3(**{**groups, "first_k_dense_replace": 1, "moe_intermediate_size": 24, **changes})


def odd(**changes: Any) -> LlamaConfig:
    """Llama on rows of an odd length (see `data`), tied."""
    return llama(**{"tie_word_embeddings": True, **changes})


def gemma2(**changes: Any) -> Gemma2Config:
    """Gemma 2: scaled embeddings, four norms a layer, soft-capped logits, a sliding window in every other layer."""
    return Gemma2Config(**{**DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, **changes})


def gemma3(**changes: Any) -> Gemma3TextConfig:
    """Gemma 3: Gemma 2 with q/k norms and without caps; layers with a sliding window rotate by another base."""
    own = {"head_dim": 16, "query_pre_attn_scalar": 16}
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return Gemma3TextConfig(**{**DECODER, **own, **window, **changes})


def gpt_oss(**changes: Any) -> GptOssConfig:
    """gpt-oss: a further score per head, a window in every other layer, experts with biases."""
    own = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return GptOssConfig(**{**DECODER, **own, **window, **rotation, "tie_word_embeddings": False, **changes})


def llama4(**changes: Any) -> Llama4TextConfig:
    """Llama 4: each token, times its router's score, runs through every expert; one expert is shared."""
    own = {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96, "intermediate_size": 48}
    layers = {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"] * 2}
    return Llama4TextConfig(**{**DECODER, **own, **layers, "tie_word_embeddings": False, **changes})


def qwen2(**changes: Any) -> Qwen2Config:
    """Qwen2: biases on the projections of queries, keys and values."""
    return Qwen2Config(**{**DECODER, "tie_word_embeddings": False, **changes})


def phi3(**changes: Any) -> Phi3Config:
    """Phi-3: one projection [q | k | v] with fewer keys than queries, and one [gate | up]."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Phi3Config(**{**DECODER, **tokens, "tie_word_embeddings": False, **changes})


def phi3_eight(**changes: Any) -> Phi3Config:
    """With a head of keys for each of four ranks, so that packed weights are cut there."""
    return phi3(**{"num_attention_heads": 8, "num_key_value_heads": 4, **changes})


def gpt2(**changes: Any) -> GPT2Config:
    """GPT-2: Conv1D, whose weight is [in, out]; one projection [q | k | v] with a bias; learned positions; tied."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 64, "n_inner": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1, "use_cache": False}
    return GPT2Config(**{**shape, **still, "bos_token_id": 1, "eos_token_id": 2, **changes})


def gpt2_eight(**changes: Any) -> GPT2Config:
    """With a head for each of eight ranks."""
    return gpt2(**{"n_head": 8, **changes})


def gpt_neox(**changes: Any) -> GPTNeoXConfig:
    """GPT-NeoX: one projection of [q k v] head by head; attention and MLP side by side; part of a head rotates."""
    return GPTNeoXConfig(**{**without("num_key_value_heads"), **changes})


def opt(**changes: Any) -> OPTConfig:
    """OPT: the MLP's two layers are the decoder layer's own, positions count the mask, tied."""
    left = without("num_key_value_heads", "intermediate_size", "initializer_range")
    return OPTConfig(**{**left, "ffn_dim": 128, "dropout": 0.0, "init_std": 0.1, **changes})


def opt_350m(**changes: Any) -> OPTConfig:
    """OPT as its 350m is: norms after the sums, so none at the end, and an embedding narrower than the layers."""
    return opt(**{"do_layer_norm_before": False, "word_embed_proj_dim": 32, **changes})


def falcon(**changes: Any) -> FalconConfig:
    """Falcon 40B: one projection of key/value groups [q q k v | q q k v], two norms side by side, no bias, tied."""
    kind = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 128}
    left = without("num_key_value_heads", "intermediate_size")
    return FalconConfig(**{**left, **kind, "bos_token_id": 1, "eos_token_id": 2, **changes})


def falcon_7b(**changes: Any) -> FalconConfig:
    """Falcon 7B: all queries share one key and value [q q q q k v], one norm feeds attention and MLP."""
    kind = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "num_kv_heads": None}
    return falcon(**{**kind, **changes})


def falcon_rw(**changes: Any) -> FalconConfig:
    """Falcon RW: ALiBi in a mask with a dimension of heads, [q k v] head by head, biases, MLP after attention."""
    kind = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": None}
    return falcon(**{**kind, "alibi": True, "bias": True, **changes})


def bloom(**changes: Any) -> BloomConfig:
    """BLOOM: ALiBi of shape [rows * heads, 1, length]; a norm after the embedding; regions add the residual."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 4, "n_head": 4}
    return BloomConfig(**{**shape, "initializer_range": 0.1, "use_cache": False, **changes})


def deepseek_v3(**changes: Any) -> DeepseekV3Config:
    """DeepSeek-V3's latent attention: queries and keys pass through narrow layers; no layer has experts."""
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    return DeepseekV3Config(**{**DECODER, **latent, "first_k_dense_replace": 4, "num_key_value_heads": 4, **changes})


def granite_swa(**changes: Any) -> PretrainedConfig:
    """Granite SWA: GPT-OSS's attention sinks, one number per head, without its experts. Newer than the others."""
    from transformers import GraniteSWAConfig

    scales = {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
    return GraniteSWAConfig(
        **{**DECODER, **scales, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2, **changes}
    )


def gpt_bigcode(**changes: Any) -> GPTBigCodeConfig:
    """StarCoder: one key and value for all queries, in one projection [q | k | v]."""
    return GPTBigCodeConfig(**{**gpt2().to_diff_dict(), "model_type": "gpt_bigcode", **changes})


def gpt_bigcode_heads(**changes: Any) -> GPTBigCodeConfig:
    """SantaCoder's other form: a key and value for each query, [q k v] head by head."""
    return gpt_bigcode(**{"multi_query": False, **changes})


def gptj(**changes: Any) -> GPTJConfig:
    """GPT-J: attention and MLP side by side on one norm, a part of each head rotates, a head with a bias."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 64, "n_inner": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1, "use_cache": False}
    return GPTJConfig(**{**shape, **still, "rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2, **changes})


def mpt(**changes: Any) -> MptConfig:
    """MPT: ALiBi of shape [heads, 1, length], one projection [q | k | v], norms without a bias."""
    shape = {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}
    return MptConfig(**{**shape, "expansion_ratio": 2, "initializer_range": 0.1, "use_cache": False, **changes})


def olmo2(**changes: Any) -> Olmo2Config:
    """OLMo 2: norms over all queries and over all keys, norms after attention and MLP."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Olmo2Config(**{**DECODER, **tokens, **changes})


def olmo2_eight(**changes: Any) -> Olmo2Config:
    """The same for its norms over all keys."""
    return olmo2(**{"num_attention_heads": 8, "num_key_value_heads": 4, **changes})


def command_r(**changes: Any) -> CohereConfig:
    """Command R+: norms of queries and keys with a weight per head, attention and MLP side by side, scaled logits."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return CohereConfig(**{**DECODER, **tokens, "use_qk_norm": True, "logit_scale": 0.5, **changes})


def doge(**changes: Any) -> DogeConfig:
    """Doge: a mask that all heads make together; tensor parallelism refuses it."""
    return DogeConfig(**{**DECODER, **changes})


def persimmon(**changes: Any) -> PersimmonConfig:
    """Persimmon: one projection of [q k v] head by head, norms over a head, squared ReLU."""
    return PersimmonConfig(**{**without("num_key_value_heads"), "bos_token_id": 1, "eos_token_id": 2, **changes})


def stablelm(**changes: Any) -> StableLmConfig:
    """StableLM: Llama with LayerNorms, biases and a quarter of each head rotating."""
    return StableLmConfig(**{**DECODER, "use_qkv_bias": True, "bos_token_id": 1, "eos_token_id": 2, **changes})


def stablelm_12b(**changes: Any) -> StableLmConfig:
    """StableLM 2 12B: a norm for each head, which tensor parallelism refuses."""
    return stablelm(**{"qk_layernorm": True, "use_parallel_residual": True, **changes})


def xglm(**changes: Any) -> XGLMConfig:
    """XGLM: sinusoidal positions, a scaled embedding, an attention that reshapes to its whole width."""
    shape = {"vocab_size": VOCABULARY, "d_model": 64, "ffn_dim": 128, "num_layers": 4, "attention_heads": 4}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.1, "use_cache": False}
    return XGLMConfig(**{**shape, **still, "max_position_embeddings": 64, **changes})


def mamba(**changes: Any) -> MambaConfig:
    """Mamba: no attention, no heads; tensor parallelism refuses it."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8}
    return MambaConfig(**{**shape, "use_cache": False, **changes})


ENCODER = {
    **without("num_key_value_heads"),
    "num_hidden_layers": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}


def bert(**changes: Any) -> BertConfig:
    """BERT sequence classification, 2 layers, no dropout: its forward takes no `num_items_in_batch`."""
    return BertConfig(**{**ENCODER, **changes})


def roberta(**changes: Any) -> RobertaConfig:
    """RoBERTa: BERT whose positions count the tokens that are no padding, and whose head is a small network."""
    return RobertaConfig(**{**ENCODER, **changes})


def deberta(**changes: Any) -> DebertaConfig:
    """DeBERTa: [q k v] head by head with biases for q and v alone; heads read an embedding of distances besides."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    return DebertaConfig(**{**ENCODER, **relative, **changes})


def deberta_v3(**changes: Any) -> DebertaV2Config:
    """DeBERTa-v3: projections shared with those of the embedding of distances, which has a norm of its own."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    shared = {"share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    return DebertaV2Config(**{**ENCODER, **relative, **shared, **changes})


def deberta_xlarge(**changes: Any) -> DebertaV2Config:
    """DeBERTa-v2 xlarge: a convolution after the first layer, which needs the whole sequence."""
    return deberta_v3(**{"conv_kernel_size": 3, "conv_act": "gelu", **changes})


def bart(**changes: Any) -> BartConfig:
    """BART: biases everywhere, learned positions, one embedding for encoder, decoder and head."""
    shape = {"vocab_size": VOCABULARY, "d_model": 64, "max_position_embeddings": 64, "init_std": 0.1}
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    stacks = {f"{stack}_{key}": size for stack in ("encoder", "decoder") for key, size in sizes.items()}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "use_cache": False}
    return BartConfig(**{**shape, **stacks, **still, **changes})


def mbart(**changes: Any) -> MBartConfig:
    """mBART: BART with norms first, whose decoder starts with the last label of a row."""
    return MBartConfig(**bart(**changes).to_diff_dict() | {"model_type": "mbart"})


def clip(**changes: Any) -> CLIPConfig:
    """CLIP's image part with a head: a model that names no input embedding."""
    shape = {key: ENCODER[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    images = {"num_attention_heads": 4, "image_size": IMAGE_SIZE, "patch_size": 4, "initializer_range": 0.1}
    return CLIPConfig(**{"vision_config": {**shape, **images}, "num_labels": CLASSES, **changes})


def t5(**changes: Any) -> T5Config:
    """T5: one embedding for encoder and decoder; a bias per head and distance that a stack's first layer computes."""
    shape = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return T5Config(**{**shape, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False, **changes})


def t5_gated(**changes: Any) -> T5Config:
    """T5 1.1: a gated MLP; the decoder's output is not scaled, so the shared embedding starts small."""
    return t5(
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "initializer_factor": 0.3, **changes}
    )


def vit(**changes: Any) -> ViTConfig:
    """ViT image classification: 16 patches and a class token, an odd length; its loss does take the item count."""
    shape = {key: ENCODER[key] for key in ENCODER if key not in ("vocab_size", "max_position_embeddings", "use_cache")}
    return ViTConfig(**{**shape, "image_size": IMAGE_SIZE, "patch_size": 4, **changes})


def llava(**changes: Any) -> LlavaConfig:
    """Llava: Llama that reads the patches of a CLIP tower, whose last layer and norm get no gradient."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = {"image_size": IMAGE_SIZE, "patch_size": 8, "projection_dim": 32, "initializer_range": 0.1}
    # An image's features are not one row per row of the batch, which Trainer's predictions must be.
    ignored = {"keys_to_ignore_at_inference": [*CACHES, "image_hidden_states", "image_outputs"]}
    own = {"image_token_index": IMAGE_TOKEN, "image_seq_length": PATCHES, "use_cache": False, **ignored}
    return LlavaConfig(
        **{"vision_config": CLIPVisionConfig(**shape, **images), "text_config": llama(), **own, **changes}
    )


CONFIGS = {
    "llama": llama,
    "deep": deep,
    "qwen3": qwen3,
    "mistral": mistral,
    "mixtral": mixtral,
    "mixtral_balanced": mixtral_balanced,
    "mixtral_idle": mixtral_idle,
    "mixtral_narrow": mixtral_narrow,
    "mixtral_one": mixtral_idle,
    "qwen3_moe": qwen3_moe,
    "deepseek_moe": deepseek_moe,
    "odd": odd,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "qwen2": qwen2,
    "phi3": phi3,
    "phi3_eight": phi3_eight,
    "gpt2": gpt2,
    "gpt2_eight": gpt2_eight,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "opt_350m": opt_350m,
    "falcon": falcon,
    "falcon_7b": falcon_7b,
    "falcon_rw": falcon_rw,
    "bloom": bloom,
    "deepseek_v3": deepseek_v3,
    "granite_swa": granite_swa,
    "gpt_bigcode": gpt_bigcode,
    "gpt_bigcode_heads": gpt_bigcode_heads,
    "gptj": gptj,
    "mpt": mpt,
    "olmo2": olmo2,
    "olmo2_eight": olmo2_eight,
    "command_r": command_r,
    "doge": doge,
    "persimmon": persimmon,
    "stablelm": stablelm,
    "stablelm_12b": stablelm_12b,
    "xglm": xglm,
    "mamba": mamba,
    "bert": bert,
    "roberta": roberta,
    "deberta": deberta,
    "deberta_v3": deberta_v3,
    "deberta_xlarge": deberta_xlarge,
    "bart": bart,
    "mbart": mbart,
    "clip": clip,
    "t5": t5,
    "t5_gated": t5_gated,
    "vit": vit,
    "llava": llava,
}

AUTO_CLASSES = {
    "bert": AutoModelForSequenceClassification,
    "roberta": AutoModelForSequenceClassification,
    "deberta": AutoModelForSequenceClassification,
    "deberta-v2": AutoModelForSequenceClassification,
    "bart": AutoModelForSeq2SeqLM,
    "mbart": AutoModelForSeq2SeqLM,
    "clip": AutoModelForImageClassification,
    "t5": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
    "llava": AutoModelForImageTextToText,
}


def auto_class(config: PretrainedConfig) -> type:
    """The Auto class a script would use for this config."""
    return AUTO_CLASSES.get(config.model_type, AutoModelForCausalLM)


def build(name: str, seed: int = SEED, **changes: Any) -> PreTrainedModel:
    """The model with weights drawn under `seed`, in this process's memory.

    Biases, norms and attention sinks start as equal numbers, whose order would not show: they get noise.
    """
    config = CONFIGS[name](**changes)
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        if name in ("mixtral_idle", "mixtral_one"):
            for module in model.modules():
                if type(module).__name__ == "MixtralTopKRouter":
                    # Of zeros none is the largest, with two opposite logits; without these all tokens take one expert.
                    module.weight[2:] = 0.0
                    module.weight[:2] = module.weight[:1] * torch.tensor([[1.0], [-1.0]]) * (name == "mixtral_idle")
    return model
