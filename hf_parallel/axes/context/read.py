"""What a model tells about cutting its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.model.anatomy import (
    attention_heads,
    head_width,
    stacks,
    text_config,
    text_part,
    token_readers,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

#: Backbones that look positions up in a table, and take those they are given.
_LEARNED_POSITIONS = {"GPT2Model", "GPTBigCodeModel", "BertModel"}
#: Layers that see whole sequences in ways of their own.
_OTHER_LAYERS = ("linear", "conv", "mamba", "recurrent", "chunked", "sparse", "ssm")
#: Where models write how much of their scores they drop.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
#: Rotations that change with the largest position a rank sees.
_GROWING = ("dynamic", "longrope")


@dataclass(frozen=True)
class ContextFacts:
    """What cp needs to know of a model.

    Attributes:
        obstacle: why its sequences cannot be cut, or None.
        heads: of queries and of keys.
        causal: does a query see no later keys?
        width: of a head.
        windows: sliding windows of its layers, in tokens.
        dense: what no kernel over blocks can do, such as dropout of scores; Ulysses can.
    """

    obstacle: str | None
    heads: tuple[int, int]
    causal: bool
    width: int = 128
    windows: tuple[int, ...] = ()
    dense: str | None = None


def read_context(model: nn.Module) -> ContextFacts:
    """Heads, masks and obstacles of a model, which is not changed."""
    if getattr(model, "config", None) is None:
        return ContextFacts(f"{type(model).__name__} has no config", (1, 1), True)
    config = text_config(model)
    window = sliding_window(config)
    return ContextFacts(
        _obstacle(model, config),
        attention_heads(model) or (1, 1),
        any(getattr(module, "is_causal", False) is True for module in model.modules()),
        _width(config),
        () if window is None else (window,),
        score_dropout(config),
    )


def sliding_window(config: PretrainedConfig) -> int | None:
    """Of its sliding layers, in tokens, or None."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else None


def score_dropout(config: PretrainedConfig) -> str | None:
    """`key=value` of the dropout of its scores, or None."""
    return next((f"{key}={value}" for key in _DROPOUTS if (value := getattr(config, key, 0.0))), None)


def uses_registries(model: nn.Module) -> bool:
    """Does it call its attention, and make its masks, through transformers' registries?"""
    return bool(getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_flash_attn", False))


def _width(config: PretrainedConfig) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return head_width(config) or getattr(config, "hidden_size", 128 * heads) // heads


def _obstacle(model: nn.Module, config: PretrainedConfig) -> str | None:
    name, readers = type(model).__name__, token_readers(model)
    if getattr(config, "is_encoder_decoder", False) or len(readers) != 1 or len(stacks(model)) != 1:
        return f"{name} is not one stack of layers that reads tokens"
    if text_part(model) is not getattr(model, "base_model", model):
        return f"{name} reads more than tokens"
    if not uses_registries(model):
        return f"{name} has an attention of its own"
    reader = readers[0]
    rotary = any("rotary" in child for child, _ in reader.named_children())
    if not rotary and type(reader).__name__ not in _LEARNED_POSITIONS:
        return f"where {type(reader).__name__} has its positions from is not known"
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if any(x in kind for x in _OTHER_LAYERS)]
    if kinds:
        return f"{name} has layers of {kinds[0]}"
    growing = [kind for kind in _rotations(config) if kind in _GROWING]
    return f"its rotary embedding is {growing[0]}, which changes with the length" if growing else None


def _rotations(config: PretrainedConfig) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [str(found.get("rope_type") or found.get("type")) for found in sets]
