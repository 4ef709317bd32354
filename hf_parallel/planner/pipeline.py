"""Stages of a pipeline: their layers and parameters, the ranks that hold them, the order and time in which they run.

Without a pipeline there is one stage, which holds all layers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field

from hf_parallel.ask.keys.pipeline import DELAYED_SCHEDULES, JOINING_SCHEDULES, MIRRORED_SCHEDULES, V_SCHEDULES
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.balance import Cost, Costs, balance, list_checkpointed_layers
from hf_parallel.axes.pipeline.timeline import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Order,
    Timeline,
    count_peak_live,
    order,
    simulate,
    simulate_without_flush,
    split_evenly,
)
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.shape import Block, Matrix, ModelShape


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks, each kind with its number; the first stage holds the embedding, the last norm and head."""

    shape: ModelShape
    counts: tuple[tuple[Block, int], ...]
    is_first: bool
    is_last: bool
    index: int = field(default=0, compare=False)  # equal stages take equal times, wherever they are

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return sum(count for _, count in self.counts)

    def ends(self, tp: int) -> float:
        """Count the parameters of embedding, head and last norm on one rank; tp does not split the norm."""
        shape = self.shape
        embedding = shape.embedding_parameters if self.is_first else 0
        copied = shape.embedding_parameters if shape.tied and not self.is_first else 0
        head = shape.head_parameters + copied if self.is_last else 0
        return (embedding + head) / tp + (shape.other_parameters if self.is_last else 0)

    def dense(self, tp: int, columns: int = 1) -> float:
        """Count all parameters on one rank but those of experts."""
        return self.ends(tp) + sum(count * count_dense_parameters(block, tp, columns) for block, count in self.counts)

    def experts(self, ep: int) -> float:
        """Count the parameters of experts on one rank."""
        return sum(count * block.expert_parameters for block, count in self.counts) / ep

    def adapters(self, rank: int, tp: int, columns: int = 1) -> float:
        """Count the parameters of adapters of `rank` on one rank."""
        return sum(count * count_adapter_parameters(block, rank, tp, columns) for block, count in self.counts)


@functools.lru_cache(maxsize=4096)
def count_dense_parameters(block: Block, tp: int, columns: int = 1) -> float:
    """Count the parameters of a block on one tp rank, without experts.

    tp splits matrices, not norms and routers. Ranks that share a key and value head hold the projections of all heads,
    but on a grid, which cuts them.
    """
    whole = block.others + sum(matrix.parameters for matrix in block.matrices if matrix.split == "whole")
    split = (block.parameters - block.expert_parameters - whole) / tp
    return whole + split + count_shared_projections(block, tp, columns) * (1 - 1 / tp)


def count_shared_projections(block: Block, tp: int, columns: int = 1) -> float:
    """Count the parameters of key and value projections that tp ranks hold whole, their heads being fewer."""
    if columns > 1:
        return 0.0
    shared = [part for part in block.attentions if part.kv_heads < tp]
    inputs = max((matrix.inputs for matrix in block.matrices if matrix.split == "column"), default=0)
    return inputs * sum(part.key_numbers for part in shared)


def list_adapted(block: Block) -> list[Matrix]:
    """Return the matrices that adapters stand beside: all linears; experts and routers are none."""
    return [matrix for matrix in block.matrices if matrix.split in ("column", "row")]


def count_packed_parameters(block: Block, layout: Layout, job: Job) -> float:
    """Count the parameters of a block that one rank holds in 4 bits: of linears, not of experts or routers."""
    if job.four_bit == "none":
        return 0.0
    split = sum(matrix.parameters for matrix in list_adapted(block)) / layout.tp
    return split + count_shared_projections(block, *layout.tp_and_columns) * (1 - 1 / layout.tp)


def is_shared(matrix: Matrix, block: Block, tp: int) -> bool:
    """Return whether it gives keys or values with fewer heads than tp ranks."""
    shared = min((part.kv_heads for part in block.attentions), default=tp) < tp
    return shared and matrix.name.rpartition(".")[2].startswith(("k", "v"))


@functools.lru_cache(maxsize=4096)
def count_adapter_parameters(block: Block, rank: int, tp: int, columns: int = 1) -> float:
    """Count the parameters of a block's adapters of `rank` on one tp rank; 0: none.

    A is whole beside columns and split beside rows, B the other way; heads that ranks share have both whole. On a grid
    its columns split what is whole otherwise, but B of those heads.
    """
    total = 0.0
    for matrix in list_adapted(block):
        whole = is_shared(matrix, block, tp)
        inputs = matrix.inputs / (tp if matrix.split == "row" else columns)
        outputs = matrix.outputs / (columns if matrix.split == "row" else 1 if whole else tp)
        total += rank * (inputs + outputs) * matrix.count
    return total


