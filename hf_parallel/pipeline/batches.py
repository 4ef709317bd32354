"""Batches cut by rows, what is counted in them, and gradients kept apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@contextlib.contextmanager
def fresh_gradients(parameters: list[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, torch.Tensor | None]]]:
    """Collect the gradients of what runs inside, apart from those already accumulated."""
    before = [parameter.grad for parameter in parameters]
    fresh: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    for parameter in parameters:
        parameter.grad = None
    yield fresh
    for parameter, gradient in zip(parameters, before, strict=True):
        fresh.append((parameter, parameter.grad))
        parameter.grad = gradient


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut every tensor that has one entry per row into `parts` along dim 0; share everything else."""
    if parts == 1:
        return [batch]
    rows = row_count(batch)
    cut = {
        key: value.tensor_split(parts)
        for key, value in batch.items()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == rows
    }
    return [{key: cut[key][i] if key in cut else value for key, value in batch.items()} for i in range(parts)]


def row_count(batch: Batch) -> int:
    named = next((batch[key] for key in ("input_ids", "inputs_embeds", "logits") if batch.get(key) is not None), None)
    if named is None:
        raise ValueError("hf_parallel: a pipelined model needs input_ids or inputs_embeds in the batch")
    return named.shape[0]


def tokens_of(batch: Batch) -> torch.Tensor:
    for key in ("input_ids", "inputs_embeds"):
        if torch.is_tensor(batch.get(key)):
            return batch[key]
    raise ValueError("hf_parallel: a pipelined model needs input_ids or inputs_embeds in the batch")


def count_targets(batch: Batch) -> torch.Tensor:
    """How many tokens the causal loss averages over: labels are shifted by one, -100 does not count."""
    labels = batch["shift_labels"] if batch.get("shift_labels") is not None else batch["labels"][..., 1:]
    return (labels != -100).sum()
