"""Seconds of a stage with one micro-batch: each kernel by roofline and fitted efficiency, and what it waits for.

    matrix product    2 m n k / (peak x gemm x depth(k) x waves(m, n) x alignment(n, k)), or its bytes over bandwidth
    attention         FLOPs of the keys that a mask shows / (peak x attention)
    element-wise      bytes read and written / (bandwidth x memory)
    communication     the ledger's transfers, less what of them can run behind compute

docs/planner.md has the numbers, their sources and the measured accuracy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hf_parallel.planner.attention import EAGER, all_keys
from hf_parallel.planner.hardware import Cluster, Gpu
from hf_parallel.planner.layout import Job, Layout, computed_job
from hf_parallel.planner.ledger import block_transfers, end_transfers
from hf_parallel.planner.pipeline import Stage
from hf_parallel.planner.shape import Attention, Block, Matrix, ModelShape
from hf_parallel.planner.transfer import ATTENTION, BACKWARD, COMPUTE, EXPOSED, FACTORS, FORWARD, PRODUCTS, Transfer

_TILE = 128
_CLOCK = 1.5e9  # Hz, within a fifth for every GPU of the catalogue
_KERNELS_FORWARD, _KERNELS_BACKWARD = 16, 30  # per block, without a compiler
#: Ranks that are not in step: once per all-reduce of tp, or per gather and scatter; per all-to-all of ep.
_WAITS = {"tp": 0.5, "ep": 1.0}


def gemm_seconds(gpu: Gpu, precision: str, m: float, n: float, k: float) -> float:
    """One matrix product [m, k] x [k, n]."""
    e = gpu.efficiency
    tiles = math.ceil(m / _TILE) * math.ceil(n / _TILE)
    filled = tiles / (tiles + e.waves * gpu.units)
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else e.misaligned
    rate = gpu.peak(precision) * e.gemm * filled * k / (k + e.depth) * aligned
    return max(2 * m * n * k / rate, 2 * (m * k + k * n + m * n) / (gpu.bandwidth * e.memory))


def memory_seconds(gpu: Gpu, size: float) -> float:
    """Seconds to read and write `size` bytes."""
    return size / (gpu.bandwidth * gpu.efficiency.memory)


@dataclass(frozen=True)
class Times:
    """Seconds of a forward and a backward by kind, of one micro-batch."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    @property
    def totals(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward."""
        return sum(self.forward.values()), sum(self.backward.values())

    def __add__(self, other: Times) -> Times:
        return Times(plus(self.forward, other.forward), plus(self.backward, other.backward))

    def times(self, count: float) -> Times:
        """`count` of them."""
        return Times(*({k: v * count for k, v in side.items()} for side in (self.forward, self.backward)))

    def with_waits(self, transfers: list[Transfer], gpu: Gpu) -> Times:
        """With what each pass waits for its collectives."""
        waits = (
            exposed((t for t in transfers if t.when == when), computed, gpu)
            for when, computed in ((FORWARD, self.forward), (BACKWARD, self.backward))
        )
        return self + Times(*waits)


def plus(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Sums by kind."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in one | other}


@functools.lru_cache(maxsize=4096)
def block_times(block: Block, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One block on one rank, with its communication over tp, cp and ep, and under ZeRO-3 of its weights."""
    gpu, tokens = cluster.gpu, job.tokens(layout)
    element_wise = memory_seconds(gpu, tokens * _elementwise(block, hidden, layout, job) * gpu.efficiency.passes)
    forward, backward = (
        {
            PRODUCTS: sum(_matrix(gpu, job, layout, m, tokens, is_backward) for m in block.matrices),
            ATTENTION: sum(_attention(gpu, job, layout, a, tokens, is_backward) for a in block.attentions),
            "element-wise": (1 + is_backward) * element_wise,
        }
        for is_backward in (False, True)
    )
    _launch(gpu, forward, _KERNELS_FORWARD)
    _launch(gpu, backward, _KERNELS_BACKWARD)
    computed = Times(forward, plus(backward, _recomputed(forward, job)))
    return computed.with_waits(block_transfers(block, hidden, layout, job, cluster), gpu)


def _launch(gpu: Gpu, times: dict[str, float], kernels: int) -> None:
    """A host that cannot launch kernels as fast as they run makes the GPU wait."""
    wait = kernels * gpu.efficiency.kernel_us * 1e-6 - sum(times.values())
    if wait > 0:
        times["host"] = wait


def _recomputed(forward: dict[str, float], job: Job) -> dict[str, float]:
    if job.each_recomputed == "full":
        return {"recomputation": sum(forward.values()) * job.recomputed_share}
    if job.recompute != "selective":
        return {}
    if job.habits.keeps_products:
        return {"recomputation": forward["element-wise"] + (forward[ATTENTION] if job.attention == EAGER else 0.0)}
    return {"recomputation": forward[PRODUCTS] / 2 * 0.8 + forward["element-wise"]}


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
    every = all_keys(attention, job.seq, job.attention)
    scores = attention.heads * (job.seq if every else attention.keys(job.seq)) * tokens / heads
    flops = attention.flops(job.seq, full=every) * tokens / heads
    rate = gpu.peak(job.products_beside) * e.attention
    seconds = scores / (16 * gpu.units * _CLOCK)
    seconds += 2.5 * flops / (rate * e.attention_backward) if backward else flops / rate
    moved = scores * _score_bytes(job.width, backward) if job.attention == EAGER else 0.0
    return seconds + memory_seconds(gpu, moved)


def _score_bytes(width: int, backward: bool) -> int:
    """Bytes read and written per score by eager attention: product, scale, mask, softmax in fp32, product."""
    casts = 0 if width == 4 else 8 if not backward else 12
    return (8 if not backward else 9 if width == 4 else 7) * width + casts


def _elementwise(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Bytes that a forward reads and writes per token between the matrix products, if each step is one kernel."""
    c = job.width
    stream = job.stored * hidden * (2 * 2 + 2 * 3)  # two norms: read, write; two residual additions: read twice, write
    heads = sum(a.heads * a.qk_width + a.kv_heads * a.qk_width for a in block.attentions)
    inner = c * block.inner * (3 if block.gated else 2)
    routed = 4 * c * block.top_k * hidden
    return stream / layout.stream_parts + (2 * c * heads + inner) / layout.tp + routed / layout.stream_parts


def exposed(transfers: Iterable[Transfer], compute: dict[str, float], gpu: Gpu) -> dict[str, float]:
    """Seconds by kind that a pass waits for its collectives, beyond what runs behind its `compute`.

    What is behind all of the compute slows it down: the two share the device.
    """
    e = gpu.efficiency
    sent: dict[tuple[str, str], float] = {}
    for t in transfers:
        wait = e.wait_us * 1e-6 * _WAITS.get(t.axis, 0.0) * FACTORS.get(t.kind, 0.0) if t.behind == EXPOSED else 0.0
        key = (kind_of(t), t.behind)
        sent[key] = sent.get(key, 0.0) + t.seconds + wait * t.count
    found: dict[str, float] = {}
    for (kind, behind), seconds in sent.items():
        window = e.hidden * (sum(compute.values()) if behind == COMPUTE else compute.get(behind, 0.0))
        slowed = e.contention * min(seconds, window) if behind == COMPUTE else 0.0
        found[kind] = found.get(kind, 0.0) + max(0.0, seconds - window) + slowed
    return {kind: seconds for kind, seconds in found.items() if seconds}


def kind_of(transfer: Transfer) -> str:
    """Under which name a collective's seconds are counted."""
    if transfer.axis in ("tp", "cp", "ep"):
        return f"{transfer.axis} communication"
    return "gathering updated weights" if transfer.what == "updated weights" else "ZeRO-3 communication"


# ---- a stage --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def stage_times(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """One micro-batch on one stage."""
    job = computed_job(layout, job)
    head = _head_times(stage.shape, layout, job, cluster.gpu) if stage.is_last else Times()
    total = head.with_waits(end_transfers(stage, layout, job, cluster), cluster.gpu)
    for block, count in stage.counts:
        total += block_times(block, stage.shape.hidden, layout, job, cluster).times(count)
    total += Times(backward={"accumulating gradients": _accumulating(stage, layout, job, cluster)})
    return total + _lowering(stage, layout, job, cluster) if job.autocast else total


def _head_times(shape: ModelShape, layout: Layout, job: Job, gpu: Gpu) -> Times:
    """Head and loss."""
    if not shape.head_outputs:
        return Times()
    tokens, columns = job.tokens(layout), shape.head_outputs / layout.tp
    product = gemm_seconds(gpu, job.products_beside, tokens, columns, shape.hidden)
    loss = memory_seconds(gpu, tokens * columns * 10)  # read 16 bit, write and read fp32, write 16 bit
    return Times({"head": product + loss}, {"head": 2 * product + loss})


def _lowering(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """Fp32 weights are read and 16-bit copies written, once for all micro-batches; gradients go back from each."""
    weights = stage.dense(layout.tp)  # experts compute in fp32
    once = memory_seconds(cluster.gpu, weights * (job.stored + job.width))
    return Times({"autocast": once / job.micro_batches}, {"autocast": 0.0 if job.lora else once})


def _accumulating(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> float:
    """Each micro-batch's 16-bit gradients are read and added to the sum, under ZeRO-3 to a shard of it."""
    if job.lora or job.micro_batches == 1:
        return 0.0
    sharded = layout.reduces_each or (layout.zero_stage == 3 and not job.habits.fsdp2)
    shards = layout.shards if sharded else 1
    numbers = stage.dense(layout.tp) / shards + stage.experts(layout.expert_split)
    return memory_seconds(cluster.gpu, numbers * (job.stored + 8))