# ---- the cut --------------------------------------------------------------------------------------------------------


def make_stages(shape: ModelShape, layout: Layout, job: Job) -> tuple[Stage, ...]:
    """Return all stages of the pipeline in order.

    Layers are spread evenly where the stages divide them, otherwise by cost, which takes layers from the last stage
    for the head's sake; `Habits.balanced` always goes by cost.

    Raises:
        SpecError: more stages than layers, or a split that is not one of this model.
    """
    number = layout.pp * layout.virtual_stages
    ends, balanced = job.habits.ends_as_layers, job.habits.balanced
    split = layout.split or _split_layers(shape, number, balanced, ends, job.recompute, job.seq)
    if len(split) != number or sum(split) != shape.layers:
        refuse(f"split={list(split)}", f"not {shape.layers} layers in {number} stages")
    return _cut_into_stages(shape, split)


@functools.lru_cache(maxsize=4096)
def _cut_into_stages(shape: ModelShape, split: tuple[int, ...]) -> tuple[Stage, ...]:
    last, first = len(split) - 1, 0
    stages: list[Stage] = []
    for index, layers in enumerate(split):
        counts = tuple(Counter(shape.blocks[first : first + layers]).items())
        first += layers
        stages.append(Stage(shape, counts, index == 0, index == last, index))
    return tuple(stages)


@functools.lru_cache(maxsize=4096)
def _split_layers(
    shape: ModelShape, number: int, balanced: bool, ends: tuple[int, int], recompute: str, length: int
) -> tuple[int, ...]:
    if not balanced and number in (shape.layers + 1, shape.layers + 2):
        return (*[0] * (number - shape.layers - 1), *[1] * shape.layers, 0)  # Megatron-LM: the ends count as layers
    if shape.layers < number:
        refuse(f"pp x virtual_stages = {number}", f"{shape.layers} layers do not fill them", shape.layers)
    if sum(ends) and 1 < number <= shape.layers // max(ends):
        first, *inner, last = split_evenly(shape.layers + sum(ends), number)
        return (first - ends[0], *inner, last - ends[1])
    if number == 1 or (not balanced and shape.layers % number == 0):
        return tuple(split_evenly(shape.layers, number))
    return split_by_cost(shape, number, recompute, length)


def split_by_cost(shape: ModelShape, number: int, recompute: str, length: int) -> tuple[int, ...]:
    """Return the layers of each stage, embedding, head and loss counted by what they cost."""
    head = shape.head_flops + 5 * shape.head_outputs
    again = list_checkpointed_layers(recompute, len(shape.blocks))
    passes = [4 / 3 if twice else 1.0 for twice in again]
    blocks = tuple(
        Cost(block.flops(length) * times, 2 * block.parameters)
        for block, times in zip(shape.blocks, passes, strict=True)
    )
    weights = shape.embedding_parameters if shape.tied else shape.head_parameters
    return balance(Costs(Cost(0, 2 * shape.embedding_parameters), blocks, Cost(head, 2 * weights)), number)


def list_stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """Return indices of a pipeline rank's stages: round and round, or down and up again in a V."""
    if layout.schedule in V_SCHEDULES:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + turn * layout.pp for turn in range(layout.virtual_stages)]


def group_stages_by_rank(stages: tuple[Stage, ...], layout: Layout) -> list[list[Stage]]:
    """Return for each pipeline rank the stages that it holds."""
    return [[stages[index] for index in list_stages_of_rank(layout, rank)] for rank in range(layout.pp)]


def list_mirrored_stages(mine: list[Stage], layout: Layout, job: Job) -> list[Stage]:
    """Return the stages that a rank has copies of, beside those that it owns: under `chimera` the mirrored one."""
    if layout.schedule not in MIRRORED_SCHEDULES:
        return []
    return [make_stages(mine[0].shape, layout, job)[layout.pp - 1 - stage.index] for stage in mine]


def count_remote_neighbours(stages: list[Stage]) -> int:
    """Count the times that a stage beside one of these is on another rank; the two at the bottom of a V are on one."""
    here = {stage.index for stage in stages}
    beside = [(stage.index - 1, not stage.is_first) for stage in stages]
    beside += [(stage.index + 1, not stage.is_last) for stage in stages]
    return sum(exists and index not in here for index, exists in beside)


# ---- the schedule ---------------------------------------------------------------------------------------------------


def make_schedule_order(layout: Layout, micro_batches: int) -> Order:
    """Return the actions of every rank of a pipeline, in order."""
    return _order(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)


@functools.lru_cache(maxsize=512)
def _order(name: str, ranks: int, virtual: int, micro_batches: int) -> Order:
    if name in DELAYED_SCHEDULES:  # forwards of later steps follow
        return make_1f1b_order(ranks, max(ranks, micro_batches))
    return make_1f1b_order(ranks, micro_batches) if name == "1f1b" else order(name, ranks, virtual, micro_batches)


