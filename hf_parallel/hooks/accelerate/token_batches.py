"""Batches of a token budget: whole examples, on each data rank of a step about as many tokens.

    step    = one batch for each data rank, of at most `budget` tokens each
    epoch   = as few steps as the examples fit in; each example once

The longest examples are dealt first, each to the batch that has least so far (Graham, 1969: LPT), over all of an
epoch; batches of like size then make a step. Examples of like length come in an order drawn from the seed and the
epoch, so that batches differ from epoch to epoch. With fewer examples than batches a data rank computes an example
without targets, to take part: `~index` stands for it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence

from hf_parallel.ask.spec import refuse

_MORE = 1.02  # times as many steps, where examples do not fit: packing finer is worth no more time
_WIDTHS = (8, 64, math.inf)  # classes of length per factor e within which the order is drawn; the last always fits


class Epoch:
    """The epoch that begins, as accelerate tells it."""

    def __init__(self) -> None:
        self.epoch = 0

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

    def __init__(self, lengths: Sequence[int], budget: int, ranks: int, seed: int) -> None:
        self.lengths, self.budget, self.ranks, self.seed = list(lengths), budget, ranks, seed
        self._check()
        self.sampler = Epoch()
        self.rest: tuple[int, list[list[list[int]]]] | None = None
        self.steps = self._fewest_steps()

    def _check(self) -> None:
        if not self.lengths:
            refuse(f"pack_tokens={self.budget}", "the data set has no rows", "a data set with rows")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > self.budget:
            why = f"example {longest} of the data set has {self.lengths[longest]} tokens"
            refuse(f"pack_tokens={self.budget}", why, f"pack_tokens={self.lengths[longest]}")

    def __len__(self) -> int:
        return self.steps * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.of_epoch(self.sampler.epoch):
            yield from step

    def tokens(self, batch: Sequence[int]) -> int:
        """Count the tokens of a batch's examples; what stands for none has none."""
        return sum(self.lengths[index] for index in batch if index >= 0)

    def of_epoch(self, epoch: int) -> list[list[list[int]]]:
        """The steps of an epoch, each with a batch for every data rank."""
        if self.rest is not None and self.rest[0] == epoch:
            return self.rest[1]
        draw = random.Random(f"{self.seed} {epoch}")
        order = list(range(len(self.lengths)))
        draw.shuffle(order)
        batches = next(filter(self._fits, (self._dealt(order, width) for width in _WIDTHS)))
        batches.sort(key=self.tokens)
        steps = self._in_steps(batches)
        for step in steps:
            draw.shuffle(step)
        draw.shuffle(steps)
        return steps

    def _in_steps(self, batches: list[list[int]]) -> list[list[list[int]]]:
        """Arrange batches in steps, one for each data rank; stand-ins fill the last step."""
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        filled = [batch or [~shortest] for batch in batches]
        filled += [[~shortest]] * (-len(filled) % self.ranks)
        return [filled[start : start + self.ranks] for start in range(0, len(filled), self.ranks)]

    def real_batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, step by step, without those of no example."""
        return [batch for step in self.of_epoch(epoch) for batch in step if batch[0] >= 0]

    def finish(self, epoch: int, batches: list[list[int]]) -> None:
        """Let that epoch consist of these batches, which another budget or number of data ranks has left."""
        self.rest = epoch, self._in_steps(batches)

    def _fewest_steps(self) -> int:
        """Return the steps of any epoch: a Trainer asks once."""
        order = list(range(len(self.lengths)))
        self.steps = math.ceil(sum(self.lengths) / (self.budget * self.ranks))
        while not self._fits(self._dealt(order, math.inf)):
            self.steps = min(max(self.steps + 1, int(_MORE * self.steps)), math.ceil(len(order) / self.ranks))
        return self.steps

    def _fits(self, batches: list[list[int]]) -> bool:
        return all(self.tokens(batch) <= self.budget for batch in batches)

    def _dealt(self, order: list[int], width: float) -> list[list[int]]:
        """Longest first, those of a class as in `order`."""
        batches: list[list[int]] = [[] for _ in range(len(self))]
        least = [(0, place) for place in range(len(batches))]
        for index in sorted(order, key=lambda index: -self._class(index, width)):
            tokens, place = least[0]
            batches[place].append(index)
            heapq.heapreplace(least, (tokens + self.lengths[index], place))
        return batches

    def _class(self, index: int, width: float) -> float:
        length = self.lengths[index]
        return length if width == math.inf else round(width * math.log(max(1, length)))
