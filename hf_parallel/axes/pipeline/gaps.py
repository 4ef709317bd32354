"""Bubbles of a timeline: how long each rank waits before which action, which work fits there, who may be slower.

gaps = find_gaps(timeline, rank=0)          # [seconds before action 0, …, seconds after the last action]
placed = place_tasks([gaps] * 4, tasks)     # four steps, over and over: first fit
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_parallel.axes.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    COMPUTE,
    FORWARD,
    Action,
    Order,
    Timeline,
    needs,
)

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


# ---- slack: by how much an action may begin later, or take longer, so that no rank ends later -----------------------


class Slack:
    """Earliest and latest times of all actions of an order, whose seconds may be changed one by one."""

    def __init__(self, order: Order, seconds: Mapping[tuple[str, int], float]) -> None:
        """Take the seconds of each action by kind and stage; the order has whole backward passes."""
        self.seconds = {action: seconds[action[:2]] for actions in order.values() for action in actions}
        self.before: dict[Action, list[Action]] = {}
        stages, kinds = 1 + max(action.stage for action in self.seconds), {FORWARD: FORWARD, BACKWARD_INPUT: BACKWARD}
        left = {rank: list(actions) for rank, actions in order.items()}
        latest: dict[int, Action] = {}
        while any(left.values()):
            for rank, actions in left.items():
                while actions:
                    inputs = [Action(kinds[kind], stage, i) for kind, stage, i in needs(actions[0], stages)]
                    if any(one not in self.before for one in inputs):
                        break
                    self.before[actions[0]] = inputs + ([latest[rank]] if rank in latest else [])
                    latest[rank] = actions.pop(0)
        self.duration = self.find()[1]

    def find(self) -> tuple[dict[Action, float], float]:
        """Return the slack of each action in seconds, and the duration of all of them."""
        ends: dict[Action, float] = {}
        for action, before in self.before.items():  # in an order in which inputs come first
            ends[action] = max((ends[one] for one in before), default=0.0) + self.seconds[action]
        duration = max(ends.values())
        latest = dict.fromkeys(ends, duration)
        for action in reversed(self.before):
            for one in self.before[action]:
                latest[one] = min(latest[one], latest[action] - self.seconds[action])
        return {action: latest[action] - end for action, end in ends.items()}, duration
