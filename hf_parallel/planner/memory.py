"""Bytes that each rank holds at the fullest moment of a step, by kind.

States follow table 1 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054), activations are added term by term after
Korthikanti et al. (2022, arXiv:2205.05198), a pipeline is followed through its schedule. Of one step the fuller of two
moments counts: a backward pass in the schedule, or the end of the backward. Where engines
differ `Habits` decides; docs/reference/planner_formulas.md has the formulas and their measured accuracy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from hf_parallel.ask.keys.data import PIECE, parameters_rest
from hf_parallel.ask.keys.pipeline import BUCKET, DELAYED_SCHEDULES, JOINING_SCHEDULES
from hf_parallel.axes.activation_offload import AHEAD
from hf_parallel.axes.chunked_loss import compute_chunk_bytes, compute_fewest_tokens
from hf_parallel.axes.pipeline.timeline import count_ahead_of_step, count_versions_held
from hf_parallel.planner.activations import (
    EAGER,
    Moment,
    StageBytes,
    count_adapted_again,
    count_kept_bytes,
    count_lowered_parameters,
    count_offloaded_bytes,
    count_output_numbers,
    count_routed_again,
    count_score_gradients,
    count_wide_bytes,
    find_fullest_moment,
    has_mask,
)
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout, make_computed_job
from hf_parallel.planner.ledger import count_expert_shards
from hf_parallel.planner.pipeline import (
    Stage,
    count_live_forwards,
    count_packed_parameters,
    count_remote_neighbours,
    count_simulated_batches,
    group_stages_by_rank,
    is_shared,
    list_adapted,
    list_mirrored_stages,
    make_schedule_order,
)
from hf_parallel.planner.shape import Block
from hf_parallel.planner.states import (
    ADAPTER_WIDTH,
    CODE_BYTES,
    count_adapter_bytes,
    count_adapter_width,
    count_host_bytes,
    count_packed_width,
    count_summed_width,
    state_bytes,
    zero_states,
)

GIB = 2**30
CONTEXT_GIB = 1.0  # CUDA, kernels
LAYERS_ON_DEVICE = AHEAD  # whose activations the device holds while those of others rest on the host
#: Bytes beside a number while a piece of a gradient is packed: divided by its scale, rounded, as codes.
_BYTES_OF_PACKING = {"int8": 6.0, "fp8": 6.0, "int4": 7.5}
FRAGMENTATION = 0.35  # of activations, temporaries and gathered weights: held by the allocator beyond need


# ---- a rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank by kind, at the peak of a step.

    `slack`: what the allocator holds beyond what is in use, and gives back before it fails.
    """

    rank: int
    kinds: dict[str, float] = field(hash=False)
    slack: float = 0.0

    @property
    def needed(self) -> float:
        """The bytes that must be there at the same time."""
        return sum(self.kinds.values())

    @property
    def tensors(self) -> float:
        """The bytes of tensors, without what is outside torch's allocator."""
        return self.needed - self.kinds["context"] - self.kinds["communication buffers"]

    def held(self, capacity: float = math.inf) -> float:
        """Return what a monitor shows on a GPU of `capacity` bytes."""
        return max(self.needed, min(self.needed + self.slack, capacity))


def predict_memory_of_ranks(stages: tuple[Stage, ...], layout: Layout, job: Job) -> list[RankMemory]:
    """Return the peak of every pipeline rank."""
    return [rank_memory(mine, layout, job, rank) for rank, mine in enumerate(group_stages_by_rank(stages, layout))]


def predict_fullest_rank(stages: tuple[Stage, ...], layout: Layout, job: Job, enough: float = math.inf) -> RankMemory:
    """Return the peak of the rank that needs most. Under 1F1B it is the first of those whose stages are alike.

    That rank holds at least as many forwards as they do. This is fast: a search rejects thousands of layouts.

    Args:
        enough: bytes; the first moment of any rank that needs more is returned as it is.
    """
    grouped, found = group_stages_by_rank(stages, layout), list[RankMemory]()
    first_alike = {tuple(mine): rank for rank, mine in reversed(list(enumerate(grouped)))}
    for rank in first_alike.values() if layout.schedule == "1f1b" else range(len(grouped)):
        found.append(rank_memory(grouped[rank], layout, job, rank, enough))
        if found[-1].needed > enough:
            break
    return find_fullest(found)


