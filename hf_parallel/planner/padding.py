"""What padding costs: a script's batches beside the same rows joined to one without padding, by their lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_parallel.config import ParallelConfig
from hf_parallel.planner.attention import FLASH, Planned
from hf_parallel.planner.candidates import Goal
from hf_parallel.planner.choices import Choice, predicted


@dataclass(frozen=True)
class Padding:
    """`share` of the tokens that is padding; `ratio` of the step time without it, which `fits` or not."""

    share: float
    ratio: float = 1.0
    fits: bool = True


def share_of(lengths: Sequence[int], size: int) -> tuple[float, float, float]:
    """Of batches of `size` rows: the share of padding, the mean length of rows, and that of rows with padding."""
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    mean = sum(lengths) / len(lengths)
    padded = sum(max(part) * len(part) for part in parts) / len(lengths)
    return 1 - mean / padded, mean, padded


def padding_of(goal: Goal, config: ParallelConfig, lengths: Sequence[int], size: int) -> Padding:
    """What the planner says of joining each batch.

    A flash kernel takes row by row what is joined; others are given a mask of all tokens by all tokens.

    Args:
        size: rows of a batch of one data rank.
    """
    share, mean, padded = share_of(lengths, size)
    alone = dataclasses.replace(goal.attention, documents=True)
    before = _step(goal, config, size, padded, alone)
    if goal.attention.kind(config) == FLASH:
        after = _step(goal, config, size, mean, alone)
    else:
        after = _step(goal, config, 1, size * mean, alone)
    return Padding(share, after.step_time_s / before.step_time_s, after.prediction.fits)


def _step(goal: Goal, config: ParallelConfig, rows: int, tokens: float, attention: Planned) -> Choice:
    seq = max(1, round(tokens))
    batch = dataclasses.replace(goal, rows=rows, seq=seq, global_batch=None, attention=attention)
    found = predicted(batch, config, rows, measure=True)
    assert isinstance(found, Choice)
    return found
