"""Examples joined to one row: what a collator makes of each alone, less padding, with positions that begin anew."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hf_parallel.hooks import runtime
from hf_parallel.spec import refuse

_alone = ("pack_tokens", 0)  # what one process was asked for, which has no layout to ask


def set_alone(key: str, value: int | bool) -> None:
    """One process was asked for this."""
    global _alone
    _alone = key, value


def asked() -> tuple[str, int | bool]:
    """The key that asks for joined batches, and its value; a value of nothing: none does."""
    current = runtime.current()
    if current is None:
        return _alone
    config = current.config
    return ("padding_free", True) if config.padding_free else ("pack_tokens", config.pack_tokens)


def refuse_joining(why: str, works: str | None = None) -> NoReturn:
    """Of what cannot be joined."""
    key, value = asked()
    if key == "padding_free" or not value:
        refuse("padding_free=true", why, works or "padding_free=false")
    refuse(f"pack_tokens={value}", why, works or "pack_tokens=0")


def joined(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One row of all tokens that are no padding."""
    parts = [_without_padding(row) for row in rows]
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def _without_padding(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    tokens: Any = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        refuse_joining("the script's collator gives no rows of input_ids and labels")
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    if odd:
        refuse_joining(f"the script's collator gives {odd[0]}, which is not of one number per token")
    mask = row.get("attention_mask", torch.ones_like(tokens))[0].bool()
    part = {key: value[:, mask] for key, value in row.items() if key != "attention_mask"}
    part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
    part["labels"] = part["labels"].clone()
    part["labels"][:, 0] = -100
    return part
