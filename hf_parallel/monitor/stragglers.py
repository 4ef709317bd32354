"""Which rank do the others wait for, and what is it slow at?

A rank is compared with the median of the others: in reading data with all of them, in computing and in the rest of a
step with those of its own stage, which hold the same layers. Where it is alone in its stage only a factor of two tells
a slow rank from a larger stage.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hf_parallel.monitor.figures import RankRow

#: A difference is clear from this share of the step, and from so many seconds of a step on.
SHARE, LEAST_S = 0.2, 0.01
_KINDS = {
    "data": "reading its data",
    "compute": "computing (forward and backward)",
    "rest": "what is around the model (optimizer, callbacks)",
}


@dataclass(frozen=True)
class Slow:
    """A rank that takes `own` seconds of each step for `kind`, the others `usual`."""

    rank: int
    kind: str
    own: float
    usual: float
    step: float

    def sentence(self, host: str) -> str:
        """The line for people."""
        return (
            f"rank {self.rank} ({host}) is slow at {_KINDS[self.kind]}: {self.own:.3g} s of each step, where the "
            f"others take {self.usual:.3g} s; all wait for it, {self.own - self.usual:.3g} s of {self.step:.3g} s"
        )


class Stragglers:
    """Looks at each gathering; speaks when two in a row show the same, once until it is over.

    Args:
        stages: the pipeline rank of each rank.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self._before: tuple[int, str] | None = None
        self._said: tuple[int, str] | None = None

    def look(self, rows: list[RankRow]) -> Slow | None:
        """The rank to name now; the same on all ranks."""
        found = max(self._clear(rows), key=lambda slow: slow.own - slow.usual, default=None)
        now = None if found is None else (found.rank, found.kind)
        again, self._before = now is not None and now == self._before, now
        if now is None:
            self._said = None
        if not again or now == self._said:
            return None
        self._said = now
        return found

    def _clear(self, rows: list[RankRow]) -> list[Slow]:
        found = []
        for rank, row in enumerate(rows if len(rows) > 1 else ()):
            for kind in _KINDS:
                usual, alone = self._usual(rows, rank, kind)
                own = getattr(row, kind)
                least = max(SHARE * row.looked, LEAST_S) + (usual if alone else 0.0)
                if own - usual > least:
                    found.append(Slow(rank, kind, own, usual, row.step))
        return found

    def _usual(self, rows: list[RankRow], rank: int, kind: str) -> tuple[float, bool]:
        """The median of those it is compared with, and is there nobody who does the same?"""
        others = [i for i in range(len(rows)) if i != rank]
        peers = [i for i in others if kind == "data" or self.stages[i] == self.stages[rank]]
        return statistics.median(getattr(rows[i], kind) for i in peers or others), not peers
