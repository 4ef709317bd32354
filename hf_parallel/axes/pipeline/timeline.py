"""When does which stage run? A pipeline schedule simulated without any process, and the best one chosen.

    timeline = simulate(order("1f1b", stages=4, virtual=1, micro_batches=8), *layer_costs([1, 1, 1, 1]))
    timeline.bubble                                                          # 3/11: idle time / (ranks x duration)

The bubble is always the idle part of the *whole* duration. With p ranks and m micro-batches it is
(p - 1) / (m + p - 1) for GPipe and 1F1B; v stages on each rank make it (p - 1) / (v m + p - 1) (Narayanan 2021). Where
a backward pass is two parts as long as a forward each, Zero Bubble (Qi 2023) comes to (p - 1) / (3 v m + p - 1).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_parallel.ask.keys.pipeline import (
    DELAYED_SCHEDULES,
    LOOPED_SCHEDULES,
    MIRRORED_SCHEDULES,
    SINGLE_SCHEDULES,
    V_SCHEDULES,
)
from hf_parallel.ask.spec import SpecError, refuse

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


# ---- What every rank of a pipeline runs, in which order: read from torch's own schedules, without any process
#     order("1f1b", stages=2, virtual=1, micro_batches=2)[1]     # forward 0, backward 0, forward 1, backward 1
#
# GPipe (Huang 2019); 1F1B (PipeDream-Flush, Narayanan 2021); interleaved, depth first (Megatron, Narayanan 2021) or
# breadth first (Lamy-Poirier 2022); the backward pass split into the gradients of input and weights (Zero Bubble, Qi
# 2023); a forward and a backward run as one (DualPipe, DeepSeek-AI 2024).


FORWARD, BACKWARD, OVERLAP = "forward", "backward", "overlap"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
COMPUTE = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT, "OVERLAP_F_B": OVERLAP}
SIMPLEST_FIRST = ("gpipe", "1f1b", *LOOPED_SCHEDULES, *V_SCHEDULES)


class Action(NamedTuple):
    """A piece of work of one rank. An overlap has two parts, a forward and a full backward, and no own stage."""

    kind: str
    stage: int
    micro_batch: int
    parts: tuple[Action, ...] = ()


Order = dict[int, list[Action]]


def order(name: str, stages: int, virtual: int, micro_batches: int) -> Order:
    """Return the compute actions of every rank, in the order in which torch's own schedule runs them.

    Args:
        stages: number of ranks of the pipeline.
        virtual: stages on each rank.

    Raises:
        SpecError: the schedule cannot run with these numbers.
        RuntimeError: this version of torch keeps its schedules in another form than 2.11 to 2.15.
    """
    if name in MIRRORED_SCHEDULES:
        return make_mirrored_order(stages, micro_batches)
    if name not in SIMPLEST_FIRST:
        refuse(f"pipeline_schedule={name}", f"not one of {', '.join(SIMPLEST_FIRST)}")
    works = count_virtual_stages(name, max(virtual, 1))
    if virtual != works:
        refuse(f"pipeline_schedule={name}", f"cannot run {virtual} stages per rank", works)
    if stages < 1 or micro_batches < 1:
        refuse(f"pipeline_microbatches={micro_batches}", f"pp_size={stages} needs at least {max(1, stages)}")
    try:
        actions = _read_torch_schedule(name, stages, virtual, micro_batches)
    except ValueError as error:  # torch's way to say that the numbers do not fit
        refuse(f"pipeline_schedule={name}", f"{' '.join(str(error).split())}", cause=error)
    except (AttributeError, TypeError, KeyError, IndexError, AssertionError) as error:
        raise RuntimeError(f"hf_parallel: cannot read the {name} schedule of torch {torch.__version__}") from error
    parts = [part for rank in actions for part in flatten_overlaps(actions[rank])]
    seen = Counter((part.kind, part.stage, part.micro_batch) for part in parts)
    # Every stage runs every micro-batch forward once and backward once, on one rank.
    for stage, i in itertools.product(range(stages * virtual), range(micro_batches)):
        forward, whole, *halves = (seen.pop((kind, stage, i), 0) for kind in COMPUTE)
        if forward != 1 or (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
            raise RuntimeError(f"hf_parallel: torch {torch.__version__} runs {name} not once over stage {stage}")
    if seen:
        raise RuntimeError(f"hf_parallel: torch {torch.__version__} adds {next(iter(seen))} to {name}")
    return actions


def compute_mirrored_rank(stage: int, micro_batch: int, ranks: int) -> int:
    """Return the rank that runs a micro-batch on a stage under `chimera`: even ones go down the ranks, odd ones up."""
    return stage if micro_batch % 2 == 0 else ranks - 1 - stage


#: The action that a rank prefers of those that it can begin at the same time: the first backward, or forward.
_PREFERENCES = ((BACKWARD, FORWARD), (FORWARD, BACKWARD))


@functools.lru_cache(maxsize=64)
def make_mirrored_order(ranks: int, micro_batches: int) -> Order:
    """Return the order of `chimera`, two pipelines of 1F1B merged (Li & Hoefler, 2021, arXiv 2107.06925, section 3.1).

    A list schedule: whichever action can begin first is next. A backward takes twice as long as a forward, and at most
    `ranks` micro-batches are alive on a rank, of both directions. Of two preferences the shorter schedule is taken.

    Raises:
        SpecError: an odd number of ranks or micro-batches, of which half cannot go each way.
    """
    if ranks % 2 or ranks < 2:
        refuse(f"pp_size={ranks}", "pipeline_schedule=chimera mirrors stages in pairs of ranks", max(2, ranks - 1))
    if micro_batches % 2 or micro_batches < ranks:
        why = f"pipeline_schedule=chimera takes even numbers from pp_size={ranks} on"
        refuse(f"pipeline_microbatches={micro_batches}", why, max(ranks, micro_batches + micro_batches % 2))
    found = [_list_schedule(ranks, micro_batches, preference) for preference in _PREFERENCES]
    return min(found, key=lambda one: one[0])[1]


def _list_schedule(ranks: int, micro_batches: int, preference: tuple[str, str]) -> tuple[float, Order]:
    """Return the duration of a schedule of two merged pipelines, in forwards of a stage, and its order."""
    ends: dict[tuple[str, int, int], float] = {}
    free, alive = [0.0] * ranks, [0] * ranks
    actions: Order = {rank: [] for rank in range(ranks)}
    following = {(kind, stage, way): way for kind in preference for stage in range(ranks) for way in (0, 1)}
    for _ in range(2 * ranks * micro_batches):
        ready = []
        for (kind, stage, way), i in following.items():
            rank, action = compute_mirrored_rank(stage, way, ranks), Action(kind, stage, i)
            needed, is_full = needs(action, ranks), kind == FORWARD and alive[rank] == ranks
            if i >= micro_batches or is_full or any(one not in ends for one in needed):
                continue
            start = max(free[rank], *(ends[one] for one in needed), 0.0)
            ready.append((start, preference.index(kind), i // 2, -stage, rank, way, action))
        start, _, _, _, rank, way, action = min(ready)
        free[rank] = ends[_name_result(action)] = start + (1 if action.kind == FORWARD else 2)
        alive[rank] += 1 if action.kind == FORWARD else -1
        actions[rank].append(action)
        following[action.kind, action.stage, way] += 2
    return max(free), actions


def count_virtual_stages(name: str, asked: int = 2) -> int:
    """Return the stages per rank: one or two where the schedule fixes them, else `asked`."""
    return asked if name in LOOPED_SCHEDULES else 2 if name in V_SCHEDULES else 1


@dataclass(eq=False)
class _StandIn:
    """A stage for torch's schedules that computes nothing and notes what they ask it to run."""

    is_first = is_last = False  # so no loss is asked for
    has_backward = True
    submod = None

    group_rank: int
    stage_index: int
    group_size: int
    num_stages: int
    actions: list[Action] = field(default_factory=list)

    def _note_action(self, kind: str, micro_batch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(kind, self.stage_index, micro_batch))

    forward_one_chunk = functools.partialmethod(_note_action, FORWARD)
    backward_one_chunk = functools.partialmethod(_note_action, BACKWARD)

    def _do_nothing(self, *args: object, **kwargs: object) -> list:
        return []  # no messages

    perform_reduce_grad = _do_nothing
    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _do_nothing
    release_fwd_send_outputs = _do_nothing


