"""Who holds which tokens.

Each document is cut into 2 R pieces for a ring of R, and ring rank r holds pieces r and 2 R - 1 - r: whoever has an
early piece, whose queries see little, has a late one, whose queries see much. A single document is a pack of one:

    ring of 2, documents of 8 and 5 tokens      0 1 2 3 4 5 6 7 | 8 9 a b c      8 = 2 + 2 + 2 + 2, 5 = 2 + 1 + 1 + 1
        ring rank 0   0 1 6 7   8 9 c
        ring rank 1   2 3 4 5   a b .

Pieces differ by one token at most and the odd ones go round, so ranks differ by one token in all, which is padded.
Inside a ring rank's part, U ranks of Ulysses hold neighbouring runs of equal length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hf_parallel.axes.context import packs
from hf_parallel.axes.context.packs import Row
from hf_parallel.axes.context.tiles import Span, Tile, make_tiles_of


@dataclass(frozen=True)
class Shape:
    """The way cp ranks share a sequence: a ring of `ring` groups of `heads` ranks, which share heads in attention."""

    ring: int
    heads: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ring * self.heads


def compute_local_length(length: int, ranks: int, multiple: int = 1) -> int:
    """Return the number of tokens that each rank holds of a row, whatever its documents."""
    share = -(-length // ranks)
    return -(-share // multiple) * multiple


def deal_documents(lengths: Sequence[int], ring: int) -> list[list[tuple[Span, ...]]]:
    """For each ring rank and document the pieces that the rank holds, where they lie in its part and in the row."""
    held: list[list[tuple[Span, ...]]] = [[] for _ in range(ring)]
    offsets, start, turn = [0] * ring, 0, 0
    for length in lengths:
        even, odd = divmod(length, 2 * ring)
        extra = [odd // ring] * ring
        for _ in range(odd % ring):
            extra[turn % ring] += 1
            turn += 1
        sizes = [even + (extra[r] > 0) for r in range(ring)] + [even + (extra[r] > 1) for r in reversed(range(ring))]
        starts = [start + sum(sizes[:i]) for i in range(2 * ring)]
        for r in range(ring):
            spans = []
            for piece in (r, 2 * ring - 1 - r):
                if sizes[piece]:
                    spans.append(Span(offsets[r], sizes[piece], starts[piece]))
                    offsets[r] += sizes[piece]
            if len(spans) == 2 and spans[0].start + spans[0].length == spans[1].start:
                spans = [Span(spans[0].offset, spans[0].length + spans[1].length, spans[0].start)]
            held[r].append(tuple(spans))
        start += length
    return held


@dataclass(eq=False)
class Layout:
    """The tokens of one batch over the ranks of a context-parallel group.

    Attributes:
        rows: the documents of each row.
        local: tokens of each row on each rank.
    """

    rows: list[Row]
    shape: Shape
    local: int
    _tiles: dict[tuple, list[Tile]] = field(default_factory=dict)
    _calls: dict[tuple, list[packs.Call]] = field(default_factory=dict)
    _on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Length of the rows, in tokens."""
        return self.rows[0].length

    @functools.cached_property
    def alike(self) -> bool:
        """Have all rows the same documents?"""
        return all(row.lengths == self.rows[0].lengths for row in self.rows)

    @functools.cached_property
    def padding(self) -> torch.Tensor | None:
        """[rows, length], on the host: the tokens of no document; None where all belong to one."""
        if all(row.order is None or sum(row.lengths) == row.length for row in self.rows):
            return None
        hidden = torch.zeros(len(self.rows), self.length, dtype=torch.bool)
        for number, row in enumerate(self.rows):
            if row.order is not None:
                hidden[number, row.order[sum(row.lengths) :]] = True
        return hidden

    @functools.cached_property
    def _held(self) -> list[list[list[tuple[Span, ...]]]]:
        rows = self.rows[:1] if self.alike else self.rows
        return [deal_documents(row.lengths, self.shape.ring) for row in rows]

    @functools.cached_property
    def table(self) -> torch.Tensor:
        """[rows, ranks, local]: which token of the row each rank holds, -1 where it holds none."""
        capacity = self.shape.heads * self.local
        made: dict[int, torch.Tensor] = {}
        for number, row in enumerate(self.rows):
            if number and self.alike and row.order is None and self.rows[0].order is None:
                made[number] = made[0]
                continue
            # Tokens of documents as dealt, those of none where there is room, -1 at the end.
            order, inside = torch.arange(row.length) if row.order is None else row.order, sum(row.lengths)
            loose, parts = order[inside:], []
            for pieces in self._held[0 if self.alike else number]:
                own = [order[span.start : span.start + span.length] for spans in pieces for span in spans]
                count = sum(map(len, own))
                own.append(loose[: capacity - count])
                loose = loose[capacity - count :]
                count += len(own[-1])
                parts += [*own, torch.full((capacity - count,), -1)]
            made[number] = torch.cat(parts).view(self.shape.size, self.local)
        return torch.stack([made[number] for number in range(len(self.rows))])

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table there, and [rows, length]: where each token lies among all that ranks hold."""
        if device not in self._on:
            flat = self.table.flatten(1)
            inverse = torch.zeros(len(self.rows), self.length + 1, dtype=torch.long)
            inverse.scatter_(1, flat.remainder(self.length + 1), torch.arange(flat.shape[1]).expand_as(flat))
            places = inverse[:, : self.length].contiguous()
            self._on[device] = packs.upload(self.table, device), packs.upload(places, device)
        return self._on[device]

    def tiles(self, queries: int, keys: int, low: float, high: float) -> list[Tile]:
        """Return the tiles that ring rank `queries` computes with the keys of ring rank `keys`.

        Args:
            low: a query sees keys that are at least so many tokens before it, such as 0.
            high: and at most so many, such as the sliding window less one.
        """
        key = queries, keys, low, high
        if key not in self._tiles:
            self._tiles[key] = [tile for tiles in self._deal_documents(*key, whole=False) for tile in tiles]
        return self._tiles[key]

    def calls(self, queries: int, keys: int, low: float, high: float, device: torch.device) -> list[packs.Call]:
        """Return the calls of `tiles`' work for kernels that take many documents, and windows, in one call."""
        key = queries, keys, low, high, device
        if key not in self._calls:
            documents = self._deal_documents(queries, keys, low, high, whole=True)
            self._calls[key] = packs.make_calls(documents, len(self.rows), self.shape.heads * self.local, device)
        return self._calls[key]

    def _deal_documents(self, queries: int, keys: int, low: float, high: float, whole: bool) -> Iterator[list[Tile]]:
        for number, held in enumerate(self._held):
            for mine, theirs in zip(held[queries], held[keys], strict=True):
                yield make_tiles_of(None if self.alike else number, mine, theirs, low, high, whole)


@dataclass(frozen=True)
class Ring:
    """An attention of one batch: whose keys this rank needs, and who needs its own."""

    layout: Layout
    group: dist.ProcessGroup | None  # None: this rank has all
    low: float
    high: float
    gathered: bool = False
    heads: dist.ProcessGroup | None = None  # whose ranks share heads, and outputs go back to
    kernel: str = "auto"  # as the spec's `attention=` names it

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This one's place."""
        return 0 if self.group is None else self.group.rank()

    def tiles(self, keys: int) -> list[Tile]:
        """Return the tiles that this rank computes with the keys of ring rank `keys`."""
        return self.layout.tiles(self.rank, keys, self.low, self.high)

    def sees(self, queries: int, keys: int) -> bool:
        """Return whether ring rank `queries` needs the keys of ring rank `keys`."""
        return bool(self.layout.tiles(queries, keys, self.low, self.high))
