"""`padding_free=true`: a Trainer's training batches, row by row those of the script, joined to one without padding.

Which rows make up a batch stays as it is, and so do all sums over targets: losses and weights are those of the padded
batch, but for the order in which numbers are added. Under `--parallel auto` it is chosen for batches of which a tenth
is padding, where the planner says that it pays and nothing below says that the numbers would change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer import losses
from hf_parallel.hooks.trainer.joining import asked, joined
from hf_parallel.hooks.trainer.joining import why_not_joined as why_row_not_joined
from hf_parallel.hooks.trl import trainers as trl

_MUCH = 0.1  # of the tokens: so much padding is worth a line
_GAIN = 0.95  # of the step time: less is below what the planner can tell
_SAMPLE = 256  # rows whose lengths are looked at for it
_planned: Any = None  # goal and layout of `--parallel auto`; of rank 0


def wanted() -> bool:
    """Are training batches joined?"""
    return asked()[0] == "padding_free"


def remember(goal: Any, config: Any) -> None:
    """What `--parallel auto` has planned, for the choice that is made when there are rows."""
    global _planned
    _planned = goal, config


def stop() -> None:
    """Forget what was planned."""
    global _planned
    _planned = None


class Joined:
    """The script's collator, called with each row alone; its rows are joined."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list) -> dict[str, torch.Tensor]:
        return joined([dict(self.collate([row])) for row in rows])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["collate"], name)


# ---- under `--parallel auto` ----------------------------------------------------------------------------------------


def choose(trainer: Any, cannot: Callable[[Any], str | None]) -> None:
    """Where the layout was left to the planner: join the batches where it pays and changes nothing. Collective.

    Args:
        cannot: why this Trainer's batches cannot be joined, or None.
    """
    current, rows = runtime.current(), trainer.train_dataset
    if current is None or not current.source.endswith("(auto)") or rows is None:
        return
    said: list[Any] = [False, None]
    if dist.get_rank() == 0:
        said = list(_choice(trainer, current.config, rows, cannot))
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        report.say(said[1])
    if said[0]:
        adopt(trainer, current)


def adopt(trainer: Any, current: Any) -> None:
    """From here on the layout says it."""
    current.config = dataclasses.replace(current.config, padding_free=True)
    state = runtime.parallel_state(trainer.model)
    if state is not None and state.plan is not None:
        state.plan = dataclasses.replace(state.plan, config=dataclasses.replace(state.config, padding_free=True))


def _choice(trainer: Any, config: Any, rows: Any, cannot: Callable[[Any], str | None]) -> tuple[bool, str | None]:
    """Whether, and the line that says why."""
    from hf_parallel.planner.padding import padding_of, share_of

    size, lengths = trainer.args.per_device_train_batch_size, _sampled(rows, trainer.args)
    if size == 1 or len(lengths) < 2 * size or getattr(trainer.data_collator, "return_position_ids", False):
        return False, None
    share, mean, _ = share_of(lengths, size)
    if share <= _MUCH:
        return False, None
    found = f"padding is {share:.0%} of the tokens of batches of {size} rows ({len(lengths)} rows looked at)"
    tokens = max(max(lengths), round(size * mean))
    packs = f"pack_tokens={tokens} leaves it out, with batches of about as many tokens in the place of as many rows"
    why = _why_not(trainer, config, rows, cannot)
    if why is None and _planned is not None:
        goal, layout = _planned
        padding = padding_of(goal, layout, lengths, size)
        times = f"predicted {padding.ratio:.2f} x the step time"
        if padding.fits and padding.ratio < _GAIN:
            return True, f"auto: padding_free=true: {found}; the same rows joined: {times}, the same numbers"
        why = f"{times} by attention={goal.attention.name}" if padding.fits else "it would not fit"
    packs = "" if config.pp_size > 1 else f"; {packs}: other numbers, so it is for you to ask for"
    return False, f"auto: {found}; not padding_free=true: {why}{packs}"


def _why_not(trainer: Any, config: Any, rows: Any, cannot: Callable[[Any], str | None]) -> str | None:
    """What would change the numbers, or cannot be."""
    if config.pp_size > 1:
        return f"a pipeline (pp_size={config.pp_size}) cuts batches by rows"
    why = cannot(trainer)
    if why is not None:
        return why
    if trainer.compute_loss_func is not None or (losses.overrides(trainer) and not trl.is_sft(trainer)):
        return "the script's own loss may look at rows"
    collate = trainer.data_collator
    first = [rows[index] for index in range(trainer.args.per_device_train_batch_size)]
    if not hasattr(rows, "column_names"):
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    else:
        first = [_kept_columns(trainer, row) for row in first]
    return differs(collate, first)


def _kept_columns(trainer: Any, row: dict) -> dict:
    """As Trainer shows it to the collator."""
    if not trainer.args.remove_unused_columns:
        return row
    trainer._set_signature_columns_if_needed()
    return {key: value for key, value in row.items() if key in trainer._signature_columns}


def differs(collate: Callable[[list], Any], rows: list) -> str | None:
    """Is what the collator makes of these rows together, less padding, what it makes of each? Else why not."""
    try:
        together, alone = dict(collate(rows)), [dict(collate([row])) for row in rows]
        why = next(filter(None, map(why_row_not_joined, alone)), None)
        apart = joined(alone) if why is None else {}
    except (KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
    if why is not None:
        return why
    mask = together.get("attention_mask")
    if not torch.is_tensor(mask):
        return "the script's collator makes no attention_mask, which tells padding"
    mask = mask.bool()
    if mask.ndim != 2 or not bool(mask[:, 0].all()) or bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return "rows are not padded on the right, so that positions would be others"
    targets = together["labels"].clone()
    targets[:, 0] = -100
    same = torch.equal(together["input_ids"][mask], apart["input_ids"][0])
    same = same and torch.equal(targets[mask], apart["labels"][0]) and bool((targets[~mask] == -100).all())
    return None if same else "the script's collator makes other rows of several than of each alone"


def _sampled(rows: Any, args: Any) -> list[int]:
    """Lengths of the first rows: from their column, or of their tokens; none of what cannot be looked at twice."""
    if isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__"):
        return []
    name = getattr(args, "length_column_name", "length")
    if name in (getattr(rows, "column_names", None) or ()):
        return [int(length) for length in rows[name][:_SAMPLE]]
    first = [rows[index] for index in range(min(_SAMPLE, len(rows)))]
    return [len(row["input_ids"]) for row in first if hasattr(row, "keys") and "input_ids" in row]
