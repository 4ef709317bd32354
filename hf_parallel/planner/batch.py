"""The effective batch of a step, and what a layout that changes it means for the learning rate.

A step has `rows` sequences per device x accumulation steps x data ranks. A script that was tuned in one process sees a
batch that is as many times larger as there are data ranks: either its arguments keep the old batch, or the learning
rate follows: in proportion for SGD (Goyal et al., 2017, arXiv:1706.02677, section 2.1), by the square root for Adam
(Malladi et al., 2022, arXiv:2205.10287, section 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepBatch:
    """Sequences of one optimizer step: of a device, times accumulation steps, times data ranks."""

    rows: int
    accumulation: int
    data_ranks: int

    @property
    def alone(self) -> int:
        """Sequences of a step of the same script in one process."""
        return self.rows * self.accumulation

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.alone * self.data_ranks

    @property
    def product(self) -> str:
        """The three factors in words."""
        ranks = f"{self.data_ranks} data rank{'s' * (self.data_ranks != 1)}"
        return f"{self.rows} per device x {self.accumulation} accumulation x {ranks}"

    def in_words(self, seq: int | None = None) -> str:
        """Return sequences with their factors, and tokens where a sequence has `seq` of them."""
        tokens = f", {self.sequences * seq:,} tokens" if seq else ""
        return f"{self.sequences:,} sequences ({self.product}){tokens}"

    @property
    def arguments(self) -> str:
        """Trainer's arguments for it."""
        return f"--per_device_train_batch_size {self.rows} --gradient_accumulation_steps {self.accumulation}"

    def advice(self, optimizer: str) -> str:
        """Return how to keep one process's batch, or how the learning rate follows; empty if nothing changes.

        Args:
            optimizer: as Trainer or the planner spells it; what is not SGD follows the rule of Adam.
        """
        if self.data_ranks == 1:
            return ""
        rule = f"learning_rate x {math.sqrt(self.data_ranks):.3g} (square-root rule, {optimizer})"
        if "sgd" in optimizer.lower():
            rule = f"learning_rate x {self.data_ranks:g} (linear rule, {optimizer})"
        share, rest = divmod(self.alone, self.data_ranks)
        if rest:
            why = f"{self.alone} sequences do not divide among {self.data_ranks} data ranks"
            return f"one process has {self.alone}; {why}: {rule}"
        rows = next(rows for rows in range(min(self.rows, share), 0, -1) if share % rows == 0)
        kept = StepBatch(rows, share // rows, self.data_ranks)
        return f"one process has {self.alone}: {kept.arguments} keep that, else {rule}"
