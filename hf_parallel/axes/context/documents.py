"""Which tokens of a batch see each other at all: the documents of each row.

A row is one document, or a pack of several (positions that start again), less what its padding mask takes out:

    position_ids      0 1 2 3 0 1 2        documents  0 0 0 0 1 1 1
    attention_mask    1 1 1 1 1 0 0        documents  0 0 0 0 0 - -

Tokens of no document are seen by nobody and see nothing, so no attention is computed for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch.

    Attributes:
        length: of the row, in tokens.
        lengths: of its documents.
        order: the row's tokens, document after document, those of none at the end; None: as they stand.
        whole: does each document lie in one piece?
    """

    length: int
    lengths: tuple[int, ...]
    order: torch.Tensor | None = None
    whole: bool = True

    def tokens(self) -> torch.Tensor:
        """The row's tokens by document."""
        return torch.arange(self.length) if self.order is None else self.order


def plain(rows: int, length: int) -> list[Row]:
    """Rows of one document each."""
    return [Row(length, (length,))] * rows


def mean_length(rows: list[Row]) -> float:
    """Of the document of a token."""
    lengths = [length for row in rows for length in row.lengths]
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def find(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    boundaries: torch.Tensor | None = None,
) -> list[Row]:
    """The documents of each row, as transformers finds them: restarts of positions count where there is no mask.

    Args:
        mask: [rows, length], zero at padding.
        positions: [length] or [rows, length]; None where they tell nothing, as in a bidirectional model.
        boundaries: `cu_seq_lens` of a batch of one row, where the collator gives no positions.
    """
    rows, length = shape
    if mask is not None:
        numbers = torch.where(mask.bool(), 0, -1)
    elif positions is not None and positions.shape[-1] == length:
        positions = positions.reshape(-1, length)
        numbers = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    elif boundaries is not None:
        place = torch.arange(length, device=boundaries.device)
        numbers = (torch.searchsorted(boundaries.to(place.dtype), place, right=True) - 1)[None]
    else:
        return plain(rows, length)
    return numbered(numbers.expand(rows, length))


def numbered(numbers: torch.Tensor) -> list[Row]:
    """The rows whose tokens belong to these documents [rows, length], less those of a negative number."""
    return [_row(number) for number in numbers.cpu()]  # the one thing about a batch that the host has to know


def _row(numbers: torch.Tensor) -> Row:
    length = len(numbers)
    inside = numbers >= 0
    if bool(inside.all()) and bool((numbers.diff() >= 0).all()):
        return Row(length, _counts(numbers))
    order = torch.where(inside, numbers, numbers.max() + 1).argsort(stable=True)
    kept = order[: int(inside.sum())]
    steps = kept.diff() != 1
    whole = not bool((steps & (numbers[kept].diff() == 0)).any())
    return Row(length, _counts(numbers[kept]), order, whole)


def _counts(numbers: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.unique_consecutive(numbers, return_counts=True)[1].tolist())