def make_1f1b_order(ranks: int, micro_batches: int) -> Order:
    """Return the order of 1F1B as torch runs it, without asking torch, which takes half a second for 48 ranks."""
    found: Order = {}
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        actions = [Action(FORWARD, rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            actions.append(Action(BACKWARD, rank, i))
            actions += [Action(FORWARD, rank, ahead + i)] if ahead + i < micro_batches else []
        found[rank] = actions
    return found


def count_simulated_batches(layout: Layout, job: Job) -> int:
    """Count the micro-batches of a run long enough to be like any longer one."""
    return min(job.micro_batches_per_call, 2 * layout.pp)


@functools.lru_cache(maxsize=4096)
def count_live_forwards(layout: Layout, job: Job) -> tuple[int, ...]:
    """Count, for each pipeline rank, the forwards of a stage that are held at a time at most."""
    return (
        (1,)
        if layout.pp == 1
        else tuple(count_peak_live(make_schedule_order(layout, count_simulated_batches(layout, job))))
    )


def split_backwards(stage: int, layout: Layout, job: Job) -> int:
    """Count the backwards of a stage that run in two halves per step.

    The first stage has no gradient of its input to compute: its backward is one piece in any schedule.
    """
    if layout.pp == 1 or stage == 0 or not layout.schedule.endswith(("zero_bubble", "dualpipe_v")):
        return 0
    if layout.schedule != "dualpipe_v":
        return job.micro_batches
    found = make_schedule_order(
        layout, count_simulated_batches(layout, job)
    )  # the others run in one piece, however many
    actions = [action for rank in found.values() for action in rank]
    return job.calls * sum(action.kind == BACKWARD_WEIGHT and action.stage == stage for action in actions)


# ---- seconds --------------------------------------------------------------------------------------------------------


def compute_pipeline_seconds(
    layout: Layout, job: Job, stages: list[tuple[float, float]], sending: float
) -> tuple[float, float]:
    """Return the duration of all micro-batches, and which part of it is bubble.

    The schedule is simulated with the times of its stages and of what they send. Long runs are continued at the pace
    that they come to: under 1F1B a round trip to the next stage is part of every micro-batch's time. This package's
    engine runs all batches of a step at once under most schedules, so the pipeline drains once per step.

    Args:
        stages: seconds of a forward and of a backward of each stage.
        sending: seconds from one rank to the next.
    """
    p, joins = layout.pp, job.engine == "hf_parallel" and layout.schedule in (*JOINING_SCHEDULES, *DELAYED_SCHEDULES)
    runs = 1 if joins else job.calls
    count = job.micro_batches // runs
    busy = [sum(sum(stages[s]) for s in list_stages_of_rank(layout, rank)) for rank in range(p)]
    if p == 1:
        return job.micro_batches * busy[0], 0.0
    if layout.schedule in MIRRORED_SCHEDULES:  # half of the micro-batches run on each of two stages
        busy = [(own + mirrored) / 2 for own, mirrored in zip(busy, reversed(busy), strict=True)]
    simulated = min(count, p if layout.schedule == "1f1b" else 2 * p)
    duration = simulate_timeline(layout, stages, sending, simulated).duration
    if count > simulated:
        if layout.schedule in ("1f1b", *DELAYED_SCHEDULES):
            pace = compute_pace_of_1f1b(busy, sending)
        else:
            pace = (duration - simulate_timeline(layout, stages, sending, simulated - p).duration) / p
        duration += (count - simulated) * max(pace, *busy)
    return runs * duration, 1 - count * sum(busy) / (p * duration)


def compute_pace_of_1f1b(busy: list[float], sending: float) -> float:
    """Return seconds per micro-batch in the long run: ranks r to q hold q - r + 1, each on its way through them."""
    sums, ranks = [0.0, *itertools.accumulate(busy)], range(len(busy))
    return max((sums[q + 1] - sums[r] + 2 * (q - r) * sending) / (q - r + 1) for r in ranks for q in ranks[r:])


def simulate_timeline(
    layout: Layout, stages: list[tuple[float, float]], sending: float, micro_batches: int
) -> Timeline:
    """Return the simulated schedule; halves of a backward take equal times, but the first stage derives no input."""
    forward, half = [forward for forward, _ in stages], [backward / 2 for _, backward in stages]
    costs = forward, [0.0, *half[1:]], [2 * half[0], *half[1:]], sending
    if layout.schedule in DELAYED_SCHEDULES:
        return simulate_without_flush(layout.pp, micro_batches, *costs)
    return simulate(make_schedule_order(layout, micro_batches), *costs)
