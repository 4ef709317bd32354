"""From two short dry runs to a long one: each further layer, or round of micro-batches, adds what the last one did."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hf_parallel.planner.ledger import Traffic
from hf_parallel.planner.observe import Observed


def fullest(seen: Observed) -> Observed:
    """Only the fullest of its moments."""
    return dataclasses.replace(seen, peaks=[seen.peak])


def extend(total: Observed, base: Observed, more: Observed, times: int) -> None:
    """Add what one further layer, or round of micro-batches, adds: `times` times."""
    for whole, one, two in zip(total.peaks, base.peaks, more.peaks, strict=True):
        _add(whole, one, two, times)
    _add(total.kept, base.kept, more.kept, times)
    for axis, kinds in more.communication.items():
        mine, former = total.communication.setdefault(axis, {}), base.communication.get(axis, {})
        for kind, moved in kinds.items():
            mine[kind] = mine.get(kind, Traffic()).grown(former.get(kind, Traffic()), moved, times)


def _add(whole: Counter[str], one: Counter[str], two: Counter[str], times: int) -> None:
    for kind in {*one, *two}:
        whole[kind] += times * (two[kind] - one[kind])
