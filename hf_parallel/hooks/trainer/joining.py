"""Examples joined to one row: what a collator makes of each alone, less padding, with positions that begin anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

from hf_parallel.hooks import runtime
from hf_parallel.hooks.trainer.rows import LABELS_COUNTED, PADDED_LENGTHS
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


def refuse_joining(
    why: str, works: str | None = None, config: ParallelConfig | None = None, alone: bool = False
) -> NoReturn:
    """Of what cannot be joined.

    Args:
        config: who asks for it, if not the layout in force.
        alone: is it a batch of this rank's own?
    """
    key, value = asked() if config is None else asked_by(config)
    off = "false" if key == "padding_free" else "0"
    refuse(f"{key}={str(value).lower()}", why, works or f"{key}={off}", alone=alone)


@dataclass(frozen=True)
class Beside:
    """What a joined batch brings along for Trainer; no model sees it.

    Attributes:
        labels: those in which the first of each example still counts, as Trainer counts it where it does not know that
            a model's loss shifts labels (GPT-2, BERT's decoder, …).
        lengths: of each token's example with its padding, from which the size of NEFTune's noise follows.
        of_batch: examples of one batch are padded to the longest of them.
    """

    labels: bool = False
    lengths: bool = False
    of_batch: bool = False

    @classmethod
    def wanted(cls, trainer: Trainer, of_batch: bool) -> Beside:
        """By this trainer."""
        noise = getattr(trainer, "neftune_noise_alpha", None) is not None
        return cls(not getattr(trainer, "_loss_shifts_labels", True), noise, of_batch)


def joined(rows: Sequence[Mapping[str, object]], beside: Beside | None = None) -> dict[str, torch.Tensor]:
    """One row of all tokens that are no padding."""
    parts = [_without_padding(row, beside or Beside()) for row in rows]
    batch = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    if beside is not None and beside.lengths and beside.of_batch:
        batch[PADDED_LENGTHS].fill_(batch[PADDED_LENGTHS].max())
    return batch


def why_not_joined(row: Mapping[str, object]) -> str | None:
    """Why a row as the collator gives it cannot be joined to others."""
    tokens = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        return "the script's collator gives no rows of input_ids and labels"
    if len(tokens) != 1:
        return f"the script's collator gives {len(tokens)} rows for one example"
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    if odd:
        return f"the script's collator gives {odd[0]}, which is not of one number per token"
    return _why_mask_not_joined(row) or _why_positions_not_joined(row)


def _why_mask_not_joined(row: Mapping[str, object]) -> str | None:
    """A token in a hole is not attended to, but has a position: joined, the hole would be gone."""
    mask = row.get("attention_mask")
    if not torch.is_tensor(mask):
        return None
    kept = mask[0].bool()
    if int((kept[1:] & ~kept[:-1]).sum()) + int(kept[:1].sum()) > 1:
        inside = ~kept & kept.cumsum(0).bool() & kept.flip(0).cumsum(0).flip(0).bool()
        return f"the attention_mask of an example has a hole at token {int(inside.nonzero()[0])}"
    return None


def _why_positions_not_joined(row: Mapping[str, object]) -> str | None:
    """Where positions begin anew tells examples apart: those of each count up from 0.

    A row may hold several documents if it has no mask: with one, models do not look for them.
    """
    positions = row.get("position_ids")
    if not torch.is_tensor(positions):
        return None
    mask = row.get("attention_mask")
    kept = positions[0][mask[0].bool()] if torch.is_tensor(mask) else positions[0]
    if not len(kept):
        return None
    if int(kept[0]) != 0:
        return f"position_ids of an example begin at {int(kept[0])}, not at 0"
    odd = kept.diff() != 1
    if mask is None:
        odd &= kept[1:] != 0
    if bool(odd.any()):
        at = int(odd.nonzero()[0])
        return f"position_ids of an example go from {int(kept[at])} to {int(kept[at + 1])}"
    return None


def _without_padding(row: Mapping[str, object], beside: Beside) -> dict[str, torch.Tensor]:
    why = why_not_joined(row)
    if why is not None:
        refuse_joining(why, alone=True)
    held = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
    mask = held.pop("attention_mask", torch.ones_like(held["input_ids"]))[0].bool()
    part = {key: value[:, mask] for key, value in held.items()}
    part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
    if beside.labels:
        part[LABELS_COUNTED] = part["labels"]
    if beside.lengths:
        part[PADDED_LENGTHS] = torch.full_like(part["labels"], len(mask))
    part["labels"] = part["labels"].clone()
    part["labels"][:, 0] = -100
    return part


def with_counted_labels(batches: list) -> list:
    """The batches as Trainer counts their targets; what only the count needs is taken out of them."""
    kept = [batch.pop(LABELS_COUNTED, None) if isinstance(batch, dict) else None for batch in batches]
    return [
        batch if labels is None else {**batch, "labels": labels} for batch, labels in zip(batches, kept, strict=True)
    ]


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
