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
        """As kernels call a window of their own for it."""
        return self.window == CAUSAL


def calls(documents: Iterable[list[Tile]], rows: int, length: int, device: torch.device) -> list[Call]:
    """The tiles of each document as calls.

    Args:
        rows: of the batch.
        length: of a row, in tokens, of which there are `rows` behind each other.
    """
    grouped: dict[tuple[Window, int], list[Tile]] = {}
    for tiles in documents:
        for number, tile in enumerate(tiles):
            window = window_of(tile)
            again = sum(_share(tile, other) and window_of(other) == window for other in tiles[:number])
            grouped.setdefault((window, again), []).append(tile)  # a query is in a call once: outputs are not added
    return [_call(tiles, window, rows, length, device) for (window, _), tiles in grouped.items()]


def window_of(tile: Tile) -> Window:
    """(keys before, keys after) the key at a query's place, counted from the ends of both."""
    if tile.kind != "band":
        return CAUSAL if tile.kind == "causal" else ALL
    behind, low, high = tile.band
    queries, keys = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    shift = keys - queries - behind
    left, right = high + shift, -(low + shift)
    return -1 if left >= keys - 1 else int(left), -1 if right >= queries - 1 else int(right)


def _share(one: Tile, other: Tile) -> bool:
    return one.q.start < other.q.stop and other.q.start < one.q.stop


def _call(tiles: list[Tile], window: Window, rows: int, length: int, device: torch.device) -> Call:
    lists = [range(rows) if tile.row is None else (tile.row,) for tile in tiles]
    of_rows = [(tile, row * length) for tile, own in zip(tiles, lists, strict=True) for row in own]
    queries = [(first + tile.q.start, tile.q.stop - tile.q.start) for tile, first in of_rows]
    keys = [(first + tile.k.start, tile.k.stop - tile.k.start) for tile, first in of_rows]
    longest = [max(count for _, count in parts) for parts in (queries, keys)]
    if window not in (ALL, CAUSAL):  # kernels count a side that is open, or larger than this, by the longest keys
        longest[1] = max(longest)
    ends = _ends(queries, device), _ends(keys, device)
    return Call(_place(queries, device), _place(keys, device), ends, (longest[0], longest[1]), window)


def _ends(parts: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    ends = [0, *itertools.accumulate(count for _, count in parts)]
    return upload(torch.tensor(ends, dtype=torch.int32), device)


def _place(parts: list[tuple[int, int]], device: torch.device) -> Place:
    """A slice where that is enough: nothing is copied then."""
    if all(start + count == after for (start, count), (after, _) in itertools.pairwise(parts)):
        return slice(parts[0][0], sum(parts[-1]))
    starts, counts = torch.tensor(parts).T
    inside = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return upload(starts.repeat_interleave(counts) + inside, device)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table of the host on the device, without waiting: CUDA copies pinned memory in its stream's order."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
