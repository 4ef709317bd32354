"""A batch that cannot be joined, on some data rank, in the middle of a training: all data ranks stop for it.

The rank that reads it would stop alone, and the others would wait for its gradients. The collator, which may run in
another process, therefore gives a batch that says why (`rows.refused`). Ranks learn of it from the count of targets
that Trainer sums over data ranks in each step:

    rank 0    37 targets     ┐ Trainer's own      ┌ below 0: asks for the reason ┐ the same
    rank 1    refused: -2^40 ┘ sum of its counts  └ below 0: tells it            ┘ SpecError

Where Trainer counts nothing, because neither model nor loss takes the count, one number is summed in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.hooks import runtime
from hf_parallel.hooks.trainer.joining import read_asked_key, refuse_joining, with_counted_labels
from hf_parallel.hooks.trainer.rows import REFUSED
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from transformers import Trainer

#: Less than all targets of a step can make up for.
_FAR_BELOW_ZERO = -(2**40)


class UncountableLabels:
    """Labels of a refused batch, whose targets Trainer counts as a number far below 0."""

    def __getitem__(self, index: object) -> UncountableLabels:
        return self

    def ne(self, ignored: int) -> UncountableLabels:
        """Return what `sum` counts."""
        return self

    def sum(self) -> torch.Tensor:
        """Return a count that no data rank can have."""
        return torch.tensor(_FAR_BELOW_ZERO)


def count_targets_of_step(
    original: Callable, self: Trainer, batch_samples: list, *args: object
) -> torch.Tensor | int | None:
    """Count the targets of a step as Trainer does. Collective over data ranks, as Trainer's count is.

    Raises:
        SpecError: on all data ranks, a batch of some rank cannot be joined.
    """
    batches = batch_samples
    if not read_asked_key()[1] or not batches:
        return original(self, with_counted_labels(batches), *args)
    why = next((batch[REFUSED] for batch in batches if REFUSED in batch), None)
    current = runtime.current()
    if current is None or current.mesh.data_size == 1:
        if why is not None:
            refuse_joining(f"{why} (in a batch for step {self.state.global_step + 1})")
        return original(self, with_counted_labels(batches), *args)
    counted = with_counted_labels(batches)
    if why is not None:
        counted = [{**batch, "labels": UncountableLabels()} if REFUSED in batch else batch for batch in counted]
    items = original(self, counted, *args)
    total = _sum_without_trainer(why) if items is None else items
    if int(total) < 0:  # joined batches make the model read a number of the device at once, too
        reasons = messages.gather_objects(why, current.mesh.data_group)
        rank, why = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        refuse_joining(f"{why} (in a batch of data rank {rank} for step {self.state.global_step + 1})")
    return items


def check_batch(inputs: object) -> None:
    """Refuse a batch whose targets no Trainer has counted."""
    if isinstance(inputs, Mapping) and REFUSED in inputs:
        refuse_joining(inputs[REFUSED], alone=True)


def _sum_without_trainer(why: str | None) -> torch.Tensor:
    mesh = runtime.mesh()
    total = torch.tensor(0 if why is None else _FAR_BELOW_ZERO, device=mesh.device)
    dist.all_reduce(total, group=mesh.data_group)
    return total