def count_fewest_bytes(stages: tuple[Stage, ...], layout: Layout, job: Job) -> float:
    """Return the bytes that the fullest rank needs at least, for any micro-batches and any recomputation.

    Activations are left out. In a schedule gathered weights count, at its end a pipeline's whole gradients.
    """
    found = []
    for mine in dict.fromkeys(map(tuple, group_stages_by_rank(stages, layout))):  # few differ
        rank = _Rank(list(mine), layout, job, 0)
        states, several = rank.states(), rank.gathers and rank.habits.fsdp2 and layout.pp > 1
        at_end = sum(states.values()) + (sum(map(rank.count_gradients, rank.stages)) if several else 0.0)
        beside = rank.count_gathered() + rank.count_lowered()
        in_schedule = states["weights"] + states["optimizer"] + beside
        found.append(max(at_end, in_schedule) + sum(rank.count_outside().values()))
    return max(found)


def find_fullest(memories: list[RankMemory]) -> RankMemory:
    """Return the rank that needs most."""
    return max(memories, key=lambda memory: memory.needed)


def rank_memory(stages: list[Stage], layout: Layout, job: Job, rank: int, enough: float = math.inf) -> RankMemory:
    """Return the memory of the pipeline rank that holds `stages`; `enough` as in `predict_fullest_rank`."""
    mine = _Rank(stages, layout, job, rank)
    mine.copied = list_mirrored_stages(stages, layout, job)
    outside, flushed = mine.count_outside(), layout.schedule not in DELAYED_SCHEDULES
    kinds: dict[str, float] = {}
    for moment in mine.iterate_moments_of_step() if flushed else mine.without_flush():
        kinds = max(kinds, moment, key=lambda kinds: sum(kinds.values()))
        if sum((kinds | outside).values()) > enough:
            break
    if mine.copied:
        kinds["weights"] += _Rank(mine.copied, layout, job, rank).states()["weights"]
    passing = kinds["activations"] + kinds["temporaries"] + kinds["gathered"]
    return RankMemory(rank, kinds | outside, FRAGMENTATION * passing)


def count_host_gib(stages: tuple[Stage, ...], layout: Layout, job: Job, cluster: Cluster) -> float:
    """Return the GiB of a node's memory that offloaded states and activations of its ranks take."""
    ranks = min(cluster.per_node, cluster.gpus)
    parameters = stages[0].shape.parameters / layout.tp / layout.pp / layout.shards
    kept = 0.0
    for number, mine in enumerate(group_stages_by_rank(stages, layout) if job.activation_offload else ()):
        rank = _Rank(mine, layout, job, number)
        live = count_live_forwards(layout, rank.job)[number]
        kept = max(kept, max(map(rank.count_offloaded, mine)) * live)
    return ranks * (count_host_bytes(parameters, job) + kept) / GIB


