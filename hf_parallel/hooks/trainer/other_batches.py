"""Batches of other loaders than the step's, whose losses a step of a script's own computes beside that of its batch.

Only where data ranks have unlike numbers of real rows does it matter whose a batch is: the step's batch is known by
what the script computes from it, a second loader's last batch by its tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.hooks.trainer import rows
from hf_parallel.hooks.trainer.checkpoints import StepRecord, record_of
from hf_parallel.ranks.nested_batches import open_batches

if TYPE_CHECKING:
    from transformers import Trainer


def find_other_batch(trainer: Trainer, inputs: Any) -> tuple[StepRecord, Any] | None:
    """Return what is known of a batch of another loader than the step's, and its real rows; None: it is the step's."""
    opened, close = open_batches(inputs)
    given = [value for value in opened.values() if torch.is_tensor(value)]
    last = cast(runtime.Runtime, runtime.current()).loop.last
    if last is not None and last.real is not None and any(one() is value for one in last.tensors for value in given):
        kept = rows.with_tokens_for_decoder(rows.trim(opened, last.real, last.rows), trainer.model)
        return StepRecord(last.real, last.share), close(kept)
    return (StepRecord(), inputs) if _is_another_batch(trainer, given) else None


def _is_another_batch(trainer: Trainer, given: list[torch.Tensor]) -> bool:
    """Return whether a step of the script's own computes the loss of other examples than those of its ragged batch.

    Such as those of a second loader, of which all are real. Its own may be changed, if they are as many: their tensors
    come from the batch's. A batch that went through other libraries has a matrix of numbers in common with it, if it
    is the same. All data ranks ask, because values may differ on one of them and tell nothing on the others.
    """
    step, mesh = record_of(trainer).step, runtime.mesh()
    if step.own is None or step.real_rows is None:
        return False
    if step.own.made_any_of(given):
        return False
    telling = [one for one in step.own.batch if one.ndim > 1 and one.numel() and bool((one != one.flatten()[0]).any())]
    pairs = ((own, other) for own in telling for other in given if own.shape == other.shape)
    differs = bool(telling) and not any(torch.equal(own.to(other), other) for own, other in pairs)
    somewhere = torch.tensor(differs, dtype=torch.int32, device=mesh.device)
    dist.all_reduce(somewhere, dist.ReduceOp.MAX, group=mesh.data_group)
    return bool(somewhere)


@contextlib.contextmanager
def compute_with(trainer: Trainer, step: StepRecord) -> Iterator[None]:
    """Compute, inside the `with`, the loss of a batch of which this is known."""
    current = cast(runtime.Runtime, runtime.current())
    known = replacing(current, real_rows=step.real_rows, in_trainer=True)
    with replacing(record_of(trainer), step=step), known, replacing(current.loop, last=None):
        yield
