"""How long a step takes: each kernel by roofline and fitted efficiency, the pipeline by simulation, the rest added up.

    matrix product    2 m n k / (peak x gemm x depth(k) x waves(m, n) x alignment(n, k)), or its bytes over bandwidth
    attention         FLOPs of the keys that a mask shows / (peak x attention)
    element-wise      bytes read and written / (bandwidth x memory)
    communication     ring formulas; what cannot hide behind compute is added

docs/planner.md has the numbers, their sources and the measured accuracy.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from hf_parallel.pipeline.orders import BACKWARD, FORWARD, Action, Order, order, peak_live
from hf_parallel.pipeline.timeline import simulate
from hf_parallel.planner.communication import Group, groups, transfer_seconds
from hf_parallel.planner.hardware import Cluster, Gpu
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import Attention, Block, Matrix, ModelShape
from hf_parallel.planner.offload import offload_times
from hf_parallel.planner.stages import Stage, stages_of_rank
from hf_parallel.planner.traffic import context_payload

_TILE = 128
_CLOCK = 1.5e9  # Hz, within a fifth for every GPU of the catalogue
_KERNELS_FORWARD, _KERNELS_BACKWARD = 16, 30  # per block, without a compiler


def gemm_seconds(gpu: Gpu, precision: str, m: float, n: float, k: float) -> float:
    """One matrix product [m, k] x [k, n]."""
    e = gpu.efficiency
    tiles = math.ceil(m / _TILE) * math.ceil(n / _TILE)
    filled = tiles / (tiles + e.waves * gpu.units)
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else e.misaligned
    rate = gpu.peak(precision) * e.gemm * filled * k / (k + e.depth) * aligned
    return max(2 * m * n * k / rate, 2 * (m * k + k * n + m * n) / (gpu.bandwidth * e.memory))


def _moved(gpu: Gpu, size: float) -> float:
    return size / (gpu.bandwidth * gpu.efficiency.memory)


@dataclass(frozen=True)
class Times:
    """Seconds of a forward and a backward by kind, of one micro-batch."""

    forward: dict[str, float]
    backward: dict[str, float]

    def __add__(self, other: Times) -> Times:
        return Times(_plus(self.forward, other.forward), _plus(self.backward, other.backward))

    def times(self, count: float) -> Times:
        """`count` of them."""
        return Times(*({k: v * count for k, v in side.items()} for side in (self.forward, self.backward)))


def _plus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in one | other}


@functools.lru_cache(maxsize=4096)
def block_times(block: Block, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One block on one rank, with its communication over tp, cp and ep, and under ZeRO-3 of its weights."""
    gpu, tokens = cluster.gpu, job.micro_batch * job.seq / layout.cp
    forward = {
        "matrix products": sum(_matrix(gpu, job, layout, m, tokens, backward=False) for m in block.matrices),
        "attention": sum(_attention(gpu, job, layout, a, tokens, backward=False) for a in block.attentions),
        "element-wise": _moved(gpu, tokens * _elementwise(block, hidden, layout, job) * gpu.efficiency.passes),
    }
    backward = {
        "matrix products": sum(_matrix(gpu, job, layout, m, tokens, backward=True) for m in block.matrices),
        "attention": sum(_attention(gpu, job, layout, a, tokens, backward=True) for a in block.attentions),
        "element-wise": 2 * forward["element-wise"],
    }
    _launch(gpu, forward, _KERNELS_FORWARD)
    _launch(gpu, backward, _KERNELS_BACKWARD)
    again = _recomputed(forward, job)
    backward = _plus(backward, again)
    links = groups(layout, cluster)
    moved = _layer_communication(block, hidden, layout, job, links, tokens, gpu.efficiency.wait_us)
    return Times(
        _with_communication(forward, moved[0], gpu, layout.context == "ulysses"),
        _with_communication(backward, moved[1], gpu, layout.context == "ulysses"),
    )


