"""`batch_shares`: a batch of examples cut among data ranks in proportion to their speeds.

batch_shares=3:3:2:1     data rank   0   1   2   3
a batch of 32 examples              11  11   7   3
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

Shares: TypeAlias = tuple[Fraction, ...]


@functools.lru_cache(maxsize=64)
def cut_examples(
    examples: int, shares: Shares, least: int = 0, most: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the number of examples of each rank, such that the last rank to end ends first.

    Examples go one after another to the rank that would be done with its next one first. For equal jobs on machines
    of unlike speed no other cut ends earlier.

    Args:
        least: the number of examples that every rank has.
        most: the number of examples that fit on each rank; where all are full, the cut goes on by shares.
    """
    counts = [least] * len(shares)
    for _ in range(examples - sum(counts)):
        room = [rank for rank in range(len(shares)) if most is None or counts[rank] < most[rank]]
        first = min(room or range(len(shares)), key=lambda rank: ((counts[rank] + 1) / shares[rank], rank))
        counts[first] += 1
    return tuple(counts)


def compute_enough_examples(shares: Shares) -> int:
    """Return a batch size per data rank with which `cut_examples` gives every rank an example."""
    return math.ceil(Fraction(sum(share // min(shares) for share in shares), len(shares)))


# ---- `batch_shares=auto`: shares that follow from measured speeds ---------------------------------------------------

#: A new cut must be so many times as fast, in so many looks in a row, by the median of so many readings.
WORTH, LOOKS, READINGS = 1.1, 2, 3


def compute_shares_of(seconds: Sequence[float]) -> Shares:
    """Return the shares of ranks that take so many seconds for an example, in two digits: noise moves no example."""
    return tuple(Fraction(f"{min(seconds) / one:.2f}") or Fraction(1, 100) for one in seconds)


@dataclass(eq=False)
class Speeds:
    """Seconds per example of each data rank, reading by reading, and what follows for the cut of a batch."""

    _readings: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=READINGS))
    _agreed: int = 0

    @property
    def medians(self) -> list[float]:
        """Seconds per example of each data rank, by the last readings."""
        return [statistics.median(of_rank) for of_rank in zip(*self._readings, strict=True)]

    def look(
        self, seconds: Sequence[float], examples: int, shares: Shares, most: tuple[int, ...] | None = None
    ) -> Shares | None:
        """Return better shares than these, once readings agree on them, or one shows a rank without room.

        Args:
            seconds: of each data rank for an example.
            examples: of a batch of all data ranks.
            shares: those that are in force.
            most: the number of examples that fit on each data rank.
        """
        self._readings.append(seconds)
        if min(seconds) <= 0:
            return None
        medians = self.medians
        now, found = cut_examples(examples, shares, 1), compute_shares_of(medians)
        free, then = (cut_examples(examples, found, 1, limit) for limit in (None, most))
        if then != free:  # these shares cut this batch so, and others in proportion
            found = tuple(map(Fraction, then))
        if most is not None and then != now and any(map(operator.gt, now, most)):
            return found
        if len(self._readings) < READINGS:
            return None
        before, after = (max(map(operator.mul, cut, medians)) for cut in (now, then))
        self._agreed = self._agreed + 1 if before >= WORTH * after else 0
        return found if self._agreed >= LOOKS else None

    def forget(self) -> None:
        """Begin anew, as after a change."""
        self._readings.clear()
        self._agreed = 0


class SharesOfPass:
    """The shares of each micro-step of a pass over the data, which change between steps.

    A loader draws ahead of what is trained on, so that a change holds from a micro-step on that no rank has drawn.

    Attributes:
        drawn: how many micro-steps of the pass have been drawn.
        taken: how many of them have been trained on.
        in_hand: the shares of the last one that was taken.
    """

    def __init__(self, shares: Shares) -> None:
        self.drawn = self.taken = 0
        self.in_hand = shares
        self._changes = [(0, shares)]

    @property
    def latest(self) -> Shares:
        """Return the shares of what is drawn later than all changes."""
        return self._changes[-1][1]

    def draw_all(self) -> Iterator[Shares]:
        """Begin a pass over the data, and yield the shares of each micro-step that is drawn."""
        self._changes = [(0, self.latest)]
        self.drawn = self.taken = 0
        while True:
            self.drawn += 1
            yield self._find_at(self.drawn - 1)

    def take(self, skipped: int) -> None:
        """The next micro-step is trained on.

        Args:
            skipped: micro-steps at the beginning of the pass that are drawn and not trained on.
        """
        self.in_hand = self._find_at(skipped + self.taken)
        self.taken += 1

    def change(self, begin: int, shares: Shares) -> None:
        """These shares hold from the micro-step `begin` on."""
        self._changes.append((begin, shares))

    def _find_at(self, micro_step: int) -> Shares:
        return next(shares for begin, shares in reversed(self._changes) if begin <= micro_step)
