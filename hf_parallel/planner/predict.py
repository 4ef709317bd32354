"""Prediction of step time and memory, with the reasons, from a model, a cluster, a layout and a batch.

prediction = predict(model=config, gpu="h100-80gb", gpus=64, layout={"tp": 8, "pp": 2}, seq=4096, micro_batch=1,
                     global_batch=256, recompute="full")
prediction.step_time_s, prediction.memory_gib, prediction.fits, prediction.breakdown.time
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.timeline import Timeline
from hf_parallel.planner.activations import EAGER, FLASH, SDPA, count_offloaded_bytes, has_mask
from hf_parallel.planner.hardware import HEADROOM, Cluster, Gpu, Link, check_headroom, make_cluster
from hf_parallel.planner.layout import Job, Layout, make_computed_job, make_job, make_layout
from hf_parallel.planner.ledger import (
    ATTENTION,
    BACKWARD,
    COMPUTE,
    EXPOSED,
    FACTORS,
    FIRST_FORWARD,
    FORWARD,
    LAST_BACKWARD,
    PRODUCTS,
    SCHEDULE,
    Transfer,
    block_transfers,
    compute_sending_seconds,
    count_expert_shards,
    end_transfers,
    find_busiest,
    step_transfers,
)
from hf_parallel.planner.memory import GIB, find_fullest, predict_memory_of_ranks
from hf_parallel.planner.pipeline import (
    Stage,
    compute_pipeline_seconds,
    count_packed_parameters,
    group_stages_by_rank,
    list_adapted,
    make_stages,
    simulate_timeline,
)
from hf_parallel.planner.prediction import Breakdown, Prediction
from hf_parallel.planner.shape import Attention, Block, Matrix, ModelShape, shape_of
from hf_parallel.planner.states import (
    PACKED_BYTES,
    count_packed_width,
    count_summed_width,
    offload_seconds,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- Seconds of a stage with one micro-batch: each kernel by roofline and fitted efficiency, and what it waits for
#     matrix product    2 m n k / (peak x gemm x depth(k) x waves(m, n) x alignment(n, k)), or its bytes over bandwidth
#     attention         FLOPs of the keys that a mask shows / (peak x attention)
#     element-wise      bytes read and written / (bandwidth x memory)
#     communication     the ledger's transfers, less what of them can run behind compute
#
# docs/reference/planner_formulas.md has the numbers, their sources and the measured accuracy.


_TILE = 128
_CLOCK = 1.5e9  # Hz, within a fifth for every GPU of the catalogue
#: Kernels of a block's forward and backward: of a fused implementation; of Transformers without a compiler, counted by
#: a profiler (docs/reference/gpu.md), with what tp, shards of FSDP2 and each adapter add.
_KERNELS = (16, 30)
_EAGER, _EAGER_TP, _EAGER_SHARDS, _EAGER_ADAPTER = (50, 100), (14, 26), (6, 11), (4, 7)
#: More where tokens are routed (sorted, counted, copied to their experts and back), and where experts lie on ep ranks.
_EAGER_EXPERTS, _EAGER_EP = (48, 97), (4, 6)
#: Of a layer that torch.compile fused: 76 kernels, and 60 for the time in which its graphs are entered (H200: 74 to 90
#: kernels fewer of 167 to 190, and 8 to 25 % off the host's time).
_COMPILED, _COMPILED_TP = (53, 83), (8, 16)
#: More for attention over cp: blocks, or heads, are exchanged; for each further block of a ring, which is merged.
_EAGER_RING, _EAGER_HEADS, _EAGER_BLOCK = (8, 14), (13, 22), (8, 13)
#: More for each linear in 4 bits: its codes to 16 bits, and the table of codes (copy, magnitude, maximum, division).
_EAGER_PACKED = (5, 5)
#: Ranks that are not in step: once per all-reduce of tp, or per gather and scatter; per all-to-all of ep.
_WAITS = {"tp": 0.5, "tp_row": 0.5, "tp_col": 0.5, "ep": 1.0}


def compute_gemm_seconds(gpu: Gpu, precision: str, m: float, n: float, k: float) -> float:
    """Return the seconds of a matrix product [m, k] x [k, n]."""
    e = gpu.efficiency
    tiles = math.ceil(m / _TILE) * math.ceil(n / _TILE)
    filled = tiles / (tiles + e.waves * gpu.units)
    aligned = 1.0 if n % 64 == 0 and k % 64 == 0 else e.misaligned
    rate = gpu.peak(precision) * e.gemm * filled * k / (k + e.depth) * aligned
    rate *= e.eight_bit if precision == "fp8" else 1.0
    return max(2 * m * n * k / rate, 2 * (m * k + k * n + m * n) / (gpu.bandwidth * e.memory))


def compute_memory_seconds(gpu: Gpu, size: float) -> float:
    """Return the seconds to read and write `size` bytes."""
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
        return Times(add_by_kind(self.forward, other.forward), add_by_kind(self.backward, other.backward))

    def times(self, count: float) -> Times:
        """Return `count` times the seconds."""
        return Times(*({k: v * count for k, v in side.items()} for side in (self.forward, self.backward)))

    def with_waits(self, transfers: list[Transfer], gpu: Gpu) -> Times:
        """Add the seconds by kind that each pass waits for its collectives, beyond those behind its compute.

        What is behind all of the compute slows it down: the two share the device. On a CPU what is behind a part of
        it does, too.
        """
        e, waits = gpu.efficiency, []
        for when, compute in ((FORWARD, self.forward), (BACKWARD, self.backward)):
            sent: dict[tuple[str, str], float] = {}
            for t in (t for t in transfers if t.when == when):
                wait = e.wait_us * 1e-6 * _WAITS.get(t.axis, 0.0) * FACTORS.get(t.kind, 0.0)
                wait = wait if t.behind == EXPOSED else 0.0
                axis = t.axis.partition("_")[0]
                kind = "gathering updated weights" if t.what == "updated weights" else "ZeRO-3 communication"
                key = (f"{axis} communication" if axis in ("tp", "cp", "ep") else kind, t.behind)
                sent[key] = sent.get(key, 0.0) + t.seconds + wait * t.count
            found: dict[str, float] = {}
            for (kind, behind), seconds in sent.items():
                window = e.hidden * (sum(compute.values()) if behind == COMPUTE else compute.get(behind, 0.0))
                slowed = e.contention * min(seconds, window) if behind == COMPUTE or gpu.name == "cpu" else 0.0
                found[kind] = found.get(kind, 0.0) + max(0.0, seconds - window) + slowed
            waits.append({kind: seconds for kind, seconds in found.items() if seconds})
        return self + Times(*waits)


def _count_copied_bytes(transfer: Transfer, job: Job) -> float:
    """Return the bytes that FSDP2 reads and writes on the GPU around all of a transfer's collectives.

    What a gather results in is copied out, parameter by parameter; all gradients are copied in, in the dtype of their
    sum. A rank's own part is copied, too (torch/distributed/fsdp/_fully_shard: foreach_all_gather, foreach_reduce).
    """
    group, kind = transfer.group, transfer.kind
    by_fsdp2 = job.habits.fsdp2 and transfer.axis == "dp_shard" and kind in ("all_gather", "reduce_scatter")
    if not by_fsdp2 or group.link.has_measured(group.axis, kind):
        return 0.0  # a calibration measures both together
    lowered = 1.0 if kind == "all_gather" or job.lora else job.stored / count_summed_width(job)
    return transfer.count * transfer.payload * (1 + lowered + 2 / group.size)


def _compute_copies(transfers: list[Transfer], job: Job, gpu: Gpu) -> Times:
    """Return the seconds of FSDP2's copies in each pass, which are part of its compute."""
    sides = (
        compute_memory_seconds(gpu, sum(_count_copied_bytes(t, job) for t in transfers if t.when == when))
        for when in (FORWARD, BACKWARD)
    )
    return Times(*({"ZeRO-3 copies": seconds} if seconds else {} for seconds in sides))


