"""`pack_tokens=N`: a Trainer's training batches by tokens, joined to one row without padding.

The script's own collator is called with each example alone, and the rows that it gives are joined: what it does to an
example is done, and what it pads is left out. position_ids begin anew with each example, and its first label, which no
token of its own predicts, is no target.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.token_batches import TokenBatches
from hf_parallel.hooks.patching import Patch, around, patch
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, Trainer, TrainingArguments

_MUCH = 0.1  # of the tokens: so much padding is worth a line
_SAMPLE = 256  # rows whose lengths are looked at for it
_alone = 0  # tokens, in one process, which has no layout to ask
_known = False  # is there a Trainer, whose loaders are the ones that are meant?


def budget() -> int:
    """Tokens of a batch of one data rank; 0: batches are as the script makes them."""
    current = runtime.current()
    return _alone if current is None else current.config.pack_tokens


def patches_alone(tokens: int) -> list[Patch]:
    """In one process: what packs its batches, and nothing else."""
    global _alone
    _alone = tokens
    why = "packs by tokens"
    made = functools.partial(Patch, "transformers.trainer:Trainer.__init__", around(_checked), why)
    return [made(), Patch("transformers.trainer:Trainer.get_train_dataloader", around(get_train_dataloader), why)]


def stop() -> None:
    """Forget what one process was asked for."""
    global _alone, _known
    _alone, _known = 0, False


def _checked(
    original: Callable,
    self: Trainer,
    model: PreTrainedModel | None = None,
    args: TrainingArguments | None = None,
    *rest: object,
    **kwargs: object,
) -> None:
    original(self, model, args, *rest, **kwargs)
    check(self)


# ---- what it cannot go with -----------------------------------------------------------------------------------------


def check(trainer: Trainer) -> None:
    """Refuse a Trainer whose batches would not be those that were asked for."""
    global _known
    _known, tokens = True, budget()
    if not tokens:
        return
    from transformers import Trainer

    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            _refuse(f"{type(trainer).__name__}.{name} makes batches of its own", "pack_tokens=0")
    asked = getattr(trainer.args, "train_sampling_strategy", "random")
    if asked != "random" or getattr(trainer.args, "group_by_length", False):
        _refuse(f"train_sampling_strategy={asked} orders rows in another way", "train_sampling_strategy=random")
    if getattr(trainer.data_collator, "mlm", False):
        _refuse("masked language modelling looks both ways, and draws what it masks", "pack_tokens=0")
    model = getattr(trainer.model, "base_model", trainer.model)
    takes = inspect.signature(getattr(model, "forward", model)).parameters
    if "position_ids" not in takes and "kwargs" not in takes:
        _refuse(f"{type(trainer.model).__name__} takes no position_ids, which tell examples apart", "pack_tokens=0")


def check_loop() -> None:
    """Refuse a loop without a Trainer, whose loader is its own.

    Raises:
        SpecError: batches of a token budget were asked for.
    """
    if budget() and not _known:
        _refuse("batches of a loop without a Trainer are the loop's own", "pack_tokens=0")


def _refuse(why: str, works: str) -> None:
    refuse(f"pack_tokens={budget()}", why, works)


# ---- the loader -----------------------------------------------------------------------------------------------------


@patch("transformers.trainer:Trainer.get_train_dataloader", "counts batches in rows")
def get_train_dataloader(original: Callable, self: Trainer) -> object:
    """Batches of at most `pack_tokens` tokens, where that is asked for."""
    if not budget():
        _advise(self)
        return original(self)
    examples, args = _examples(self), self.args
    current = runtime.current()
    ranks = 1 if current is None else current.mesh.data_size
    seed = args.seed if args.data_seed is None else args.data_seed
    batches = TokenBatches(_lengths(self.train_dataset, args), budget(), ranks, seed)
    joined([examples[0]])
    report.say(_line(batches))
    loader = torch.utils.data.DataLoader(
        examples,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=joined,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
    return self.accelerator.prepare(loader)


def _line(batches: TokenBatches) -> str:
    filled = sum(batches.lengths) / (len(batches) * batches.budget)
    return (
        f"pack_tokens={batches.budget}: {len(batches.lengths)} examples in {batches.steps} batches of each of "
        f"{batches.ranks} data ranks, {filled:.0%} full; per_device_train_batch_size is not used for training"
    )


def _advise(trainer: Trainer) -> None:
    """Where the layout was left to the planner: what packing would save, which changes the batches of a script."""
    current, rows = runtime.current(), trainer.train_dataset
    if current is None or not current.source.endswith("(auto)") or current.config.pp_size > 1:
        return
    lengths = _sampled(rows)
    size = trainer.args.per_device_train_batch_size
    if getattr(trainer.data_collator, "return_position_ids", False) or len(lengths) < 2 * size or size == 1:
        return
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    padding = 1 - sum(lengths) / sum(max(part) * len(part) for part in parts)
    if padding > _MUCH:
        tokens = max(max(lengths), round(size * sum(lengths) / len(lengths)))
        report.say(
            f"auto: padding is {padding:.0%} of the tokens of batches of {size} rows; pack_tokens={tokens} leaves it "
            "out, with batches of about as many tokens in the place of as many rows"
        )


def _sampled(rows: Dataset) -> list[int]:
    """Lengths of the first rows of a data set whose rows are tokens."""
    if rows is None or isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__"):
        return []
    first = [rows[index] for index in range(min(_SAMPLE, len(rows)))]
    return [len(row["input_ids"]) for row in first if hasattr(row, "keys") and "input_ids" in row]


class Examples(torch.utils.data.Dataset):
    """Each example as the script's collator makes it alone; `~index` is example `index` without targets."""

    def __init__(self, rows: Dataset, collate: Callable[[list], Mapping]) -> None:
        self.rows, self.collate = rows, collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.collate([self.rows[index if index >= 0 else ~index]]))
        if index < 0:
            row["labels"] = torch.full_like(row["labels"], -100)
        return row


