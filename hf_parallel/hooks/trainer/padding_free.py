"""`padding_free=true`: a Trainer's training batches, row by row those of the script, joined to one without padding.

Which rows make up a batch stays as it is, and so do all sums over targets: losses and weights are those of the padded
batch, but for the order in which numbers are added. Under `--parallel auto` it is chosen for batches of which a tenth
is padding, where the planner says that it pays and nothing below says that the numbers would change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hf_parallel.collectives import objects
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer import joining_proof
from hf_parallel.hooks.trainer.joining import Beside, Collate, asked, joined, lengths_of, rows_and_collator
from hf_parallel.hooks.trainer.joining import why_not_joined as why_row_not_joined

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_parallel.config import ParallelConfig
    from hf_parallel.planner.candidates import Goal

_MUCH = 0.1  # of the tokens: so much padding is worth a line
_GAIN = 0.95  # of the step time: less is below what the planner can tell
_SAMPLE = 256  # rows whose lengths are looked at for it
_planned: tuple[Goal, ParallelConfig] | None = None  # by `--parallel auto`; of rank 0


def wanted() -> bool:
    """Are training batches joined?"""
    return asked()[0] == "padding_free"


def remember(goal: Goal, config: ParallelConfig) -> None:
    """What `--parallel auto` has planned, for the choice that is made when there are rows."""
    global _planned
    _planned = goal, config


def stop() -> None:
    """Forget what was planned."""
    global _planned
    _planned = None


class Joined:
    """The script's collator, called with each row alone; its rows are joined."""

    def __init__(self, collate: Collate, beside: Beside | None = None) -> None:
        self.collate, self.beside = collate, beside

    def __call__(self, rows: list) -> dict[str, torch.Tensor]:
        return joined([dict(self.collate([row])) for row in rows], self.beside)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["collate"], name)


# ---- under `--parallel auto` ----------------------------------------------------------------------------------------


def choose(trainer: Trainer, cannot: Callable[[Trainer], str | None]) -> None:
    """Where the layout was left to the planner: join the batches where it pays and changes nothing. Collective.

    Args:
        cannot: why this Trainer's batches cannot be joined, or None.
    """
    current = runtime.current()
    if current is None or not current.source.endswith("(auto)") or trainer.train_dataset is None:
        return
    if not objects.from_one(lambda: _padding_found(trainer)):
        return
    why = joining_proof.why_other_numbers(trainer)
    pays, line = objects.from_one(lambda: _choice(trainer, current.config, why, cannot))
    report.say(line)
    if pays:
        adopt(trainer, current)


def adopt(trainer: Trainer, current: runtime.Runtime) -> None:
    """From here on the layout says it."""
    current.config = dataclasses.replace(current.config, padding_free=True)
    state = runtime.parallel_state(trainer.model)
    if state is not None and state.plan is not None:
        state.plan = dataclasses.replace(state.plan, config=dataclasses.replace(state.config, padding_free=True))


def _padding_found(trainer: Trainer) -> str | None:
    """How much of batches is padding, in words; None if that is too little to do anything about."""
    from hf_parallel.planner.choices import share_of

    size, lengths = trainer.args.per_device_train_batch_size, _sampled(trainer)
    if size == 1 or len(lengths) < 2 * size or getattr(trainer.data_collator, "return_position_ids", False):
        return None
    share, _, _ = share_of(lengths, size)
    if share <= _MUCH:
        return None
    return f"padding is {share:.0%} of the tokens of batches of {size} rows ({len(lengths)} rows looked at)"


def _choice(
    trainer: Trainer, config: ParallelConfig, why: str | None, cannot: Callable[[Trainer], str | None]
) -> tuple[bool, str]:
    """Whether, and the line that says why.

    Args:
        why: joined examples would give other numbers.
    """
    from hf_parallel.planner.choices import padding_of, share_of

    size, lengths, found = trainer.args.per_device_train_batch_size, _sampled(trainer), _padding_found(trainer)
    _, mean, _ = share_of(lengths, size)
    tokens = max(max(lengths), round(size * mean))
    packs = f"pack_tokens={tokens} leaves it out, with batches of about as many tokens in the place of as many rows"
    packs = "" if why is not None or config.pp_size > 1 else f"; {packs}: other numbers, so it is for you to ask for"
    why = _why_not(trainer, config, cannot) or why
    if why is None and _planned is not None:
        goal, layout = _planned
        padding = padding_of(goal, layout, lengths, size)
        times = f"predicted {padding.ratio:.2f} x the step time"
        if padding.fits and padding.ratio < _GAIN:
            return True, f"auto: padding_free=true: {found}; the same rows joined: {times}, the same numbers"
        why = f"{times} by attention={goal.attention.name}" if padding.fits else "it would not fit"
    return False, f"auto: {found}; not padding_free=true: {why}{packs}"


def _why_not(trainer: Trainer, config: ParallelConfig, cannot: Callable[[Trainer], str | None]) -> str | None:
    """What would change the rows, or cannot be."""
    if config.pp_size > 1:
        return f"a pipeline (pp_size={config.pp_size}) cuts batches by rows"
    why = cannot(trainer)
    if why is not None:
        return why
    rows, collate = rows_and_collator(trainer)
    return differs(collate, [rows[index] for index in range(trainer.args.per_device_train_batch_size)])


def differs(collate: Collate, rows: list) -> str | None:
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


def _sampled(trainer: Trainer) -> list[int]:
    """Lengths of the first rows; none of what cannot be looked at twice."""
    rows = trainer.train_dataset
    if isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__") or not len(rows):
        return []
    return lengths_of(rows, trainer.args, _SAMPLE) or []
