"""Every collective of a training step: axis, kind, payload, number, and what it can run behind.

One entry yields both the bytes that a rank sends and the seconds that it takes, so that the two cannot disagree.
Ring formulas, per rank, for a tensor of S bytes among N ranks (Thakur et al., 2005; NCCL's "bus" bytes):

    all-reduce 2 (N-1)/N S      all-gather, reduce-scatter, all-to-all (N-1)/N S      point-to-point S

Which collectives there are:

    tp          2 all-reduces per layer in the forward, 2 in the backward (Shoeybi et al., 2019, arXiv:1909.08053)
    tp + sp     each as a reduce-scatter and an all-gather (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2)
    cp, ring    keys and values pass by all ranks; backward again, with their gradients (Liu et al., 2023,
                arXiv:2310.01889, section 3)
    cp, Ulysses an all-to-all of queries, keys, values, outputs per pass (Jacobs et al., 2023, arXiv:2309.14509, 3.2)
    ep          2 all-to-alls of top_k tokens per pass (GShard, Lepikhin et al., 2020, arXiv:2006.16668, section 3.2)
    dp          ZeRO 0 to 2: 2 parameters' worth of traffic, 3: 3 (Rajbhandari et al., 2020, arXiv:1910.02054, 7)
    pp          an activation on and a gradient back per boundary and micro-batch

Where engines differ `Habits` decides. Bytes of this package's engine are compared with dry runs and real runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hf_parallel.planner.hardware import Cluster, Link
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.pipeline import (
    Stage,
    adapted,
    adapter_parameters,
    dense_parameters,
    remote_neighbours,
    shared_projections,
    split_backwards,
    stages_by_rank,
)
from hf_parallel.planner.shape import Block

#: Times that a tensor goes round a ring.
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # when: in each micro-batch, or once per step
#: What a collective can run behind: nothing, the pass's matrix products, its attention, all of its compute; the last
#: backward; the simulated schedule.
EXPOSED, PRODUCTS, ATTENTION, COMPUTE, LAST_BACKWARD, SCHEDULE = (
    "nothing",
    "matrix products",
    "attention",
    "compute",
    "last backward",
    "schedule",
)
ADAPTER_WIDTH = 4  # bytes: peft keeps adapters in fp32 beside a 16-bit base
_LOSS_WIDTH = 4  # bytes: fp32


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: how many, the slowest link among them, and a rank's share of it in bytes/s."""

    axis: str
    size: int
    link: Link
    bandwidth: float


@dataclass(frozen=True)
class Transfer:
    """`count` equal collectives of one axis, per micro-batch (forward, backward) or per step.

    `payload`: bytes of the whole tensor: what is reduced, what a gather results in, what is sent.
    """

    axis: str
    kind: str
    payload: float
    count: float
    group: Group
    what: str
    when: str = FORWARD
    behind: str = EXPOSED

    @property
    def bytes(self) -> float:
        """What a rank sends in all of them, by the ring formulas."""
        return self.count * self.payload * ring_factor(self.kind, self.group.size)

    @property
    def seconds(self) -> float:
        """How long all of them take, one after the other."""
        return self.count * transfer_seconds(self.kind, self.payload, self.group)

    def times(self, count: float) -> Transfer:
        """`count` times as many."""
        return dataclasses.replace(self, count=self.count * count)


def ring_factor(kind: str, size: int) -> float:
    """Bytes that a rank sends per byte of payload."""
    return 1.0 if kind == "p2p" else FACTORS[kind] * (size - 1) / size


def transfer_seconds(kind: str, payload: float, group: Group) -> float:
    """Latency of each step of a ring, or of a tree if that is faster, plus bytes over bandwidth."""
    if group.size == 1:
        return 0.0
    steps = 1.0 if kind == "p2p" else FACTORS[kind] * min(group.size - 1, 4 * math.log2(group.size) + 8)
    return steps * group.link.latency + payload * ring_factor(kind, group.size) / group.bandwidth


