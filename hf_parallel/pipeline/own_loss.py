"""A script's own loss: does it add up over micro-batches, so that a schedule may compute it part by part?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.pipeline.batches import Batch, count_targets, split_rows, tokens_of
from hf_parallel.pipeline.schedules import micro_batch_count


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[list[tuple[Batch, Any]]]:
    """Keep what the model is called with, and returns, in here."""
    calls: list[tuple[Batch, Any]] = []
    engine._watch = lambda batch, outputs: calls.append((batch, outputs))
    try:
        yield calls
    finally:
        engine._watch = None


def adds_up(engine: Any, batch: Batch, calls: list, loss: torch.Tensor, loss_of: Callable[[Batch], Any]) -> bool:
    """Is `loss` the sum of the losses of micro-batches? Computed from parts of the outputs, without the model."""
    if len(calls) != 1 or tokens_of(calls[0][0]).shape != tokens_of(batch).shape:
        return False
    outputs = calls[0][1]
    parts = split_rows(batch, micro_batch_count(tokens_of(batch).shape[0], engine.config))
    total = torch.zeros_like(loss, dtype=torch.float32)
    with torch.no_grad(), counted(engine, batch):
        for part, seen in zip(parts, split_rows({**outputs}, len(parts)), strict=True):
            engine._replay = lambda batch, seen=seen: type(outputs)(**_with_loss(engine, seen, batch))
            try:
                total += loss_of(part).float()
            finally:
                engine._replay = None
    # Means over micro-batches, or over pairs of rows, are off by far more than bf16 rounds.
    return torch.allclose(total, loss.detach().float(), rtol=1e-2 if loss.dtype != torch.float32 else 1e-5)


def _with_loss(engine: Any, outputs: Batch, batch: Batch) -> Batch:
    """The model's own loss of these rows, where the script reads it."""
    if outputs.get("loss") is None or batch.get("labels") is None or not engine.sums_over_tokens:
        return outputs
    known = {"num_items_in_batch": batch.get("num_items_in_batch"), "shift_labels": batch.get("shift_labels")}
    vocabulary = outputs["logits"].shape[-1]
    loss = engine.model.loss_function(outputs["logits"], batch["labels"], vocabulary, **known)
    return {**outputs, "loss": loss}


@contextlib.contextmanager
def counted(engine: Any, batch: Batch) -> Iterator[None]:
    """The model's own mean, where the script gives it no count, runs over the whole batch of all data ranks."""
    if torch.is_tensor(batch.get("labels")) and engine.sums_over_tokens:
        engine.items = count_targets(batch)
        if engine.mesh.data_size > 1:
            dist.all_reduce(engine.items, group=engine.mesh.data_group)
            engine.items = engine.items / engine.mesh.data_size
    try:
        yield
    finally:
        engine.items = None
