"""Examples joined to one row: what a collator makes of each alone, less padding, with positions that begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hf_parallel.hooks import runtime
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.config import ParallelConfig

_alone: ParallelConfig | None = None  # of one process, which has no layout to ask


def set_alone(config: ParallelConfig | None) -> None:
    """One process was asked for this."""
    global _alone
    _alone = config


def asked() -> tuple[str, int | bool]:
    """The key that asks for joined batches, and its value; a value of nothing: none does."""
    current = runtime.current()
    config = _alone if current is None else current.config
    return ("pack_tokens", 0) if config is None else asked_by(config)


def asked_by(config: ParallelConfig) -> tuple[str, int | bool]:
    """The same, of this config."""
    return ("padding_free", True) if config.padding_free else ("pack_tokens", config.pack_tokens)


def refuse_joining(why: str, works: str | None = None, config: ParallelConfig | None = None) -> NoReturn:
    """Of what cannot be joined.

    Args:
        config: who asks for it, if not the layout in force.
    """
    key, value = asked() if config is None else asked_by(config)
    off = "false" if key == "padding_free" else "0"
    refuse(f"{key}={str(value).lower()}", why, works or f"{key}={off}")


def joined(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One row of all tokens that are no padding."""
    parts = [_without_padding(row) for row in rows]
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def why_not_joined(row: dict[str, Any]) -> str | None:
    """Why a row as the collator gives it cannot be joined to others."""
    tokens: Any = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        return "the script's collator gives no rows of input_ids and labels"
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    return f"the script's collator gives {odd[0]}, which is not of one number per token" if odd else None


def _without_padding(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    why = why_not_joined(row)
    if why is not None:
        refuse_joining(why)
    tokens = row["input_ids"]
    mask = row.get("attention_mask", torch.ones_like(tokens))[0].bool()
    part = {key: value[:, mask] for key, value in row.items() if key != "attention_mask"}
    part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
    part["labels"] = part["labels"].clone()
    part["labels"][:, 0] = -100
    return part
