"""Every collective of this package's own engine in one step of one rank, as rewrite, sharding and pipeline run them.

    tp, sequence parallel    a layer gathers its two inputs, and again both in its backward, where it also gathers what
                             arrives; it scatters two outputs, and two gradients. Checkpointing repeats the two gathers
                             and the first scatter. Gradients of whole parameters are added once per micro-batch.
    tp alone                 two all-reduces forward, two backward (Megatron-LM); checkpointing repeats the first
    vocabulary               the embedding's sum, the head's gradient; of the loss a maximum and two sums per token
    dp                       FSDP2: every layer and the rest; reduced once per step, or per schedule of a pipeline
    pp                       an activation on and a gradient back per neighbour and micro-batch, the loss to all ranks

Bytes are exact where no split layer has a bias; tests compare them with dry runs and with real ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from hf_parallel.planner.communication import Group, Transfer, groups
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import lora_share
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.own_engine import parameters_of
from hf_parallel.planner.stages import Stage, stages_of_rank

_LOSS_BYTES = 4  # fp32


def busiest_traffic(
    shape: ModelShape, stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster
) -> list[Transfer]:
    """What the rank that sends most does in a step of one call."""
    links = groups(layout, cluster)
    held = [[stages[index] for index in stages_of_rank(layout, rank)] for rank in range(layout.pp)]
    each = [own_traffic(shape, mine, layout, job, links) for mine in held]
    return max(each, key=lambda transfers: sum(transfer.bytes for transfer in transfers))


def own_traffic(
    shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, links: dict[str, Group], calls: int = 1
) -> list[Transfer]:
    """What the rank that holds `stages` does; an axis of size 1 does nothing.

    Args:
        calls: of the model per step; a pipeline runs one schedule in each.
    """
    found = [
        *_tensor(shape, stages, layout, job, links["tp"]),
        *_vocabulary(shape, stages, layout, job, links["tp"]),
        *_data(shape, stages, layout, job, links, calls),
        *_pipeline(shape, stages, layout, job, links, calls),
    ]
    return [transfer for transfer in found if transfer.group.size > 1 and transfer.payload and transfer.count]


def _stream(shape: ModelShape, job: Job) -> float:
    return job.micro_batch * job.seq * shape.hidden * job.stored


def _tensor(shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """Under autocast products read and write 16 bits: inputs of regions and their gradients are of the stream's dtype.

    Outputs, what the backward gathers again, and what arrives in it are of the products'.
    """
    layers, again = sum(stage.layers for stage in stages), job.recompute == "full"
    stream, product = _stream(shape, job), _stream(shape, job) * job.width / job.stored
    outputs = (3 if again else 2) * layers
    if not layout.sequence_parallel:
        yield Transfer("tp", "all_reduce", product, outputs * job.micro_batches, group, "outputs of attention and MLP")
        yield Transfer("tp", "all_reduce", stream, 2 * layers * job.micro_batches, group, "gradients of their inputs")
    else:
        ends = sum(stage.is_first + stage.is_last for stage in stages)
        inputs = (4 if again else 2) * layers + ends
        yield Transfer("tp", "all_gather", stream, inputs * job.micro_batches, group, "layers' inputs")
        yield Transfer("tp", "all_gather", product, 4 * layers * job.micro_batches, group, "inputs again, gradients")
        yield Transfer("tp", "reduce_scatter", product, outputs * job.micro_batches, group, "layers' outputs")
        yield Transfer("tp", "reduce_scatter", stream, 2 * layers * job.micro_batches, group, "gradients of inputs")
        whole = sum(count * block.others for stage in stages for block, count in stage.counts)
        last_norm = shape.other_parameters if any(stage.is_last for stage in stages) else 0
        payload = (whole + last_norm) * job.stored
        yield Transfer("tp", "all_reduce", payload, job.micro_batches, group, "gradients of norms")
    yield Transfer("tp", "all_reduce", _shared_heads(shape, stages, layout, job), job.micro_batches, group, "k and v")


def _shared_heads(shape: ModelShape, stages: list[Stage], layout: Layout, job: Job) -> float:
    """Gradients of key and value projections that several ranks share."""
    widths = (
        count * part.kv_heads * (part.qk_width + part.v_width)
        for stage in stages
        for block, count in stage.counts
        for part in block.attentions
        if part.kv_heads < layout.tp
    )
    return shape.hidden * sum(widths) * job.stored


def _vocabulary(shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    stream, tokens = _stream(shape, job), job.micro_batch * job.seq
    if any(stage.is_first for stage in stages):
        yield Transfer("tp", "all_reduce", stream, job.micro_batches, group, "embedding")
    if any(stage.is_last for stage in stages):
        yield Transfer("tp", "all_reduce", stream, job.micro_batches, group, "gradient of the head's input")
        yield Transfer("tp", "all_reduce", tokens * _LOSS_BYTES, job.micro_batches, group, "largest logits")
        yield Transfer("tp", "all_reduce", 2 * tokens * _LOSS_BYTES, job.micro_batches, group, "sums of the loss")


def _data(
    shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, links: dict[str, Group], calls: int
) -> Iterator[Transfer]:
    each = [(parameters_of(block, shape, layout), count) for stage in stages for block, count in stage.counts]
    layers = job.stored * sum(size * count for size, count in each)
    # Embedding and head are split over tp, the last norm is not.
    norm = shape.other_parameters * any(stage.is_last for stage in stages)
    ends = job.stored * ((sum(stage.embedding + stage.head for stage in stages) - norm) / layout.tp + norm)
    trained = lora_share(stages, job.lora) if job.lora else 1.0
    rounds = calls if layout.pp > 1 else 1  # of reducing
    reduced = (layers + ends) * trained
    if not layout.zero_stage:
        yield Transfer("dp_replicate", "all_reduce", reduced, rounds, links["dp"], "gradients")
        return
    gathers = calls if layout.pp > 1 else job.micro_batches
    twice = 2 if layout.zero_stage == 3 and layout.pp == 1 else 1
    yield Transfer("dp_shard", "all_gather", twice * layers + ends, gathers, links["zero"], "weights")
    yield Transfer("dp_shard", "reduce_scatter", reduced, rounds, links["zero"], "gradients")
    if layout.dp_replicate > 1:
        yield Transfer(
            "dp_replicate", "all_reduce", reduced / layout.shards, rounds, links["replicate"], "gradients of replicas"
        )


def _pipeline(
    shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, links: dict[str, Group], calls: int
) -> Iterator[Transfer]:
    parts = layout.tp if layout.sequence_parallel else 1
    sides = sum(2 - stage.is_first - stage.is_last for stage in stages)
    stream = _stream(shape, job) / parts
    yield Transfer("pp", "p2p", stream, sides * job.micro_batches, links["pp"], "between stages")
    yield Transfer("pp", "p2p", _LOSS_BYTES, calls, links["pp"], "loss")
    if shape.tied and layout.pp > 1 and len(stages) == 1 and (stages[0].is_first or stages[0].is_last):
        shards = layout.shards if layout.zero_stage else 1
        both = Group("pp", 2, links["pp"].link, links["pp"].bandwidth)
        payload = shape.embedding_parameters * job.stored / layout.tp / shards
        yield Transfer("pp", "all_reduce", payload, calls, both, "gradients of the tied embedding")
