"""Which layouts this package can run for a model, a cluster and a batch, and one of them predicted.

A layout is tried with growing micro-batches while it fits, without activation checkpointing first: checkpointing
costs a third of the compute and is worth it only where the activations do not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hf_parallel.config import ParallelConfig
from hf_parallel.planner.choices import Choice, Goal
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import GIB, fits, fullest
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.predict import memory_of_ranks, predict_step
from hf_parallel.planner.stage_times import stage_times
from hf_parallel.planner.stages import make_stages, stages_of_rank

_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
_MOST_STAGES = 64


def layouts(goal: Goal) -> Iterator[ParallelConfig]:
    """Every layout of the GPUs that the engine takes for this model and batch, tp inside a node."""
    gpus, shape = goal.cluster.gpus, goal.shape
    inside = min(goal.cluster.per_node, gpus)
    for tp in _divisors(inside):
        if not heads_divide(shape, tp) or gpus % tp:
            continue
        for pp in _divisors(gpus // tp):
            if pp > min(shape.layers, _MOST_STAGES):
                break
            data = gpus // tp // pp
            if goal.global_batch is not None and goal.global_batch % data:
                continue
            for replicate in _replicas(data, tp, goal.cluster):
                for stage in _zero_stages(data // replicate, pp):
                    yield ParallelConfig(
                        dp_replicate_size=replicate,
                        dp_shard_size=data // replicate,
                        pp_size=pp,
                        tp_size=tp,
                        zero_stage=stage,
                    )


def heads_divide(shape: ModelShape, tp: int) -> bool:
    """Do the heads divide? Keys and values are shared by ranks where there are fewer."""
    return all(
        attention.heads % tp == 0 and (attention.kv_heads % tp == 0 or tp % attention.kv_heads == 0)
        for block in set(shape.blocks)
        for attention in block.attentions
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _replicas(data: int, tp: int, cluster: Cluster) -> list[int]:
    """Everything sharded; shards of a node, or of a few; everything replicated."""
    inside = max(1, cluster.per_node // tp)
    shards = {data, 1} | {n for n in (inside, 4 * inside) if data % n == 0 and n < data}
    return sorted({data // shard for shard in shards})


def _zero_stages(shards: int, pp: int) -> tuple[int, ...]:
    return (3,) if shards == 1 or pp > 1 else (3, 2)  # in a pipeline weights stay gathered between micro-batches


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs `gib` on its fullest rank, which is more than there is."""

    config: ParallelConfig
    size: int
    gib: float


def variants(goal: Goal, config: ParallelConfig, limit: float) -> Iterator[Choice | TooLarge]:
    """Growing micro-batches; with checkpointing only if none fits without.

    A larger one may fit where a smaller does not: the last needs no accumulation, which holds whole gradients.
    """
    share = goal.share(config)
    for recompute in ("none", "full"):
        fitted = False
        for size in _micro_batches(goal, share, config) if share else ():
            choice = predicted(goal, dataclasses.replace(config, activation_checkpointing=recompute), size, limit)
            if choice is None:
                continue
            yield choice
            fitted = fitted or isinstance(choice, Choice)
        if fitted:
            return


def _micro_batches(goal: Goal, share: int, config: ParallelConfig) -> list[int]:
    """Rows of a micro-batch: what the script gives, or powers of two up to 64 k tokens; a pipeline cuts a call."""
    if goal.rows is not None and share % goal.rows:
        return []
    if goal.rows is not None and config.pp_size == 1:
        return [goal.rows]
    call = goal.rows or share
    sizes = [n for n in _divisors(call) if n == 1 or (n & (n - 1) == 0 and n * goal.seq <= 65536)]
    if config.pp_size == 1 and share * goal.seq <= 65536:
        sizes = sorted({*sizes, share})
    return [n for n in sizes if call // n >= config.pp_size]


def predicted(
    goal: Goal, config: ParallelConfig, size: int, limit: float = math.inf, measure: bool = False
) -> Choice | TooLarge | None:
    """One layout with micro-batches of `size` rows; None if it cannot be as fast as `limit`.

    Args:
        measure: predict the time of what does not fit, too.
    """
    share = goal.share(config)
    assert share is not None
    count = share // size
    rows = size if config.pp_size == 1 else goal.rows or share  # a pipeline gets all of a step in one call
    accumulation = share // rows
    if config.pp_size > 1:
        config = dataclasses.replace(config, pipeline_microbatches=rows // size)
    layout, job = to_layout(config), to_job(goal, config, size, count)
    stages = make_stages(goal.shape, layout, job)
    if limit < math.inf and _least_seconds(goal, stages, layout, job) > limit * share * layout.dp:
        return None
    peak = fullest(memory_of_ranks(goal.shape, stages, layout, job))
    if not measure and not fits(peak, goal.cluster):
        return TooLarge(config, size, peak.needed / GIB)
    return Choice(config, predict_step(goal.shape, goal.cluster, layout, job), rows, accumulation)


def _least_seconds(goal: Goal, stages: tuple, layout: Layout, job: Job) -> float:
    """No schedule of one stage per rank is faster: the slowest computes, the others fill and drain its pipeline."""
    each = [stage_times(goal.shape, stage, layout, job, goal.cluster) for stage in stages]
    busy = [sum(t.forward.values()) + sum(t.backward.values()) for t in each]
    ranks = [sum(busy[index] for index in stages_of_rank(layout, rank)) for rank in range(layout.pp)]
    filling = (sum(ranks) - max(ranks)) / layout.virtual_stages if layout.schedule == "1f1b" else 0.0
    return job.micro_batches * max(ranks) + filling


def to_layout(config: ParallelConfig) -> Layout:
    """What the planner calls this config: in a pipeline weights stay whole, as they do in ZeRO-2."""
    sharded = config.dp_shard_size > 1
    stage = 0 if not sharded else 2 if config.pp_size > 1 else config.zero_stage
    return Layout(
        tp=config.tp_size,
        pp=config.pp_size,
        dp=config.data_parallel_size,
        zero_stage=stage,
        virtual_stages=config.stages_per_rank,
        sequence_parallel=config.tp_size > 1 and config.sequence_parallel is not False,
        dp_replicate=config.dp_replicate_size if sharded else 1,
        schedule=config.pipeline_schedule,
        split=config.pipeline_split,
    )


def to_job(goal: Goal, config: ParallelConfig, micro_batch: int, count: int) -> Job:
    """What a config and a batch are to the planner."""
    in_a_call = config.pipeline_microbatches if config.pp_size > 1 else None
    return Job(
        goal.seq,
        micro_batch,
        count,
        recompute=config.activation_checkpointing,
        precision=goal.precision,
        lora=goal.lora,
        optimizer=goal.optimizer,
        engine="hf_parallel",
        calls=count // (in_a_call or count),
    )


def other_schedules(goal: Goal, choice: Choice) -> Iterator[Choice]:
    config, size = choice.config, choice.prediction.job.micro_batch
    if config.pp_size == 1:
        return
    micro_batches = choice.rows // size
    for name in _SCHEDULES:
        tied_v = name == "zbv_zero_bubble" and goal.shape.tied and config.data_parallel_size > 1
        enough = goal.shape.layers >= 2 * config.pp_size
        # Each half of a backward recomputes for itself, the second once per parameter: more than a bubble costs.
        again = config.activation_checkpointing != "none" and name.endswith("zero_bubble")
        if enough and not again and not tied_v and micro_batches % config.pp_size == 0:
            other = predicted(goal, dataclasses.replace(config, pipeline_schedule=name), size)
            if isinstance(other, Choice):
                yield other
