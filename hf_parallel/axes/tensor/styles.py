"""Which module gets which tensor-parallel style: the model's own plan, else inferred; checked against its sizes.

A style is a word; `tensor_parallel.py` and `vocab_parallel.py` know what it does. The words are those of transformers'
`tp_plan` where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.tensor.infer import (
    UNSPLITTABLE,
    by_heads,
    infer_styles,
    is_attention,
    latent_attention,
    linear_sizes,
    packed_style,
)
from hf_parallel.config import SpecError
from hf_parallel.model.anatomy import attention_heads, text_config, text_part, tied_to_embedding

#: Words of transformers' plans that this version can apply.
SUPPORTED = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
}
#: transformers' own answer to packed weights is to compute them whole; where the packing is known we split them.
_WHOLE = {"colwise_gather_output": "packed", "rowwise_split_input": "rowwise"}
_APART = (".q_proj", ".k_proj", ".v_proj")
_OF_VOCABULARY = ("embedding_rowwise", "colwise_gather_output")


def resolve_styles(model: Any, tp_size: int) -> dict[str, str]:
    """Map the full name of each module that is split to its style.

    Raises:
        SpecError: a style is unknown here, nothing can be inferred, or a size does not divide.
    """
    return {name: style for name, (style, _) in styles_and_origins(model, tp_size).items()}


def styles_and_origins(model: Any, tp_size: int) -> dict[str, tuple[str, str]]:
    """As `resolve_styles`, with where each style comes from: "plan", "inferred" or "known"."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    for module in model.modules():
        reason = UNSPLITTABLE.get(type(module).__name__)
        if reason is not None:
            raise SpecError(f"tp_size={tp_size}: {type(module).__name__} {reason}; tp_size=1 works")
    shared = _shares_heads(model, tp_size)
    try:
        latent = latent_attention(model)
        attentions = {name.rpartition(".")[0] for name in latent}
        published = _from_plan(model, {k: v for k, v in plan.items() if v != "local_params"}, attentions)
        styles = {name: (style, "plan") for name, style in published.items()}
        if not latent and _splits_no_layer(styles):
            styles.update({name: (style, "inferred") for name, style in infer_styles(model).items()})
    except SpecError as error:
        raise SpecError(f"tp_size={tp_size}: {type(model).__name__}: {error}; tp_size=1 works") from error
    for known in (latent, _vocabulary(model), by_heads(model)):
        styles.update({name: (style, "known") for name, style in known.items() if name not in styles})
    if _reads_embedding(model):
        styles = {name: found for name, found in styles.items() if found[0] not in _OF_VOCABULARY}
    if shared:
        styles.update({name: (_shared(style, name), origin) for name, (style, origin) in styles.items()})
    _check_widths(model, {name: style for name, (style, _) in styles.items()}, tp_size)
    _check_lists(model, [name for name, (style, _) in styles.items() if style == "colwise"], tp_size)
    return styles


def _from_plan(model: Any, plan: dict[str, str], latent: set[str]) -> dict[str, str]:
    """The plan's words by module, without those of latent attentions, which we cut in our own way."""
    styles = {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = {id(module) for module in text_part(model).modules()}
    matches = list(_matches(model, plan))
    split = {name.rpartition(".")[0] for name, _, word in matches if word.startswith("rowwise")}
    for name, module, word in matches:
        if id(module) not in inside and module is not head:
            continue  # the vision part of a composite model stays whole
        if name.rpartition(".")[0] in latent:
            continue
        if word == "colwise_gather_output" and module is not head and name.rpartition(".")[0] not in split:
            continue  # no layer follows that would split it: all of it stays whole
        style = word if module is head else _packed(model, name, _WHOLE.get(word, word))
        if style == "packed" and name.endswith(_APART):
            style = "colwise"  # gathered for a norm over all heads, which `SplitNorm` does
        if style not in SUPPORTED and not style.startswith("packed_"):
            raise SpecError(f"style {word} of {name} is not supported")
        styles[name] = style
    return styles


def _packed(model: Any, name: str, style: str) -> str:
    owner, _, child = name.rpartition(".")
    known = packed_style(model.get_submodule(owner), child) or style
    return known if style in ("packed", "colwise") else style


def _reads_embedding(model: Any) -> bool:
    """Does a forward read the embedding's weight itself? Gemma 4's does for the layers' own inputs, heads too."""
    kinds = {type(module).__name__ for module in model.modules()}
    by_layer = "Gemma4Model" in kinds and bool(getattr(text_config(model), "hidden_size_per_layer_input", 0))
    return by_layer or not kinds.isdisjoint({"DebertaLMPredictionHead", "DebertaV2LMPredictionHead"})


def _splits_no_layer(styles: dict[str, tuple[str, str]]) -> bool:
    return not any(style in ("colwise", "rowwise") for style, _ in styles.values())


def _vocabulary(model: Any) -> dict[str, str]:
    """Embeddings and head, which several plans leave out."""
    styles = dict.fromkeys(tied_to_embedding(model), "embedding_rowwise")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is nn.Linear:
        styles[next(name for name, module in model.named_modules() if module is head)] = "colwise_gather_output"
    return styles


def _shared(style: str, name: str) -> str:
    """The style of key and value projections when ranks share heads."""
    if style == "colwise" and name.endswith((".k_proj", ".v_proj")):
        return "colwise_shared_heads"
    return {"packed_qkv": "shared_qkv", "falcon_qkv": "shared_groups"}.get(style, style)


def _matches(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield name, module, style


def _shares_heads(model: Any, tp_size: int) -> bool:
    """Are there fewer key/value heads than ranks, so that ranks share them?

    Raises:
        SpecError: no attention; query heads, or key/value heads, do not fall into whole groups.
    """
    counts = attention_heads(model)
    if counts is None:
        raise SpecError(
            f"tp_size={tp_size}: {type(model).__name__} publishes no tensor-parallel plan and has no attention heads "
            "to split; tp_size=1 works"
        )
    heads, kv_heads = counts
    works = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp_size not in works:
        choice = f"tp_size={' or '.join(map(str, works))}" if works else "tp_size=1"
        raise SpecError(
            f"tp_size={tp_size} does not divide {heads} attention heads and {kv_heads} key/value heads; {choice} works"
        )
    return tp_size > kv_heads


def _check_lists(model: nn.Module, names: list[str], tp_size: int) -> None:
    """A module for each head, as StableLM 2's norms: a rank would take the first ones, whichever heads it has."""
    heads = attention_heads(model) or ()
    owners = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in names}
    for owner, attention in owners.items():
        for module in attention.modules() if is_attention(attention) else ():
            if isinstance(module, nn.ModuleList | nn.ParameterList) and len(module) > 1 and len(module) in heads:
                raise SpecError(f"tp_size={tp_size}: {owner} keeps a module for each head; tp_size=1 works")


def _check_widths(model: nn.Module, styles: dict[str, str], tp_size: int) -> None:
    for name, style in styles.items():
        if style not in ("colwise", "rowwise"):
            continue
        module = model.get_submodule(name)
        width = linear_sizes(module)[style == "colwise"] if isinstance(module, nn.Linear | Conv1D) else 0
        if width % tp_size:
            side = "output" if style == "colwise" else "input"
            raise SpecError(
                f"tp_size={tp_size} does not divide the {width} {side} features of {name}; tp_size=1 works"
            )
