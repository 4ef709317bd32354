"""Which module gets which tensor-parallel style: the model's own plan, checked against its sizes.

A style is a word; `tensor_parallel.py` knows what it does. The words are those of transformers' `tp_plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_parallel.config import SpecError

#: Words of transformers' plans that this version can apply.
SUPPORTED = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
}


def resolve_styles(model: Any, tp_size: int) -> dict[str, str]:
    """Map the full name of each module that is split to its style.

    Raises:
        SpecError: the model publishes no plan, uses a style unknown here, or a size does not divide.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise SpecError(
            f"tp_size={tp_size}: {type(model).__name__} publishes no tensor-parallel plan; tp_size=1 works"
        )
    shared = _shares_heads(model, tp_size)
    styles = {name: style for name, _, style in _matches(model, plan)}
    unknown = sorted({style for style in styles.values() if style not in SUPPORTED})
    if unknown:
        raise SpecError(
            f"tp_size={tp_size}: style {unknown[0]} of {type(model).__name__} is not supported; tp_size=1 works"
        )
    if shared:
        styles.update({name: "colwise_shared_heads" for name in styles if name.endswith((".k_proj", ".v_proj"))})
    _check_widths(model, styles, tp_size)
    return styles


def _matches(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield name, module, style


def _shares_heads(model: Any, tp_size: int) -> bool:
    """Are there fewer key/value heads than ranks, so that ranks share them?

    Raises:
        SpecError: query heads, or key/value heads, do not fall into whole groups.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return False
    works = [n for n in range(2, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp_size not in works:
        choice = f"tp_size={' or '.join(map(str, works))}" if works else "tp_size=1"
        raise SpecError(
            f"tp_size={tp_size} does not divide {heads} attention heads and {kv_heads} key/value heads; {choice} works"
        )
    return tp_size > kv_heads


def _check_widths(model: nn.Module, styles: dict[str, str], tp_size: int) -> None:
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        dim = {"colwise": 0, "rowwise": 1}.get(style)
        if isinstance(weight, torch.Tensor) and dim is not None and weight.shape[dim] % tp_size:
            raise SpecError(f"tp_size={tp_size} does not divide {name}.weight dim {dim} of {weight.shape[dim]}")