class _Rank:
    """The quantities of one rank, in bytes unless they are called numbers."""

    def __init__(self, stages: list[Stage], layout: Layout, job: Job, rank: int) -> None:
        self.kept, self.job = job, make_computed_job(layout, job)  # as states are kept, and as layers compute
        job = self.job
        self.stages, self.layout, self.rank, self.habits = stages, layout, rank, job.habits
        self.copied: list[Stage] = []  # other ranks own them
        self.shape, self.width = stages[0].shape, job.stored
        self.tokens = job.tokens(layout)
        self.parts = layout.stream_parts
        self.stream = self.tokens * self.shape.hidden * self.width / self.parts
        self.ends = sum(stage.ends(layout.tp) for stage in stages)
        self.numbers = sum(stage.dense(*layout.tp_and_columns) for stage in stages)  # of parameters before ZeRO
        self.experts = sum(stage.experts(layout.expert_split) for stage in stages)
        # No other rank has these experts: FSDP2 neither gathers them nor reduces their gradients.
        self.alone = self.habits.fsdp2 and layout.ep > 1 and layout.dp_replicate * count_expert_shards(layout) == 1
        self.adapters = sum(stage.adapters(job.lora, *layout.tp_and_columns) for stage in stages)
        self.packed = sum(map(self._count_packed, stages))  # of `numbers`, those in 4 bits
        self.narrower = self.width - count_packed_width(job) if self.packed else 0.0  # bytes that each of them saves
        self.adapter_width = count_adapter_width(job)  # gathered
        several = layout.has_several_data_ranks and not layout.fills_bubbles  # then without FSDP2
        self.gathers = several if self.habits.fsdp2 else layout.zero_stage == 3 and layout.shards > 1
        # Replicas alone compute with what they store, if on the GPU and in its own dtype.
        self.in_place = self.habits.fsdp2 and several and layout.zero_stage == 0 and layout.cp == 1
        self.in_place &= self.width == self.kept.stored and not parameters_rest(job.offload)
        self.summed = count_summed_width(job) if self.gathers else float(self.width)
        self.reshards = self.gathers and layout.zero_stage == 3 and (layout.pp == 1 or not self.habits.fsdp2)
        # Do gradients stay whole between micro-batches?
        several = layout.pp > 1 or (job.micro_batches > 1 and not layout.reduces_each)
        self.accumulates = self.habits.fsdp2 and several
        # Does FSDP2 reduce a layer's gradients as soon as they are there, those of all its numbers?
        self.reduces_each_layer = self.habits.fsdp2 and self.reshards and layout.pp == 1 and not self.accumulates
        self.reduces_each_layer &= not job.lora and not job.activation_offload
        # The errors that quantised gradients leave; of two hops, each keeps its own.
        hops = 1 + (1 / layout.hierarchical_shard if layout.hierarchical_shard > 1 else 0.0)
        self.lost = 4.0 * hops * (self.numbers + self.experts) * layout.gradient_error_feedback
        # Are head and loss computed a chunk of tokens at a time, without logits beyond it?
        fewest = compute_fewest_tokens(self.shape.hidden, not job.lora, job.width, layout.tp > 1)
        self.lean = job.lean_loss and (layout.dp > 1 or self.tokens >= fewest)
        head = 0 if job.lora else self.shape.head_outputs / layout.tp
        self.gradients_of_loss = 4 * self.shape.hidden * (self.tokens + head)  # of hidden states and head, in fp32
        # Is the loss of a split vocabulary computed some tokens at a time?
        self.chunks = layout.tp > 1 and self.habits.loss_chunk > 0
        self.vocabulary_parts = 1 if self.habits.whole_logits else layout.tp  # in which tp ranks hold the logits

    # ---- states --------------------------------------------------------------------------------------------------

    def count_outside(self) -> dict[str, float]:
        """Return the bytes by kind beside those of a step's own tensors."""
        layout, habits = self.layout, self.habits
        axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
        buckets = habits.bucket_gib if layout.zero_stage in (1, 2) and layout.dp > 1 else 0.0
        communication = (axes * habits.communicator_gib + buckets) * GIB
        outside = {"context": CONTEXT_GIB * GIB, "communication buffers": communication}
        return {**outside, "curvature": self.curvature()} if layout.fills_bubbles else outside

    def states(self) -> dict[str, float]:
        """Return the bytes of weights, of gradients after they are reduced, and of what the optimizer keeps."""
        stage = 3 if self.habits.fsdp2 and self.layout.zero_stage else self.layout.zero_stage
        per, adapter = state_bytes(self.kept, self.layout.zero_stage), count_adapter_bytes(self.kept)
        each = (
            zero_states(self.numbers, self.layout.shards, stage, per),
            zero_states(self.experts, count_expert_shards(self.layout), stage, per),
            zero_states(self.adapters, self.layout.shards, stage, adapter),
        )
        found = {kind: sum(states[kind] for states in each) for kind in each[0]}
        if per.weights:
            found["weights"] -= self.narrower * self.packed / (self.layout.shards if stage >= 3 else 1)
        found["gradients"] += self.lost
        return found

    def count_gradients(self, stage: Stage) -> float:
        """Return the bytes of whole gradients of a stage."""
        if self.job.lora:
            return ADAPTER_WIDTH * stage.adapters(self.job.lora, *self.layout.tp_and_columns)
        experts = stage.experts(self.layout.expert_split)
        of_experts = (self.width if self.alone else self.summed) * experts
        return self.summed * stage.dense(*self.layout.tp_and_columns) + of_experts

    def _count_sums(self, gradients: float) -> float:
        """Return the bytes of gradients while micro-batches add to them; sums over ranks each time are in fp32."""
        if self.job.lora or not self.layout.reduces_each:
            return gradients
        own = min(gradients, self.kept.stored * self.experts) if self.alone else 0.0
        return own + self.summed / self.kept.stored * (gradients - own)

    def count_gathered(self) -> float:
        """Return the bytes of whole weights: of the layers at work and the ends, or of all."""
        if not self.gathers or self.in_place:
            return 0.0
        if not self.reshards:
            whole = self.width * (self.numbers + self.experts * (not self.alone)) - self.narrower * self.packed
            return whole + self.adapter_width * self.adapters
        alone = [self._count_alone(block) for stage in self.stages for block, _ in stage.counts]
        layer = max(map(self._count_layer_bytes, alone), default=0.0)
        adapters = self.adapter_width * self.adapters / max(1, sum(stage.layers for stage in self.stages))
        reduced = max(layer, self.width * self.ends) if not self.habits.fsdp2 else 0.0
        ends = self.ends - self._count_freed_embedding(self.stages[0])
        gathered = self.width * ends + self.habits.gathered_layers * layer
        return gathered + adapters + reduced + self._count_kept_nearby()

    def _count_packed(self, stage: Stage) -> float:
        """Return the numbers of a stage that are in 4 bits."""
        return sum(count * count_packed_parameters(block, self.layout, self.job) for block, count in stage.counts)

    def _count_layer_bytes(self, alone: Stage) -> float:
        """Return the bytes of a layer's whole weights."""
        numbers = alone.dense(*self.layout.tp_and_columns)
        numbers += alone.experts(self.layout.expert_split) * (not self.alone)
        return self.width * numbers - self.narrower * self._count_packed(alone)

    def _count_freed_embedding(self, stage: Stage) -> float:
        """Return the numbers of an embedding that nothing needs after the forward: FSDP2 gives it its own group."""
        alone = self.habits.fsdp2 and stage.is_first and not self.shape.tied
        return self.shape.embedding_parameters / self.layout.tp if alone else 0.0

    def _count_kept_nearby(self) -> float:
        """Return the weights of the layers that a group of hierarchical shards keeps among its ranks, as gathered."""
        if self.layout.hierarchical_shard == 1:
            return 0.0
        width = CODE_BYTES.get(self.layout.quantize_weights, self.width)
        packed = (width - self.width + self.narrower) * self.packed  # in their own codes, whatever others have
        return (width * (self.numbers + self.experts - self.ends) - packed) / self.layout.hierarchical_shard

    def _count_alone(self, block: Block) -> Stage:
        return Stage(self.shape, ((block, 1),), False, False)

    # ---- moments of a step ---------------------------------------------------------------------------------------

    def iterate_moments_of_step(self) -> Iterator[dict[str, float]]:
        """Yield bytes by kind at each moment that can be the fullest of a step with an end."""
        yield self.in_schedule()
        yield self.in_first_layers()
        yield self.at_head_reduction()
        yield self.end_of_backward()
        kinds = self.stages[0].counts if self.reduces_each_layer else ()  # each of which can be the last one
        places = sorted({done for done in (0, 1, self.stages[0].layers - 1) if done < self.stages[0].layers})
        yield from (self.in_layer(block, done) for block, _ in kinds for done in places)

    def in_layer(self, block: Block, done: int) -> dict[str, float]:
        """Count a layer's backward pass after that of `done` layers, while gradients behind it are being reduced.

        FSDP2 holds what a reduce-scatter sends, in the sums' dtype, until the next one: of the head, or of a layer. It
        has gathered this layer's weights, and those of the layer before it. A tied head waits for the end. What
        replicas add up is held in the sums' dtype until the backward ends, beside the gradients in their own.
        """
        (stage,), one, states = self.stages, self._count_alone(block), self.states()
        head = self.shape.head_outputs * self.shape.hidden / self.layout.tp
        dense = one.dense(*self.layout.tp_and_columns)
        unit = dense + (one.experts(self.layout.expert_split) if self.layout.ep == 1 else 0.0)  # else alone
        reduced = unit if done else 0.0 if self.shape.tied else head
        following = self.width * dense if self.layout.ep > 1 else self._count_layer_bytes(one)
        following *= done + 1 < stage.layers
        gathered = self.summed * reduced + self._count_layer_bytes(one) + following + self._count_kept_nearby()
        gathered += 2 * self.width * self.ends * self.shape.tied  # with its gradient
        given = self.kept.stored * (head * (not self.shape.tied) + dense * done) / self.layout.shards
        given += self.kept.stored * one.experts(self.layout.expert_split) * done / count_expert_shards(self.layout)
        if self.layout.dp_replicate > 1 and self.summed > self.kept.stored:
            gathered += self.summed / self.kept.stored * given
        if self.job.micro_batches == 1:  # other gradients come later
            states["gradients"] = min(states["gradients"], self.lost + given)
        else:
            states["gradients"] = self._count_sums(states["gradients"])
        kept = self._count_blocks(stage) * (1 - done / stage.layers) + self._mask
        kept += self.stream  # the gradient that comes
        again = self._count_again(stage, block) + self._count_unpacked(stage)
        if block.top_k and self.job.recompute != "none":
            # Whole gradients of the layer's experts, and what else there is of a layer that has run again: what was
            # between their halves is gone, but for the gradient of the first half.
            rerun = self._count_kept(one, "none") - self._count_kept(one, self.job.each_recomputed)
            beside = (2 if block.gated else 1) * self.job.width * block.inner / self.layout.tp
            beside -= count_wide_bytes(block, self.shape.hidden, self.layout, self.job)
            experts = self.width * one.experts(self.layout.expert_split)
            again = max(again, experts + self.tokens * (rerun + beside))
        whole = gathered + self.count_lowered()
        return {**states, "gathered": whole, "activations": kept, "temporaries": again}

    def in_schedule(self) -> dict[str, float]:
        """Count the begin of a backward pass in the schedule, or the end of its first half, with what is gathered."""
        states, layout = self.states(), self.layout
        each = {stage.index: self._count_stage_bytes(stage) for stage in (*self.stages, *self.copied)}
        if layout.pp > 1 and layout.schedule != "1f1b":
            order = make_schedule_order(layout, count_simulated_batches(layout, self.job))
            moment = find_fullest_moment(order[self.rank], each)
        else:
            (own,) = each.values()
            live = count_live_forwards(layout, self.job)[self.rank]
            moment = Moment(live * own.kept, own.begin, own.gradients)
            if layout.pp > 1 and self.job.micro_batches_per_call <= live:  # full once, before there is any gradient
                later = moment._replace(held=moment.held - own.kept)
                moment = max(moment._replace(gradients=0.0), later, key=sum)
        if self.habits.fsdp2:  # a pipeline reduces in each call, and adds to what it put aside
            joins = self.job.engine == "hf_parallel" and layout.pp > 1  # a step is one run
            joins &= layout.schedule in JOINING_SCHEDULES
            more = (self.job.calls > 1 and not joins) or (layout.reduces_each and self.job.micro_batches > 1)
            states["gradients"] = self._count_sums(states["gradients"]) if more else 0.0
            several = self.gathers and layout.pp > 1 and self.job.calls > 1
            if several and not layout.reduces_each_run:  # whole gradients stay from one run to the next
                states["gradients"] = sum(map(self.count_gradients, self.stages))
        whole = "gathered" if self.gathers else "gradients"
        kinds = {**states, "gathered": self.count_gathered() + self.count_lowered()}
        kinds[whole] += moment.gradients
        return {**kinds, "activations": moment.held, "temporaries": moment.passing}

    def in_first_layers(self) -> dict[str, float]:
        """Count the backward pass of the second layer, the fullest where layers keep next to nothing on the device.

        The gradients of all later layers are there, and the first layer's weights are gathered.
        """
        if not self.job.activation_offload or not self.habits.fsdp2 or self.layout.pp > 1 or self.accumulates:
            return {}
        (stage,) = self.stages
        states, gathered = self.states(), self.count_gathered()
        alone = [self._count_alone(block) for block, _ in stage.counts]
        split = self.layout.expert_split
        layer = max(one.dense(*self.layout.tp_and_columns) + one.experts(split) for one in alone)
        late = 2 * layer + self._count_freed_embedding(stage)
        if self.job.micro_batches == 1 and not self.job.lora:
            states["gradients"] *= max(0.0, 1 - late / (self.numbers + self.experts))
        else:
            states["gradients"] = self._count_sums(states["gradients"])
        if self.reshards:
            gathered = 2 * max(map(self._count_layer_bytes, alone)) + self._count_kept_nearby()
        if self.gathers and not self.job.lora:  # of this layer as they are made, of the last one as they are reduced
            gathered += (self.width + self.summed) * layer
        again = self._count_again(stage) + self._count_unpacked(stage)
        kept, whole = self._count_blocks(stage) + self._mask, gathered + self.count_lowered()
        return {**states, "gathered": whole, "activations": kept, "temporaries": again}

    def at_head_reduction(self) -> dict[str, float]:
        """Count the moment when the head's gradient is packed and sent in fewer bits, while all layers keep
        activations.
        """
        kind, (stage, *more) = self.layout.quantize_gradients, self.stages
        if kind == "none" or more or self.accumulates or not self.reshards or self.job.lora or self.shape.tied:
            return {}
        states, numbers = self.states(), self.shape.head_outputs * self.shape.hidden / self.layout.tp
        gathered = self.count_gathered() + self.summed * numbers  # whose last part is the gradient that is sent
        feedback = self.layout.gradient_error_feedback  # sums with what was lost, then the codes' own numbers
        copies = (self.layout.hierarchical_shard > 1) + feedback
        beside = max(_BYTES_OF_PACKING[kind] * min(numbers, PIECE), 5 * numbers * feedback)
        packed = (4 * copies + CODE_BYTES[kind]) * numbers + beside
        if self.job.micro_batches == 1:  # other gradients come later; what earlier steps have lost is there
            states["gradients"] = self.lost
        kept = self._count_blocks(stage) + self._mask + self.tokens * 4 * self.shape.hidden
        return {**states, "gathered": gathered + self.count_lowered(), "activations": kept, "temporaries": packed}

    def end_of_backward(self) -> dict[str, float]:
        """Count all gradients, the last ones still whole under FSDP2: the embedding's, or both ends' if it is tied."""
        if not self.habits.fsdp2:
            return {}  # they are there at any moment
        embedding = sum(map(self._count_freed_embedding, self.stages)) if self.layout.pp == 1 else 0.0
        ends = (self.ends - embedding) * (self.layout.pp > 1 or self.shape.tied)
        whole = ends * self.width + (0.0 if self.job.lora else (ends + embedding) * (self.width + self.summed))
        if self.accumulates:
            whole = self.width * ends + sum(map(self.count_gradients, self.stages))
        if self.in_place and self.layout.pp == 1:  # what is reduced is what stays
            whole = 0.0 if self.job.lora else (ends + embedding) * self.width
        whole = whole * self.gathers + self.count_lowered() + self._count_averaged()
        return {**self.states(), "gathered": whole, "activations": self.stream, "temporaries": 0.0}

    def without_flush(self) -> tuple[dict[str, float], dict[str, float]]:
        """Count the last backward of a step whose successors have begun, and its end, when gradients are averaged.

        1F1B goes on without an end, so each backward pass begins with as many forwards held as the rank ever has.
        """
        (stage,), ranks, count, states = self.stages, self.layout.pp, self.job.micro_batches, self.states()
        each, (forwards, backwards) = self._count_stage_bytes(stage), count_ahead_of_step(self.rank, ranks)
        weights, sums = count_versions_held(self.layout.schedule, self.rank, ranks, count)
        begun = -(-(count + backwards - 1) // count)  # sums of gradients that earlier passes have left
        # Another version of the weights that are trained, or another sum of their gradients.
        trained = ADAPTER_WIDTH * self.adapters if self.job.lora else self.kept.stored * (self.numbers + self.experts)
        kinds = {**states, "weights": states["weights"] + (weights - 1) * trained}
        sent = min(count * count_remote_neighbours(self.stages), 2 * (ranks + 1)) - (forwards - backwards)
        last, end = (ranks - self.rank) * each.kept, (forwards - backwards) * each.kept + max(0, sent) * self.stream
        lowered = {"gathered": self.count_lowered()}
        averaged = {"gathered": self.count_lowered() + self._count_averaged()}
        return (
            {**kinds, **lowered, "gradients": begun * trained, "activations": last, "temporaries": each.begin},
            {**kinds, **averaged, "gradients": sums * trained, "activations": end, "temporaries": 0.0},
        )

    def _count_averaged(self) -> float:
        """Return the bytes of fp32 sums of 16-bit gradients, by bucket, if data ranks average without FSDP2."""
        if self.gathers or self.layout.dp == 1 or self.job.lora or self.kept.stored == 4:
            return 0.0
        largest = self.shape.embedding_parameters / self.layout.tp if self.ends else 0.0
        return 4 * min(self.numbers + self.experts, largest + BUCKET / self.kept.stored)

    def curvature(self) -> float:
        """Return the bytes of K-FAC: inputs and gradients of all linears in a step's micro-batches, and the factors.

        Factors are there four times in fp32: sums of this interval and of the last one, whose inverses are being made,
        and the inverses in use.
        """
        width, job, total = self.job.width, self.job, 0.0
        for block, count in (block_count for stage in self.stages for block_count in stage.counts):
            for matrix in list_adapted(block):
                pairs = [(matrix.inputs, matrix.outputs)]
                if job.lora:
                    pairs = [(matrix.inputs, job.lora), (job.lora, matrix.outputs)]
                for inputs, outputs in pairs:
                    kept = self.tokens * job.micro_batches * width * (inputs + outputs)
                    total += count * matrix.count * (kept + 4 * 4 * (inputs**2 + outputs**2))
        return total

    # ---- activations ---------------------------------------------------------------------------------------------

    def _count_stage_bytes(self, stage: Stage) -> StageBytes:
        logits = self.tokens * self.shape.head_outputs / self.vocabulary_parts * stage.is_last
        # The logarithms of probabilities; of a split vocabulary the logits themselves.
        kept_logits = logits * (self.job.width if self.chunks else self.habits.kept_logit_bytes)
        if self.lean:  # no logits, but the gradients that the loss has computed on its way
            kept_logits = self.gradients_of_loss * stage.is_last
        sent = self.stream if self.layout.pp > 1 else 0.0  # what arrives, or is sent on, is kept
        kept = self._count_blocks(stage) + sent + kept_logits + self._mask
        # A layer's backward begins when the loss has handed over its gradient of the hidden states.
        freed = 4 * self.shape.hidden * self.tokens if self.job.tiled_mlp and self.lean and stage.is_last else 0.0
        again = self._count_again(stage) - freed + self._count_unpacked(stage)
        if self.reduces_each_layer and self.layout.quantize_gradients == "none":  # what the loss kept is gone by then
            again = 0.0
        between = 0.0
        if not stage.is_first:  # whose input needs no gradient: all its backward is in the second half
            # Gradients of all outputs of products, and of norms; what checkpointing computed for the first half.
            hidden, layout = self.shape.hidden, self.layout
            outputs = sum(count * count_output_numbers(block, hidden, layout) for block, count in stage.counts)
            head = self.shape.head_outputs / layout.tp * stage.is_last
            more = self._count_kept(stage, "none") - self._count_kept(stage, self.job.recompute)
            between = self.tokens * (self.job.width * (outputs + head) + more)
        # Are gradients added up in more bits than the backward gives them?
        widens = self.accumulates and self.gathers and self.summed > self.width and not self.job.lora
        return StageBytes(
            kept,
            between,
            max(self._count_loss(stage) - kept_logits, again),
            self.tokens * 5 * 4 * self.shape.hidden / self.parts,  # a norm's backward in fp32
            self.count_gradients(stage) if self.accumulates else 0.0,
            self.count_gradients(stage) * self.width / self.summed if widens else 0.0,
        )

    def _count_blocks(self, stage: Stage) -> float:
        """Return the bytes that a stage's blocks keep on the device after a forward."""
        blocks = self.tokens * self._count_kept(stage, self.job.recompute)
        if self.job.activation_offload:
            blocks -= self.count_offloaded(stage) * max(0.0, 1 - LAYERS_ON_DEVICE / max(1, stage.layers))
        return blocks

    def count_offloaded(self, stage: Stage) -> float:
        """Return the bytes of a stage's blocks that go to the host in one forward."""
        hidden, layout = self.shape.hidden, self.layout
        each = (n * count_offloaded_bytes(block, hidden, layout, self.job) for block, n in stage.counts)
        return self.tokens * sum(each)

    def _count_kept(self, stage: Stage, recompute: str) -> float:
        """Return the bytes per token of a stage's blocks."""
        job = self.job if recompute == self.job.recompute else dataclasses.replace(self.job, recompute=recompute)
        return sum(
            count * count_kept_bytes(block, self.shape.hidden, self.layout, job) for block, count in stage.counts
        )

    def count_lowered(self) -> float:
        """Return the bytes of 16-bit copies. Without data ranks: of each matrix one, for all micro-batches of a step.

        With them: copies of the experts that FSDP2 does not gather, from a layer's forward to its backward.
        """
        if not self.job.autocast:
            copied = self.alone and self.job.lowered
            return self.width * self.experts * (1 - self.job.recomputed_share) * copied
        blocks = (block_count for stage in self.stages for block_count in stage.counts)
        layers = sum(count * count_lowered_parameters(block, self.layout) for block, count in blocks)
        head = (
            self.shape.head_outputs * self.shape.hidden / self.layout.tp * any(stage.is_last for stage in self.stages)
        )
        return self.job.width * (layers + head)

    def _count_loss(self, stage: Stage) -> float:
        """Return the bytes of logits, their probabilities and gradients, and the last norm."""
        if not stage.is_last:
            return 0.0
        each, hidden = self.habits.logit_bytes, self.shape.hidden
        norm = (4 + 2 * self.width) * hidden / self.parts if not self.habits.fused else 0.0
        beside = self.tokens * (norm + self.width * hidden * (self.layout.tp > 1))
        if self.lean:  # a chunk's fullest moment, beside the gradients of the loss
            chunk = compute_chunk_bytes(hidden, not self.job.lora, self.job.width)
            return self.gradients_of_loss + self.shape.head_outputs / self.layout.tp * chunk + beside
        if self.chunks:
            each = 2 * self.job.width + 4 * min(1.0, self.habits.loss_chunk / self.tokens)
        return self.tokens * self.shape.head_outputs / self.vocabulary_parts * each + beside

    def _count_again(self, stage: Stage, *blocks: Block) -> float:
        """Return the bytes that a layer needs beyond what it keeps, of the layer that needs most.

        Of an eager layer it may be while scores have gradients: these, and what was computed again.

        Args:
            blocks: the layers that count; default: all of the stage.
        """
        counted, scores = blocks or [block for block, _ in stage.counts], 0.0
        if stage.counts and self.job.attention == EAGER:
            last = stage.counts[-1][0]
            one = self._count_alone(last)
            again = self._count_kept(one, "none") - self._count_kept(one, self.job.each_recomputed)
            gradients = count_score_gradients(last, self.shape.hidden, self.layout, self.job)
            scores = self.tokens * (again + gradients)
        return max([scores, *(self._count_layer_again(block, stage) for block in counted)])

    def _count_layer_again(self, block: Block, stage: Stage) -> float:
        """Return a checkpointed layer's recomputed activations, and gradients of its widest part and of the stream."""
        if self.job.recompute == "none" and not self.job.tiled_mlp:
            return 0.0
        one, recompute = self._count_alone(block), self.job.each_recomputed
        again = self._count_kept(one, "none") - self._count_kept(one, recompute)
        stream, inner = self.shape.hidden / self.parts, block.inner / self.layout.tp
        if self.job.lora and not self.habits.fused and not self.job.tiled_mlp:
            of_loss = 4 * self.shape.hidden if self.lean and stage.is_last else 0.0
            return self.tokens * count_adapted_again(block, self.shape.hidden, self.layout, self.job, of_loss)
        if not self.job.tiled_mlp:
            routed = count_routed_again(block, self.shape.hidden, self.layout, self.job)
            return self.tokens * (again + max(2 * self.width * (inner + stream), routed))
        piece = min(self.tokens, self.shape.hidden * self.parts)  # and outputs of all pieces, alone and joined
        wide = count_wide_bytes(block, self.shape.hidden, self.layout, self.job) + 2 * self.width * inner
        in_mlp = self.tokens * (again + 4 * self.width * stream) + piece * wide
        if self.habits.fused:
            return in_mlp
        # The backward of the norm before it, in fp32, without that norm's outputs; and the gradient beside it.
        return max(in_mlp, self.tokens * (again + (5 * 4 - self.width) * stream))

    def _count_unpacked(self, stage: Stage) -> float:
        """Return the largest linear in 4 bits, in 16 for as long as its product takes."""
        if not self.packed:
            return 0.0
        tp, each = self.layout.tp, [(m, block) for block, _ in stage.counts for m in list_adapted(block)]
        whole = [m.inputs * m.outputs / (1 if is_shared(m, block, tp) else tp) for m, block in each]
        return self.width * max(whole, default=0.0)

    @property
    def _mask(self) -> float:
        """Return the bytes of the mask of queries by keys that all layers are given."""
        masked = any(
            has_mask(part, self.job.seq, self.job.attention)
            for stage in self.stages
            for block, _ in stage.counts
            for part in block.attentions
        )
        width = self.job.width if self.job.attention == EAGER else 1.0 if masked else 0.0
        return width * self.tokens * self.job.seq
