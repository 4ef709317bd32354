"""Every collective of a training step: axis, kind, payload, number, and the computation it can run behind.

One entry yields both the bytes that a rank sends and the seconds that it takes, so that the two cannot disagree.
They are:

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hf_parallel.ask.keys.pipeline import DELAYED_SCHEDULES, JOINING_SCHEDULES
from hf_parallel.planner.hardware import Cluster, Link
from hf_parallel.planner.layout import Job, Layout, make_computed_job
from hf_parallel.planner.pipeline import (
    Stage,
    count_adapter_parameters,
    count_dense_parameters,
    count_packed_parameters,
    count_remote_neighbours,
    count_shared_projections,
    group_stages_by_rank,
    is_shared,
    list_adapted,
    list_mirrored_stages,
    split_backwards,
)
from hf_parallel.planner.shape import Block
from hf_parallel.planner.states import (
    ADAPTER_WIDTH,
    CODE_BYTES,
    count_adapter_width,
    count_packed_width,
    count_summed_width,
)

# ---- One kind of collective in a step: its bytes by the ring formulas, its seconds over the slowest link of its
# group
# Per rank, for a tensor of S bytes among N ranks (Thakur et al., 2005; NCCL's tests call the same "bus" bytes):
#
#     all-reduce 2 (N-1)/N S      all-gather, reduce-scatter, all-to-all (N-1)/N S      point-to-point S


#: Times that a tensor goes round a ring.
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # when: in each micro-batch, or once per step
#: What a collective runs behind, if anything: a pass's matrix products, its attention, all of its compute; gradients
#: behind the last backward, updated weights behind the first forward; the schedule simulates sends between stages.
EXPOSED, PRODUCTS, ATTENTION, COMPUTE = "nothing", "matrix products", "attention", "compute"
LAST_BACKWARD, FIRST_FORWARD, SCHEDULE = "last backward", "first forward", "schedule"


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
        """The bytes that a rank sends in all of them, by the ring formulas."""
        return self.count * self.payload * ring_factor(self.kind, self.group.size)

    @property
    def seconds(self) -> float:
        """The seconds that all of them take, one after the other."""
        return self.count * compute_transfer_seconds(self.kind, self.payload, self.group)

    def times(self, count: float) -> Transfer:
        """Return `count` times as many."""
        return dataclasses.replace(self, count=self.count * count)


def ring_factor(kind: str, size: int) -> float:
    """Return the bytes that a rank sends per byte of payload."""
    return 1.0 if kind == "p2p" else FACTORS[kind] * (size - 1) / size


def compute_transfer_seconds(kind: str, payload: float, group: Group) -> float:
    """Return the latency of each step of a ring, or of a tree if that is faster, plus bytes over bandwidth."""
    if group.size == 1:
        return 0.0
    known = {name: (latency, bandwidth) for name, latency, bandwidth in group.link.measured}
    measured = known.get(f"{group.axis} {kind}") or known.get(kind)  # as the axis makes them, else bare
    if measured is not None:
        latency, bandwidth = measured
        rounds = 1 if kind == "p2p" else group.size - 1
        return rounds * latency + payload * ring_factor(kind, group.size) / bandwidth
    steps = 1.0 if kind == "p2p" else FACTORS[kind] * min(group.size - 1, 4 * math.log2(group.size) + 8)
    return steps * group.link.latency + payload * ring_factor(kind, group.size) / group.bandwidth


@functools.lru_cache(maxsize=4096)
def make_groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """Return the group of each axis on a cluster whose ranks are numbered with tp innermost, then cp, dp, pp.

    `cp`: of rings; `heads`: of Ulysses. `zero`: the ranks over which ZeRO spreads what is not an expert's; `experts`:
    those that hold the same experts.
    """
    inner, replica = layout.tp * layout.cp, layout.dp // layout.dp_replicate
    experts = count_expert_shards(layout)
    placed = {  # size, distance of neighbours in ranks
        "tp": (layout.tp, 1),
        "tp_row": (layout.tp_rows, layout.tp_columns),
        "tp_col": (layout.tp_columns, 1),
        "cp": (layout.cp // layout.heads_over, layout.tp * layout.heads_over),
        "heads": (layout.heads_over, layout.tp),
        "ep": (layout.ep, 1),
        "dp": (layout.dp, inner),
        "zero": (layout.shards, layout.tp),
        "within": (layout.hierarchical_shard, layout.tp),
        "across": (layout.shards // layout.hierarchical_shard, layout.tp * layout.hierarchical_shard),
        "experts": (experts, layout.tp * layout.shards // experts),
        "replicate": (layout.dp_replicate, inner * replica),
        "pp": (layout.pp, inner * layout.dp),
    }
    return {axis: _group(axis, size, stride, cluster) for axis, (size, stride) in placed.items()}


def count_expert_shards(layout: Layout) -> int:
    """Count the ranks over which ZeRO spreads an expert's states: those of a replica that hold the same experts."""
    return max(1, layout.shards * layout.tp // layout.expert_split)


def _group(axis: str, size: int, stride: int, cluster: Cluster) -> Group:
    """Return a group's slowest link and a rank's share of it: its ranks in a node drive the adapters together.

    Under pp one rank sends to one. The more nodes a ring spans, the more switches its flows share with others (Gangidi
    et al., 2024, "RDMA over Ethernet for distributed AI training at Meta scale", SIGCOMM, section 4: collisions of
    flows between switches).
    """
    efficiency = cluster.gpu.efficiency
    inside = Group(axis, size, cluster.inside, cluster.inside.bandwidth * efficiency.link)
    if size * stride <= cluster.per_node:
        return inside
    together = 1 if axis == "pp" else min(size, max(1, cluster.per_node // stride))
    bandwidth = cluster.between.bandwidth * efficiency.network * together
    if axis != "pp":
        bandwidth /= 1 + efficiency.taper * math.log2(size * stride / cluster.per_node)
    return Group(axis, size, cluster.between, min(inside.bandwidth, bandwidth))


_LOSS_WIDTH = 4  # bytes: fp32
#: Part of tp's collectives that `tp_overlap` hides: one of two halves. Torch's fused operations hid 0.35 to 0.5 of
#: them in eight pairs of torchtitan's runs.
_OVERLAPPED = 0.5


# ---- the ledger of a rank -------------------------------------------------------------------------------------------


def find_busiest(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Return the transfers per step of the pipeline rank that sends most bytes."""
    ledgers = (list_transfers(mine, layout, job, cluster) for mine in group_stages_by_rank(stages, layout))
    return max(ledgers, key=lambda transfers: sum(transfer.bytes for transfer in transfers))


def list_transfers(stages: list[Stage], layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Return every transfer in one step of the rank that holds `stages`; equal ones are one entry."""
    found: list[Transfer] = []
    copied = list_mirrored_stages(stages, layout, job)
    runs = job.micro_batches / (2 if copied else 1)  # half of the micro-batches run on the copies
    for stage in (*stages, *copied):
        for block, count in stage.counts:
            each = block_transfers(block, stage.shape.hidden, layout, job, cluster)
            found += [t.times(count * runs) for t in each]
        found += [t.times(runs) for t in end_transfers(stage, layout, job, cluster)]
    found += step_transfers(stages, layout, job, cluster)
    merged: dict[tuple, Transfer] = {}
    for t in found:
        known = merged.get(key := (t.axis, t.kind, t.payload, t.group))
        if known:
            what = known.what if t.what in known.what else f"{known.what}, {t.what}"
            t = dataclasses.replace(known, count=known.count + t.count, what=what)
        merged[key] = t
    return [t for t in merged.values() if t.count]


def block_transfers(block: Block, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Return what one block sends with one micro-batch on one rank."""
    sends = _Sends(hidden, layout, job, cluster)
    found = [*sends.regions(block), *sends.adapters(block), *sends.context(block), *sends.experts(block)]
    return _drop_empty_transfers([*found, *sends.weights(block)])


def end_transfers(stage: Stage, layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Return what a stage sends with one micro-batch beside its blocks: embedding, head, loss, norms."""
    sends = _Sends(stage.shape.hidden, layout, job, cluster)
    ends = stage.ends(layout.tp)
    gradients = 0.0 if job.lora else ends * count_summed_width(sends.job)
    found = list(sends.zero(ends * sends.job.stored, gradients, "zero", kept=True))
    if job.habits.whole_logits and stage.is_last:
        found.append(sends.tp("all_gather", sends.tokens * stage.shape.head_outputs * job.width, 1, "logits"))
    if job.habits.counts_ends:
        found += sends.ends(stage)
        if layout.sequence_parallel and not job.lora:  # a backward in two halves gathers its regions' inputs for each
            regions = sum(count * count_regions(block, layout) for block, count in stage.counts)
            count = regions * split_backwards(stage.index, layout, sends.job) / job.micro_batches
            what = "inputs of attention and MLP"
            found.append(sends.tp("all_gather", sends.product, count, what, BACKWARD, PRODUCTS))
    return _drop_empty_transfers(found)


def step_transfers(stages: list[Stage], layout: Layout, job: Job, cluster: Cluster) -> list[Transfer]:
    """Return what the rank that holds `stages` sends once per step, or once per call of a pipeline's schedule.

    These are gradients and updated weights that `_Sends.zero` does not send, and what stages send: activations and
    gradients to neighbours, the loss to all ranks, a tied embedding's gradient to both ends.
    """
    shape, cut = stages[0].shape, layout.tp_and_columns
    sends = _Sends(shape.hidden, layout, job, cluster)
    job, link, runs = sends.job, sends.links["pp"], sends.runs
    counts = [block_count for stage in stages for block_count in stage.counts]
    dense, _ = sends.stored_bytes(sum(stage.dense(*cut) for stage in stages), counts)
    experts = sum(stage.experts(layout.expert_split) for stage in stages) * job.stored
    adapters = sum(stage.adapters(job.lora, *cut) for stage in stages)
    summed = ADAPTER_WIDTH * adapters if job.lora else dense * sends.widened
    found = [*sends.once(dense + count_adapter_width(job) * adapters, summed, "zero")]
    found += sends.once(experts, 0.0 if job.lora else experts * sends.widened, "experts")
    count = count_remote_neighbours(stages) * job.micro_batches
    found.append(Transfer("pp", "p2p", sends.boundary, count, link, "between stages", STEP, SCHEDULE))
    copied = list_mirrored_stages(stages, layout, job)
    for mine, what in ((stages, "weights to their mirror"), (copied, "gradients to their owner")) if copied else ():
        if job.lora:
            trained = count_adapter_width(job) * sum(stage.adapters(job.lora, *cut) for stage in mine)
        else:
            trained = sends.kept_width * sum(stage.dense(*cut) for stage in mine)
        found.append(Transfer("pp", "p2p", trained, runs, link, what, STEP))
    if job.habits.counts_ends:
        found.append(Transfer("pp", "p2p", _LOSS_WIDTH * job.calls / runs, runs, link, "loss", STEP, SCHEDULE))
        if shape.tied and len(stages) == 1 and (stages[0].is_first or stages[0].is_last):
            shards = layout.shards if layout.zero_stage else 1
            payload = shape.embedding_parameters * sends.kept_width / layout.tp / shards
            both, what = dataclasses.replace(link, size=min(2, link.size)), "gradients of the tied embedding"
            found.append(Transfer("pp", "all_reduce", payload, sends.reductions, both, what, STEP))
    return _drop_empty_transfers(found)


def count_regions(block: Block, layout: Layout) -> int:
    """Return how many regions of tensor parallelism a layer has: attention and MLP.

    Under ep experts by themselves are no region: their tokens travel from the tp ranks that hold them.
    """
    travel = layout.ep > 1 and layout.sequence_parallel and block.top_k > 0
    return 1 if travel and sum(matrix.split == "row" for matrix in block.matrices) == 1 else 2


def _drop_empty_transfers(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Leave out axes of one rank, and what has no bytes: they send nothing."""
    return [t for t in transfers if t.payload and t.count and t.group.size > 1]


class _Sends:
    """The transfers of one layout and batch on one rank; counts are per micro-batch, those of STEP per step.

    `stream`, `product`: bytes of a micro-batch's residual stream [tokens, hidden] as it is stored, and in the dtype of
    matrix products.
    """

    def __init__(self, hidden: int, layout: Layout, job: Job, cluster: Cluster) -> None:
        self.kept_width = job.stored  # of weights where they rest
        self.job = job = make_computed_job(layout, job)
        self.layout, self.habits, self.cluster, self.links = layout, job.habits, cluster, make_groups(layout, cluster)
        self.widened = count_summed_width(job) / job.stored  # a gradient's bytes beside its weight's
        self.tokens = job.tokens(layout)
        self.stream, self.product = (self.tokens * hidden * width for width in (job.stored, job.width))
        self.entering = self.product if job.habits.lowers_inputs else self.stream
        # What tp ranks gather of a sequence, and of gradients.
        entering, product = self.entering, self.product
        self.gathered = (self.tokens * hidden,) * 2 if job.gathers_codes else (entering, product)
        self.data_axis = "dp_shard" if job.habits.fsdp2 else "dp"
        self.reduce = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        self.boundary = self.stream / layout.stream_parts  # bytes that a stage sends the next for a micro-batch
        # Inputs are gathered again for the weights' gradients, but adapters keep what they would gather.
        self.regathers = job.habits.regathers and not (job.lora and job.stored < count_adapter_width(job))
        # Runs of a pipeline's schedule in a step: one, where this package joins the batches of a step.
        joining = layout.schedule in (*JOINING_SCHEDULES, *DELAYED_SCHEDULES) and layout.pp > 1
        self.runs = 1 if joining and job.engine == "hf_parallel" else job.calls
        # A step reduces what micro-batches have added up: in every run of a schedule, or once.
        held = job.habits.fsdp2 and layout.has_several_data_ranks and not layout.reduces_each_run
        self.reductions = 1 if held else self.runs

    def tp(
        self,
        kind: str,
        payload: float,
        count: float,
        what: str,
        when: str = FORWARD,
        behind: str = EXPOSED,
        axis: str = "tp",
    ) -> Transfer:
        return Transfer(axis, kind, payload, count, self.links[axis], what, when, behind)

    # ---- tensor parallelism --------------------------------------------------------------------------------------

    def regions(self, block: Block) -> Iterator[Transfer]:
        """Yield what attention and MLP send: inputs and their gradients, and outputs in the dtype of products.

        Experts are not on a grid.
        """
        experts = any(matrix.split == "expert" for matrix in block.matrices)
        of_layer = count_regions(block, self.layout)
        on_grid = 0 if self.layout.tp_columns == 1 else 2 - experts
        count = of_layer - on_grid  # over all ranks of tp
        if count:
            inputs, outputs, again_in, again_out = self.around_regions(count, of_layer)
            yield from self.around_products(self.reduce, self.product, count, outputs, FORWARD)
            yield from self.around_products(self.reduce, self.product, again_out, outputs, BACKWARD)
            yield from self.around_products(self.reduce, self.entering, count, "gradients of inputs", BACKWARD)
            if self.layout.sequence_parallel:
                entering, leaving = self.gathered
                yield from self.around_products("all_gather", entering, count, inputs, FORWARD)
                yield from self.around_products("all_gather", entering, again_in, inputs, BACKWARD)
                yield from self.around_products("all_gather", leaving, count, "gradients of outputs", BACKWARD)
                yield self.tp("all_gather", self.product, count * self.regathers, inputs, BACKWARD, PRODUCTS)
        if on_grid:
            yield from self.grid_regions(block, on_grid, of_layer)

    def around_products(self, kind: str, payload: float, count: float, what: str, when: str) -> Iterator[Transfer]:
        """Yield what a region waits for, and the part of it that runs behind its products.

        `tp_overlap` sends one half of an output while the other is computed; in compiled layers torch's fused
        operations do so with inputs, too, and in the backward.
        """
        if self.habits.transformer_engine and self.layout.sequence_parallel:
            yield self.tp(kind, payload, count, what, when, PRODUCTS)
            return
        cut = self.job.compiled or (kind == self.reduce and when == FORWARD)
        hidden = _OVERLAPPED if self.layout.tp_overlap and cut else 0.0
        yield self.tp(kind, payload, count * (1 - hidden), what, when)
        yield self.tp(kind, payload, count * hidden, what, when, PRODUCTS)

    def around_regions(self, count: int, of_layer: int) -> tuple[str, str, float, float]:
        """Return what goes in and out of regions, in words, and how often a recomputed layer sends each again.

        Args:
            of_layer: regions of a layer, of which `count` communicate alike.
        """
        keeps, share = self.habits.keeps_products, self.job.recomputed_share
        again_in = {"none": 0, "selective": count if keeps else 1, "full": count * share}[self.job.each_recomputed]
        # The last output of a layer is not needed again.
        full = max(0, self.habits.recomputed_outputs - (of_layer - count)) * share
        again_out = {"none": 0, "selective": 0 if keeps else 1, "full": full}[self.job.each_recomputed]
        return "inputs of attention and MLP", "outputs of attention and MLP", again_in, again_out

    def grid_regions(self, block: Block, count: int, of_layer: int) -> Iterator[Transfer]:
        """Yield inputs and outputs of `count` regions on a grid of R x C ranks: all tokens with 1/C of their features.

        Tokens go to their row's ranks by features, and these gather them over rows; and the way back. Inside a region
        the grid's columns sum outputs of column layers, and gather inputs of row layers.
        """
        inputs, outputs, again_in, again_out = self.around_regions(count, of_layer)
        columns, own = self.layout.tp_columns, self.layout.tp
        if not self.layout.sequence_parallel:
            again_in = 0  # a rank takes its features of what it has
        for payload, kind, times, what, when in (
            (self.product, self.reduce, count, outputs, FORWARD),
            (self.product, self.reduce, again_out, outputs, BACKWARD),
            (self.entering, self.reduce, count, "gradients of inputs", BACKWARD),
            (self.entering, "all_gather", count * self.layout.sequence_parallel, inputs, FORWARD),
            (self.entering, "all_gather", again_in, inputs, BACKWARD),
            (self.product, "all_gather", count * self.layout.sequence_parallel, "gradients of outputs", BACKWARD),
        ):
            yield self.tp(kind, payload / columns, times, what, when, axis="tp_row")
            if self.layout.sequence_parallel:
                yield self.tp("all_to_all", payload / own, times, what, when, axis="tp_col")
            else:
                yield self.tp("all_gather", payload, times, what, when, axis="tp_col")
        if self.layout.sequence_parallel:
            again = count * self.regathers
            yield self.tp("all_gather", self.product / columns, again, inputs, BACKWARD, PRODUCTS, "tp_row")
        rows, share = self.tokens * self.job.width / self.layout.tp_rows, self.job.recomputed_share
        again_full = share * (self.job.each_recomputed == "full")
        again_rows = self.job.each_recomputed == "selective" or again_full
        for matrix in block.matrices:
            if matrix.split == "column":
                payload, what = rows * matrix.outputs, "sums over columns"
                yield self.tp("reduce_scatter", payload, matrix.count, what, axis="tp_col")
                yield self.tp("reduce_scatter", payload, matrix.count * again_full, what, BACKWARD, axis="tp_col")
                yield self.tp("all_gather", payload, matrix.count, what, BACKWARD, axis="tp_col")
            elif matrix.split == "row":
                payload, what = rows * matrix.inputs, "inputs of row layers"
                yield self.tp("all_gather", payload, matrix.count, what, axis="tp_col")
                yield self.tp("all_gather", payload, matrix.count * again_rows, what, BACKWARD, axis="tp_col")
                yield self.tp("reduce_scatter", payload, matrix.count, what, BACKWARD, axis="tp_col")
                regathers = matrix.count * (self.habits.regathers and not self.job.lora)
                yield self.tp("all_gather", payload, regathers, what, BACKWARD, PRODUCTS, "tp_col")
        yield from self.grid_heads(block, 1, again_rows, 1)

    def grid_heads(self, block: Block, forward: float, again: float, backward: float) -> Iterator[Transfer]:
        """Yield parts of keys and values to the ranks of one head, and of their gradients, so many times each."""
        for part in block.attentions:
            # The ranks of tp that share a head: this one alone where each has some.
            group = _group("tp", max(1, self.layout.tp // part.kv_heads), 1, self.cluster)
            payload, what = self.tokens * self.job.width * part.key_numbers / part.kv_heads, "shared keys and values"
            for kind, count, when in (
                ("all_gather", forward, FORWARD),
                ("all_gather", again, BACKWARD),
                ("reduce_scatter", backward, BACKWARD),
            ):
                yield Transfer("tp", kind, payload, count, group, what, when)

    def adapters(self, block: Block) -> Iterator[Transfer]:
        """Yield the half of each adapter that is whole on every rank; both halves of those beside shared heads.

        On a grid, the half that its rows hold alike; and of each the inner product, which columns sum.
        """
        if not (self.job.lora and self.habits.counts_ends):
            return
        what, rank = "gradients of adapters", ADAPTER_WIDTH * self.job.lora
        if self.layout.tp_columns > 1:
            width = self.job.width if self.job.autocast else count_adapter_width(self.job)
            columns, inner = self.layout.tp_columns, self.tokens * width * self.job.lora
            for matrix in list_adapted(block):
                halved = rank * (matrix.outputs if matrix.split == "row" else matrix.inputs) / columns
                yield self.tp("all_reduce", halved, matrix.count, what, BACKWARD, PRODUCTS, "tp_row")
                for when in (FORWARD, BACKWARD):
                    yield self.tp("all_reduce", inner, matrix.count, "inner products of adapters", when, axis="tp_col")
                if is_shared(matrix, block, self.layout.tp):
                    yield self.tp("all_reduce", rank * matrix.outputs, matrix.count, what, BACKWARD, PRODUCTS)
            return
        summed = sum(m.count * (m.outputs if m.split == "row" else m.inputs) for m in list_adapted(block))
        shared = [a for a in block.attentions if a.kv_heads < self.layout.tp]
        summed += sum(a.key_numbers for a in shared)
        yield self.tp("all_reduce", rank * summed, 1, what, BACKWARD, PRODUCTS)

    def ends(self, stage: Stage) -> Iterator[Transfer]:
        """Yield the embedding's sum and the head's gradient, of the loss a maximum and two sums per token.

        And gradients of what tp does not split: norms under sequence parallelism, projections of shared heads.
        """
        gathers, losses = self.layout.sequence_parallel, self.tokens * _LOSS_WIDTH
        if stage.is_first:
            yield self.tp("all_reduce", self.stream, 1, "embedding")
            frozen = self.job.lora and self.job.recompute == "none"  # PEFT gives checkpoints inputs with gradients
            if frozen and self.layout.tp_columns > 1:
                # Less what the first layer's frozen input does not need: its gradient, and those of its products.
                first, what = stage.counts[0][0], "gradients of inputs"
                own = self.entering / (self.layout.tp if gathers else 1)
                yield self.tp(self.reduce, self.entering / self.layout.tp_columns, -1, what, BACKWARD, axis="tp_row")
                yield self.tp("all_to_all" if gathers else "all_gather", own, -1, what, BACKWARD, axis="tp_col")
                rows = self.tokens * self.job.width / self.layout.tp_rows
                for part in first.attentions:
                    numbers = part.heads * part.qk_width + part.key_numbers
                    yield self.tp("all_gather", rows * numbers, -1, "sums over columns", BACKWARD, axis="tp_col")
                yield from self.grid_heads(first, 0, 0, -1)
            elif frozen:  # the first layer's input has no gradient
                yield self.tp(self.reduce, self.entering, -1, "gradients of inputs", BACKWARD)
            else:
                yield self.tp("all_gather", self.stream, gathers, "gradient of the embedding", BACKWARD)
        if stage.is_last:
            yield self.tp("all_gather", self.stream, gathers, "input of the head")
            yield self.tp("all_reduce", self.entering, 1, "gradient of the head's input", BACKWARD)
            yield self.tp("all_reduce", losses, 1, "largest logits")
            yield self.tp("all_reduce", 2 * losses, 1, "sums of the loss")
        norms = sum(count * block.others for block, count in stage.counts)
        norms += stage.shape.other_parameters if stage.is_last else 0
        if self.layout.ep > 1:  # routers, of which each rank has met its own tokens
            routers = ((m, count) for block, count in stage.counts if block.top_k for m in block.matrices)
            norms += sum(count * m.parameters for m, count in routers if m.split == "whole")
        shared = sum(
            count * count_shared_projections(block, *self.layout.tp_and_columns) for block, count in stage.counts
        )
        if not self.job.lora:
            gathers, width = self.layout.sequence_parallel, count_summed_width(self.job)
            yield self.tp("all_reduce", norms * width, gathers, "gradients of norms", BACKWARD)
            yield self.tp("all_reduce", shared * width, 1, "gradients of k and v", BACKWARD)

    # ---- context, experts ----------------------------------------------------------------------------------------

    def context(self, block: Block) -> Iterator[Transfer]:
        """Yield what `cp` sends: a ring keys and values, backward also their gradients; Ulysses what attention reads
        and writes.

        Ulysses exchanges 4 N h / P numbers where all heads are alike, and all but the outputs again where a layer is
        recomputed, which is given what attention gave. In a hybrid a ring has the keys of a part of the heads. What
        is gathered at once is waited for, and so is what a ring was measured to add to attention. This package sends
        gradients of keys in fp32, as they are summed.
        """
        ring, heads = self.links["cp"], self.links["heads"]
        rows = self.job.micro_batch * self.job.seq * self.job.width / self.layout.tp
        keys = sum(a.key_numbers for a in block.attentions)
        outputs = rows / self.layout.cp * sum(a.heads * a.v_width for a in block.attentions)
        inputs = rows / self.layout.cp * (sum(a.heads * a.qk_width for a in block.attentions) + keys)
        yield Transfer("cp", "all_to_all", inputs + outputs, 1, heads, "queries, keys, values, outputs")
        yield Transfer("cp", "all_to_all", inputs + outputs, 1, heads, "queries, keys, values, outputs", BACKWARD)
        if self.job.each_recomputed == "full":
            again = self.job.recomputed_share
            yield Transfer("cp", "all_to_all", inputs, again, heads, "queries, keys, values", BACKWARD)
        part, what, at_once = rows * keys / heads.size, "keys, values", self.layout.context == "allgather"
        waited = at_once or ring.link.has_measured("cp", "all_gather")
        behind = EXPOSED if waited else ATTENTION
        back = "reduce_scatter" if at_once else "all_gather"
        summed = part * max(4, self.job.width) / self.job.width if self.habits.fp32_keys else part
        yield Transfer("cp", "all_gather", part, 1, ring, what, FORWARD, behind)
        yield Transfer("cp", "all_gather", part, 1, ring, what, BACKWARD, behind)
        yield Transfer("cp", back, summed, 1, ring, "gradients of keys, values", BACKWARD, behind)

    def experts(self, block: Block) -> Iterator[Transfer]:
        """Yield tokens to their experts and back."""
        payload, what = self.product / self.layout.tp * block.top_k, "tokens to experts and back"
        again_of = {"none": 0, "selective": 0 if self.habits.keeps_products else 1, "full": 2}
        again = again_of[self.job.each_recomputed] * self.job.recomputed_share
        yield Transfer("ep", "all_to_all", payload, 2, self.links["ep"], what)
        yield Transfer("ep", "all_to_all", payload, 2 + again, self.links["ep"], what, BACKWARD)

    # ---- data parallelism ----------------------------------------------------------------------------------------

    def weights(self, block: Block) -> Iterator[Transfer]:
        """Yield ZeRO's transfers of one block."""
        dense, packed = self.stored_bytes(count_dense_parameters(block, *self.layout.tp_and_columns), [(block, 1)])
        numbers = count_adapter_parameters(block, self.job.lora, *self.layout.tp_and_columns)
        adapters = count_adapter_width(self.job) * numbers
        experts = block.expert_parameters / self.layout.expert_split * self.job.stored
        reduced = ADAPTER_WIDTH * numbers if self.job.lora else dense * self.widened
        yield from self.zero(dense + adapters, reduced, "zero", exact=packed + adapters)
        yield from self.zero(experts, 0.0 if self.job.lora else experts * self.widened, "experts")

    def zero(
        self, weights: float, gradients: float, group: str, kept: bool = False, exact: float = 0.0
    ) -> Iterator[Transfer]:
        """Yield ZeRO's transfers: stage 3 gathers weights in each pass, 1 and 2 once per step or run of a schedule.

        Those of the ends (`kept`) FSDP2 gathers once: an embedding's backward needs none, and a head's comes at once.
        `exact`: bytes that are never quantised.
        """
        fsdp2, stage, once = self.habits.fsdp2, self.layout.zero_stage, 1 / self.job.micro_batches
        weights = self.coded_weights(weights - exact) + exact
        if stage == 3 or (stage and fsdp2 and self.layout.pp == 1):
            what = "weights" if stage == 3 else "updated weights"
            yield from self.gather(weights, 1 if stage == 3 else once, group, what, FORWARD, COMPUTE)
        if stage == 3:
            yield from self.gather(weights, not (kept and fsdp2), group, "weights", BACKWARD, COMPUTE)
        if stage == 3 or self.layout.reduces_each:
            rounds = once if fsdp2 and not self.layout.reduces_each else 1
            yield from self.scatter(gradients, rounds, group, BACKWARD, COMPUTE)

    def gather(
        self, size: float, count: float, group: str, what: str, when: str, behind: str = EXPOSED
    ) -> Iterator[Transfer]:
        """Gather in two hops where shards are hierarchical, of which ZeRO-3's backward makes the one inside."""
        axis, inside = self.data_axis, self.layout.hierarchical_shard
        if inside == 1 or group != "zero":
            yield Transfer(axis, "all_gather", size, count, self.links[group], what, when, behind)
            return
        if when != BACKWARD:
            yield Transfer(axis, "all_gather", size / inside, count, self.links["across"], what, when, behind)
        yield Transfer(axis, "all_gather", size, count, self.links["within"], what, when, behind)

    def scatter(self, size: float, count: float, group: str, when: str, behind: str) -> Iterator[Transfer]:
        """Reduce gradients; quantised ones are exchanged and then summed, in two hops if shards are hierarchical."""
        axis, inside = self.data_axis, self.layout.hierarchical_shard
        if self.layout.quantize_gradients == "none":
            yield Transfer(axis, "reduce_scatter", size, count, self.links[group], "gradients", when, behind)
            return
        size *= CODE_BYTES[self.layout.quantize_gradients] / (self.job.stored * self.widened)
        hops = [(group, 1)] if inside == 1 or group != "zero" else [("within", 1), ("across", inside)]
        for hop, parts in hops:
            yield Transfer(axis, "all_to_all", size / parts, count, self.links[hop], "gradients", when, behind)

    def stored_bytes(self, dense: float, counts: Iterable[tuple[Block, int]]) -> tuple[float, float]:
        """Return bytes of `dense` parameters, those of these blocks among them, as they travel; and of 4-bit ones."""
        numbers = sum(count * count_packed_parameters(block, self.layout, self.job) for block, count in counts)
        packed = numbers * count_packed_width(self.job) if numbers else 0.0
        return (dense - numbers) * self.job.stored + packed, packed

    def coded_weights(self, size: float) -> float:
        """Return the bytes of weights as they are gathered."""
        return size * CODE_BYTES.get(self.layout.quantize_weights, self.job.stored) / self.job.stored

    def once(self, weights: float, gradients: float, group: str) -> Iterator[Transfer]:
        """Yield a step's all-reduce, or reduce-scatter and gather, and what replicas reduce."""
        axis, fsdp2, stage = self.data_axis, self.habits.fsdp2, self.layout.zero_stage
        rounds, link = self.reductions, self.links[group]
        if stage == 0:
            axis = "dp_replicate" if fsdp2 else axis
            yield Transfer(axis, "all_reduce", gradients, rounds, link, "gradients", STEP, LAST_BACKWARD)
        elif stage < 3:
            if self.habits.reduces_in_step:
                widened = gradients * 4 / self.job.stored
                yield Transfer(axis, "all_reduce", widened, rounds, link, "gradients", STEP)
            elif not self.layout.reduces_each:
                yield from self.scatter(gradients, rounds, group, STEP, LAST_BACKWARD)
            if self.layout.pp > 1 or not fsdp2:
                updated = self.coded_weights(weights) if fsdp2 else gradients
                behind = FIRST_FORWARD if self.habits.transformer_engine else EXPOSED
                yield from self.gather(updated, self.runs, group, "updated weights", STEP, behind)
        part, replicas = gradients / (link.size if stage else 1), self.links["replicate"]
        rounds = self.job.micro_batches if self.layout.reduces_each else rounds
        yield Transfer("dp_replicate", "all_reduce", part, rounds, replicas, "gradients of replicas", STEP)


def compute_sending_seconds(hidden: int, layout: Layout, job: Job, cluster: Cluster) -> float:
    """Return the seconds from one pipeline rank to the next, per micro-batch."""
    sends = _Sends(hidden, layout, job, cluster)
    return compute_transfer_seconds("p2p", sends.boundary, sends.links["pp"])
