"""One layout predicted: with growing micro-batches while it fits, and with what saves memory only where it must.

Activation checkpointing costs a third of the compute, offloading waits for PCIe and the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hf_parallel.config import ParallelConfig
from hf_parallel.planner.candidates import configured, micro_batches
from hf_parallel.planner.choices import Choice, Goal
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import GIB, fits, fullest
from hf_parallel.planner.model_shape import distinct
from hf_parallel.planner.offload import host_bytes
from hf_parallel.planner.predict import memory_of_ranks, predict_step
from hf_parallel.planner.stage_times import block_times, stage_times
from hf_parallel.planner.stages import make_stages, stages_of_rank


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs `gib` on its fullest rank, or in its node's memory, which is more than there is."""

    config: ParallelConfig
    size: int
    gib: float


def variants(
    goal: Goal, config: ParallelConfig, limit: float, ways: Iterable[dict[str, Any]]
) -> Iterator[Choice | TooLarge]:
    """Growing micro-batches in each of `ways`, up to the first in which any fits.

    A larger one may fit where a smaller does not: the last needs no accumulation, which holds whole gradients.
    """
    share = goal.share(config)
    sizes = micro_batches(goal, share, config) if share else []
    for way in ways:
        fitted = False
        for size in sizes:
            if limit < math.inf and _floor(goal, config, size, way["activation_checkpointing"]) > limit:
                continue
            choice = predicted(goal, configured(config, **way), size, limit)
            if choice is None:
                continue
            yield choice
            fitted = fitted or isinstance(choice, Choice)
        if fitted:
            return


def _floor(goal: Goal, config: ParallelConfig, size: int, recompute: str) -> float:
    """Seconds per row that its blocks alone take if no rank ever waits, however the data are shared out."""
    layout = Layout(
        tp=config.tp_size,
        cp=config.cp_size,
        ep=config.ep_size,
        sequence_parallel=config.tp_size > 1,
        context=config.context_parallel,
    )
    job = Job(goal.seq, size, 1, recompute, goal.precision, goal.lora, engine="hf_parallel")
    blocks = distinct(goal.shape.blocks)
    times = {block: block_times(block, goal.shape.hidden, layout, job, goal.cluster) for block in blocks}
    busy = sum(
        count * (sum(times[block].forward.values()) + sum(times[block].backward.values()))
        for block, count in blocks.items()
    )
    return busy * config.tp_size * config.cp_size / (goal.cluster.gpus * size)


def predicted(
    goal: Goal, config: ParallelConfig, size: int, limit: float = math.inf, measure: bool = False
) -> Choice | TooLarge | None:
    """One layout with micro-batches of `size` rows; None if it cannot be as fast as `limit`.

    Args:
        limit: seconds per row.
        measure: predict the time of what does not fit, too.
    """
    share = goal.share(config)
    assert share is not None
    rows = size if config.pp_size == 1 else goal.rows or share  # a pipeline gets all of a step in one call
    if config.pp_size > 1:
        config = configured(config, pipeline_microbatches=rows // size)
    layout, job = to_layout(config), to_job(goal, config, size, share // size)
    stages = make_stages(goal.shape, layout, job)
    if limit < math.inf and _least_seconds(goal, stages, layout, job) > limit * share * layout.dp:
        return None
    peak = fullest(memory_of_ranks(goal.shape, stages, layout, job))
    fitting = fits(peak, goal.cluster) and _offloaded(goal, layout, job) <= goal.cluster.gpu.host.memory_gib
    if not measure and not fitting:
        return TooLarge(config, size, peak.needed / GIB)
    return Choice(config, predict_step(goal.shape, goal.cluster, layout, job), rows, share // rows)


def _offloaded(goal: Goal, layout: Layout, job: Job) -> float:
    """GiB in the memory of a node."""
    ranks = min(goal.cluster.per_node, goal.cluster.gpus)
    return ranks * host_bytes(goal.shape.parameters / layout.tp / layout.pp / layout.shards, job) / GIB


def _least_seconds(goal: Goal, stages: tuple, layout: Layout, job: Job) -> float:
    """No schedule of one stage per rank is faster: the slowest computes, the others fill and drain its pipeline."""
    each = [stage_times(goal.shape, stage, layout, job, goal.cluster) for stage in stages]
    busy = [sum(t.forward.values()) + sum(t.backward.values()) for t in each]
    ranks = [sum(busy[index] for index in stages_of_rank(layout, rank)) for rank in range(layout.pp)]
    filling = (sum(ranks) - max(ranks)) / layout.virtual_stages if layout.schedule == "1f1b" else 0.0
    return job.micro_batches * max(ranks) + filling


def to_layout(config: ParallelConfig) -> Layout:
    """What the planner calls this config: in a pipeline weights stay whole, as they do in ZeRO-2."""
    sharded = config.dp_shard_size * config.cp_size > 1
    stage = 0 if not sharded else min(2, config.zero_stage) if config.pp_size > 1 else config.zero_stage
    return Layout(
        tp=config.tp_size,
        pp=config.pp_size,
        dp=config.data_parallel_size,
        cp=config.cp_size,
        ep=config.ep_size,
        zero_stage=stage,
        virtual_stages=config.stages_per_rank,
        sequence_parallel=config.tp_size > 1 and config.sequence_parallel is not False,
        dp_replicate=config.dp_replicate_size if sharded else 1,
        schedule=config.pipeline_schedule,
        context=config.context_parallel,
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
        offload=config.offload.partition(":")[0],
        engine="hf_parallel",
        calls=count // (in_a_call or count),
    )
