"""How long a stage takes with one micro-batch: each kernel by roofline and fitted efficiency.

    matrix product    2 m n k / (peak x gemm x depth(k) x waves(m, n) x alignment(n, k)), or its bytes over bandwidth
    attention         FLOPs of the keys that a mask shows / (peak x attention)
    element-wise      bytes read and written / (bandwidth x memory)
    communication     ring formulas; what cannot hide behind compute is added

docs/planner.md has the numbers, their sources and the measured accuracy.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hf_parallel.planner.communication import Group, groups, transfer_seconds
from hf_parallel.planner.hardware import Cluster, Gpu
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import Attention, Block, Matrix, ModelShape
from hf_parallel.planner.stages import Stage
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


def moved(gpu: Gpu, size: float) -> float:
    """Seconds to read and write `size` bytes."""
    return size / (gpu.bandwidth * gpu.efficiency.memory)


@dataclass(frozen=True)
class Times:
    """Seconds of a forward and a backward by kind, of one micro-batch."""

    forward: dict[str, float]
    backward: dict[str, float]

    def __add__(self, other: Times) -> Times:
        return Times(plus(self.forward, other.forward), plus(self.backward, other.backward))

    def times(self, count: float) -> Times:
        """`count` of them."""
        return Times(*({k: v * count for k, v in side.items()} for side in (self.forward, self.backward)))


def plus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Sums by kind."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in one | other}


@functools.lru_cache(maxsize=4096)
def block_times(block: Block, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One block on one rank, with its communication over tp, cp and ep, and under ZeRO-3 of its weights."""
    gpu, tokens = cluster.gpu, job.micro_batch * job.seq / layout.cp
    forward = {
        "matrix products": sum(_matrix(gpu, job, layout, m, tokens, backward=False) for m in block.matrices),
        "attention": sum(_attention(gpu, job, layout, a, tokens, backward=False) for a in block.attentions),
        "element-wise": moved(gpu, tokens * _elementwise(block, hidden, layout, job) * gpu.efficiency.passes),
    }
    backward = {
        "matrix products": sum(_matrix(gpu, job, layout, m, tokens, backward=True) for m in block.matrices),
        "attention": sum(_attention(gpu, job, layout, a, tokens, backward=True) for a in block.attentions),
        "element-wise": 2 * forward["element-wise"],
    }
    _launch(gpu, forward, _KERNELS_FORWARD)
    _launch(gpu, backward, _KERNELS_BACKWARD)
    again = _recomputed(forward, job)
    backward = plus(backward, again)
    links = groups(layout, cluster)
    sent = _layer_communication(block, hidden, layout, job, links, tokens, gpu.efficiency.wait_us)
    return Times(
        _with_communication(forward, sent[0], gpu, layout.context == "ulysses"),
        _with_communication(backward, sent[1], gpu, layout.context == "ulysses"),
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
    lowered = matrix.split != "expert" or not job.autocast  # autocast leaves grouped products alone
    precision = job.products if lowered else "fp32"
    if not backward:
        return count * gemm_seconds(gpu, precision, m, n, k)
    data = gemm_seconds(gpu, precision, m, k, n)
    return count * (data + (0 if job.lora else gemm_seconds(gpu, precision, n, k, m)))


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
    stream = job.stored * hidden * (2 * 2 + 2 * 3)  # two norms: read, write; two residual additions: read twice, write
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
        gathered = transfer_seconds("all_gather", dense * job.stored, links["zero"])
        reduced = 0.0 if job.lora else transfer_seconds("reduce_scatter", dense * job.stored, links["zero"])
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


def _with_communication(times: dict[str, float], sent: dict[str, float], gpu: Gpu, ulysses: bool) -> dict[str, float]:
    """A ring's next keys travel while attention computes; Ulysses has nothing to do before its heads are there."""
    e, compute = gpu.efficiency, sum(times.values())
    exposed = {
        "tp communication": sent["tp"],
        "ep communication": sent["ep"],
        "cp communication": sent["cp"] if ulysses else max(0.0, sent["cp"] - times["attention"] * e.hidden),
        "ZeRO-3 communication": max(0.0, sent["zero"] - compute * e.hidden)
        + e.contention * min(sent["zero"], compute * e.hidden),
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
    loss = moved(gpu, tokens * columns * 10)  # read 16 bit, write and read fp32, write 16 bit
    return Times({"head": product + loss}, {"head": 2 * product + loss})


# ---- a stage --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def stage_times(shape: ModelShape, stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One micro-batch on one stage."""
    total = end_times(shape, layout, job, cluster) if stage.is_last else Times({}, {})
    for block, count in stage.counts:
        total += block_times(block, shape.hidden, layout, job, cluster).times(count)
    total += Times({}, {"accumulating gradients": _accumulating(stage, layout, job, cluster)})
    return total + _lowering(stage, layout, job, cluster) if job.autocast else total


def _lowering(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """Autocast reads fp32 weights and writes 16-bit copies, again where a forward is recomputed; gradients go back."""
    weights = stage.dense_parameters(layout.tp)  # experts compute in fp32
    once = moved(cluster.gpu, weights * (job.stored + job.width))
    back = 0 if job.lora else once
    return Times({"autocast": once}, {"autocast": back + (once if job.recompute == "full" else 0.0)})


def _accumulating(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> float:
    """Each micro-batch's 16-bit gradients are read and added to the sum, under ZeRO-3 to a shard of it."""
    if job.lora or job.micro_batches == 1:
        return 0.0
    dense = stage.dense_parameters(layout.tp) / (layout.shards if layout.zero_stage == 3 else 1)
    return moved(cluster.gpu, (dense + stage.expert_parameters(layout.ep)) * (job.stored + 8))
