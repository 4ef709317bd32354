"""Sets of moments: sorted intervals that do not touch, as (begin, end) in whatever unit."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The same time, each moment once; pauses of up to `gap` are part of it."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The time that both hold; each of them a union."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The time that the first holds and the second does not; each of them a union."""
    bounds = [-float("inf"), *(moment for interval in other for moment in interval), float("inf")]
    return common(one, list(zip(bounds[::2], bounds[1::2], strict=True)))


def length(intervals: list[Interval]) -> float:
    """Of all of them together."""
    return sum(end - begin for begin, end in intervals)
