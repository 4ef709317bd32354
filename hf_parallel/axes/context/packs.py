"""Many tiles in one call of a kernel that takes sequences of any lengths, one behind the other.

    queries   a a a a a b b b c c c c        the rows' tokens [tokens, heads, width], or some of them
    ends      0         5     8       12     of the queries of each tile; the keys have their own
    window    (left, right)                  of a tile's last query and last key: they are at the same place

So a window says for all tiles of a call which keys a query sees, whatever their lengths: -1 is all on that side. What
tiles of a document over several pieces see of each other (`tiles.py`) is such a window once the queries that see
nothing and the keys that nobody sees are left out, and tiles of the same window are one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_parallel.axes.context.tiles import Tile

# ---- Which tokens of a batch see each other at all: the documents of each row ---------------------------------------
# A row is one document, or a pack of several (positions that start again), less what its padding mask takes out:
#
#     position_ids      0 1 2 3 0 1 2        documents  0 0 0 0 1 1 1
#     attention_mask    1 1 1 1 1 0 0        documents  0 0 0 0 0 - -
#
# Tokens of no document are seen by nobody and see nothing, so no attention is computed for them.


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a batch.

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


def make_unpacked_rows(rows: int, length: int) -> list[Row]:
    """Return the rows of one document each."""
    return [Row(length, (length,))] * rows


def compute_mean_length(rows: list[Row]) -> float:
    """Return the mean, over tokens, of the length of a token's document."""
    lengths = [length for row in rows for length in row.lengths]
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def find(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    boundaries: torch.Tensor | None = None,
) -> list[Row]:
    """Return the documents of each row as transformers finds them: without a mask, restarts of positions count.

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
        return make_unpacked_rows(rows, length)
    return read_numbered_rows(numbers.expand(rows, length))


def read_numbered_rows(numbers: torch.Tensor) -> list[Row]:
    """Return the rows whose tokens belong to these documents [rows, length], less those of a negative number."""
    rows = []
    for number in numbers.cpu():  # the one thing about a batch that the host has to know
        inside, dealt, order, whole = number >= 0, number, None, True
        if not bool(inside.all()) or not bool((number.diff() >= 0).all()):
            order = torch.where(inside, number, number.max() + 1).argsort(stable=True)
            kept = order[: int(inside.sum())]
            dealt = number[kept]
            whole = not bool(((kept.diff() != 1) & (dealt.diff() == 0)).any())
        lengths = torch.unique_consecutive(dealt, return_counts=True)[1].tolist()
        rows.append(Row(len(number), tuple(lengths), order, whole))
    return rows


Window = tuple[int, int]
#: Where tokens lie among the flattened rows: all in order, or one after the other.
Place = slice | torch.Tensor
ALL: Window = (-1, -1)
CAUSAL: Window = (-1, 0)


@dataclass(frozen=True, eq=False)
class Call:
    """Tiles of one window, each for itself.

    Attributes:
        queries: where they lie among the flattened rows, as those of `keys` do.
        ends: [tiles + 1] of queries, of keys: int32, on the device.
        longest: tile, in queries and in keys.
    """

    queries: Place
    keys: Place
    ends: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]
    window: Window

    @property
    def causal(self) -> bool:
        """Return whether the call is causal, which kernels call a window of its own."""
        return self.window == CAUSAL


def make_calls(documents: Iterable[list[Tile]], rows: int, length: int, device: torch.device) -> list[Call]:
    """Return the tiles of each document as calls.

    Args:
        rows: of the batch.
        length: of a row, in tokens, of which there are `rows` behind each other.
    """
    grouped: dict[tuple[Window, int], list[Tile]] = {}
    for tiles in documents:
        for number, tile in enumerate(tiles):
            window = compute_window_of(tile)
            # A query is in a call once, because outputs are not added.
            shared = [other for other in tiles[:number] if tile.q.start < other.q.stop and other.q.start < tile.q.stop]
            again = sum(compute_window_of(other) == window for other in shared)
            grouped.setdefault((window, again), []).append(tile)
    calls = []
    for (window, _), tiles in grouped.items():
        lists = [range(rows) if tile.row is None else (tile.row,) for tile in tiles]
        of_rows = [(tile, row * length) for tile, own in zip(tiles, lists, strict=True) for row in own]
        queries = [(first + tile.q.start, tile.q.stop - tile.q.start) for tile, first in of_rows]
        keys = [(first + tile.k.start, tile.k.stop - tile.k.start) for tile, first in of_rows]
        longest = [max(count for _, count in parts) for parts in (queries, keys)]
        if window not in (ALL, CAUSAL):  # kernels count a side that is open, or larger than this, by the longest keys
            longest[1] = max(longest)
        (own, own_ends), (theirs, their_ends) = _place_parts(queries, device), _place_parts(keys, device)
        calls.append(Call(own, theirs, (own_ends, their_ends), (longest[0], longest[1]), window))
    return calls


def compute_window_of(tile: Tile) -> Window:
    """(keys before, keys after) the key at a query's place, counted from the ends of both."""
    if tile.kind != "band":
        return CAUSAL if tile.kind == "causal" else ALL
    behind, low, high = tile.band
    queries, keys = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    shift = keys - queries - behind
    left, right = high + shift, -(low + shift)
    return -1 if left >= keys - 1 else int(left), -1 if right >= queries - 1 else int(right)


def _place_parts(parts: list[tuple[int, int]], device: torch.device) -> tuple[Place, torch.Tensor]:
    """Return where the tokens of parts (start, count) lie, and the parts' ends.

    The place is a slice where that is enough: nothing is copied then.
    """
    counted = [0, *itertools.accumulate(count for _, count in parts)]
    ends = upload(torch.tensor(counted, dtype=torch.int32), device)
    if all(start + count == after for (start, count), (after, _) in itertools.pairwise(parts)):
        return slice(parts[0][0], sum(parts[-1])), ends
    starts, counts = torch.tensor(parts).T
    inside = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return upload(starts.repeat_interleave(counts) + inside, device), ends


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table on the device, without waiting: CUDA copies pinned memory in its stream's order.

    A table is on the host, unless the script has set a default device.
    """
    pins = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pins else tensor).to(device, non_blocking=True)
