"""Seconds of a step: the pipeline by simulation, what is communicated after it, the optimizer, the host.

The optimizer may run on the host. ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840): 16-bit weights stay on the GPU,
gradients go down and updated weights come back, 2 bytes each per parameter and step over PCIe (section 3); the CPU's
Adam is as fast as its memory (table 4). ZeRO-Infinity (Rajbhandari et al., 2021, arXiv:2104.07857): the optimizer's
state is read from NVMe and written back, twice its size per step (section 4.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_parallel.pipeline.timeline import Timeline
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.ledger import (
    LAST_BACKWARD,
    SCHEDULE,
    Transfer,
    boundary_bytes,
    expert_shards,
    groups,
    step_transfers,
    transfer_seconds,
)
from hf_parallel.planner.pipeline import Stage, pipeline_seconds, stages_by_rank, timeline
from hf_parallel.planner.stage_time import Times, memory_seconds, plus, stage_times

_UPDATE_BYTES = 40  # per parameter: a 16-bit gradient and fp32 states read, states and weights written
_READ_AND_WRITTEN = 7  # states on the host: weight, gradient, two moments read; weight and two moments written
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
    duration, bubble = pipeline_seconds(layout, job, totals, sending_seconds(stages, layout, job, cluster))
    by_rank = stages_by_rank(stages, layout)
    slowest = max(by_rank, key=lambda mine: sum(sum(totals[stage.index]) for stage in mine))
    busy = sum((each[stage.index] for stage in slowest), Times({}, {}))
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


def sending_seconds(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> float:
    """From one pipeline rank to the next, per micro-batch."""
    if layout.pp == 1:
        return 0.0
    payload = boundary_bytes(stages[0].shape.hidden, layout, job)
    return transfer_seconds("p2p", payload, groups(layout, cluster)["pp"])


def predicted_timeline(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> tuple[Timeline, int]:
    """The simulated schedule in seconds and how many micro-batches it shows: all, or as many as can be seen."""
    shown = min(job.micro_batches, max(_MOST_SHOWN, 2 * layout.pp))
    shown -= shown % layout.pp if shown > layout.pp else 0
    totals = [stage_times(stage, layout, job, cluster).totals for stage in stages]
    return timeline(layout, totals, sending_seconds(stages, layout, job, cluster), shown), shown


# ---- after the last micro-batch -------------------------------------------------------------------------------------


def _reductions(
    by_rank: list[list[Stage]], layout: Layout, job: Job, cluster: Cluster, backward: float
) -> dict[str, float]:
    """Seconds of the once-per-step collectives of the rank that waits longest for them."""
    hidden = cluster.gpu.efficiency.hidden_gradients * backward
    each = [_exposed(list(step_transfers(mine, layout, job, cluster)), hidden) for mine in by_rank]
    return max(each, key=lambda kinds: sum(kinds.values()))


def _exposed(transfers: list[Transfer], hidden: float) -> dict[str, float]:
    kinds = {"gradients' reduction": 0.0, "gathering updated weights": 0.0}
    overlapped = sum(t.seconds for t in transfers if t.payload and t.behind == LAST_BACKWARD)
    kinds["gradients' reduction"] = max(0.0, overlapped - hidden)
    for t in transfers:
        if t.payload and t.behind not in (LAST_BACKWARD, SCHEDULE):
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
    return sum(stage.dense(layout.tp) / shards + stage.experts(layout.ep) / experts for stage in stages)


# ---- offloading -----------------------------------------------------------------------------------------------------


def state_width(job: Job) -> float:
    """Bytes of one element of the optimizer's state: fp32, except where training has no fp32 weights."""
    return 4.0 if job.habits.master_weights else float(job.stored)


def host_bytes(parameters: float, job: Job) -> float:
    """What `parameters` whose optimizer runs on the host take in its memory: gradient, weight, two moments."""
    return parameters * (job.stored + 3 * state_width(job)) if job.offload == "cpu" else 0.0


def pcie_bytes(parameters: float, job: Job) -> tuple[float, float]:
    """Per step: gradients down, updated weights up."""
    return parameters * job.stored, parameters * job.stored


def nvme_bytes(parameters: float, job: Job) -> float:
    """Per step: master weights and moments, read and written."""
    return 2 * 3 * state_width(job) * parameters if job.offload.startswith("nvme") else 0.0


def offload_seconds(parameters: float, job: Job, cluster: Cluster, backward: float) -> dict[str, float]:
    """Seconds after the last backward; all ranks of a node share its memory and its NVMe.

    Args:
        parameters: those that this rank updates.
        backward: seconds of the last backward, behind which gradients go down as they are made.
    """
    host, ranks = cluster.gpu.host, min(cluster.per_node, cluster.gpus)
    down, up = (size / host.pcie for size in pcie_bytes(parameters, job))
    adam = ranks * parameters * _READ_AND_WRITTEN * state_width(job) / host.bandwidth
    disk = ranks * nvme_bytes(parameters, job) / host.nvme
    return {
        "gradients to the host": max(0.0, down - backward),
        "optimizer": max(adam, disk, up),  # in tiles: one is updated while others travel (ZeRO-Offload, section 4.1)
    }
