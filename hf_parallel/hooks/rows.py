"""The rows of a batch, and how those that are repeated to fill a ragged last batch are left out.

A batch holds its examples in one of three ways:

    plain     one row per example
    blocks    k rows per example, all the first ones, then all the second ones: TRL's chosen and rejected
    joined    all examples behind one another in a single row: batches without padding; JOINED says whose a token is
"""

from __future__ import annotations

from typing import Any

import torch

#: Key of a tensor [1, tokens] with the number of each token's example; taken out before a model sees the batch.
JOINED = "hf_parallel_example_of_token"


def count(batch: Any, blocks: int = 1) -> int | None:
    """How many examples the batch holds; None if it is not known."""
    if not isinstance(batch, dict) and not hasattr(batch, "items"):
        return None
    if JOINED in batch:
        return int(batch[JOINED].max()) + 1
    sizes = [value.shape[0] for value in batch.values() if torch.is_tensor(value) and value.ndim > 0]
    return sizes[0] // blocks if sizes else None


def trim(batch: Any, real: int, rows: int, blocks: int = 1) -> dict:
    """Only the real examples; one without a target where there are none, so that the rank still takes part."""
    kept = max(1, real)
    if JOINED in batch:
        trimmed = _trim_joined(batch, int((batch[JOINED] < kept).sum()))
    else:
        trimmed = {key: _first(value, kept, rows, blocks) for key, value in batch.items()}
    return trimmed if real else without_targets(trimmed, 0, kept)


def opened(batch: Any) -> Any:
    """The batch as a model takes it."""
    return {key: value for key, value in batch.items() if key != JOINED} if JOINED in batch else batch


def without_targets(batch: Any, real: int, rows: int) -> dict:
    """The same rows, but only the first `real` of each block have targets: the others add nothing to a loss per token.

    Args:
        rows: of a block.
    """
    kept = dict(batch)
    for key in ("labels", "shift_labels"):
        if torch.is_tensor(kept.get(key)) and not kept[key].is_floating_point():
            kept[key] = kept[key].clone()
            kept[key][torch.arange(len(kept[key])) % rows >= real] = -100
    return kept


def fill(value: Any, rows: int | None) -> Any:
    """Repeat the last row, for those that `trim` took away."""
    if value is None or rows is None:
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(fill(item, rows) for item in value)
    if isinstance(value, dict):
        return type(value)({key: fill(item, rows) for key, item in value.items()})
    if not torch.is_tensor(value) or value.ndim == 0 or value.shape[0] >= rows:
        return value
    return torch.cat([value, value[-1:].expand(rows - value.shape[0], *value.shape[1:])])


def _first(value: Any, kept: int, rows: int, blocks: int) -> Any:
    if not torch.is_tensor(value) or value.ndim == 0:
        return value
    if value.shape[0] == rows:
        return value[:kept]
    if value.shape[0] == rows * blocks:
        return value.unflatten(0, (blocks, rows))[:, :kept].flatten(0, 1)
    return value


def _trim_joined(batch: Any, tokens: int) -> dict:
    """The first `tokens` tokens, and what tells attention kernels where their sequences begin."""
    kept = {
        key: value[:, :tokens] if torch.is_tensor(value) and value.ndim > 1 else value for key, value in batch.items()
    }
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if key in kept:
            kept[key] = kept[key][kept[key] <= tokens]
            kept["max_length_" + key[-1]] = int(kept[key].diff().max())
    return kept