def _launch(gpu: Gpu, times: dict[str, float], kernels: int) -> None:
    """A host that cannot launch kernels as fast as they run makes the GPU wait."""
    wait = kernels * gpu.efficiency.kernel_us * 1e-6 - sum(times.values())
    if wait > 0:
        times["host"] = wait


def _recomputed(forward: dict[str, float], job: Job) -> dict[str, float]:
    if job.recompute == "full":
        return {"recomputation": sum(forward.values())}
    if job.recompute == "selective" and job.attention == "flash":
        return {"recomputation": forward["matrix products"] / 2 * 0.8 + forward["element-wise"]}
    if job.recompute == "selective":
        return {"recomputation": forward["attention"]}
    return {}


def _matrix(gpu: Gpu, job: Job, layout: Layout, matrix: Matrix, tokens: float, backward: bool) -> float:
    m, n, k, count = tokens, float(matrix.outputs), float(matrix.inputs), matrix.count
    if matrix.split == "column":
        n /= layout.tp
    elif matrix.split == "row":
        k /= layout.tp
    elif matrix.split == "expert":
        count = max(1, matrix.count // layout.ep)
        m = tokens / layout.tp * layout.ep * matrix.share
    if not backward:
        return count * gemm_seconds(gpu, job.precision, m, n, k)
    data = gemm_seconds(gpu, job.precision, m, k, n)
    return count * (data + (0 if job.lora else gemm_seconds(gpu, job.precision, n, k, m)))


def _attention(gpu: Gpu, job: Job, layout: Layout, attention: Attention, tokens: float, backward: bool) -> float:
    """Products, and an exponential per score, of which a unit makes 16 per clock; a backward computes scores again."""
    e, heads = gpu.efficiency, layout.tp
    flops = attention.flops(job.seq) * tokens / heads
    exponentials = attention.heads * attention.keys(job.seq) * tokens / heads / (16 * gpu.units * _CLOCK)
    rate = gpu.peak("bf16") * e.attention
    return exponentials + (2.5 * flops / (rate * e.attention_backward) if backward else flops / rate)


def _elementwise(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Bytes that a forward reads and writes per token between the matrix products, if each step is one kernel."""
    c = job.width
    stream = c * hidden * (2 * 2 + 2 * 3)  # two norms: read, write; two residual additions: read twice, write
    heads = sum(a.heads * a.qk_width + a.kv_heads * a.qk_width for a in block.attentions)
    inner = c * block.inner * (3 if block.gated else 2)
    routed = 4 * c * block.top_k * hidden
    parts = layout.tp if layout.sequence_parallel else 1
    return stream / parts + (2 * c * heads + inner) / layout.tp + routed / parts


def _layer_communication(
    block: Block, hidden: int, layout: Layout, job: Job, links: dict[str, Group], tokens: float, wait_us: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a block's collectives in forward and backward, by axis."""
    stream = tokens * hidden * job.width
    wait = wait_us * 1e-6
    reductions = 2 * (transfer_seconds("all_reduce", stream, links["tp"]) + wait) if layout.tp > 1 else 0.0
    kind = "all_to_all" if layout.context == "ulysses" else "all_gather"
    context = transfer_seconds(kind, context_payload(block, layout, job), links["cp"])
    routed = 2 * (transfer_seconds("all_to_all", stream / layout.tp * block.top_k, links["ep"]) + wait)
    routed = routed if layout.ep > 1 and block.top_k else 0.0
    gathered = reduced = 0.0
    if layout.zero_stage == 3:
        dense = (block.parameters - block.expert_parameters) / layout.tp
        gathered = transfer_seconds("all_gather", dense * job.width, links["zero"])
        reduced = 0.0 if job.lora else transfer_seconds("reduce_scatter", dense * job.width, links["zero"])
    forward = {"tp": reductions, "cp": context, "ep": routed, "zero": gathered}
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[job.recompute]
    passes = (1 if layout.context == "ulysses" else 2) + (job.recompute == "full")
    backward = {
        "tp": reductions * (1 + again),
        "cp": context * passes,
        "ep": routed * (1 + again),
        "zero": gathered + reduced,
    }
    return forward, backward


def _with_communication(times: dict[str, float], moved: dict[str, float], gpu: Gpu, ulysses: bool) -> dict[str, float]:
    """A ring's next keys travel while attention computes; Ulysses has nothing to do before its heads are there."""
    e, compute = gpu.efficiency, sum(times.values())
    exposed = {
        "tp communication": moved["tp"],
        "ep communication": moved["ep"],
        "cp communication": moved["cp"] if ulysses else max(0.0, moved["cp"] - times["attention"] * e.hidden),
        "ZeRO-3 communication": max(0.0, moved["zero"] - compute * e.hidden)
        + e.contention * min(moved["zero"], compute * e.hidden),
    }
    return {**times, **{kind: seconds for kind, seconds in exposed.items() if seconds}}


@functools.lru_cache(maxsize=4096)
def end_times(shape: ModelShape, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """Head and loss, on the last stage."""
    gpu, tokens = cluster.gpu, job.micro_batch * job.seq / layout.cp
    if not shape.head_outputs:
        return Times({}, {})
    columns = shape.head_outputs / layout.tp
    product = gemm_seconds(gpu, "bf16", tokens, columns, shape.hidden)
    loss = _moved(gpu, tokens * columns * 10)  # read 16 bit, write and read fp32, write 16 bit
    return Times({"head": product + loss}, {"head": 2 * product + loss})


# ---- stages, pipeline -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def stage_times(shape: ModelShape, stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One micro-batch on one stage."""
    total = end_times(shape, layout, job, cluster) if stage.is_last else Times({}, {})
    for block, count in stage.counts:
        total += block_times(block, shape.hidden, layout, job, cluster).times(count)
    return total + Times({}, {"accumulating gradients": _accumulating(stage, layout, job, cluster)})


def _accumulating(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> float:
    """Each micro-batch's 16-bit gradients are read and added to the sum, under ZeRO-3 to a shard of it."""
    if job.lora or job.micro_batches == 1:
        return 0.0
    dense = stage.dense_parameters(layout.tp) / (layout.shards if layout.zero_stage == 3 else 1)
    return _moved(cluster.gpu, (dense + stage.expert_parameters(layout.ep)) * (job.width + 8))


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
    count, p = job.micro_batches, layout.pp
    busy = [sum(sum(stages[s]) for s in stages_of_rank(layout, rank)) for rank in range(p)]
    if p == 1:
        return count * busy[0], 0.0
    simulated = min(count, p) if layout.schedule == "1f1b" else simulated_batches(layout, job)
    duration = _simulated(layout, stages, sending, simulated)
    if count > simulated:
        if layout.schedule == "1f1b":
            pace = pace_of_1f1b(busy, sending)
        else:
            pace = (duration - _simulated(layout, stages, sending, simulated - p)) / p
        duration += (count - simulated) * max(pace, *busy)
    return duration, 1 - count * sum(busy) / (p * duration)


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
    return min(job.micro_batches, 2 * layout.pp)


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
        busy = _plus(busy, _plus(times.forward, times.backward))
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
    stream = job.micro_batch * job.seq / layout.cp * shape.hidden * job.width
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
        whole = transfer_seconds(kind, dense * job.width, links["zero"])
        reduction = max(0.0, whole - e.hidden_gradients * backward)
        gather = transfer_seconds("all_gather", dense * job.width, links["zero"]) if layout.zero_stage else 0.0
    if layout.dp_replicate > 1:
        reduction += transfer_seconds("all_reduce", dense / shards * job.width, links["replicate"])
    stepping = {"optimizer": _moved(cluster.gpu, updated * 40)}
    if job.offload != "none":
        stepping = offload_times(updated, job, cluster, backward)
    return {
        "gradients' reduction": reduction,
        "gathering updated weights": gather,
        **stepping,
        "host, per step": e.step_ms * 1e-3,
    }