def _read_torch_schedule(name: str, stages: int, virtual: int, micro_batches: int) -> Order:
    """Read what torch's schedule computes on every rank.

    Schedules of several stages per rank run what they publish, with None where a rank is expected to wait. Others are
    run, because the order that 1F1B publishes for its last rank leaves out the first forward.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class  # slow to import: for pipelines only

    kind: Any = get_schedule_class(name.replace("_", ""))
    make = functools.partial(kind, n_microbatches=micro_batches, loss_fn=lambda output, target: output)
    if name not in SINGLE_SCHEDULES:
        published = make([_StandIn(0, index, stages, stages * virtual) for index in range(virtual)]).pipeline_order
        return {rank: [_translate_action(action) for action in published[rank] if action] for rank in range(stages)}
    actions = {}
    for rank in range(stages):
        stage = _StandIn(rank, rank, stages, stages)
        schedule = make(stage)
        schedule._initialize_stage = lambda *args, **kwargs: None  # would look for a process group
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        actions[rank] = stage.actions
    return actions


def _translate_action(action: _Action) -> Action:
    parts = tuple(_translate_action(part) for part in action.sub_actions or ())
    micro_batch = -1 if action.microbatch_index is None else action.microbatch_index
    return Action(_KINDS[action.computation_type.value], action.stage_index, micro_batch, parts)


def flatten_overlaps(actions: Iterable[Action]) -> list[Action]:
    """Replace each overlap by its parts."""
    return [part for action in actions for part in action.parts or (action,)]


def count_peak_live(order: Order) -> list[int]:
    """Return per rank the largest number of forwards whose activations are held: until both parts of their backward
    ran.
    """
    peaks = []
    for rank in sorted(order):
        live = [0]
        for action in flatten_overlaps(order[rank]):
            live.append(live[-1] + (action.kind == FORWARD) - (action.kind in (BACKWARD, BACKWARD_WEIGHT)))
        peaks.append(max(live))
    return peaks


COMMUNICATION, FILL = "communication", "fill"  # a fill is other work, in a bubble


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
    """The actions of every rank and when they ran: simulated, or recorded in a real run."""

    spans: list[Span]
    ranks: int

    @property
    def start(self) -> float:
        """The time at which the first rank begins."""
        return min(span.start for span in self.spans)

    @property
    def duration(self) -> float:
        """From the first begin to the last end of any rank."""
        return max(span.end for span in self.spans) - self.start

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which nothing is computed; communication counts as idle."""
        busy = sum(span.end - span.start for span in self.spans if span.kind in (*COMPUTE, FILL))
        return 1 - busy / (self.ranks * self.duration)

    @property
    def ranks_at_work(self) -> float:
        """Return how many ranks compute at a time, as a rank that computes sees it on average."""
        changes = [(when, step) for span in self.spans for when, step in ((span.start, 1), (span.end, -1))]
        busy = seen = 0.0
        working, before = 0, self.start
        for when, step in sorted(changes):
            busy += working * (when - before)
            seen += working**2 * (when - before)
            working, before = working + step, when
        return seen / busy if busy else 1.0


