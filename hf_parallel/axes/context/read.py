"""What a model tells about cutting its sequences, and the variant that fits it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from hf_parallel.axes.context.axis import AUTO, RING, ULYSSES
from hf_parallel.model.anatomy import attention_heads, stacks, text_config, text_part, token_readers
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.config import ParallelConfig

#: Backbones that look positions up in a table, and take those they are given.
_LEARNED_POSITIONS = {"GPT2Model", "GPTBigCodeModel", "BertModel"}
#: Layers that see whole sequences in ways of their own.
_OTHER_LAYERS = ("linear", "conv", "mamba", "recurrent", "chunked", "sparse", "ssm")
#: Rotations that change with the largest position a rank sees.
_GROWING = ("dynamic", "longrope")
#: Ranks of a node where no launcher tells.
_NODE = 8


@dataclass(frozen=True)
class ContextFacts:
    """What cp needs to know of a model.

    Attributes:
        obstacle: why its sequences cannot be cut, or None.
        heads: of queries and of keys.
        causal: does a query see no later keys?
        windows: sliding windows of its layers, in tokens.
        dense: what no kernel over blocks can do, such as dropout of scores; Ulysses can.
    """

    obstacle: str | None
    heads: tuple[int, int]
    causal: bool
    windows: tuple[int, ...] = ()
    dense: str | None = None


def read_context(model: Any) -> ContextFacts:
    """Heads, masks and obstacles of a model, which is not changed."""
    if getattr(model, "config", None) is None:
        return ContextFacts(f"{type(model).__name__} has no config", (1, 1), True)
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    return ContextFacts(
        _obstacle(model, config),
        attention_heads(model) or (1, 1),
        any(getattr(module, "is_causal", False) is True for module in model.modules()),
        (window,) if isinstance(window, int) and getattr(config, "use_sliding_window", True) else (),
        _dense(config),
    )


def _obstacle(model: Any, config: Any) -> str | None:
    name, readers = type(model).__name__, token_readers(model)
    if getattr(config, "is_encoder_decoder", False) or len(readers) != 1 or len(stacks(model)) != 1:
        return f"{name} is not one stack of layers that reads tokens"
    if text_part(model) is not getattr(model, "base_model", model):
        return f"{name} reads more than tokens"
    if not (getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_flash_attn", False)):
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


def _rotations(config: Any) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [str(found.get("rope_type") or found.get("type")) for found in sets]


def _dense(config: Any) -> str | None:
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, key, 0.0):
            return f"{key}={getattr(config, key)}"
    return None


# ---- the variant -------------------------------------------------------------------------------------------------


def choose(config: ParallelConfig, facts: ContextFacts) -> tuple[str, str | None]:
    """The variant, and why, where the spec leaves it open.

    Raises:
        SpecError: nothing works, or not what the spec asks for.
    """
    if facts.obstacle is not None:
        refuse(f"cp_size={config.cp_size}", facts.obstacle, "cp_size=1")
    if config.attention not in ("auto", "sdpa"):
        refuse(f"attention={config.attention}", f"cp_size={config.cp_size} has kernels of its own", "attention=auto")
    heads, kv_heads = (max(1, count // config.tp_size) for count in facts.heads)
    if config.context_parallel == AUTO:
        return _chosen(config, facts, heads, kv_heads)
    asked, inner = f"context_parallel={config.context_parallel}", config.ulysses_size
    if heads % inner:
        refuse(asked, f"{heads} heads are not divided by {inner} ranks", "context_parallel=ring")
    if facts.dense is not None and inner < config.cp_size:
        _refuse_dense(config, asked, facts.dense, heads)
    return config.context_parallel, None


def _refuse_dense(config: ParallelConfig, asked: str, what: str, heads: int) -> NoReturn:
    fits = max(size for size in range(1, config.cp_size + 1) if heads % size == 0)
    works = "context_parallel=ulysses" if fits == config.cp_size else f"cp_size={fits}"
    refuse(asked, f"{what} needs all keys of a head on one rank", works)


def _chosen(config: ParallelConfig, facts: ContextFacts, heads: int, kv_heads: int) -> tuple[str, str]:
    size, node = config.cp_size, int(os.environ.get("LOCAL_WORLD_SIZE") or _NODE)
    if facts.dense is not None:
        if heads % size:
            _refuse_dense(config, f"cp_size={size}", facts.dense, heads)
        return ULYSSES, f"{facts.dense} needs all keys of a head on one rank"
    if heads % size == 0 and size * config.tp_size <= node and not facts.windows:
        sent = (2 * heads + 2 * max(kv_heads, size)) / size
        if sent < 2 * kv_heads:
            return ULYSSES, f"it moves {sent:g} heads of each token, a ring {2 * kv_heads}"
    inner = _inner(size, heads, kv_heads, node // config.tp_size)
    if size * config.tp_size > node and inner > 1 and not facts.windows:
        return f"hybrid:{inner}", f"cp crosses nodes of {node}: heads inside a node, a ring between them"
    if facts.windows:
        return RING, f"what is beyond a window of {facts.windows[0]} tokens is not sent"
    if heads % size:
        return RING, f"{heads} heads are not divided by {size} ranks"
    return RING, f"it moves {2 * kv_heads} heads of each token while it computes"


def _inner(size: int, heads: int, kv_heads: int, node: int) -> int:
    """The most ranks of a node that share heads without repeating keys."""
    fits = [u for u in range(1, size) if size % u == 0 and u <= node and heads % u == 0 and kv_heads % u == 0]
    return max(fits, default=1)