def add_by_kind(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return sums by kind."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in one | other}


@functools.lru_cache(maxsize=4096)
def block_times(block: Block, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """Return the times of a block on one rank, with its communication over tp, cp, ep and ZeRO-3."""
    gpu, tokens = cluster.gpu, job.tokens(layout)
    forward, backward = (
        {
            PRODUCTS: sum(_compute_matrix_seconds(gpu, job, layout, m, tokens, is_backward) for m in block.matrices),
            ATTENTION: sum(
                _compute_attention_seconds(gpu, job, layout, a, tokens, is_backward) for a in block.attentions
            ),
            "element-wise": compute_memory_seconds(
                gpu, tokens * _count_bytes_between(block, hidden, layout, job, gpu, is_backward)
            ),
        }
        for is_backward in (False, True)
    )
    if job.products == "fp8":
        for side, is_backward in ((forward, False), (backward, True)):
            casts = _count_cast_bytes(block, layout, job, is_backward)
            side["casts to fp8"] = compute_memory_seconds(gpu, tokens * casts)
    packed = count_packed_parameters(block, layout, job)
    if packed:  # each pass reads the codes and writes 16 bits, which the product reads
        unpacking = compute_memory_seconds(gpu, packed * (count_packed_width(job) + job.width))
        forward["unpacking 4 bits"] = backward["unpacking 4 bits"] = unpacking
    if not job.habits.eager:  # else of a whole stage: see `_compute_host_waits`
        for side, kernels in ((forward, _KERNELS[0]), (backward, _KERNELS[1])):
            # A host that cannot launch kernels as fast as they run makes the GPU wait.
            wait = kernels * gpu.efficiency.kernel_us * 1e-6 - sum(side.values())
            if wait > 0:
                side["host"] = wait
    again: float | None = None
    if job.each_recomputed == "full":
        again = sum(forward.values()) * job.recomputed_share
    elif job.recompute == "selective" and job.habits.keeps_products:
        again = forward["element-wise"] + (forward[ATTENTION] if job.attention == EAGER else 0.0)
    elif job.recompute == "selective":
        again = forward[PRODUCTS] / 2 * 0.8 + forward["element-wise"]
    computed = Times(forward, add_by_kind(backward, {} if again is None else {"recomputation": again}))
    if job.activation_offload:
        copied = tokens * count_offloaded_bytes(block, hidden, layout, job) / gpu.host.pcie
        waits = (max(0.0, copied - sum(side.values())) for side in (computed.forward, computed.backward))
        computed += Times(*({"activations to the host and back": wait} for wait in waits))
    if job.tiled_mlp and tokens > hidden:
        mlp = [m for m in block.matrices if block.inner in (m.inputs, m.outputs, m.outputs / 2)]
        again = sum(_compute_matrix_seconds(gpu, job, layout, m, tokens, False) for m in mlp)
        computed += Times(backward={"recomputation": again})
    transfers = block_transfers(block, hidden, layout, job, cluster)
    return (computed + _compute_copies(transfers, job, gpu)).with_waits(transfers, gpu)


def _compute_host_waits(stage: Stage, times: Times, layout: Layout, job: Job, gpu: Gpu) -> Times:
    """Return for how long a stage's GPU waits for kernels that Python has not launched yet.

    The host runs ahead of the GPU, so that a forward and its backward are compared as one: the larger of host and GPU
    counts. Communication occupies the GPU's queue as kernels do. A CPU runs its kernels itself: both times add up.
    """
    forward = backward = 0.0
    shards = job.habits.fsdp2 and layout.has_several_data_ranks
    for block, count in stage.counts:
        adapters = sum(matrix.count for matrix in list_adapted(block)) if job.lora else 0
        own, of_tp = (_COMPILED, _COMPILED_TP) if job.compiled else (_EAGER, _EAGER_TP)
        kinds = [(own, 1), (of_tp, layout.tp > 1), (_EAGER_SHARDS, shards), (_EAGER_ADAPTER, adapters)]
        kinds += [(_EAGER_PACKED, adapters)] if job.four_bit != "none" else []
        kinds += [(_EAGER_HEADS if layout.heads_over > 1 else _EAGER_RING, layout.cp > 1)]
        kinds += [(_EAGER_BLOCK, layout.cp // layout.heads_over - 1)]
        kinds += [(_EAGER_EXPERTS, 1), (_EAGER_EP, layout.ep > 1)] if block.expert_parameters else []
        ahead, back = (sum(kernels[side] * times for kernels, times in kinds) for side in (0, 1))
        forward += ahead * count
        backward += (back + ahead * job.recomputed_share) * count
    host = (forward + backward) * gpu.efficiency.eager_us * 1e-6
    hidden = sum(times.totals) if gpu.name != "cpu" else 0.0
    waits = max(0.0, host - hidden) / max(1, forward + backward)
    return Times({"host": waits * forward}, {"host": waits * backward}) if waits else Times()


def _compute_matrix_seconds(
    gpu: Gpu, job: Job, layout: Layout, matrix: Matrix, tokens: float, backward: bool
) -> float:
    m, n, k, count = tokens, float(matrix.outputs), float(matrix.inputs), matrix.count
    if matrix.split == "column":
        n, k = n / layout.tp_rows, k / layout.tp_columns
    elif matrix.split == "row":
        n, k = n / layout.tp_columns, k / layout.tp_rows
    elif matrix.split == "expert":
        count = max(1, matrix.count // layout.ep)
        m = tokens / layout.tp * layout.ep * matrix.share
    lowered = matrix.split != "expert" or not job.autocast  # autocast leaves grouped products alone
    precision = job.products if lowered else "fp32"
    if not backward:
        return count * compute_gemm_seconds(gpu, precision, m, n, k)
    data = compute_gemm_seconds(gpu, precision, m, k, n)
    kept = job.products_beside if precision == "fp8" and job.eight_bit_scaling == "rowwise_with_gw_hp" else precision
    return count * (data + (0 if job.lora else compute_gemm_seconds(gpu, kept, n, k, m)))


def _compute_attention_seconds(
    gpu: Gpu, job: Job, layout: Layout, attention: Attention, tokens: float, backward: bool
) -> float:
    """Products, and an exponential per score, of which a unit makes 16 per clock; a backward computes scores again."""
    e, heads, eager = gpu.efficiency, layout.tp, job.attention == EAGER
    # The part of the peak that a forward of the job's kernel reaches, where it was measured.
    own = {SDPA: e.cudnn, FLASH: e.flash}.get(job.attention, 0.0) * job.habits.eager
    own = (e.cudnn if job.habits.transformer_engine else own) or e.attention
    every = eager or has_mask(attention, job.seq, job.attention)  # scores of keys, too, that a mask then hides
    scores = attention.heads * (job.seq if every else attention.keys(job.seq)) * tokens / heads
    flops = attention.flops(job.seq, full=every) * tokens / heads
    rate = gpu.peak(job.products_beside) * own
    seconds = scores / (16 * gpu.units * _CLOCK)
    seconds += 2.5 * flops / (rate * e.attention_backward) if backward else flops / rate
    # Bytes that eager attention reads and writes per score: product, scale, mask, softmax in fp32, product.
    casts = 0 if job.width == 4 else 8 if not backward else 12
    per_score = (8 if not backward else 9 if job.width == 4 else 7) * job.width + casts
    return seconds + compute_memory_seconds(gpu, scores * per_score if eager else 0.0)


def _count_bytes_between(block: Block, hidden: int, layout: Layout, job: Job, gpu: Gpu, backward: bool) -> float:
    """Return the bytes per token that move between the matrix products.

    In a fused implementation each step is one kernel. Of Transformers' own layers each kernel reads and writes: a norm
    goes to fp32, squares, takes the mean, scales, goes back and multiplies by its weight; a backward of it moves twice
    that. Rotary embeddings are nine passes over queries and keys, a gated activation five.
    """
    e, c, s = gpu.efficiency, job.width, job.stored
    norm = (2 * (s + 4) if s < 4 else 0) + 20 + 2 * s  # of torch's own operations, per number in a forward
    rotated = sum(a.heads * a.qk_width + a.kv_heads * a.qk_width for a in block.attentions)
    if job.compiled or not job.habits.eager:
        passes = e.eager_passes if job.habits.transformer_engine or job.compiled else e.passes
        own = 0.0 if job.fused_norms else 2 * (norm - 2 * s) * hidden / layout.stream_parts
        stream = s * hidden * (2 * 2 + 2 * 3)  # two norms: read, write; two residual additions: read twice, write
        inner, routed = c * block.inner * (3 if block.gated else 2), 4 * c * block.top_k * hidden
        once = stream / layout.stream_parts + (2 * c * rotated + inner) / layout.tp + routed / layout.stream_parts
        return (1 + backward) * (once * passes + own * e.eager_passes)
    stream = 2 * norm + 2 * 3 * s
    output = sum(a.heads * a.v_width for a in block.attentions)
    inside = 9 * rotated + 2 * output + (5 if block.gated else 2) * block.inner
    if backward:  # and the gradients of an input that several products read are added
        stream += 2 * norm + 9 * s
        inside = 12 * rotated + 2 * output + (9 if block.gated else 3) * block.inner
    routed = 4 * c * block.top_k * hidden * (1 + backward)
    return ((stream * hidden + routed) / layout.stream_parts + c * inside / layout.tp) * e.eager_passes


def _count_cast_bytes(block: Block, layout: Layout, job: Job, backward: bool) -> float:
    """Return the bytes per token that casts of a block's fp8 products move: inputs, in the backward their gradients.

    Transformer Engine reads 16 bits and writes 8, and once more transposed for the gradient of the weight
    (`cast_transpose`; Micikevicius et al., 2022, arXiv:2209.05433). Scales of rows are not those of columns: torchao
    reads 16 bits for the largest number and once more to round, for a product and for the gradient of the weight.
    """
    roundings = {"tensorwise": 0, "rowwise": 2, "rowwise_with_gw_hp": 1}[job.eight_bit_scaling]
    read_and_written, numbers = roundings * (2 + 2 + 1) or 2 + 1 + 1, 0.0
    for matrix in list_adapted(block):
        split = layout.tp if job.gathers_codes or (matrix.split == "column") == backward else 1
        numbers += matrix.count * (matrix.outputs if backward else matrix.inputs) / split
    return read_and_written * numbers


# ---- a stage --------------------------------------------------------------------------------------------------------

#: Read and written per logit in a forward and in a backward: 16 bit read, fp32 written and read, 16 bit written; by
#: Transformers' loss, which keeps fp32 logits and their logarithms.
_LOGIT_BYTES, _EAGER_LOGIT_BYTES = (10, 10), (18, 22)


@functools.lru_cache(maxsize=4096)
def compute_stage_times(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> Times:
    """Return the times of a micro-batch on one stage."""
    job, gpu, shape = make_computed_job(layout, job), cluster.gpu, stage.shape
    total = Times()
    if stage.is_last and shape.head_outputs:  # head and loss
        tokens, columns = job.tokens(layout), shape.head_outputs / layout.tp
        product = compute_gemm_seconds(gpu, job.products_beside, tokens, columns, shape.hidden)
        moved = _EAGER_LOGIT_BYTES if job.habits.eager or job.habits.whole_logits else _LOGIT_BYTES
        logits = tokens * (shape.head_outputs if job.habits.whole_logits else columns)
        forward, backward = (compute_memory_seconds(gpu, logits * size) for size in moved)
        total = Times({"head": product + forward}, {"head": 2 * product + backward})
    transfers = end_transfers(stage, layout, job, cluster)
    total = (total + _compute_copies(transfers, job, gpu)).with_waits(transfers, gpu)
    for block, count in stage.counts:
        total += block_times(block, shape.hidden, layout, job, cluster).times(count)
    accumulating = 0.0
    if not job.lora and job.micro_batches != 1:
        # Each micro-batch's gradients are added to their sum, under ZeRO-3 to a shard of it. A sum in the gradients'
        # own 16 bits is read and written in 16 bits. Products that add to the sum by themselves (Megatron-LM's
        # gradient_accumulation_fusion) read and write it too, at the end of each tile.
        sharded = layout.reduces_each or (layout.zero_stage == 3 and not job.habits.fsdp2)
        shards = layout.shards if sharded else 1
        numbers = stage.dense(*layout.tp_and_columns) / shards + stage.experts(layout.expert_split)
        own = 0 if job.habits.transformer_engine else job.stored
        summed = count_summed_width(job)  # bytes per number
        if job.habits.master_weights:
            summed = float(max(job.stored, 2 if job.gradient_bytes == 2 else 4))
        accumulating = compute_memory_seconds(gpu, numbers * (own + 2 * summed))
    total += Times(backward={"accumulating gradients": accumulating})
    if job.autocast:  # fp32 weights are read and 16-bit copies written once for all micro-batches, gradients from each
        weights = stage.dense(*layout.tp_and_columns)  # experts compute in fp32
        once = compute_memory_seconds(gpu, weights * (job.stored + job.width))
        total += Times({"autocast": once / job.micro_batches}, {"autocast": 0.0 if job.lora else once})
    return total + _compute_host_waits(stage, total, layout, job, gpu) if job.habits.eager else total


# ---- Seconds of a step: the pipeline by simulation, what is communicated after it, the optimizer, the host ----------


_UPDATE_BYTES = 40  # per parameter: a 16-bit gradient and fp32 states read, states and weights written
_MOST_SHOWN = 16  # micro-batches of a timeline; boxes of more could not be told apart


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by kind of the slowest rank; `bubble`: idle part of the pipeline, 0 to 1."""

    seconds: float
    kinds: dict[str, float]
    bubble: float


def step_time(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> StepTime:
    """Return the seconds of all micro-batches, of what data parallelism adds after them, of optimizer and host."""
    times_of = {stage: compute_stage_times(stage, layout, job, cluster) for stage in set(stages)}  # few differ
    sending = compute_sending_seconds(stages[0].shape.hidden, layout, job, cluster)
    if layout.pp > 1 and cluster.alone != 1.0 and cluster.nodes <= 1:
        # Ranks in a bubble leave caches and memory to others, whose stages take less: between `alone`, where all
        # others rest, and 1, where none does, in proportion to those at work.
        totals = [times_of[stage].totals for stage in stages]
        timeline = simulate_timeline(layout, totals, sending, min(job.micro_batches_per_call, 4 * layout.pp))
        others = timeline.ranks_at_work * layout.gpus / layout.pp - 1
        shared = cluster.alone + (1 - cluster.alone) * others / (layout.gpus - 1)
        times_of = {stage: times.times(shared) for stage, times in times_of.items()}
    each = [times_of[stage] for stage in stages]
    totals = [times.totals for times in each]
    duration, bubble = compute_pipeline_seconds(layout, job, totals, sending)
    by_rank = group_stages_by_rank(stages, layout)
    slowest = max(by_rank, key=lambda mine: sum(sum(totals[stage.index]) for stage in mine))
    busy = sum((each[stage.index] for stage in slowest), Times())
    kinds = {kind: s * job.micro_batches for kind, s in add_by_kind(busy.forward, busy.backward).items()}
    kinds["bubble"] = duration - sum(kinds.values())
    backward = max(sum(totals[stage.index][1] for stage in mine) for mine in by_rank)
    kinds = add_by_kind(kinds, compute_seconds_after_schedule(by_rank, layout, job, cluster, backward))
    noise = cluster.gpu.efficiency.node_noise
    kinds["stragglers"] = noise * math.log2(max(1, cluster.nodes)) * sum(kinds.values())
    kinds = {kind: seconds for kind, seconds in kinds.items() if seconds > 0}
    return StepTime(sum(kinds.values()), kinds, bubble)


def predict_timeline(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> tuple[Timeline, int]:
    """Return the simulated schedule in seconds and how many micro-batches it shows: all, or as many as can be seen."""
    shown = min(job.micro_batches, max(_MOST_SHOWN, 2 * layout.pp))
    shown -= shown % layout.pp if shown > layout.pp else 0
    totals = [compute_stage_times(stage, layout, job, cluster).totals for stage in stages]
    return simulate_timeline(
        layout, totals, compute_sending_seconds(stages[0].shape.hidden, layout, job, cluster), shown
    ), shown


# ---- after the last micro-batch -------------------------------------------------------------------------------------


def compute_seconds_after_schedule(
    by_rank: list[list[Stage]], layout: Layout, job: Job, cluster: Cluster, backward: float
) -> dict[str, float]:
    """Return seconds by kind after the last micro-batch: what data ranks reduce, the optimizer, the host.

    Gradients travel behind a part of the last backward, weights behind half of that, the first forward. Megatron-LM
    sends a stage's gradients while the last micro-batches of the rank's other stages run (Narayanan et al., 2021,
    arXiv:2104.04473, figure 4: `pp` micro-batches of one stage, then of the next).

    Args:
        backward: seconds of the last backward, behind which gradients are reduced.
    """
    efficiency, updated = cluster.gpu.efficiency, 0.0
    hidden = efficiency.hidden_gradients * backward
    slowed = efficiency.contention if cluster.gpu.name == "cpu" else 0.0
    if job.habits.transformer_engine:
        others = 1 - 1 / layout.virtual_stages
        hidden += efficiency.hidden * others * min(layout.pp, job.micro_batches) * backward
    each = []
    for mine in by_rank:  # the rank decides that waits longest for the collectives of a step
        transfers = step_transfers(mine, layout, job, cluster)
        reduced = sum(t.seconds for t in transfers if t.behind == LAST_BACKWARD)
        gathered = sum(t.seconds for t in transfers if t.behind == FIRST_FORWARD)
        waits = {"gradients' reduction": max(0.0, reduced - hidden) + slowed * min(reduced, hidden)}
        waits["gathering updated weights"] = max(0.0, gathered - hidden / 2) + slowed * min(gathered, hidden / 2)
        copied = sum(_count_copied_bytes(t, job) for t in transfers)
        waits["ZeRO-3 copies"] = compute_memory_seconds(cluster.gpu, copied)
        for t in transfers:
            if t.behind not in (LAST_BACKWARD, FIRST_FORWARD, SCHEDULE):
                waits["gathering updated weights" if t.kind == "all_gather" else "gradients' reduction"] += t.seconds
        each.append(waits)
    kinds = max(each, key=lambda waits: sum(waits.values()))
    shards, experts = (layout.shards, count_expert_shards(layout)) if layout.zero_stage else (1, 1)
    for mine in by_rank:  # the rank decides that updates most parameters: those whose state it keeps, after ZeRO
        if job.lora:
            kept = sum(stage.adapters(job.lora, *layout.tp_and_columns) for stage in mine) / shards
        else:
            dense, split = layout.tp_and_columns, layout.expert_split
            kept = sum(stage.dense(*dense) / shards + stage.experts(split) / experts for stage in mine)
        updated = max(updated, kept)
    if job.offload != "none":
        kinds = add_by_kind(kinds, offload_seconds(updated, job, cluster, backward))
    else:
        seconds = compute_memory_seconds(cluster.gpu, updated * _UPDATE_BYTES * efficiency.update_passes)
        kinds = add_by_kind(kinds, {"optimizer": seconds})
    kinds["host, per step"] = (efficiency.eager_step_ms if job.habits.eager else efficiency.step_ms) * 1e-3
    return kinds


def predict(
    *,
    model: PreTrainedModel,
    gpu: str | Gpu | Cluster,
    gpus: int | None = None,
    gpus_per_node: int | None = 8,
    layout: Mapping | Layout | None = None,
    seq: int,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    recompute: str | None = "none",
    precision: str | None = "bf16",
    lora: bool | int | None = False,
    network: str | Link | None = None,
    optimizer: str = "adamw",
    offload: str = "none",
    attention: str = "flash",
    engine: str = "standard",
    lean_loss: bool = False,
    tiled_mlp: bool = False,
    activation_offload: bool = False,
    compiled: bool = False,
    fused_norms: bool = True,
    gradients: str = "auto",
    four_bit: str = "none",
    eight_bit_scaling: str = "tensorwise",
    headroom: float = HEADROOM,
) -> Prediction:
    """Predict one training step.

    Args:
        model: an HF config or model, a `ModelShape`, or a mapping with `layers, hidden, heads, kv_heads, ffn_hidden,
            vocab` and optional `gated_mlp, tied, experts, top_k, params`.
        gpu: a name of the catalogue, or a `Gpu` or `Cluster` of your own.
        gpus: how many; default: what the layout multiplies to.
        layout: sizes `tp, pp, dp, cp, ep` and `zero_stage, virtual_stages, sequence_parallel, dp_replicate, schedule,
            split`; what is missing or None is off, `dp` takes the GPUs that are left.
        seq: tokens per sequence.
        micro_batch: sequences that a data rank computes at a time; default: all of its share.
        global_batch: sequences per step over all data ranks.
        recompute: none, selective or full activation checkpointing.
        lora: train adapters only; a number is their rank, True means 16.
        network: link between nodes; default: the catalogue's for this GPU.
        engine: "standard": the habits of Megatron-LM, DeepSpeed and FSDP in fused implementations;
            "transformer_engine": Megatron-LM on NVIDIA's kernels; "scaling": Aleph Alpha's framework; "composer":
            llm-foundry's; "nanotron": Hugging Face's; "torchtitan": FSDP2 on fused implementations; "transformers":
            models of Transformers as they are; "hf_parallel": this package's own, which runs them, too.
        lean_loss: are head and loss computed a chunk of tokens at a time, where that needs less memory?
        tiled_mlp: do MLPs run over pieces of the sequence, each again in the backward?
        activation_offload: does what layers keep for the backward rest on the host?
        compiled: does torch.compile fuse what lies between the products of a fused implementation?
        fused_norms: is a norm of a fused implementation one kernel? If not it is torch's own operations.
        gradients: how 16-bit training with fp32 weights sums them: "bf16", "fp32", "both" (a 16-bit gradient beside
            the fp32 sum); "auto": as the engine does.
        four_bit: "nf4" or "nf4_double": the base under the adapters is packed by bitsandbytes, its largest values
            once more in the second case; "none".
        eight_bit_scaling: what has one scale in products in fp8: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        headroom: percent of a GPU's memory that stays free in a layout that `fits`.

    Raises:
        SpecError: a name that is not known or numbers that cannot hold; the message says what works.
    """
    check_headroom(headroom)
    shape = shape_of(model)
    sizes = make_layout(layout, gpus)
    cluster = make_cluster(gpu, gpus or sizes.gpus, gpus_per_node or 8, network)
    rank = 16 if lora is True else int(lora or 0)
    how = {"recompute": recompute, "precision": precision, "optimizer": optimizer, "offload": offload}
    how |= {"attention": attention, "engine": engine, "gradients": gradients, "eight_bit_scaling": eight_bit_scaling}
    kernels = {"compiled": compiled, "fused_norms": fused_norms, "lean_loss": lean_loss, "tiled_mlp": tiled_mlp}
    kernels["activation_offload"] = activation_offload
    job = make_job(sizes, seq, micro_batch, global_batch, lora=rank, four_bit=four_bit, **how, **kernels)
    check_four_bit_job(job)
    return predict_step(shape, cluster, sizes, job, headroom)


def check_four_bit_job(job: Job) -> None:
    """Refuse a base in 4 bits that trains, or whose other weights have more than 16."""
    if job.four_bit not in ("none", *PACKED_BYTES):
        refuse(f"four_bit={job.four_bit}", f"not one of none, {', '.join(PACKED_BYTES)}", "four_bit=nf4")
    if job.four_bit != "none" and not job.lora:
        refuse("a base in 4 bits", "does not train, so that lora=0 leaves nothing to train", "lora=16")
    if job.four_bit != "none" and (job.precision, job.products) != ("bf16", "bf16"):
        asked = job.precision if job.eight_bit == "auto" else job.eight_bit
        refuse(f"precision={asked}", "a base in 4 bits is planned with all else in bf16", "precision=bf16")


def predict_step(
    shape: ModelShape, cluster: Cluster, layout: Layout, job: Job, headroom: float = HEADROOM
) -> Prediction:
    """Predict with everything read and checked: a search calls this many times."""
    stages = make_stages(shape, layout, job)
    time = step_time(stages, layout, job, cluster)
    ranks = predict_memory_of_ranks(stages, layout, job)
    peak = find_fullest(ranks)
    held = peak.held(cluster.gpu.memory_gib * GIB)
    kinds = {**peak.kinds, "held by the allocator": held - peak.needed}
    per_gpu = job.seq * job.micro_batch * job.micro_batches * layout.dp / time.seconds / layout.gpus
    flops = 3 * shape.forward_flops(job.seq, full_attention=True)
    return Prediction(
        step_time_s=time.seconds,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops / cluster.gpu.peak("bf16"),
        memory_gib=held / GIB,
        headroom=headroom,
        bubble=time.bubble,
        breakdown=Breakdown(
            {kind: size / GIB for kind, size in kinds.items()},
            time.kinds,
            tuple(ranks),
            functools.partial(find_busiest, stages, layout, job, cluster),
        ),
        shape=shape,
        cluster=cluster,
        layout=layout,
        job=job,
    )
