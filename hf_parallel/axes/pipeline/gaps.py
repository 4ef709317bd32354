"""Bubbles of a timeline: how long each rank waits before which action, and which work fits there.

gaps = find_gaps(timeline, rank=0)          # [seconds before action 0, …, seconds after the last action]
placed = place_tasks([gaps] * 4, tasks)     # four steps, over and over: first fit
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_parallel.axes.pipeline.timeline import COMPUTE, Timeline

#: The part of a gap that is filled: actions do not take the same time in each step.
_FILLED = 0.9


class Place(NamedTuple):
    """A gap: that before an action of a rank, in one of the steps from a curvature to the next."""

    step: int
    action: int


@dataclass(frozen=True)
class Task:
    """Work that may wait for a gap.

    Attributes:
        seconds: how long it takes.
        ready: the first gap in which its inputs are there.
        deadline: the last step in which it may run.
    """

    key: Hashable
    seconds: float
    ready: Place
    deadline: int


def find_gaps(timeline: Timeline, rank: int) -> list[float]:
    """Return the idle seconds of a rank before each of its actions, and after the last one."""
    own = [span for span in timeline.spans if span.rank == rank and span.kind in COMPUTE]
    own.sort(key=lambda span: span.start)
    ends = [timeline.start, *(span.end for span in own)]
    begins = [*(span.start for span in own), timeline.start + timeline.duration]
    return [begin - end for begin, end in zip(begins, ends, strict=True)]


def place_tasks(gaps: Sequence[Sequence[float]], tasks: Iterable[Task]) -> dict[Hashable, Place]:
    """Give each task the first gap that has room for it (first fit); what fits nowhere has no place.

    Args:
        gaps: seconds before each action and after the last, for each step of an interval, which repeats: step
            len(gaps) has what step 0 has left.
    """
    left = [[_FILLED * seconds for seconds in step] for step in gaps]
    placed: dict[Hashable, Place] = {}
    for task in tasks:
        for step in range(task.ready.step, task.deadline + 1):
            room = left[step % len(left)]
            first = task.ready.action if step == task.ready.step else 0
            action = next((i for i in range(first, len(room)) if room[i] >= task.seconds), None)
            if action is not None:
                room[action] -= task.seconds
                placed[task.key] = Place(step, action)
                break
    return placed
