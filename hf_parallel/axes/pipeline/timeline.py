"""When does which stage run? A pipeline schedule simulated without any process, and the best one chosen.

    timeline = simulate(order("1f1b", stages=4, virtual=1, micro_batches=8), *layer_costs([1, 1, 1, 1]))
    timeline.bubble                                                          # 3/11: idle time / (ranks x duration)

The bubble is always the idle part of the *whole* duration. With p ranks and m micro-batches it is
(p - 1) / (m + p - 1) for GPipe and 1F1B; v stages on each rank make it (p - 1) / (v m + p - 1) (Narayanan 2021). Where
a backward pass is two parts as long as a forward each, Zero Bubble (Qi 2023) comes to (p - 1) / (3 v m + p - 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_parallel.axes.pipeline.orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    SIMPLEST_FIRST,
    Action,
    Order,
    flat,
    order,
    peak_live,
    virtual_stages,
)
from hf_parallel.spec import SpecError, refuse

COMMUNICATION = "communication"


class Span(NamedTuple):
    """An action and when it ran."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank did when: simulated, or recorded in a real run."""

    spans: list[Span]
    ranks: int

    @property
    def start(self) -> float:
        """When the first rank begins."""
        return min(span.start for span in self.spans)

    @property
    def duration(self) -> float:
        """From the first begin to the last end of any rank."""
        return max(span.end for span in self.spans) - self.start

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which no stage computes; communication counts as idle."""
        busy = sum(span.end - span.start for span in self.spans if span.kind in COMPUTE)
        return 1 - busy / (self.ranks * self.duration)


def layer_costs(layers: Sequence[int], backward: float = 2.0) -> tuple[list[float], list[float], list[float]]:
    """Forward, input-gradient and weight-gradient time of stages of so many layers, in forwards of one layer.

    The first stage needs no gradient of its input: torch's split backward does nothing there and runs all of it as the
    weight part, which the simulation of the zero-bubble schedules has to know.
    """
    forward = [float(count) for count in layers]
    half = [backward / 2 * count for count in forward]
    return forward, [0.0, *half[1:]], [2 * half[0], *half[1:]]


def simulate(
    order: Order,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    communication: float = 0.0,
) -> Timeline:
    """Start every action as soon as its rank is free and its inputs are there.

    Args:
        forward, backward_input, backward_weight: durations per stage; a full backward takes the sum of the last two.
        communication: time from the end of an action until its result is on another rank; ranks go on while they send.

    Raises:
        ValueError: the order deadlocks.
    """
    durations = {FORWARD: forward, BACKWARD_INPUT: backward_input, BACKWARD_WEIGHT: backward_weight}
    simulation = _Simulation(order, durations, communication)
    left = {rank: list(reversed(actions)) for rank, actions in order.items()}
    while any(left.values()):
        before = len(simulation.spans)
        for rank, actions in left.items():
            while actions and simulation.run(rank, actions[-1]):
                actions.pop()
        if len(simulation.spans) == before:
            raise ValueError(f"deadlock: {'; '.join(f'rank {r} at {a[-1]}' for r, a in left.items() if a)}")
    return Timeline(sorted(simulation.spans, key=lambda span: (span.rank, span.start)), len(order))


class _Simulation:
    def __init__(self, order: Order, durations: dict[str, Sequence[float]], communication: float) -> None:
        self.spans: list[Span] = []
        self.durations, self.communication = durations, communication
        self.home = {part.stage: rank for rank, actions in order.items() for part in flat(actions)}
        self.free = dict.fromkeys(order, 0.0)
        self.done: dict[tuple[str, int, int], float] = {}  # when which result was there, on the rank that made it

    def run(self, rank: int, action: Action) -> bool:
        """Give an action its time, if that of all its inputs is known."""
        parts = action.parts or (action,)
        if not all(need in self.done for part in parts for need in needs(part, len(self.home))):
            return False
        for part in parts:  # torch runs the parts of an overlap one after the other...
            start = max([self.free[rank], *(self._arrival(rank, need) for need in needs(part, len(self.home)))])
            self.free[rank] = start + self._duration(part)
            self.spans.append(Span(rank, *part[:3], start, self.free[rank]))
        for part in parts:  # ... and sends the results of both after the second
            self.done[_result(part)] = self.free[rank]
        return True

    def _arrival(self, rank: int, need: tuple[str, int, int]) -> float:
        return self.done[need] + (self.communication if self.home[need[1]] != rank else 0.0)

    def _duration(self, action: Action) -> float:
        kinds = (BACKWARD_INPUT, BACKWARD_WEIGHT) if action.kind == BACKWARD else (action.kind,)
        return sum(self.durations[kind][action.stage] for kind in kinds)


def needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """The results an action waits for, as (kind, stage, micro-batch); a full backward counts as its input gradient."""
    kind, stage, i, _ = action
    if kind == FORWARD:
        return [(FORWARD, stage - 1, i)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [(BACKWARD_INPUT, stage, i)]
    return [(FORWARD, stage, i), *([(BACKWARD_INPUT, stage + 1, i)] if stage + 1 < stages else [])]


def _result(action: Action) -> tuple[str, int, int]:
    kind = BACKWARD_INPUT if action.kind == BACKWARD else action.kind
    return kind, action.stage, action.micro_batch


def with_communication(timeline: Timeline) -> Timeline:
    """A recorded timeline with spans for what a rank waits for a result that is ready on another one.

    Before the sender has it, waiting is idle time; after that, and once the receiver is free, it is communication.
    """
    compute = [span for span in timeline.spans if span.kind in COMPUTE]
    stages = 1 + max(span.stage for span in compute)
    ready = {_result(Action(*span[1:4])): (span.rank, span.end) for span in compute}
    added, free = [], dict.fromkeys(range(timeline.ranks), timeline.start)
    for span in sorted(compute, key=lambda span: span.start):
        sent = [ready[need] for need in needs(Action(*span[1:4]), stages) if need in ready]
        arrived = max((end for rank, end in sent if rank != span.rank), default=span.start)
        start = max(free[span.rank], arrived)
        if start < span.start:
            added.append(Span(span.rank, COMMUNICATION, span.stage, span.micro_batch, start, span.start))
        free[span.rank] = span.end
    return Timeline([*timeline.spans, *added], timeline.ranks)


def even_split(layers: int, stages: int) -> list[int]:
    """Layers per stage; early stages take the remainder."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def choose(
    stages: int,
    micro_batches: int,
    layers: int,
    allowed: Iterable[str] = SIMPLEST_FIRST,
    *,
    virtual: int = 2,
    most_live: float | None = None,
) -> str:
    """The schedule with the smallest simulated bubble; of equal ones the simplest.

    Args:
        virtual: stages per rank of the interleaved schedules; the others have one or two.
        most_live: how many micro-batches' activations (of all of a rank's layers) may be held at a time.

    Raises:
        SpecError: none of the schedules can run.
    """
    found: list[tuple[float, int, str]] = []
    for place, name in enumerate(name for name in SIMPLEST_FIRST if name in set(allowed)):
        each = virtual_stages(name, virtual)
        try:
            actions = order(name, stages, each, micro_batches)
        except SpecError:
            continue
        if layers >= stages * each and (most_live is None or max(peak_live(actions)) <= most_live * each):
            timeline = simulate(actions, *layer_costs(even_split(layers, stages * each)))
            found.append((round(timeline.bubble, 9), place, name))
    if not found:
        limit = "" if most_live is None else f" with {most_live} of them alive"
        refuse(
            "pipeline_schedule=auto",
            f"no schedule runs {micro_batches} micro-batches{limit} over {stages} ranks and {layers} layers",
            do=f"{stages} micro-batches{limit and f', {stages} alive,'} work on {stages} layers",
        )
    return min(found)[2]