# ---- groups ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """The group of each axis on a cluster whose ranks are numbered with tp innermost, then cp, dp, pp.

    `zero`: the ranks over which ZeRO spreads what is not an expert's; `experts`: those that hold the same experts.
    """
    inner, replica = layout.tp * layout.cp, layout.dp // layout.dp_replicate
    experts = expert_shards(layout)
    placed = {  # size, distance of neighbours in ranks
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "ep": (layout.ep, 1),
        "dp": (layout.dp, inner),
        "zero": (layout.shards, layout.tp),
        "experts": (experts, layout.tp * layout.shards // experts),
        "replicate": (layout.dp_replicate, inner * replica),
        "pp": (layout.pp, inner * layout.dp),
    }
    return {axis: _group(axis, size, stride, cluster) for axis, (size, stride) in placed.items()}


def expert_shards(layout: Layout) -> int:
    """Over how many ranks ZeRO spreads an expert's states: those of a replica that hold the same experts."""
    return max(1, layout.shards * layout.tp // layout.ep)


def _group(axis: str, size: int, stride: int, cluster: Cluster) -> Group:
    """Ranks of one group in one node drive that node's adapters together; pp sends from one rank to one."""
    efficiency = cluster.gpu.efficiency
    inside = Group(axis, size, cluster.inside, cluster.inside.bandwidth * efficiency.link)
    if size * stride <= cluster.per_node:
        return inside
    together = 1 if axis == "pp" else min(size, max(1, cluster.per_node // stride))
    bandwidth = cluster.between.bandwidth * efficiency.network * together
    return Group(axis, size, cluster.between, min(inside.bandwidth, bandwidth))


# ---- the ledger of a rank -------------------------------------------------------------------------------------------


def busiest(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """The transfers per step of the pipeline rank that sends most bytes."""
    ledgers = (ledger(mine, layout, job, cluster) for mine in stages_by_rank(stages, layout))
    return max(ledgers, key=lambda transfers: sum(transfer.bytes for transfer in transfers))


def ledger(stages: list[Stage], layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Every transfer in one step of the rank that holds `stages`; equal ones are one entry."""
    links, found = groups(layout, cluster), list(step_transfers(stages, layout, job, cluster))
    for stage in stages:
        found += [t.times(job.micro_batches) for t in end_transfers(stage, layout, job, links)]
        for block, count in stage.counts:
            each = block_transfers(block, stage.shape.hidden, layout, job, links)
            found += [t.times(count * job.micro_batches) for t in each]
    return _merged(found)


def _merged(transfers: list[Transfer]) -> list[Transfer]:
    merged: dict[tuple, Transfer] = {}
    for t in transfers:
        key = (t.axis, t.kind, t.payload, t.group)
        if key in merged:
            known = merged[key]
            what = known.what if t.what in known.what else f"{known.what}, {t.what}"
            t = dataclasses.replace(known, count=known.count + t.count, what=what)
        merged[key] = t
    return [t for t in merged.values() if t.count and t.payload and t.group.size > 1]


# ---- of a block, per micro-batch ------------------------------------------------------------------------------------


def block_transfers(block: Block, hidden: int, layout: Layout, job: Job, links: dict[str, Group]) -> list[Transfer]:
    """What one block sends with one micro-batch on one rank; axes of one rank send nothing."""
    found: list[Transfer] = []
    if layout.tp > 1:
        found += _tensor(hidden, layout, job, links["tp"])
        found += _adapters(block, layout, job, links["tp"])
    if layout.cp > 1:
        found += _context(block, layout, job, links["cp"])
    if layout.ep > 1 and block.top_k:
        found += _experts(block, hidden, layout, job, links["ep"])
    if layout.zero_stage:
        found += _weights(block, layout, job, links)
    return [t for t in found if t.payload and t.count and t.group.size > 1]


def stream_bytes(hidden: int, layout: Layout, job: Job) -> tuple[float, float]:
    """Bytes of the residual stream of a micro-batch, [tokens, hidden], as stored and as matrix products read it."""
    numbers = job.micro_batch * job.seq / layout.cp * hidden
    return numbers * job.stored, numbers * job.width


def _tensor(hidden: int, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """Two regions, attention and MLP: inputs and their gradients in the stream's dtype, outputs in the products'."""
    stream, product = stream_bytes(hidden, layout, job)
    again_in = {"none": 0, "selective": 1, "full": 2}[job.recompute]
    again_out = {"none": 0, "selective": 1, "full": job.habits.recomputed_outputs}[job.recompute]
    outputs, gradients = "outputs of attention and MLP", "gradients of their inputs"
    reduce = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    yield Transfer("tp", reduce, product, 2, group, outputs)
    yield Transfer("tp", reduce, product, again_out, group, outputs, BACKWARD)
    yield Transfer("tp", reduce, stream, 2, group, gradients, BACKWARD)
    if layout.sequence_parallel:
        yield Transfer("tp", "all_gather", stream, 2, group, "inputs of attention and MLP")
        yield Transfer("tp", "all_gather", stream, again_in, group, "inputs of attention and MLP", BACKWARD)
        yield Transfer("tp", "all_gather", product, 2, group, "gradients of their outputs", BACKWARD)
        regathered = 2 if job.habits.regathers and not (job.lora and job.stored < ADAPTER_WIDTH) else 0
        yield Transfer("tp", "all_gather", product, regathered, group, "inputs again", BACKWARD, PRODUCTS)


def _adapters(block: Block, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """The half of each adapter that is whole on every rank; both halves of those beside shared heads."""
    if job.lora and job.habits.counts_ends:
        summed = sum(m.count * (m.outputs if m.split == "row" else m.inputs) for m in adapted(block))
        summed += sum(a.kv_heads * (a.qk_width + a.v_width) for a in block.attentions if a.kv_heads < layout.tp)
        payload = ADAPTER_WIDTH * job.lora * summed
        yield Transfer("tp", "all_reduce", payload, 1, group, "gradients of adapters", BACKWARD, PRODUCTS)


def _context(block: Block, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """A ring moves keys and values, backward also their gradients; Ulysses each way what attention reads and writes.

    Ulysses exchanges 4 N h / P numbers where all heads are alike.
    """
    rows = job.micro_batch * job.seq * job.width / layout.tp
    keys = sum(a.kv_heads * (a.qk_width + a.v_width) for a in block.attentions)
    queries = sum(a.heads * (a.qk_width + a.v_width) for a in block.attentions)
    again = int(job.recompute == "full")
    if layout.context == "ring":
        kind, payload, back, behind, what = "all_gather", rows * keys, 2 + again, ATTENTION, "keys and values"
    else:
        payload, back = rows * (queries + keys) / layout.cp, 1 + again
        kind, behind, what = "all_to_all", EXPOSED, "queries, keys, values, outputs"
    yield Transfer("cp", kind, payload, 1, group, what, FORWARD, behind)
    yield Transfer("cp", kind, payload, back, group, what, BACKWARD, behind)


def _experts(block: Block, hidden: int, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """Tokens to their experts and back."""
    payload = stream_bytes(hidden, layout, job)[1] / layout.tp * block.top_k
    again = {"none": 0, "selective": 1, "full": 2}[job.recompute]
    yield Transfer("ep", "all_to_all", payload, 2, group, "tokens to experts and back")
    yield Transfer("ep", "all_to_all", payload, 2 + again, group, "tokens to experts and back", BACKWARD)


def _weights(block: Block, layout: Layout, job: Job, links: dict[str, Group]) -> Iterator[Transfer]:
    dense, experts = dense_parameters(block, layout.tp) * job.stored, block.expert_parameters / layout.ep * job.stored
    adapters = ADAPTER_WIDTH * adapter_parameters(block, layout.tp, job.lora) if job.lora else 0.0
    yield from _zero(dense + adapters, adapters if job.lora else dense, links["zero"], layout, job)
    yield from _zero(experts, 0.0 if job.lora else experts, links["experts"], layout, job)


def _zero(
    weights: float, gradients: float, group: Group, layout: Layout, job: Job, kept: bool = False
) -> Iterator[Transfer]:
    """ZeRO-3 gathers weights in each pass and reduces gradients, FSDP2 in the last micro-batch only.

    FSDP2 at stages 1 and 2 keeps weights from the forward to the backward, those of the ends (`kept`) at every stage;
    in a pipeline it keeps all of them for the whole schedule.
    """
    axis, fsdp2 = job.habits.data_axis, job.habits.fsdp2
    if layout.zero_stage == 3 or (layout.zero_stage and fsdp2 and layout.pp == 1):
        yield Transfer(axis, "all_gather", weights, 1, group, "weights", FORWARD, COMPUTE)
    if layout.zero_stage == 3:
        rounds = 1 / job.micro_batches if fsdp2 else 1
        yield Transfer(axis, "all_gather", weights, 0 if kept and fsdp2 else 1, group, "weights", BACKWARD, COMPUTE)
        yield Transfer(axis, "reduce_scatter", gradients, rounds, group, "gradients", BACKWARD, COMPUTE)


# ---- of a stage, per micro-batch, beside its blocks -----------------------------------------------------------------


def end_transfers(stage: Stage, layout: Layout, job: Job, links: dict[str, Group]) -> Iterator[Transfer]:
    """Embedding, head, loss, and what all blocks of a stage send together, with one micro-batch."""
    if layout.tp > 1 and job.habits.counts_ends:
        yield from _vocabulary(stage, layout, job, links["tp"])
        yield from _whole_on_all_ranks(stage, layout, job, links["tp"])
        yield from _second_halves(stage, layout, job, links["tp"])
    weights = stage.ends(layout.tp) * job.stored
    yield from _zero(weights, 0.0 if job.lora else weights, links["zero"], layout, job, kept=True)


def _vocabulary(stage: Stage, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """The embedding's sum, the head's gradient; of the loss a maximum and two sums per token."""
    stream, _ = stream_bytes(stage.shape.hidden, layout, job)
    tokens = job.micro_batch * job.seq / layout.cp * _LOSS_WIDTH
    if stage.is_first:
        yield Transfer("tp", "all_reduce", stream, 1, group, "embedding")
        if layout.sequence_parallel and not job.lora:
            yield Transfer("tp", "all_gather", stream, 1, group, "gradient of the embedding", BACKWARD)
        if job.lora:  # the first layer's input is frozen: it has no gradient
            reduce = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
            yield Transfer("tp", reduce, stream, -1, group, "gradients of their inputs", BACKWARD)
    if stage.is_last:
        if layout.sequence_parallel:
            yield Transfer("tp", "all_gather", stream, 1, group, "input of the head")
        yield Transfer("tp", "all_reduce", stream, 1, group, "gradient of the head's input", BACKWARD)
        yield Transfer("tp", "all_reduce", tokens, 1, group, "largest logits")
        yield Transfer("tp", "all_reduce", 2 * tokens, 1, group, "sums of the loss")


def _whole_on_all_ranks(stage: Stage, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """Gradients of what tp does not split: norms under sequence parallelism, projections of shared heads."""
    if job.lora:
        return
    norms = sum(count * block.others for block, count in stage.counts)
    norms += stage.shape.other_parameters if stage.is_last else 0
    shared = sum(count * shared_projections(block, layout.tp) for block, count in stage.counts)
    if layout.sequence_parallel:
        yield Transfer("tp", "all_reduce", norms * job.stored, 1, group, "gradients of norms", BACKWARD)
    yield Transfer("tp", "all_reduce", shared * job.stored, 1, group, "gradients of k and v", BACKWARD)


def _second_halves(stage: Stage, layout: Layout, job: Job, group: Group) -> Iterator[Transfer]:
    """A backward in two halves gathers the inputs of its regions for each half."""
    if layout.sequence_parallel and not job.lora:
        _, product = stream_bytes(stage.shape.hidden, layout, job)
        count = 2 * stage.layers * split_backwards(stage.index, layout, job) / job.micro_batches
        yield Transfer("tp", "all_gather", product, count, group, "inputs again", BACKWARD, PRODUCTS)


# ---- of a rank, per step --------------------------------------------------------------------------------------------


def step_transfers(stages: list[Stage], layout: Layout, job: Job, cluster: Cluster) -> Iterator[Transfer]:
    """What the rank that holds `stages` sends once per step, or once per call of a pipeline's schedule."""
    links = groups(layout, cluster)
    yield from _data(stages, layout, job, links)
    if layout.pp > 1:
        yield from _pipeline(stages, layout, job, links)


def _data(stages: list[Stage], layout: Layout, job: Job, links: dict[str, Group]) -> Iterator[Transfer]:
    """Gradients, and updated weights, of what is not an expert's and of experts; ZeRO-3 does both block by block."""
    dense = sum(stage.dense(layout.tp) for stage in stages) * job.stored
    experts = sum(stage.experts(layout.ep) for stage in stages) * job.stored
    adapters = ADAPTER_WIDTH * sum(stage.adapters(layout.tp, job.lora) for stage in stages)
    yield from _once(dense + adapters, adapters if job.lora else dense, links["zero"], layout, job, links)
    yield from _once(experts, 0.0 if job.lora else experts, links["experts"], layout, job, links)


def _once(
    weights: float, gradients: float, group: Group, layout: Layout, job: Job, links: dict[str, Group]
) -> Iterator[Transfer]:
    axis, fsdp2, stage, rounds = job.habits.data_axis, job.habits.fsdp2, layout.zero_stage, job.calls
    if stage == 0:
        axis = "dp_replicate" if fsdp2 else axis
        yield Transfer(axis, "all_reduce", gradients, rounds, group, "gradients", STEP, LAST_BACKWARD)
    elif stage < 3:
        yield Transfer(axis, "reduce_scatter", gradients, rounds, group, "gradients", STEP, LAST_BACKWARD)
        if layout.pp > 1 or not fsdp2:
            gathered = weights if fsdp2 else gradients
            yield Transfer(axis, "all_gather", gathered, rounds, group, "updated weights", STEP)
    part, replicas = gradients / (group.size if stage else 1), links["replicate"]
    yield Transfer("dp_replicate", "all_reduce", part, rounds, replicas, "gradients of replicas", STEP)


def _pipeline(stages: list[Stage], layout: Layout, job: Job, links: dict[str, Group]) -> Iterator[Transfer]:
    """Activations and gradients to neighbours; the loss to all ranks, the gradient of an embedding at both ends."""
    shape, count = stages[0].shape, remote_neighbours(stages) * job.micro_batches
    payload = boundary_bytes(shape.hidden, layout, job)
    yield Transfer("pp", "p2p", payload, count, links["pp"], "between stages", STEP, SCHEDULE)
    if not job.habits.counts_ends:
        return
    yield Transfer("pp", "p2p", _LOSS_WIDTH, job.calls, links["pp"], "loss", STEP, SCHEDULE)
    if shape.tied and len(stages) == 1 and (stages[0].is_first or stages[0].is_last):
        payload = shape.embedding_parameters * job.stored / layout.tp / (layout.shards if layout.zero_stage else 1)
        ends = dataclasses.replace(links["pp"], size=2)
        yield Transfer("pp", "all_reduce", payload, job.calls, ends, "gradients of the tied embedding", STEP)


def boundary_bytes(hidden: int, layout: Layout, job: Job) -> float:
    """Bytes of what one stage sends the next for one micro-batch."""
    return stream_bytes(hidden, layout, job)[0] / (layout.tp if layout.sequence_parallel else 1)
