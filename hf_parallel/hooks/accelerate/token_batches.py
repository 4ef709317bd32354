"""Batches of a token budget: whole examples, on each data rank of a step about as many tokens.

    step    = one batch for each data rank, of at most `budget` tokens each
    epoch   = as few steps as the examples fit in; each example once

The longest examples are dealt first, each to the batch that has least so far (Graham, 1969: LPT), over all of an
epoch; batches of like size then make a step. Under `batch_shares=3:1` the budgets are in these proportions, and an
example goes to the batch that is done with it first (Gonzalez, Ibarra and Sahni, 1977). Examples of like length come
in an order drawn from the seed and the epoch, so that batches differ from epoch to epoch. With fewer examples than
batches a data rank computes an example without targets, to take part: `~index` stands for it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hf_parallel.ask.spec import refuse
from hf_parallel.ranks.shares import Shares

_MORE = 1.02  # times as many steps, where examples do not fit: packing finer is worth no more time
_WIDTHS = (8, 64, math.inf)  # classes of length per factor e within which the order is drawn; the last always fits


@dataclass
class Epoch:
    """The epoch that begins, as accelerate tells it."""

    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """It is this one."""
        self.epoch = epoch


class TokenBatches:
    """A batch sampler whose batches come for data rank 0, 1, … of a step in turn.

    Attributes:
        batch_size: none that all batches have.
        drop_last: accelerate need not fill the last step.
        rest: an epoch that a former run has begun, and the steps in which it is finished.
    """

    batch_size, drop_last = None, True

    def __init__(
        self, lengths: Sequence[int], budget: int, ranks: int, seed: int, shares: Shares | None = None
    ) -> None:
        self.lengths, self.budget, self.ranks, self.seed = list(lengths), budget, ranks, seed
        self.shares = shares or (Fraction(1),) * ranks
        self.budgets = [int(budget * ranks * share / sum(self.shares)) for share in self.shares]
        # Data ranks with like shares have the same budget, and their batches may be exchanged.
        self._alike = [
            [rank for rank in range(ranks) if self.shares[rank] == one] for one in dict.fromkeys(self.shares)
        ]
        if not self.lengths:
            refuse(f"pack_tokens={self.budget}", "the data set has no rows", "a data set with rows")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > max(self.budgets):
            why = f"example {longest} of the data set has {self.lengths[longest]} tokens"
            works = math.ceil(self.lengths[longest] * sum(self.shares) / (self.ranks * max(self.shares)))
            refuse(f"pack_tokens={self.budget}", why, f"pack_tokens={works}")
        self.sampler = Epoch()
        self.rest: tuple[int, list[list[list[int]]]] | None = None
        order = list(range(len(self.lengths)))
        # The fewest steps, which are those of any epoch: a Trainer asks once.
        self.steps = math.ceil(sum(self.lengths) / (self.budget * self.ranks))
        while not self._fits(self._deal_batches(order, math.inf)):
            most = len(order) if len(self._alike) > 1 else math.ceil(len(order) / self.ranks)
            self.steps = min(max(self.steps + 1, int(_MORE * self.steps)), most)

    def __len__(self) -> int:
        return self.steps * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.of_epoch(self.sampler.epoch):
            yield from step

    def tokens(self, batch: Sequence[int]) -> int:
        """Count the tokens of a batch's examples; what stands for none has none."""
        return sum(self.lengths[index] for index in batch if index >= 0)

    def of_epoch(self, epoch: int) -> list[list[list[int]]]:
        """Return the steps of an epoch, each with a batch for every data rank."""
        if self.rest is not None and self.rest[0] == epoch:
            return self.rest[1]
        draw = random.Random(f"{self.seed} {epoch}")
        order = list(range(len(self.lengths)))
        draw.shuffle(order)
        dealt = next(filter(self._fits, (self._deal_batches(order, width) for width in _WIDTHS)))
        steps: list[list[list[int]]] = [[[]] * self.ranks for _ in range(self.steps)]
        for ranks, batches in zip(self._alike, dealt, strict=True):
            batches.sort(key=self.tokens)
            for step, own in zip(steps, self._arrange_in_steps(batches, len(ranks)), strict=True):
                draw.shuffle(own)
                for rank, batch in zip(ranks, own, strict=True):
                    step[rank] = batch
        draw.shuffle(steps)
        return steps

    def _arrange_in_steps(self, batches: list[list[int]], ranks: int) -> list[list[list[int]]]:
        """Arrange batches in steps, one for each of so many data ranks; stand-ins fill the last step."""
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        filled = [batch or [~shortest] for batch in batches]
        filled += [[~shortest]] * (-len(filled) % ranks)
        return [filled[start : start + ranks] for start in range(0, len(filled), ranks)]

    def finish(self, epoch: int, batches: list[list[int]]) -> None:
        """Let that epoch consist of these batches, which another budget or number of data ranks has left."""
        self.rest = epoch, self._arrange_in_steps(batches, self.ranks)

    def skip(self, epoch: int, seen: int) -> bool:
        """Let that epoch consist of its steps after those with so many batches of examples. Is anything left?"""
        self.rest, steps = None, self.of_epoch(epoch)
        while steps and seen > 0:
            seen -= sum(batch[0] >= 0 for batch in steps[0])
            steps = steps[1:]
        self.rest = (epoch, steps) if steps else None
        return bool(steps)

    def _fits(self, dealt: list[list[list[int]]]) -> bool:
        return all(
            self.tokens(batch) <= self.budgets[ranks[0]]
            for ranks, batches in zip(self._alike, dealt, strict=True)
            for batch in batches
        )

    def _deal_batches(self, order: list[int], width: float) -> list[list[list[int]]]:
        """Batches of the data ranks of each share. Longest examples first, those of a class as in `order`."""
        dealt: list[list[list[int]]] = [[[] for _ in range(self.steps * len(ranks))] for ranks in self._alike]
        least = [[(0, place) for place in range(len(batches))] for batches in dealt]
        speeds = [float(self.shares[ranks[0]]) for ranks in self._alike]
        budgets = [self.budgets[ranks[0]] for ranks in self._alike]
        classes: list[float] = list(self.lengths)
        if width != math.inf:
            classes = [round(width * math.log(max(1, length))) for length in self.lengths]
        for index in sorted(order, key=lambda index: -classes[index]):
            ends = [heap[0][0] + self.lengths[index] for heap in least]
            # What fits nowhere is found by `_fits`.
            at = min(range(len(ends)), key=lambda one: (ends[one] > budgets[one], ends[one] / speeds[one]))
            place = least[at][0][1]
            dealt[at][place].append(index)
            heapq.heapreplace(least[at], (ends[at], place))
        return dealt
