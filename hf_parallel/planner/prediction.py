"""The prediction of a step: seconds, memory, bytes sent; and each formula with its numbers and source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from hf_parallel.planner.activations import count_kept_bytes, count_parts, list_terms_of
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.ledger import Transfer, ring_factor
from hf_parallel.planner.memory import GIB, RankMemory, find_fullest
from hf_parallel.planner.pipeline import group_stages_by_rank, make_stages
from hf_parallel.planner.shape import ModelShape
from hf_parallel.planner.states import count_adapter_bytes, count_packed_width, state_bytes

#: Ninth decile of the step time's error where a series, or a whole type of GPU, was left out; of models with experts,
#: on which nothing was fitted (docs/reference/planner_formulas.md).
MEASURED, TRANSFERRED, EXPERTS = 0.25, 0.45, 0.55


@dataclass(frozen=True)
class Breakdown:
    """Where memory and time go.

    `memory`: GiB of the fullest rank by kind. `time`: seconds of the slowest rank's step by kind. `communication`:
    collectives with axis, bytes a rank sends, number per step and link. `ranks`: memory of each pipeline rank.
    `list_transfers` gives `communication` when it is first read: of most layouts of a search nobody reads it.
    """

    memory: dict[str, float]
    time: dict[str, float]
    ranks: tuple[RankMemory, ...]
    list_transfers: Callable[[], list[Transfer]] = field(repr=False, compare=False)

    @cached_property
    def communication(self) -> tuple[Transfer, ...]:
        """Every transfer per step of the rank that sends most bytes."""
        return tuple(self.list_transfers())

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """The bytes that a rank sends in one step, by the ring formulas."""
        axes = dict.fromkeys(transfer.axis for transfer in self.communication)
        return {axis: sum(t.bytes for t in self.communication if t.axis == axis) for axis in axes}


@dataclass(frozen=True)
class Prediction:
    """The result of `predict`. `mfu`: model FLOPs utilisation in 0..1, attention counted without a mask (PaLM)."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_gib: float
    headroom: float
    bubble: float
    breakdown: Breakdown
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    job: Job

    @property
    def needed_gib(self) -> float:
        """The GiB that the fullest rank must have."""
        return find_fullest(list(self.breakdown.ranks)).needed / GIB

    @property
    def fits(self) -> bool:
        """Return whether it fits a GPU less the headroom. Of the published runs that failed none is said to fit."""
        return self.needed_gib <= self.cluster.gpu.compute_room_gib(self.headroom)

    @property
    def allocated_gib(self) -> float:
        """The GiB of tensors on the fullest rank: `torch.cuda.max_memory_allocated`."""
        return find_fullest(list(self.breakdown.ranks)).tensors / GIB

    @property
    def reserved_gib(self) -> float:
        """The GiB that torch's allocator holds there: `torch.cuda.max_memory_reserved`."""
        peak, memory = find_fullest(list(self.breakdown.ranks)), self.cluster.gpu.memory_gib
        return (peak.held(memory * GIB) - (peak.needed - peak.tensors)) / GIB

    @property
    def uncertainty(self) -> float:
        """Relative error of the step time that one run in ten exceeds; larger for types without published runs."""
        experts = EXPERTS if any(block.top_k for block in self.shape.blocks) else 0.0
        return max(experts, TRANSFERRED if self.cluster.gpu.like else MEASURED)

    def cost_per_billion_tokens(self, dollars_per_gpu_hour: float) -> float:
        """Return the dollars for 1e9 tokens."""
        return 1e9 / self.tokens_per_s_per_gpu / 3600 * dollars_per_gpu_hour

    def explain(self) -> str:
        """Return each formula with its numbers and source."""
        return "\n".join(
            [
                *_render_model_and_hardware(self),
                *_render_memory_formulas(self),
                *_render_step_formulas(self),
            ]
        )


# ---- the formulas ---------------------------------------------------------------------------------------------------


