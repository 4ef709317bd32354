"""Batches cut by rows, what is counted in them, and gradients kept apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from hf_parallel.model.batches import Batch

#: Key of a mask [rows, length] of packs in rows: which tokens count, where attention goes by positions alone. The same
#: stands beside it as `attention_mask`, for scripts that count tokens; no layer sees either.
COUNTED = "hf_parallel_counted_tokens"


def by_positions(batch: Batch) -> Batch:
    """What a model takes of a batch of packs: no mask, which would stand for their positions."""
    return {key: value for key, value in batch.items() if key != "attention_mask"} if COUNTED in batch else batch


def without_count(batch: Batch) -> Batch:
    """What a model has a name for."""
    return {key: value for key, value in batch.items() if key != COUNTED}


def counted_tokens(batch: Batch) -> torch.Tensor | None:
    """Which tokens [rows, length] are no padding; None: all."""
    return batch.get(COUNTED, batch.get("attention_mask"))


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
    return [batch] if parts == 1 else split_examples(batch, parts, 1, row_count(batch))


def split_examples(batch: Batch, parts: int, rows_each: int, rows: int) -> list[Batch]:
    """Cut a batch into `parts`, keeping together the rows of an example; share what has no entry per example.

    Tensors are cut along dim 0, and so are lists, such as the texts of the examples.

    Args:
        rows_each: rows of an example, which are not neighbours: [chosen 0, chosen 1, …, rejected 0, rejected 1, …].
        rows: of the batch.
    """
    cut: dict[str, list] = {}
    for key, value in batch.items():
        if isinstance(value, list) and len(value) in (rows, rows // rows_each):
            places = torch.arange(len(value)).unflatten(0, (len(value) * rows_each // rows, -1))
            cut[key] = [[value[i] for i in part.flatten().tolist()] for part in places.tensor_split(parts, dim=1)]
        if not torch.is_tensor(value) or value.dim() == 0:
            continue
        if value.shape[0] == rows:
            blocks = value.unflatten(0, (rows_each, -1))
            cut[key] = [block.flatten(0, 1) for block in blocks.tensor_split(parts, dim=1)]
        elif value.shape[0] * rows_each == rows:
            cut[key] = list(value.tensor_split(parts))
    return [{key: cut[key][i] if key in cut else value for key, value in batch.items()} for i in range(parts)]


#: What holds a row per row of the batch; trainers that generate keep prompts and completions apart.
_ROWS = ("input_ids", "inputs_embeds", "logits", "completion_ids")


def row_count(batch: Batch) -> int:
    named = next((batch[key] for key in _ROWS if batch.get(key) is not None), None)
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