def compute_layer_costs(layers: Sequence[int], backward: float = 2.0) -> tuple[list[float], list[float], list[float]]:
    """Return the times of stages of so many layers (forward, input gradient, weight gradient), in forwards of one
    layer.

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


def count_ahead_of_step(rank: int, ranks: int) -> tuple[int, int]:
    """Return the forwards and backwards of later steps that a rank has run when a step ends, without a flush.

    The step ends with the last backward of rank 0. Until then rank r goes on for as long as 2 r forwards take; a
    forward and a backward, which takes as long as two forwards, are a slot of three.
    """
    return ranks - 1 - rank + -(-2 * rank // 3), 2 * rank // 3


def count_versions_held(name: str, rank: int, ranks: int, micro_batches: int) -> tuple[int, int]:
    """Return how many versions of the weights, and how many sums of gradients, a rank holds when a step has ended.

    Args:
        micro_batches: of an optimizer step.
    """
    if name not in DELAYED_SCHEDULES:
        return 1, 1
    forwards, backwards = count_ahead_of_step(rank, ranks)
    weights = 2 if name == "pipedream_2bw" else 1 + -(-(forwards - backwards) // micro_batches)
    return weights, 1 + -(-backwards // micro_batches)


def simulate_without_flush(
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    communication: float = 0.0,
) -> Timeline:
    """Simulate a step of a pipeline that does not drain between steps, after several like it. Ranks end it together.

    Args:
        micro_batches: of a step; those before the step in progress have negative numbers.
        forward, backward_input, backward_weight, communication: as in `simulate`.
    """
    warm_up = 2 + -(-ranks // micro_batches)
    durations = {FORWARD: forward, BACKWARD_INPUT: backward_input, BACKWARD_WEIGHT: backward_weight}
    simulation = _Simulation({rank: [Action(FORWARD, rank, 0)] for rank in range(ranks)}, durations, communication)
    done = {rank: [0, 0] for rank in range(ranks)}
    for step in range(1, warm_up + 1):
        before, began = len(simulation.spans), max(simulation.free.values())
        simulation.free = dict.fromkeys(simulation.free, began)
        goals = {rank: [step * micro_batches + ahead for ahead in count_ahead_of_step(rank, ranks)] for rank in done}
        while any(done[rank] != goals[rank] for rank in done):
            for rank, counts in done.items():
                while counts != goals[rank]:
                    is_forward = counts[0] < goals[rank][0] and counts[0] - counts[1] < ranks - rank
                    kind = FORWARD if is_forward else BACKWARD
                    if not simulation.run(rank, Action(kind, rank, counts[not is_forward])):
                        break
                    counts[not is_forward] += 1
    first = (warm_up - 1) * micro_batches
    spans = [
        span._replace(micro_batch=span.micro_batch - first, start=span.start - began, end=span.end - began)
        for span in simulation.spans[before:]
    ]
    return Timeline(sorted(spans, key=lambda span: (span.rank, span.start)), ranks)


class _Simulation:
    def __init__(self, order: Order, durations: dict[str, Sequence[float]], communication: float) -> None:
        self.spans: list[Span] = []
        self.communication = communication
        halves = zip(durations[BACKWARD_INPUT], durations[BACKWARD_WEIGHT], strict=True)
        self.durations = {**durations, BACKWARD: [first + second for first, second in halves]}
        self.stages = len({part.stage for actions in order.values() for part in flatten_overlaps(actions)})
        self.free = dict.fromkeys(order, 0.0)
        self.done: dict[tuple[str, int, int], tuple[float, int]] = {}  # when which result was there, and on which rank

    def run(self, rank: int, action: Action) -> bool:
        """Give an action its time, if that of all its inputs is known."""
        parts = action.parts or (action,)
        needed = [needs(part, self.stages) for part in parts]
        for need in itertools.chain.from_iterable(needed):
            if need not in self.done:
                return False
        free = self.free[rank]
        for part, inputs in zip(parts, needed, strict=True):  # torch runs the parts of an overlap one after another...
            start = free
            for made, where in (self.done[need] for need in inputs):
                start = max(start, made + (self.communication if where != rank else 0.0))
            free = start + self.durations[part.kind][part.stage]
            self.spans.append(Span(rank, *part[:3], start, free))
        self.free[rank] = free
        for part in parts:  # ... and sends the results of both after the second
            self.done[_name_result(part)] = free, rank
        return True


def needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """Return the results an action waits for: (kind, stage, micro-batch).

    A full backward counts as its input gradient.
    """
    kind, stage, i, _ = action
    if kind == FORWARD:
        return [(FORWARD, stage - 1, i)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [(BACKWARD_INPUT, stage, i)]
    return [(FORWARD, stage, i), *([(BACKWARD_INPUT, stage + 1, i)] if stage + 1 < stages else [])]


def _name_result(action: Action) -> tuple[str, int, int]:
    kind = BACKWARD_INPUT if action.kind == BACKWARD else action.kind
    return kind, action.stage, action.micro_batch


def with_communication(timeline: Timeline) -> Timeline:
    """Return a recorded timeline with spans for what a rank waits for a result that is ready on another one.

    Before the sender has it, waiting is idle time; after that, and once the receiver is free, it is communication.
    """
    compute = [span for span in timeline.spans if span.kind in COMPUTE]
    stages = 1 + max(span.stage for span in compute)
    ready = {_name_result(Action(*span[1:4])): (span.rank, span.end) for span in compute}
    added, free = [], dict.fromkeys(range(timeline.ranks), timeline.start)
    for span in sorted((s for s in timeline.spans if s.kind in (*COMPUTE, FILL)), key=lambda span: span.start):
        if span.kind == FILL:
            free[span.rank] = span.end
            continue
        sent = [ready[need] for need in needs(Action(*span[1:4]), stages) if need in ready]
        arrived = max((end for rank, end in sent if rank != span.rank), default=span.start)
        start = max(free[span.rank], arrived)
        if start < span.start:
            added.append(Span(span.rank, COMMUNICATION, span.stage, span.micro_batch, start, span.start))
        free[span.rank] = span.end
    return Timeline([*timeline.spans, *added], timeline.ranks)


def split_evenly(layers: int, stages: int) -> list[int]:
    """Return the layers per stage; early stages take the remainder."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def choose_fastest_schedule(
    stages: int,
    micro_batches: int,
    layers: int,
    allowed: Iterable[str] = SIMPLEST_FIRST,
    *,
    virtual: int = 2,
    most_live: float | None = None,
) -> str:
    """Return the schedule with the smallest simulated bubble; of equal ones the simplest.

    Args:
        virtual: stages per rank of the interleaved schedules; the others have one or two.
        most_live: how many micro-batches' activations (of all of a rank's layers) may be held at a time.

    Raises:
        SpecError: none of the schedules can run.
    """
    found: list[tuple[float, int, str]] = []
    for place, name in enumerate(name for name in SIMPLEST_FIRST if name in set(allowed)):
        each = count_virtual_stages(name, virtual)
        try:
            actions = order(name, stages, each, micro_batches)
        except SpecError:
            continue
        if layers >= stages * each and (most_live is None or max(count_peak_live(actions)) <= most_live * each):
            timeline = simulate(actions, *compute_layer_costs(split_evenly(layers, stages * each)))
            found.append((round(timeline.bubble, 9), place, name))
    if not found:
        limit = "" if most_live is None else f" with {most_live} of them alive"
        refuse(
            "pipeline_schedule=auto",
            f"no schedule runs {micro_batches} micro-batches{limit} over {stages} ranks and {layers} layers",
            do=f"{stages} micro-batches{limit and f', {stages} alive,'} work on {stages} layers",
        )
    return min(found)[2]