def _render_title(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"


def _render_model_and_hardware(p: Prediction) -> Iterable[str]:
    shape, length = p.shape, p.job.seq
    gpu, cluster = p.cluster.gpu, p.cluster
    yield _render_title(f"Model: {shape.name}")
    yield f"parameters {shape.parameters / 1e9:.3f}e9 in {shape.layers} layers, embedding and head"
    for block, count in Counter(shape.blocks).items():
        kind = "gated MLP" if block.gated else "MLP"
        experts = f", {block.top_k} experts at work" if block.top_k else ""
        yield (
            f"  {count} x {block.parameters / 1e6:.1f}e6: {kind} of {block.inner:.0f}{experts}; forward "
            f"{block.flops(length) / 1e6:.1f} MFLOP per token (2 per weight, 2 h (d_qk + d_v) per visible key)"
        )
    yield f"  head and loss: forward {shape.head_flops / 1e6:.1f} MFLOP per token; a backward costs twice a forward"
    yield _render_title(f"Hardware: {cluster.gpus} x {gpu.name}, {cluster.per_node} in a node")
    peak, memory = gpu.peak(p.job.precision) / 1e12, gpu.bandwidth / 1e9
    yield f"peak {peak:.0f} TFLOP/s {p.job.precision}, memory {gpu.memory_gib} GiB at {memory:.0f} GB/s [{gpu.source}]"
    if gpu.like:
        yield f"no published runs: efficiencies of {gpu.like}; seconds within {p.uncertainty:.0%} in nine of ten"
    if p.job.offload != "none":
        host = gpu.host
        yield (
            f"host: PCIe {host.pcie / 1e9:g} GB/s per GPU, memory {host.bandwidth / 1e9:g} GB/s, NVMe "
            f"{host.nvme / 1e9:g} GB/s, shared by the node's GPUs [{host.source}]"
        )
    for place, link, part in (
        ("inside a node", cluster.inside, gpu.efficiency.link),
        ("between nodes", cluster.between, gpu.efficiency.network),
    ):
        speed = f"{link.bandwidth / 1e9:g} GB/s per GPU, of which {part:.0%} reached"
        yield f"{place}: {link.name}, {speed} [{link.source}]"


_DIVIDED = ("nothing", "the optimizer", "optimizer and gradients", "optimizer, gradients and weights")


def _render_memory_formulas(p: Prediction) -> Iterable[str]:
    layout, job, block, hidden = p.layout, p.job, p.shape.blocks[0], p.shape.hidden
    stage, tokens = layout.zero_stage, job.tokens(layout)
    rank = find_fullest(list(p.breakdown.ranks)).rank
    yield _render_title(f"Memory of pipeline rank {rank}, the fullest: {p.memory_gib:.1f} GiB")
    per = count_adapter_bytes(job) if job.lora else state_bytes(job, stage)
    yield (
        f"bytes per trained parameter: weights {per.weights:g}, gradients {per.gradients:g}, optimizer "
        f"{per.optimizer:g}; ZeRO-{stage} over {layout.shards} ranks divides {_DIVIDED[stage]} "
        "[arXiv:1910.02054, table 1]"
    )
    if job.four_bit != "none":
        yield (
            f"linears of the layers: {count_packed_width(job):.4f} bytes per weight, a code of 4 bits and its part "
            "of the largest value of a block of 64 [arXiv:2305.14314, section 3]"
        )
    if job.habits.fsdp2:
        yield "gathered: weights that FSDP2 holds whole, and gradients between micro-batches [docs/dry_run.md]"
    yield from (f"  {kind:<24}{size:8.2f} GiB" for kind, size in p.breakdown.memory.items() if size >= 0.005)

    yield _render_title(f"Activations of a layer, {tokens:.0f} tokens, recompute={job.recompute}")
    for term in list_terms_of(block, hidden, job):
        size = (term.bytes + term.squared * job.seq) / hidden
        if size:
            count = count_parts(term, layout)
            by_columns = f"/ {count} columns of tp_mesh" if count > 1 else "whole on each tp rank"
            cut = f"/ tp={layout.tp}" if term.cut == "tp" or count == layout.tp > 1 else by_columns
            yield f"  {term.name:<32}{size:7.2f} bytes x s b h   {cut}"
    kept = count_kept_bytes(block, hidden, layout, job)
    yield f"kept: {kept / hidden:.2f} bytes x s b h = {tokens * kept / 2**20:.0f} MiB [method: arXiv:2205.05198]"


def _render_step_formulas(p: Prediction) -> Iterable[str]:
    yield _render_title("Communication of a rank per step (ring formulas: all-reduce 2 (N-1)/N S, others (N-1)/N S)")
    for t in p.breakdown.communication:
        factor = ring_factor(t.kind, t.group.size)
        yield (
            f"  {t.axis:<12}{t.kind:<15}{t.count:8.0f} x {t.payload / 2**20:10.2f} MiB x {factor:.3f} = "
            f"{t.bytes / 2**30:8.2f} GiB over {t.group.size} ranks, {t.group.link.name}: {t.what}"
        )
    e = p.cluster.gpu.efficiency
    yield _render_title(f"Step: {p.step_time_s:.4g} s, {p.tokens_per_s_per_gpu:.0f} tokens/s/GPU, MFU {p.mfu:.1%}")
    yield (
        f"large matrix products at {e.gemm:.0%} of the peak, attention at {e.attention:.0%}, memory at {e.memory:.0%} "
        f"with {e.passes:g} times the fewest bytes in fused implementations [fitted, docs/planner.md]"
    )
    if p.job.habits.eager:
        yield (
            f"Transformers without a compiler: Python launches a kernel in {e.eager_us:g} us, and a stage takes the "
            f"larger of its and the GPU's time; flash attention at {e.flash or e.attention:.0%} of the peak, sdpa on "
            f"whole rows at {e.cudnn or e.attention:.0%}; {e.eager_passes:g} times the bytes of element-wise kernels "
            "[docs/reference/gpu.md]"
        )
    for kind, seconds in sorted(p.breakdown.time.items(), key=lambda item: -item[1]):
        yield f"  {kind:<28}{seconds:10.4f} s {seconds / p.step_time_s:7.1%}"
    if p.layout.pp > 1:
        by_rank = group_stages_by_rank(make_stages(p.shape, p.layout, p.job), p.layout)
        counts = [sum(stage.layers for stage in mine) for mine in by_rank]
        yield f"{p.layout.schedule}: layers per rank {counts}, simulated bubble {p.bubble:.1%}"
