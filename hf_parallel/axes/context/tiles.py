"""Blocks of attention as rectangles that a kernel can compute: whole, causal, or with a small mask.

    keys of another rank      own keys            with a sliding window
        full                  causal              full, and bands along both edges

A mask is only ever as large as a band's rectangle, of at most `SQUARE` queries: never that of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: How many queries one mask may have.
SQUARE = 1024


class Span(NamedTuple):
    """Tokens in one piece: where they lie in a rank's part, how many, and where they lie in the row."""

    offset: int
    length: int
    start: int


@dataclass(frozen=True)
class Tile:
    """Queries `q` by keys `k` of one row, or of all (None).

    Attributes:
        kind: "full", "causal" (as many queries as keys, of the same tokens) or "band".
        band: of a band: how far its first query is behind its first key, and the least and largest distance seen.
    """

    row: int | None
    q: slice
    k: slice
    kind: str
    band: tuple[int, float, float] = (0, 0, 0)


def make_tiles_of(
    row: int | None, queries: tuple[Span, ...], keys: tuple[Span, ...], low: float, high: float, whole: bool = False
) -> list[Tile]:
    """Return the tiles of one document, whose queries see keys `low` to `high` tokens before them.

    Args:
        whole: a band is one tile, as large as it is: for kernels that need no mask of it.
    """
    if not queries or not keys:
        return []
    everything = float("inf")
    if low == -everything and high == everything:
        return [Tile(row, _join_to_slice(queries), _join_to_slice(keys), "full")]
    if low == 0 and high == everything and queries == keys:
        return [Tile(row, _join_to_slice(queries), _join_to_slice(keys), "causal")]
    found = [tile for q in queries for k in keys for tile in _make_tiles_of_pair(row, q, k, low, high, whole)]
    return _merge_tiles(_merge_tiles(found, by_keys=True), by_keys=False)


def cut_into_squares(tile: Tile) -> Iterator[Tile]:
    """The tile in parts of at most `SQUARE` queries by as many keys, without those of which no pair counts."""
    for top in range(tile.q.start, tile.q.stop, SQUARE):
        for left in range(tile.k.start, tile.k.stop, SQUARE):
            q, k = slice(top, min(top + SQUARE, tile.q.stop)), slice(left, min(left + SQUARE, tile.k.stop))
            behind = (tile.band[0] if tile.kind == "band" else 0) + (top - tile.q.start) - (left - tile.k.start)
            low, high = (0, float("inf")) if tile.kind == "causal" else tile.band[1:]
            nearest, farthest = behind - (k.stop - k.start - 1), behind + q.stop - q.start - 1
            if tile.kind == "full" or (low <= nearest and farthest <= high):
                yield Tile(tile.row, q, k, "full")
            elif farthest >= low and nearest <= high:
                yield Tile(tile.row, q, k, "band", (behind, low, high))


def _join_to_slice(spans: tuple[Span, ...]) -> slice:
    """Pieces of a document lie next to each other in a rank's part."""
    return slice(spans[0].offset, spans[-1].offset + spans[-1].length)


def _make_tiles_of_pair(row: int | None, q: Span, k: Span, low: float, high: float, whole: bool) -> Iterator[Tile]:
    nearest, farthest = q.start - (k.start + k.length - 1), q.start + q.length - 1 - k.start
    if farthest < low or nearest > high:
        return
    if nearest >= low and farthest <= high:
        yield Tile(row, _join_to_slice((q,)), _join_to_slice((k,)), "full")
    elif q.start == k.start and q.length == k.length and low == 0 and high >= q.length - 1:
        yield Tile(row, _join_to_slice((q,)), _join_to_slice((k,)), "causal")
    elif whole:  # the band of queries that see a key, and of keys that a query sees
        begin, end = max(k.start, q.start - high), min(k.start + k.length, q.start + q.length - low)
        first, after = max(q.start, begin + low), min(q.start + q.length, end + high)
        seeing = Span(q.offset + int(first) - q.start, int(after - first), int(first))
        yield from _make_band_tiles(row, seeing, k, begin, end, low, high)
    else:  # of a few queries at a time: keys that all of them see in the middle, bands at the edges
        for done in range(0, q.length, SQUARE):
            few = Span(q.offset + done, min(SQUARE, q.length - done), q.start + done)
            last = few.start + few.length - 1
            begin, end = max(k.start, few.start - high), min(k.start + k.length, last - low + 1)
            full, after = max(begin, last - high), min(end, few.start - low + 1)
            if full >= after:
                yield from _make_band_tiles(row, few, k, begin, end, low, high)
                continue
            yield from _make_band_tiles(row, few, k, begin, full, low, high)
            seen = slice(k.offset + int(full) - k.start, k.offset + int(after) - k.start)
            yield Tile(row, _join_to_slice((few,)), seen, "full")
            yield from _make_band_tiles(row, few, k, after, end, low, high)


def _make_band_tiles(
    row: int | None, q: Span, k: Span, begin: float, end: float, low: float, high: float
) -> Iterator[Tile]:
    if end > begin:
        seen = slice(k.offset + int(begin) - k.start, k.offset + int(end) - k.start)
        yield Tile(row, _join_to_slice((q,)), seen, "band", (q.start - int(begin), low, high))


def _merge_tiles(tiles: list[Tile], by_keys: bool) -> list[Tile]:
    """Full tiles that are neighbours along the queries (`by_keys`: with the same keys), or along the keys, as one."""
    merged: list[Tile] = []
    for tile in tiles:
        for number, other in enumerate(merged):
            same = other.k == tile.k if by_keys else other.q == tile.q
            near = other.q.stop == tile.q.start if by_keys else other.k.stop == tile.k.start
            if same and near and other.kind == tile.kind == "full":
                q = slice(other.q.start, tile.q.stop) if by_keys else tile.q
                k = tile.k if by_keys else slice(other.k.start, tile.k.stop)
                merged[number] = Tile(tile.row, q, k, "full")
                break
        else:
            merged.append(tile)
    return merged