def _examples(trainer: Trainer) -> Examples:
    from transformers.trainer_utils import has_length

    rows, collate = trainer.train_dataset, trainer.data_collator
    if rows is None or isinstance(rows, torch.utils.data.IterableDataset) or not has_length(rows):
        _refuse("examples of a data set without a length cannot be dealt out", "a data set with a length")
    if hasattr(rows, "column_names"):
        rows = trainer._remove_unused_columns(rows, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    return Examples(rows, collate)


def _lengths(rows: Dataset, args: TrainingArguments) -> list[int]:
    """Of each row of the script's data set, with all of its columns: that of lengths, else its tokens."""
    name = getattr(args, "length_column_name", "length")
    if name in (getattr(rows, "column_names", None) or ()):
        lengths = [int(length) for length in rows[name]]
        _check_lengths(rows, lengths, name)
        return lengths
    first = rows[0]
    if not hasattr(first, "keys") or "input_ids" not in first:
        _refuse("rows of the data set have no input_ids to count", "a data set of tokens")
    if hasattr(rows, "select_columns") and rows.format["type"] != "custom":  # a script's transform takes whole rows
        rows = rows.select_columns(["input_ids"])
    return [len(rows[index]["input_ids"]) for index in range(len(rows))]


def _check_lengths(rows: Dataset, lengths: list[int], name: str) -> None:
    """Some rows all over the data set: too small lengths let batches overflow, too large ones leave them empty."""
    told = counted = 0
    for index in range(0, len(rows), max(1, len(rows) // _SAMPLE)):
        row = rows[index]
        tokens = len(row["input_ids"]) if "input_ids" in row else lengths[index]
        if tokens > lengths[index]:
            why = f"the column {name} says {lengths[index]} of example {index}, which has {tokens} tokens"
            _refuse(why, "a data set without that column, or length_column_name")
        told, counted = told + lengths[index], counted + tokens
    if told > (1 + _MUCH) * counted:
        report.say(
            f"pack_tokens: the column {name} says {told} of examples that have {counted} tokens: batches hold less"
        )


def joined(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One row of all tokens that are no padding."""
    parts = [_without_padding(row) for row in rows]
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def _without_padding(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    tokens: Any = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        _refuse("the script's collator gives no rows of input_ids and labels", "pack_tokens=0")
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    if odd:
        _refuse(f"the script's collator gives {odd[0]}, which is not of one number per token", "pack_tokens=0")
    mask = row.get("attention_mask", torch.ones_like(tokens))[0].bool()
    part = {key: value[:, mask] for key, value in row.items() if key != "attention_mask"}
    part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
    part["labels"] = part["labels"].clone()
    part["labels"][:, 0] = -100
    return part
