"""Where things are in a Hugging Face model: text part, stacks of layers, what runs before and after them, heads.

What a model says of itself (plans, attribute maps) comes first. `_BACKBONES` holds the order of execution of models
that say nothing; it was read in their sources, since the order in which modules are registered proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Backbone:
    """What a decoder runs, in order: names relative to the backbone. `tuples`: its layers return tuples."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    tuples: bool = False


@dataclass(frozen=True)
class Stack:
    """Layers that follow each other directly, and the norm right after them if it is known."""

    name: str
    layers: nn.ModuleList
    norm: nn.Module | None


_BACKBONES = {
    "GPT2Model": Backbone(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "FalconModel": Backbone(("word_embeddings",), "h", ("ln_f",), tuples=True),
    "BloomModel": Backbone(("word_embeddings", "word_embeddings_layernorm"), "h", ("ln_f",), tuples=True),
    "OPTModel": Backbone(
        ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        "decoder.layers",
        ("decoder.final_layer_norm", "decoder.project_out"),
    ),
}


def backbone_plan(backbone: Any) -> Backbone | None:
    """The published pipeline plan of a backbone, else the known one, else None."""
    plan = list(getattr(getattr(backbone, "config", None), "base_model_pp_plan", None) or {})
    lists = [name for name in plan if isinstance(getattr(backbone, name, None), nn.ModuleList)]
    if len(lists) == 1:
        place = plan.index(lists[0])
        return Backbone(tuple(plan[:place]), lists[0], tuple(plan[place + 1 :]))
    return _BACKBONES.get(type(backbone).__name__)


def text_part(model: Any) -> Any:
    """The part that reads tokens: of a vision-language model its language model, else the whole backbone."""
    backbone = getattr(model, "base_model", model)
    config = getattr(model, "config", None)
    is_composite = any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))
    return model.get_decoder() if is_composite and hasattr(model, "get_decoder") else backbone


def stacks(model: Any) -> list[Stack]:
    """The stacks of layers of the text part: one, or two of an encoder-decoder model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    part = text_part(model)
    plan = backbone_plan(part)
    found = []
    for name, module in part.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if plan is not None and name == plan.layers:
            found.append(Stack(name, module, _norm_after(part, plan)))
        elif plan is None and all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            found.append(Stack(name, module, None))
    return found


def _norm_after(part: nn.Module, plan: Backbone) -> nn.Module | None:
    """The norm right after the layers; some checkpoints of a family have none."""
    owner, _, name = (plan.after[0] if plan.after else "").rpartition(".")
    module = getattr(part.get_submodule(owner), name, None)
    return module if isinstance(module, nn.Module) and "norm" in type(module).__name__.lower() else None


def text_config(model: Any) -> Any:
    """The config that describes the text part."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def attention_heads(model: Any) -> tuple[int, int] | None:
    """Number of query heads and of key/value heads, or None for a model without attention."""
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon-7B, StarCoder
    return heads, kv_heads


def tied_to_embedding(model: Any) -> list[str]:
    """Full names of all token embeddings: the one the model names, and those that share its weight."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return []
    named = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    own = {key for key, module in named.items() if module is embedding or module.weight is embedding.weight}
    sources = own | {tied[key] for key in own if key in tied}
    shared = {key for key in named if tied.get(key) in sources}
    return sorted(key.removesuffix(".weight") for key in own | (sources & set(named)) | shared)
