"""One call from a model, a cluster, a layout and a batch to step time and memory, with the reasons.

prediction = predict(model=config, gpu="h100-80gb", gpus=64, layout={"tp": 8, "pp": 2}, seq=4096, micro_batch=1,
                     global_batch=256, recompute="full")
prediction.step_time_s, prediction.memory_gib, prediction.fits, prediction.breakdown.time
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.planner.hardware import Cluster, Gpu, Link, make_cluster
from hf_parallel.planner.layout import Job, Layout, make_job, make_layout
from hf_parallel.planner.ledger import Transfer, busiest
from hf_parallel.planner.memory import GIB, RankMemory, fits, fullest, memory_of_ranks
from hf_parallel.planner.pipeline import make_stages
from hf_parallel.planner.shape import ModelShape, shape_of
from hf_parallel.planner.step_time import step_time

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Ninth decile of the step time's error where a series, or a whole type of GPU, was left out; of models with experts,
#: on which nothing was fitted (docs/planner.md).
MEASURED, TRANSFERRED, EXPERTS = 0.25, 0.45, 0.55


@dataclass(frozen=True)
class Breakdown:
    """Where memory and time go.

    `memory`: GiB of the fullest rank by kind. `time`: seconds of the slowest rank's step by kind. `communication`:
    collectives with axis, bytes a rank sends, number per step and link. `ranks`: memory of each pipeline rank.
    """

    memory: dict[str, float]
    time: dict[str, float]
    communication: tuple[Transfer, ...]
    ranks: tuple[RankMemory, ...]

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """What a rank sends in one step, by the ring formulas."""
        axes = dict.fromkeys(transfer.axis for transfer in self.communication)
        return {axis: sum(t.bytes for t in self.communication if t.axis == axis) for axis in axes}


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns. `mfu`: model FLOPs utilisation in 0..1, attention counted without a mask (PaLM)."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_gib: float
    fits: bool
    bubble: float
    breakdown: Breakdown
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    job: Job

    @property
    def uncertainty(self) -> float:
        """Relative error of the step time that one run in ten exceeds; larger for types without published runs."""
        experts = EXPERTS if any(block.top_k for block in self.shape.blocks) else 0.0
        return max(experts, TRANSFERRED if self.cluster.gpu.like else MEASURED)

    def cost_per_billion_tokens(self, dollars_per_gpu_hour: float) -> float:
        """Dollars for 1e9 tokens."""
        return 1e9 / self.tokens_per_s_per_gpu / 3600 * dollars_per_gpu_hour

    def explain(self) -> str:
        """Each formula with its numbers and source."""
        from hf_parallel.planner.report import explain

        return explain(self)


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
        engine: "standard": the habits of Megatron-LM, DeepSpeed and FSDP; "hf_parallel": this package's own.

    Raises:
        SpecError: a name that is not known or numbers that cannot hold; the message says what works.
    """
    shape = shape_of(model)
    sizes = make_layout(layout, gpus)
    cluster = make_cluster(gpu, gpus or sizes.gpus, gpus_per_node or 8, network)
    rank = 16 if lora is True else int(lora or 0)
    how = {"recompute": recompute, "precision": precision, "optimizer": optimizer, "offload": offload}
    how |= {"attention": attention, "engine": engine}
    job = make_job(sizes, seq, micro_batch, global_batch, lora=rank, **how)
    return predict_step(shape, cluster, sizes, job)


def predict_step(
    shape: ModelShape, cluster: Cluster, layout: Layout, job: Job, ranks: list[RankMemory] | None = None
) -> Prediction:
    """`predict` with everything read and checked: what a search calls many times.

    Args:
        ranks: their memory, if it is known already.
    """
    stages = make_stages(shape, layout, job)
    time = step_time(stages, layout, job, cluster)
    ranks = ranks or memory_of_ranks(stages, layout, job)
    peak = fullest(ranks)
    held = peak.held(cluster.gpu.memory_gib * GIB)
    kinds = {**peak.kinds, "held by the allocator": held - peak.needed}
    per_gpu = job.seq * job.micro_batch * job.micro_batches * layout.dp / time.seconds / layout.gpus
    flops = 3 * shape.forward_flops(job.seq, full_attention=True)
    return Prediction(
        step_time_s=time.seconds,
        tokens_per_s_per_gpu=per_gpu,
        mfu=per_gpu * flops / cluster.gpu.peak("bf16"),
        memory_gib=held / GIB,
        fits=fits(peak, cluster),
        bubble=time.bubble,
        breakdown=Breakdown(
            {kind: size / GIB for kind, size in kinds.items()},
            time.kinds,
            tuple(busiest(stages, layout, job, cluster)),
            tuple(ranks),
        ),
        shape=shape,
        cluster=cluster,
        layout=layout,
        job=job,
    )