# ---- A timeline as a picture: one row per rank, time to the right, one box per action, in plain SVG
# write("step.svg", timeline, "1f1b", predicted=3 / 11, measured=timeline.bubble)


#: Told apart by hue and by lightness, so that the picture also reads in grey and without red and green.
COLOURS = {
    FORWARD: ("#2f6fba", "forward"),
    BACKWARD: ("#d9822b", "backward"),
    BACKWARD_INPUT: ("#c8553d", "backward, input"),
    BACKWARD_WEIGHT: ("#e9b949", "backward, weights"),
    COMMUNICATION: ("#8d7bb5", "communication"),
    FILL: ("#5b9a68", "fill"),
}
IDLE, INK, QUIET, LINE = "#eceff3", "#1f2933", "#66727f", "#d3d9e0"
_LEFT, _TOP, _PLOT, _ROW, _STEP, _MARGIN = 76, 78, 1120, 32, 40, 24  # pixels; a row and its distance to the next


def write_timeline_picture(
    path: str | Path, timeline: Timeline, name: str, predicted: float | None = None, measured: float | None = None
) -> None:
    """Write the picture of a timeline; the arguments are those of `render_timeline`."""
    Path(path).write_text(render_timeline(timeline, name, predicted, measured), encoding="utf-8")


def render_timeline(
    timeline: Timeline, name: str, predicted: float | None = None, measured: float | None = None
) -> str:
    """Return the picture as text.

    Args:
        name: of the schedule, for the title.
        predicted, measured: bubbles for the caption, as parts of one.
    """
    foot = _TOP + timeline.ranks * _STEP
    width, height = _LEFT + _PLOT + _MARGIN, foot + 76
    stages, micro_batches = ({span[field] for span in timeline.spans if span.kind != FILL} for field in (2, 3))
    values = (("predicted", predicted), ("measured", measured))
    bubble = ", ".join(f"{value:.1%} {word}" for word, value in values if value is not None)
    caption = f"{timeline.ranks} ranks · {len(stages)} stages · {len(micro_batches)} micro-batches"
    lines = list(
        render_picture_head(width, height, _LEFT, name, f"{caption} · bubble {bubble}" if bubble else caption)
    )
    for rank in range(timeline.ranks):  # what stays visible of a row is idle time
        y = _TOP + rank * _STEP
        lines += [
            render_text_at(_LEFT - 12, y + _ROW / 2 + 4, f"rank {rank}", fill=QUIET, anchor="end"),
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_ROW}" rx="3" fill="{IDLE}"/>',
        ]
    lines += [
        *_render_boxes(timeline),
        *time_axis(timeline.duration, _LEFT, foot, _PLOT),
    ]
    shown = {span.kind for span in timeline.spans if span.end > span.start}
    x, y = float(_LEFT), foot + 52  # of the legend
    for colour, label in [pair for kind, pair in COLOURS.items() if kind in shown] + [(IDLE, "idle")]:
        lines.append(f'<rect class="key" x="{x}" y="{y - 11}" width="14" height="14" rx="2" fill="{colour}"/>')
        lines.append(render_text_at(x + 20, y, label))
        x += 44 + 6.6 * len(label)
    if max(len({s.stage for s in timeline.spans if s.rank == rank}) for rank in range(timeline.ranks)) > 1:
        lines.append(render_text_at(x, y, "lighter: a later stage of the same rank", fill=QUIET))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _render_boxes(timeline: Timeline) -> Iterator[str]:
    """Yield a box per action: the later a stage among those of its rank, the lighter."""
    scale = _PLOT / timeline.duration
    stages_of = [sorted({span.stage for span in timeline.spans if span.rank == n}) for n in range(timeline.ranks)]
    # Communication first: it may run beside a computation, which stays in front of it.
    for span in sorted(timeline.spans, key=lambda span: span.kind != COMMUNICATION):
        x, y, wide = _LEFT + (span.start - timeline.start) * scale, _TOP + span.rank * _STEP, span.end - span.start
        wide *= scale
        if wide <= 0:  # the first stage's input gradient takes no time
            continue
        (colour, word), stages = COLOURS[span.kind], stages_of[span.rank]
        white = 0.55 * stages.index(span.stage) / max(1, len(stages) - 1)
        mixed = [round(value + (255 - value) * white) for value in bytes.fromhex(colour[1:])]
        label, thin = str(span.micro_batch), span.kind == COMMUNICATION
        high = _ROW / 4 if thin else _ROW
        about = f"{word}, stage {span.stage}, micro-batch {label}: {span.start:.4g} to {span.end:.4g}"
        text = ""
        if not thin and wide >= 7 * len(label) + 4:
            luminance = (0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2]) / 255
            ink = "#ffffff" if luminance < 0.45 else INK
            text = render_text_at(x + wide / 2, y + _ROW / 2 + 4, label, fill=ink, anchor="middle")
        yield (
            f'<g><title>{escape(about)}</title><rect class="box {span.kind}" x="{x:.2f}" y="{y + _ROW - high:.2f}" '
            f'width="{wide:.2f}" height="{high:.2f}" rx="2" fill="#{bytes(mixed).hex()}" stroke="#ffffff"/>{text}</g>'
        )


def render_picture_head(width: float, height: float, x: float, name: str, caption: str) -> Iterator[str]:
    """The picture's begin: a white page with a title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield render_text_at(x, 34, name, size=19, weight=600)
    yield render_text_at(x, 56, caption, fill=QUIET, size=13)


def time_axis(duration: float, left: float, y: float, wide: float, unit: str = "") -> Iterator[str]:
    """The axis of time below the rows, with about ten ticks, at 1, 2 or 5 times a power of ten."""
    yield f'<path d="M{left} {y}h{wide}" stroke="{LINE}"/>'
    power = 10.0 ** math.floor(math.log10(duration / 10))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * 12 >= duration)
    for number in range(int(duration / step * (1 + 1e-9)) + 1):
        tick = number * step
        x = left + tick / duration * wide
        yield f'<path d="M{x:.2f} {y}v5" stroke="{LINE}"/>'
        yield render_text_at(x, y + 19, f"{tick:.6g}{unit}", fill=QUIET, anchor="middle", size=11)


def render_text_at(
    x: float, y: float, text: str, fill: str = INK, anchor: str = "start", size: int = 12, weight: int = 400
) -> str:
    """Return a line of text."""
    style = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'
