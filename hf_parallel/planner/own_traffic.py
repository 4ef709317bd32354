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

from hf_parallel.axes.pipeline.orders import BACKWARD_WEIGHT
from hf_parallel.planner.communication import Group, Transfer, groups
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.own_layers import ADAPTER_WIDTH, adapted, adapters_of, parameters_of, summed_width
from hf_parallel.planner.stages import Stage, neighbours_elsewhere, stages_of_rank
from hf_parallel.planner.step_time import schedule_order, simulated_batches

_LOSS_BYTES = 4  # fp32


def busiest_traffic(
    shape: ModelShape, stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster
) -> list[Transfer]:
    """What the rank that sends most does in a step."""
    links = groups(layout, cluster)
    held = [[stages[index] for index in stages_of_rank(layout, rank)] for rank in range(layout.pp)]
    each = [own_traffic(shape, mine, layout, job, links, job.calls) for mine in held]
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
    halves = _layers_of_second_halves(stages, layout, job)
    stream, product = _stream(shape, job), _stream(shape, job) * job.width / job.stored
    if job.lora:
        yield from _tensor_of_adapters(shape, stages, layout, job, group)
        return
    outputs = (3 if again else 2) * layers
    if not layout.sequence_parallel:
        yield Transfer("tp", "all_reduce", product, outputs * job.micro_batches, group, "outputs of attention and MLP")
        yield Transfer("tp", "all_reduce", stream, 2 * layers * job.micro_batches, group, "gradients of their inputs")
    else:
        ends = sum(stage.is_first + stage.is_last for stage in stages)
        inputs = (4 if again else 2) * layers + ends
        yield Transfer("tp", "all_gather", stream, inputs * job.micro_batches, group, "layers' inputs")
        yield Transfer("tp", "all_gather", product, 4 * layers * job.micro_batches, group, "inputs again, gradients")
        yield Transfer("tp", "all_gather", product, 2 * halves, group, "inputs again, for weights' gradients")
        yield Transfer("tp", "reduce_scatter", product, outputs * job.micro_batches, group, "layers' outputs")
        yield Transfer("tp", "reduce_scatter", stream, 2 * layers * job.micro_batches, group, "gradients of inputs")
        whole = sum(count * block.others for stage in stages for block, count in stage.counts)
        last_norm = shape.other_parameters if any(stage.is_last for stage in stages) else 0
        payload = (whole + last_norm) * max(4.0, job.stored)
        yield Transfer("tp", "all_reduce", payload, job.micro_batches, group, "gradients of norms")
    yield Transfer("tp", "all_reduce", _shared_heads(shape, stages, layout, job), job.micro_batches, group, "k and v")


def _tensor_of_adapters(
    shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, group: Group
) -> Iterator[Transfer]:
    """Nothing frozen is gathered again for a gradient, but each adapter's whole half is summed over ranks.

    Adapters in the dtype of their input, as beside an fp32 base, gather it once more instead of keeping it.
    """
    layers, again, batches = sum(stage.layers for stage in stages), job.recompute == "full", job.micro_batches
    stream, product = _stream(shape, job), _stream(shape, job) * job.width / job.stored
    outputs, first = (3 if again else 2) * layers, any(stage.is_first for stage in stages)  # whose input is frozen
    if layout.sequence_parallel:
        inputs = (4 if again else 2) * layers + any(stage.is_last for stage in stages)
        gathered_again = 0 if job.stored < ADAPTER_WIDTH else 2 * layers
        yield Transfer("tp", "all_gather", stream, inputs * batches, group, "layers' inputs")
        yield Transfer("tp", "all_gather", product, (2 * layers + gathered_again) * batches, group, "gradients")
        yield Transfer("tp", "reduce_scatter", product, outputs * batches, group, "layers' outputs")
        yield Transfer("tp", "reduce_scatter", stream, (2 * layers - first) * batches, group, "gradients of inputs")
    else:
        yield Transfer("tp", "all_reduce", product, outputs * batches, group, "outputs of attention and MLP")
        yield Transfer("tp", "all_reduce", stream, (2 * layers - first) * batches, group, "gradients of their inputs")
    blocks = [(block, count) for stage in stages for block, count in stage.counts]
    summed: float = sum(
        count * m.count * (m.outputs if m.split == "row" else m.inputs) for b, count in blocks for m in adapted(b)
    )
    summed += _shared_heads(shape, stages, layout, job) / shape.hidden / job.stored  # of these the other half too
    yield Transfer("tp", "all_reduce", ADAPTER_WIDTH * job.lora * summed, batches, group, "gradients of adapters")


def _layers_of_second_halves(stages: list[Stage], layout: Layout, job: Job) -> int:
    """How often a layer's backward goes in two halves, each of which gathers the inputs of its regions.

    The first stage has no gradient of inputs to compute: its backward is one piece in any schedule.
    """
    if not layout.sequence_parallel or not layout.schedule.endswith(("zero_bubble", "dualpipe_v")):
        return 0
    layers = {stage.index: stage.layers for stage in stages if not stage.is_first}
    if layout.schedule != "dualpipe_v":
        return job.micro_batches * sum(layers.values())
    # The others go in one piece, however many there are.
    order, _ = schedule_order(layout.schedule, layout.pp, layout.virtual_stages, simulated_batches(layout, job))
    actions = [action for rank in order.values() for action in rank if action.kind == BACKWARD_WEIGHT]
    return job.calls * sum(layers.get(action.stage, 0) for action in actions)


def _shared_heads(shape: ModelShape, stages: list[Stage], layout: Layout, job: Job) -> float:
    """Gradients of key and value projections that several ranks share."""
    widths = (
        count * part.kv_heads * (part.qk_width + part.v_width)
        for stage in stages
        for block, count in stage.counts
        for part in block.attentions
        if part.kv_heads < layout.tp
    )
    return shape.hidden * sum(widths) * max(4.0, job.stored)


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
    blocks = [(block, count) for stage in stages for block, count in stage.counts]
    adapters = ADAPTER_WIDTH * sum(adapters_of(block, layout, job.lora) * count for block, count in blocks)
    rounds = calls if layout.pp > 1 else 1  # of reducing
    reduced = adapters if job.lora else (layers + ends) * summed_width(layout, job) / job.stored
    layers += adapters
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
    sides = neighbours_elsewhere(stages)
    stream = _stream(shape, job) / parts
    yield Transfer("pp", "p2p", stream, sides * job.micro_batches, links["pp"], "between stages")
    yield Transfer("pp", "p2p", _LOSS_BYTES, calls, links["pp"], "loss")
    if shape.tied and layout.pp > 1 and len(stages) == 1 and (stages[0].is_first or stages[0].is_last):
        shards = layout.shards if layout.zero_stage else 1
        both = Group("pp", 2, links["pp"].link, links["pp"].bandwidth)
        payload = shape.embedding_parameters * job.stored / layout.tp / shards
        yield Transfer("pp", "all_reduce", payload, calls, both, "gradients of the tied embedding")
