"""What a trainer counts beside its loss, where a pipeline computes the loss of a batch in parts.

TRL's metrics are quotients of what it gathers: of sums over tokens, of rows. Each part is given what was gathered of
all parts so far, so that the last one counts the whole batch; what the ones before have counted is forgotten.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from hf_parallel.hooks.accelerate.data import replacing

if TYPE_CHECKING:
    from transformers import Trainer


class Joined:
    """The parts of one batch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.gathered: list[torch.Tensor] = []  # by the order of the calls in a part
        self.reduced: list[torch.Tensor] = []
        self.restore: Callable[[], None] | None = None

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """The loss of a part is computed in here."""
        if self.restore is None:
            self.restore = remembered(self.trainer)
        else:
            self.restore()
        gather, calls = self.trainer.accelerator.gather, itertools.count()
        reduce, reductions = self.trainer.accelerator.reduce, itertools.count()

        def with_former(value: torch.Tensor) -> torch.Tensor:
            found, place = gather(value), next(calls)
            if place == len(self.gathered):
                self.gathered.append(found)
            else:
                self.gathered[place] = torch.cat([self.gathered[place], found])
            return self.gathered[place]

        def added(value: torch.Tensor, **kwargs: object) -> torch.Tensor:
            found, place = reduce(value, **kwargs), next(reductions)
            if place == len(self.reduced):
                self.reduced.append(found)
            else:
                self.reduced[place] = self.reduced[place] + found
            return self.reduced[place]

        # `gather` is what `gather_for_metrics` calls as well; what is reduced are sums.
        with replacing(self.trainer.accelerator, gather=with_former, reduce=added):
            yield


def remembered(trainer: Trainer) -> Callable[[], None]:
    """A function after which the trainer has counted and collected no more than now."""
    counters = {name: value for name, value in vars(trainer).items() if _collects(value)}
    before = copy.deepcopy(counters)

    def restore() -> None:
        for name, value in counters.items():
            setattr(trainer, name, _restored(value, copy.deepcopy(before[name])))

    return restore


def _collects(value: object, depth: int = 3) -> bool:
    """A number, or containers of numbers and words."""
    if value is None or isinstance(value, int | float | str):
        return True
    if not depth or not isinstance(value, dict | list | deque) or len(value) > 10_000:
        return False
    return all(_collects(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


def _restored(value: object, before: dict | list | deque) -> object:
    """The same container with its former content: others may hold it too."""
    if isinstance(value, dict):
        value.clear()
        value.update(before)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    return value if isinstance(value, dict | list | deque) else before
