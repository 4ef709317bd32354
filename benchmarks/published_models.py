"""Mixtures of experts by their configurations: what widths of a table leave open.

A row gives one width of the MLP and one number of heads. Heads are not `hidden / heads` wide in these models, some
layers look only at a window, latent attention has widths of its own, and DeepSeek-V3's first layers are dense with
experts beside that all tokens meet. Sizes are those of each model's `config.json` on the Hub.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from hf_parallel.planner import ModelShape, shape_of


def _qwen3(hidden: int, layers: int, heads: int, inner: int) -> PretrainedConfig:
    widths = {"hidden_size": hidden, "num_hidden_layers": layers, "moe_intermediate_size": inner}
    groups = {"num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeConfig(**widths, **groups, num_experts=128, num_experts_per_tok=8, vocab_size=151936)


def _gpt_oss(layers: int, experts: int) -> PretrainedConfig:
    widths = {"hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088}
    groups = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    return GptOssConfig(**widths, **groups, num_hidden_layers=layers, num_local_experts=experts, num_experts_per_tok=4)


def _kimi_k2() -> PretrainedConfig:
    """DeepSeek-V3 with fewer heads, more experts and one dense layer."""
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163840}
    return DeepseekV3Config(**sizes, first_k_dense_replace=1, n_group=1, topk_group=1)


_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "Qwen3-30B-A3B": lambda: _qwen3(2048, 48, 32, 768),
    "Qwen3-235B-A22B": lambda: _qwen3(4096, 94, 64, 1536),
    "GPT-OSS-20B": lambda: _gpt_oss(24, 32),
    "GPT-OSS-120B": lambda: _gpt_oss(36, 128),
    "DeepSeek-V3": DeepseekV3Config,
    "Kimi-K2": _kimi_k2,
}


@functools.cache
def shape_of_mixture(name: str) -> ModelShape | None:
    """The shape of a mixture of this name, or None where only its published numbers are known."""
    return shape_of(_CONFIGS[name]()) if name in _CONFIGS else None
