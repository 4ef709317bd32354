"""Every collective of one step of one rank: axis, kind, payload, number, link."""

from __future__ import annotations

from hf_parallel.planner.communication import Group, Transfer, groups
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.stages import Stage, stages_of_rank

Links = dict[str, Group]


def traffic(
    shape: ModelShape, stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster
) -> list[Transfer]:
    """What the rank that communicates most does in a step; an axis of size 1 does nothing."""
    links = groups(layout, cluster)
    held = [[stages[index] for index in stages_of_rank(layout, rank)] for rank in range(layout.pp)]
    busiest = max(held, key=lambda mine: sum(stage.dense_parameters(layout.tp) for stage in mine))
    layers = max(sum(stage.layers for stage in mine) for mine in held)
    stream = job.micro_batch * job.seq / layout.cp * shape.hidden * job.width
    found = [
        *_tensor(layers, stream, layout, job, links),
        *_context(shape, layers, layout, job, links),
        *_experts(shape, layers, stream, layout, job, links),
        *_pipeline(stream / job.width * job.stored, layout, job, links),
        *_data(busiest, layout, job, links),
    ]
    return [transfer for transfer in found if transfer.group.size > 1 and transfer.payload and transfer.count]


def _tensor(layers: int, stream: float, layout: Layout, job: Job, links: Links) -> list[Transfer]:
    """Megatron-LM (arXiv:1909.08053): two all-reduces in a layer's forward, two in its backward.

    Sequence parallelism (arXiv:2205.05198) writes each as a reduce-scatter and an all-gather, of the same bytes.
    """
    passes = 3 if job.recompute == "full" else 2
    count = 2 * passes * layers * job.micro_batches
    if layout.sequence_parallel:
        kinds = [("all_gather", "layers' inputs"), ("reduce_scatter", "layers' outputs")]
        return [Transfer("tp", kind, stream, count, links["tp"], what) for kind, what in kinds]
    return [Transfer("tp", "all_reduce", stream, count, links["tp"], "outputs of attention and MLP")]


def _context(shape: ModelShape, layers: int, layout: Layout, job: Job, links: Links) -> list[Transfer]:
    width = max(
        (sum(a.kv_heads * (a.qk_width + a.v_width) for a in block.attentions) for block in shape.blocks), default=0
    )
    payload = job.micro_batch * job.seq * width * job.width / layout.tp
    passes = 4 if job.recompute == "full" else 3  # backward passes keys and values, and their gradients
    return [Transfer("cp", "all_gather", payload, passes * layers * job.micro_batches, links["cp"], "keys and values")]


def _experts(shape: ModelShape, layers: int, stream: float, layout: Layout, job: Job, links: Links) -> list[Transfer]:
    top_k = max((block.top_k for block in shape.blocks), default=0)
    passes = 3 if job.recompute == "full" else 2
    count = 2 * passes * layers * job.micro_batches
    return [Transfer("ep", "all_to_all", stream / layout.tp * top_k, count, links["ep"], "tokens to experts and back")]


def _pipeline(stream: float, layout: Layout, job: Job, links: Links) -> list[Transfer]:
    """An activation on and a gradient back per boundary and micro-batch."""
    count = 2 * job.micro_batches * layout.virtual_stages
    return [
        Transfer(
            "pp", "p2p", stream / (layout.tp if layout.sequence_parallel else 1), count, links["pp"], "between stages"
        )
    ]


def _data(stages: list[Stage], layout: Layout, job: Job, links: Links) -> list[Transfer]:
    """ZeRO (arXiv:1910.02054, section 7): 2 parameters' worth of traffic for stages 0 to 2, 3 for stage 3."""
    parameters = sum(stage.dense_parameters(layout.tp) for stage in stages)
    share = 1.0
    if job.lora:
        from hf_parallel.planner.memory import lora_share

        share = lora_share(stages, job.lora)
    gradients = parameters * share * gradient_width(job)
    weights = parameters * job.stored
    found = []
    if layout.zero_stage == 0:
        found = [Transfer("dp", "all_reduce", gradients, 1, links["zero"], "gradients")]
    elif layout.zero_stage < 3:
        found = [
            Transfer("dp", "reduce_scatter", gradients, 1, links["zero"], "gradients"),
            Transfer("dp", "all_gather", weights * share, 1, links["zero"], "updated weights"),
        ]
    else:
        found = [
            Transfer("dp", "all_gather", weights, 2 * job.micro_batches, links["zero"], "weights"),
            Transfer("dp", "reduce_scatter", gradients, job.micro_batches, links["zero"], "gradients"),
        ]
    if layout.dp_replicate > 1:
        local = gradients / (layout.shards if layout.zero_stage else 1)
        found.append(Transfer("dp_replicate", "all_reduce", local, 1, links["replicate"], "gradients of replicas"))
    return found


def gradient_width(job: Job) -> int:
    """Bytes per element of gradients that travel: those of the weights."""
    return job.stored
