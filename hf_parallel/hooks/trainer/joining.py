"""Examples joined to one row: what a collator makes of each alone, less padding, with positions that begin anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

from hf_parallel.hooks import runtime
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from hf_parallel.config import ParallelConfig

#: Examples in, a batch out.
Collate: TypeAlias = Callable[[list], Mapping]

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


def joined(rows: Sequence[Mapping[str, object]]) -> dict[str, torch.Tensor]:
    """One row of all tokens that are no padding."""
    parts = [_without_padding(row) for row in rows]
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def why_not_joined(row: Mapping[str, object]) -> str | None:
    """Why a row as the collator gives it cannot be joined to others."""
    tokens = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        return "the script's collator gives no rows of input_ids and labels"
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    return f"the script's collator gives {odd[0]}, which is not of one number per token" if odd else None


def _without_padding(row: Mapping[str, object]) -> dict[str, torch.Tensor]:
    why = why_not_joined(row)
    if why is not None:
        refuse_joining(why)
    held = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
    mask = held.pop("attention_mask", torch.ones_like(held["input_ids"]))[0].bool()
    part = {key: value[:, mask] for key, value in held.items()}
    part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
    part["labels"] = part["labels"].clone()
    part["labels"][:, 0] = -100
    return part


# ---- the rows of a Trainer ------------------------------------------------------------------------------------------


def rows_and_collator(trainer: Trainer) -> tuple[Dataset, Collate]:
    """The training rows and the collator, of which one leaves out unused columns, as Trainer puts them together."""
    rows, collate = trainer.train_dataset, trainer.data_collator
    if hasattr(rows, "column_names"):
        return trainer._remove_unused_columns(rows, description="training"), collate
    return rows, trainer._get_collator_with_removed_columns(collate, description="training")


def length_column(rows: Dataset, args: TrainingArguments) -> str | None:
    """The column that says how long rows are, if there is one."""
    name = getattr(args, "length_column_name", "length")
    return name if name in (getattr(rows, "column_names", None) or ()) else None


def lengths_of(rows: Dataset, args: TrainingArguments, most: int | None = None) -> list[int] | None:
    """Of the script's first rows, with all of their columns: that of lengths, else their tokens; None without any."""
    name = length_column(rows, args)
    if name is not None:
        return [int(length) for length in rows[name][:most]]
    first = rows[0]
    if not hasattr(first, "keys") or "input_ids" not in first:
        return None
    if hasattr(rows, "select_columns") and rows.format["type"] != "custom":  # a script's transform takes whole rows
        rows = rows.select_columns(["input_ids"])
    return [len(rows[index]["input_ids"]) for index in range(len(rows))[:most]]
