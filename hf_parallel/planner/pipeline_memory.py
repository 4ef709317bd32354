"""What a rank of a pipeline holds at the fullest moment of its schedule, stage by stage and action by action.

A backward pass in one piece frees a stage's activations as it goes. In two (Qi et al., 2023), that of the inputs frees
nothing, since the graph is needed once more, and leaves the gradient of every product's output and every norm's beside
it; only that of the weights frees both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hf_parallel.axes.pipeline.orders import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, flat


@dataclass(frozen=True)
class StageBytes:
    """Of one micro-batch on one stage.

    kept: by its forward. between: gradients of outputs, from one backward pass to the other. begin, end: what else a
    backward needs when it begins, and what that of the inputs needs at its end. gradients: of weights, from the first
    backward on.
    """

    kept: float
    between: float
    begin: float
    end: float
    gradients: float


class Moment(NamedTuple):
    """Bytes at one moment: activations held, needed in passing, gradients of weights."""

    held: float = 0.0
    passing: float = 0.0
    gradients: float = 0.0


def fullest_moment(actions: Iterable[Action], stages: dict[int, StageBytes]) -> Moment:
    """When a rank needs most.

    Args:
        actions: of the rank, in order.
        stages: of the rank, by index.
    """
    held, most = 0.0, Moment()
    summed: set[int] = set()
    for action in flat(actions):
        stage = stages[action.stage]
        whole = sum(stages[index].gradients for index in summed)
        if action.kind == FORWARD:
            held += stage.kept
            most = max(most, Moment(held, 0.0, whole), key=sum)
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            most = max(most, Moment(held, stage.begin, whole), key=sum)
        if action.kind == BACKWARD_INPUT:
            held += stage.between
            most = max(most, Moment(held, stage.end, whole), key=sum)
        if action.kind == BACKWARD_WEIGHT:
            held -= stage.between
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            held -= stage.kept
            summed.add(action.stage)
    return most
