"""How long a step takes: the pipeline by simulation, what is communicated after it, the optimizer, the host.

What its stages take: `stage_times.py`. docs/planner.md has the measured accuracy.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from hf_parallel.axes.pipeline.orders import BACKWARD, FORWARD, Action, Order, order, peak_live
from hf_parallel.axes.pipeline.timeline import simulate
from hf_parallel.planner.communication import groups, transfer_seconds
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.offload import offload_times
from hf_parallel.planner.stage_times import moved, plus, stage_times
from hf_parallel.planner.stages import Stage, stages_of_rank


@functools.lru_cache(maxsize=512)
def schedule_order(name: str, ranks: int, virtual: int, micro_batches: int) -> tuple[Order, tuple[int, ...]]:
    """Who runs what when, and how many forwards of a stage each rank holds at most."""
    actions = one_f_one_b(ranks, micro_batches) if name == "1f1b" else order(name, ranks, virtual, micro_batches)
    return actions, tuple(peak_live(actions))


def one_f_one_b(ranks: int, micro_batches: int) -> Order:
    """The order of 1F1B as torch runs it, without asking torch, which takes half a second for 48 ranks."""
    found: Order = {}
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        actions = [Action(FORWARD, rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            actions.append(Action(BACKWARD, rank, i))
            actions += [Action(FORWARD, rank, ahead + i)] if ahead + i < micro_batches else []
        found[rank] = actions
    return found


def pipeline_seconds(
    layout: Layout, job: Job, stages: list[tuple[float, float]], sending: float
) -> tuple[float, float]:
    """Duration of all micro-batches, and which part of it is bubble.

    The schedule is simulated with the real times of its stages and of what they send. Long runs are continued at the
    pace that they come to: under 1F1B a round trip to the next stage is part of every micro-batch's time.
    """
    count, p = job.micro_batches_per_call, layout.pp
    busy = [sum(sum(stages[s]) for s in stages_of_rank(layout, rank)) for rank in range(p)]
    if p == 1:
        return job.micro_batches * busy[0], 0.0
    simulated = min(count, p) if layout.schedule == "1f1b" else simulated_batches(layout, job)
    duration = _simulated(layout, stages, sending, simulated)
    if count > simulated:
        if layout.schedule == "1f1b":
            pace = pace_of_1f1b(busy, sending)
        else:
            pace = (duration - _simulated(layout, stages, sending, simulated - p)) / p
        duration += (count - simulated) * max(pace, *busy)
    return job.calls * duration, 1 - count * sum(busy) / (p * duration)


def pace_of_1f1b(busy: list[float], sending: float) -> float:
    """Seconds per micro-batch in the long run: ranks r to q hold q - r + 1 of them, each on its way through them."""
    sums, ranks = [0.0, *itertools.accumulate(busy)], range(len(busy))
    return max((sums[q + 1] - sums[r] + 2 * (q - r) * sending) / (q - r + 1) for r in ranks for q in ranks[r:])


def _simulated(layout: Layout, stages: list[tuple[float, float]], sending: float, micro_batches: int) -> float:
    actions, _ = schedule_order(layout.schedule, layout.pp, layout.virtual_stages, micro_batches)
    halves = [backward / 2 for _, backward in stages]
    return simulate(actions, [forward for forward, _ in stages], halves, halves, sending).duration


@functools.lru_cache(maxsize=4096)
def live_forwards(layout: Layout, job: Job) -> tuple[int, ...]:
    """Per pipeline rank, how many forwards of a stage are held at a time at most."""
    if layout.pp == 1:
        return (1,)
    return schedule_order(layout.schedule, layout.pp, layout.virtual_stages, simulated_batches(layout, job))[1]


def simulated_batches(layout: Layout, job: Job) -> int:
    """Micro-batches of a run long enough to be like any longer one."""
    return min(job.micro_batches_per_call, 2 * layout.pp)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind of the slowest rank; `bubble`: idle part of the pipeline."""

    seconds: float
    kinds: dict[str, float]
    bubble: float


def step_time(shape: ModelShape, stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> StepTime:
    """The pipeline of all micro-batches, what data parallelism adds after it, the optimizer, the host."""
    each = [stage_times(shape, stage, layout, job, cluster) for stage in stages]
    totals = [(sum(t.forward.values()), sum(t.backward.values())) for t in each]
    sending = _sending(shape, layout, job, cluster)
    duration, bubble = pipeline_seconds(layout, job, totals, sending)
    slowest = max(range(layout.pp), key=lambda rank: sum(sum(totals[s]) for s in stages_of_rank(layout, rank)))
    mine = [each[index] for index in stages_of_rank(layout, slowest)]
    busy: dict[str, float] = {}
    for times in mine:
        busy = plus(busy, plus(times.forward, times.backward))
    kinds = {kind: seconds * job.micro_batches for kind, seconds in busy.items()}
    kinds["bubble"] = duration - sum(kinds.values())
    backward = max(b for _, b in totals)
    kinds.update(_tail(stages, layout, job, cluster, backward))
    efficiency = cluster.gpu.efficiency
    noise = efficiency.node_noise * math.log2(max(1, cluster.nodes)) * sum(kinds.values())
    kinds["stragglers"] = noise
    kinds = {kind: seconds for kind, seconds in kinds.items() if seconds > 0}
    return StepTime(sum(kinds.values()), kinds, bubble)


def _sending(shape: ModelShape, layout: Layout, job: Job, cluster: Cluster) -> float:
    if layout.pp == 1:
        return 0.0
    stream = job.micro_batch * job.seq / layout.cp * shape.hidden * job.stored
    parts = layout.tp if layout.sequence_parallel else 1
    return transfer_seconds("p2p", stream / parts, groups(layout, cluster)["pp"])


def _tail(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster, backward: float) -> dict[str, float]:
    """After the last micro-batch: gradients that found no compute to hide behind, the optimizer, weights back."""
    e, links = cluster.gpu.efficiency, groups(layout, cluster)
    held = [[stages[index] for index in stages_of_rank(layout, rank)] for rank in range(layout.pp)]
    dense = max(sum(stage.dense_parameters(layout.tp) for stage in mine) for mine in held)
    experts = max(sum(stage.expert_parameters(layout.ep) for stage in mine) for mine in held)
    shards = layout.shards if layout.zero_stage else 1
    updated = dense / shards + experts / max(1, shards * layout.tp // layout.ep)
    if job.lora:
        from hf_parallel.planner.memory import lora_share

        updated *= max(lora_share(mine, job.lora) for mine in held)
    reduction = gather = 0.0
    if layout.zero_stage < 3:
        kind = "all_reduce" if layout.zero_stage == 0 else "reduce_scatter"
        whole = transfer_seconds(kind, dense * job.stored, links["zero"])
        reduction = max(0.0, whole - e.hidden_gradients * backward)
        gather = transfer_seconds("all_gather", dense * job.stored, links["zero"]) if layout.zero_stage else 0.0
    if layout.dp_replicate > 1:
        reduction += transfer_seconds("all_reduce", dense / shards * job.stored, links["replicate"])
    stepping = {"optimizer": moved(cluster.gpu, updated * 40)}
    if job.offload != "none":
        stepping = offload_times(updated, job, cluster, backward)
    return {
        "gradients' reduction": reduction,
        "gathering updated weights": gather,
        **stepping,
        "host, per step": e.step_ms * 1e-3,
    }
