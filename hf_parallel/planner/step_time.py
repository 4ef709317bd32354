"""Seconds of a step: the pipeline by simulation, what is communicated after it, the optimizer, the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_parallel.axes.pipeline.timeline import Timeline
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.ledger import sending_seconds, step_transfers
from hf_parallel.planner.pipeline import Stage, pipeline_seconds, stages_by_rank, timeline
from hf_parallel.planner.stage_time import Times, memory_seconds, plus, stage_times
from hf_parallel.planner.states import offload_seconds
from hf_parallel.planner.transfer import LAST_BACKWARD, SCHEDULE, Transfer, expert_shards

_UPDATE_BYTES = 40  # per parameter: a 16-bit gradient and fp32 states read, states and weights written
_MOST_SHOWN = 16  # micro-batches of a timeline; boxes of more could not be told apart


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind of the slowest rank; `bubble`: idle part of the pipeline, 0 to 1."""

    seconds: float
    kinds: dict[str, float]
    bubble: float


def step_time(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> StepTime:
    """The pipeline of all micro-batches, what data parallelism adds after it, the optimizer, the host."""
    each = [stage_times(stage, layout, job, cluster) for stage in stages]
    totals = [times.totals for times in each]
    duration, bubble = pipeline_seconds(
        layout, job, totals, sending_seconds(stages[0].shape.hidden, layout, job, cluster)
    )
    by_rank = stages_by_rank(stages, layout)
    slowest = max(by_rank, key=lambda mine: sum(sum(totals[stage.index]) for stage in mine))
    busy = sum((each[stage.index] for stage in slowest), Times())
    kinds = {kind: s * job.micro_batches for kind, s in plus(busy.forward, busy.backward).items()}
    kinds["bubble"] = duration - sum(kinds.values())
    backward = max(backward for _, backward in totals)
    kinds = plus(kinds, _reductions(by_rank, layout, job, cluster, backward))
    kinds = plus(kinds, _update(by_rank, layout, job, cluster, backward))
    efficiency = cluster.gpu.efficiency
    kinds["host, per step"] = efficiency.step_ms * 1e-3
    kinds["stragglers"] = efficiency.node_noise * math.log2(max(1, cluster.nodes)) * sum(kinds.values())
    kinds = {kind: seconds for kind, seconds in kinds.items() if seconds > 0}
    return StepTime(sum(kinds.values()), kinds, bubble)


def predicted_timeline(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> tuple[Timeline, int]:
    """The simulated schedule in seconds and how many micro-batches it shows: all, or as many as can be seen."""
    shown = min(job.micro_batches, max(_MOST_SHOWN, 2 * layout.pp))
    shown -= shown % layout.pp if shown > layout.pp else 0
    totals = [stage_times(stage, layout, job, cluster).totals for stage in stages]
    return timeline(layout, totals, sending_seconds(stages[0].shape.hidden, layout, job, cluster), shown), shown


# ---- after the last micro-batch -------------------------------------------------------------------------------------


def _reductions(
    by_rank: list[list[Stage]], layout: Layout, job: Job, cluster: Cluster, backward: float
) -> dict[str, float]:
    """Seconds of the once-per-step collectives of the rank that waits longest for them."""
    hidden = cluster.gpu.efficiency.hidden_gradients * backward
    each = [_exposed(step_transfers(mine, layout, job, cluster), hidden) for mine in by_rank]
    return max(each, key=lambda kinds: sum(kinds.values()))


def _exposed(transfers: list[Transfer], hidden: float) -> dict[str, float]:
    overlapped = sum(t.seconds for t in transfers if t.behind == LAST_BACKWARD)
    kinds = {"gradients' reduction": max(0.0, overlapped - hidden), "gathering updated weights": 0.0}
    for t in transfers:
        if t.behind not in (LAST_BACKWARD, SCHEDULE):
            kinds["gathering updated weights" if t.kind == "all_gather" else "gradients' reduction"] += t.seconds
    return kinds


def _update(
    by_rank: list[list[Stage]], layout: Layout, job: Job, cluster: Cluster, backward: float
) -> dict[str, float]:
    """Seconds of the optimizer on the rank that updates most parameters."""
    updated = max(updated_parameters(mine, layout, job) for mine in by_rank)
    if job.offload != "none":
        return offload_seconds(updated, job, cluster, backward)
    return {"optimizer": memory_seconds(cluster.gpu, updated * _UPDATE_BYTES)}


def updated_parameters(stages: list[Stage], layout: Layout, job: Job) -> float:
    """Trained parameters whose optimizer state the rank that holds `stages` keeps, after ZeRO."""
    shards, experts = (layout.shards, expert_shards(layout)) if layout.zero_stage else (1, 1)
    if job.lora:
        return sum(stage.adapters(layout.tp, job.lora) for stage in stages) / shards
    return sum(stage.dense(layout.tp) / shards + stage.experts(layout.expert_split) / experts for stage in stages)
