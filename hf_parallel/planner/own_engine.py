"""What this package's own engine keeps on a rank: the code of rewrite, sharding and pipeline as arithmetic.

It differs from Megatron-LM and DeepSpeed, whose formulas are in `memory.py`, in what a dry run shows:

    weights, gradients, moments   all of the weights' own dtype, no fp32 master copy unless the weights are fp32
    autocast                      fp32 weights, and whole 16-bit copies of them between forward and backward, however
                                  ZeRO shards; in a pipeline for each micro-batch in flight
    FSDP2, reshard                embedding, norm and head stay whole, and one layer; without it all weights
    accumulation                  gradients stay whole between the calls of a step, and in a pipeline between
                                  micro-batches: they are reduced once
    pipeline                      a buffer per micro-batch for what arrives, from either side
    loss                          12 bytes per logit in the fullest moment, 10 if the vocabulary is split

Checked against dry runs in tests/planner/test_own_engine.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import EIGHT_BIT_MOMENTS, GIB, HABITS, RankMemory, activation_terms, kept_bytes
from hf_parallel.planner.model_shape import Block, Matrix, ModelShape
from hf_parallel.planner.pipeline_memory import Moment, StageBytes, fullest_moment
from hf_parallel.planner.stages import Stage, neighbours_elsewhere
from hf_parallel.planner.step_time import schedule_order, simulated_batches

ADAPTER_WIDTH = 4  # bytes: peft keeps adapters in fp32 beside a 16-bit base
_MANY = 65536  # tokens
_LOGIT_BYTES, _SPLIT_LOGIT_BYTES = 12.0, 10.0


def own_memory(shape: ModelShape, stages: list[Stage], live: int, layout: Layout, job: Job, rank: int) -> RankMemory:
    """Memory of a pipeline rank that holds `stages` in the fullest of three moments around its backward pass.

    Args:
        live: how many forwards of one stage are held at a time, at most.
    """
    mine = _Rank(shape, stages, live, layout, job, rank)
    moments = mine.end_of_forward(), mine.in_schedule(), mine.in_backward()
    kinds = max(moments, key=lambda kinds: sum(kinds.values()))
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
    habits = HABITS["hf_parallel"]
    kinds |= {"context": habits.context_gib * GIB, "communication buffers": axes * habits.communicator_gib * GIB}
    passing = kinds["activations"] + kinds["temporaries"] + kinds["gathered"]
    return RankMemory(rank, kinds, habits.fragmentation * passing)


class _Rank:
    def __init__(self, shape: ModelShape, stages: list[Stage], live: int, layout: Layout, job: Job, rank: int) -> None:
        self.shape, self.stages, self.live, self.layout, self.job, self.rank = shape, stages, live, layout, job, rank
        self.width, self.tokens = job.stored, job.micro_batch * job.seq / layout.cp
        self.parts = layout.tp if layout.sequence_parallel else 1  # of the residual stream
        each = [(parameters_of(block, shape, layout), count) for stage in stages for block, count in stage.counts]
        self.layer = max(size for size, _ in each)
        self.ends = sum((stage.embedding + stage.head) / layout.tp for stage in stages)
        self.parameters = self.ends + sum(size * count for size, count in each)
        self.adapters = sum(map(self._adapters_of, stages))
        self.shards = layout.shards if layout.zero_stage else 1
        self.sharded = layout.dp > 1  # FSDP2 is there
        self.reshards = self.sharded and layout.zero_stage == 3 and layout.pp == 1

    # ---- states --------------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, float]:
        moments = own_moments(self.job) * (self.adapters if self.job.lora else self.parameters) / self.shards
        weights = (self.parameters * self.width + self.adapters * ADAPTER_WIDTH) / self.shards
        return {"weights": weights, "optimizer": moments if self.job.offload == "none" else 0.0}

    def _adapters_of(self, stage: Stage) -> float:
        return sum(count * adapters_of(block, self.layout, self.job.lora) for block, count in stage.counts)

    @property
    def _accumulates(self) -> bool:
        return self.layout.pp > 1 or self.job.micro_batches > 1

    def _of_earlier_calls(self) -> float:
        """A pipeline reduces in each call, and adds to what it put aside."""
        return self._gradients() / self.shards if self.job.calls > 1 else 0.0

    def _whole_gradients(self) -> float:
        return self._gradients() if self._accumulates else 0.0

    def _gradients(self) -> float:
        return sum(map(self._gradients_of, self.stages))

    def _gradients_of(self, stage: Stage) -> float:
        if self.job.lora:
            return ADAPTER_WIDTH * self._adapters_of(stage)
        layers = sum(parameters_of(block, self.shape, self.layout) * count for block, count in stage.counts)
        return (layers + (stage.embedding + stage.head) / self.layout.tp) * self.width

    # ---- moments of a step ---------------------------------------------------------------------------------------

    def end_of_forward(self) -> dict[str, float]:
        """Autocast holds a copy of every weight until the forward is over, also of layers that are recomputed."""
        if not self.job.autocast or self.job.lora or self.job.recompute != "full" or self.layout.pp > 1:
            return {}  # of frozen weights it holds none
        kinds = self.in_schedule()
        logits = self.tokens * self.shape.head_outputs / self.layout.tp
        kinds["temporaries"] -= 2 * logits  # the gradient is not there yet
        more = self._lowered(self.stages[0], "none") - self._lowered(self.stages[0], "full")
        return {**kinds, "activations": kinds["activations"] + more}

    def in_schedule(self) -> dict[str, float]:
        """At the beginning of a backward pass, or the end of its first half; with what is gathered."""
        gathered = 0.0
        if self.sharded:
            layers = max(1, sum(stage.layers for stage in self.stages))
            adapters = self.adapters / layers if self.reshards else self.adapters
            gathered = (self.ends + self.layer if self.reshards else self.parameters) * self.width
            gathered += adapters * ADAPTER_WIDTH
        moment = self._fullest_moment()
        return {
            **self._states(),
            "gradients": self._of_earlier_calls() + (0.0 if self.sharded else moment.gradients),
            "gathered": gathered + (moment.gradients if self.sharded else 0.0),
            "activations": moment.held + self._received(),
            "temporaries": moment.passing,
        }

    def _fullest_moment(self) -> Moment:
        each = [self._of_stage(stage) for stage in self.stages]
        if self.layout.pp == 1 or self.layout.schedule == "1f1b":
            (stage,) = each
            full = Moment(self.live * stage.kept, stage.begin, self._whole_gradients())
            if self.layout.pp == 1 or self.job.micro_batches_per_call > self.live:
                return full
            # It is full once, before there is any gradient.
            return max(full._replace(gradients=0.0), full._replace(held=full.held - stage.kept), key=sum)
        batches = simulated_batches(self.layout, self.job)
        order, _ = schedule_order(self.layout.schedule, self.layout.pp, self.layout.virtual_stages, batches)
        return fullest_moment(order[self.rank], dict(zip((stage.index for stage in self.stages), each, strict=True)))

    def in_backward(self) -> dict[str, float]:
        """At its end: all gradients, those of embedding and head still whole under FSDP2."""
        whole = self.ends * self.width * (1 if self.job.lora else 3) if self.sharded else 0.0
        if self.sharded and self._accumulates:
            whole = self.ends * self.width + self._gradients()
        return {
            **self._states(),
            "gradients": self._gradients() / self.shards,
            "gathered": whole,
            "activations": self._received() + self.tokens * self.shape.hidden * self.width / self.parts,
            "temporaries": 0.0,
        }

    # ---- activations ---------------------------------------------------------------------------------------------

    def _of_stage(self, stage: Stage) -> StageBytes:
        kept = sum(count * kept_of(block, self.shape, self.layout, self.job) for block, count in stage.counts)
        probabilities = 4 * self.shape.head_outputs / self.layout.tp if stage.is_last else 0.0  # their logarithms
        sent = self.width * self.shape.hidden / self.parts if self.layout.pp > 1 and not stage.is_last else 0.0
        return StageBytes(
            self.tokens * (kept + sent + probabilities) + self._lowered(stage, self.job.recompute),
            self._between_halves(stage),
            max(self._loss(stage) - self.tokens * probabilities, self._layer_again(stage)),
            self.tokens * 5 * 4 * self.shape.hidden / self.parts,  # a norm's backward in fp32
            self._gradients_of(stage),
        )

    def _between_halves(self, stage: Stage) -> float:
        """Gradients of all outputs of products, and of norms; and what checkpointing computed for the first half.

        The first stage's input needs no gradient: all its backward is in the second half.
        """
        if stage.is_first:
            return 0.0
        layers = sum(count * outputs_of(block, self.shape, self.layout) for block, count in stage.counts)
        head = self.shape.head_outputs / self.layout.tp if stage.is_last else 0.0
        whole = dataclasses.replace(self.job, recompute="none")
        again = sum(
            count
            * (kept_of(block, self.shape, self.layout, whole) - kept_of(block, self.shape, self.layout, self.job))
            for block, count in stage.counts
        )
        return self.tokens * (self.job.width * (layers + head) + again)

    def _lowered(self, stage: Stage, recompute: str) -> float:
        """16-bit copies of weights that products under autocast keep for their backward, of each forward in flight."""
        if not self.job.autocast:
            return 0.0
        layers = sum(lowered_of(block, self.layout, self.job.lora > 0) * count for block, count in stage.counts)
        head = self.shape.head_outputs * self.shape.hidden if stage.is_last and self.layout.tp == 1 else 0.0
        return self.job.width * (head + (layers if recompute != "full" else 0.0))

    def _received(self) -> float:
        """A pipeline's buffers: one per micro-batch and neighbour that sends."""
        if self.layout.pp == 1:
            return 0.0
        stream = self.tokens * self.shape.hidden * self.width / self.parts
        return neighbours_elsewhere(self.stages) * self.job.micro_batches_per_call * stream

    def _loss(self, stage: Stage) -> float:
        if not stage.is_last:
            return 0.0
        split = self.layout.tp > 1
        logits = self.shape.head_outputs / self.layout.tp * (_SPLIT_LOGIT_BYTES if split else _LOGIT_BYTES)
        norm = (4 + 2 * self.width) * self.shape.hidden / self.parts
        return self.tokens * (logits + norm + (self.width * self.shape.hidden if split else 0.0))

    def _layer_again(self, stage: Stage) -> float:
        """A checkpointed layer's activations, computed again, and the gradients of its widest part."""
        if self.job.recompute != "full":
            return 0.0
        whole = dataclasses.replace(self.job, recompute="none")
        block = max((block for block, _ in stage.counts), key=lambda block: block.inner)
        kept = kept_of(block, self.shape, self.layout, whole)
        lowered = self.job.width * lowered_of(block, self.layout, self.job.lora > 0) if self.job.autocast else 0.0
        return self.tokens * (kept + 2 * self.width * block.inner / self.layout.tp) + lowered


def own_moments(job: Job) -> float:
    """Bytes per trained parameter of the optimizer's state, which has that one's dtype unless it is an 8-bit one."""
    width = ADAPTER_WIDTH if job.lora else job.stored
    known = {"adamw": 2.0 * width, "adamw_8bit": EIGHT_BIT_MOMENTS, "sgd": 0.0, "sgd_momentum": 1.0 * width}
    return known[job.optimizer]


def adapters_of(block: Block, layout: Layout, rank: int) -> float:
    """Numbers in a block's adapters of `rank` on one tp rank: beside each linear; experts and routers are none.

    A is whole beside columns and cut beside rows, B the other way; heads that ranks share have both whole.
    """
    shared = min((part.kv_heads for part in block.attentions), default=layout.tp) < layout.tp
    total = 0.0
    for matrix in adapted(block):
        whole = shared and matrix.name.rpartition(".")[2].startswith(("k", "v"))
        inputs = matrix.inputs / (layout.tp if matrix.split == "row" else 1)
        outputs = matrix.outputs / (layout.tp if matrix.split == "column" and not whole else 1)
        total += rank * (inputs + outputs) * matrix.count
    return total


def adapted(block: Block) -> list[Matrix]:
    """The linears of a block."""
    return [matrix for matrix in block.matrices if matrix.split in ("column", "row")]


def parameters_of(block: Block, shape: ModelShape, layout: Layout) -> float:
    """On one rank; where ranks share a key and value head, each has the projections of all of them."""
    split = Stage(((block, 1),), 0, 0, False, False).dense_parameters(layout.tp) + block.expert_parameters / layout.ep
    shared = [part for part in block.attentions if part.kv_heads < layout.tp]
    whole = sum(shape.hidden * part.kv_heads * (part.qk_width + part.v_width) for part in shared)
    return split + whole * (1 - 1 / layout.tp)


def outputs_of(block: Block, shape: ModelShape, layout: Layout) -> float:
    """Numbers per token of all outputs of a block's products and of its two norms, on one rank."""
    parts = layout.tp if layout.sequence_parallel else 1
    column = sum(m.outputs * m.count * m.share for m in block.matrices if m.split != "row")
    rows = sum(1 for m in block.matrices if m.split == "row")
    return column / layout.tp + (rows + 2) * shape.hidden / parts


def lowered_of(block: Block, layout: Layout, frozen: bool = False) -> float:
    """Weights of a block that autocast keeps a copy of on one rank.

    Products that gather their input, as columns under sequence parallelism unless they are frozen, lower their weight
    again in the backward. Grouped products of experts it does not lower.
    """
    lowered = [m for m in block.matrices if m.split != "expert"]
    kept = [m for m in lowered if m.split == "row" or frozen or not layout.sequence_parallel]
    return sum(m.parameters / (1 if m.split == "whole" else layout.tp) for m in kept)


def kept_of(block: Block, shape: ModelShape, layout: Layout, job: Job) -> float:
    """Bytes per token that a rank keeps of one block: counted from the model if it was, else by formula."""
    if job.recompute == "full":
        parts = layout.tp if layout.sequence_parallel else 1
        return job.stored * shape.hidden / parts
    formula = _by_formula(block, shape, layout, job)
    counted = dict(block.kept).get(counted_as(job.precision, job.lora))
    if counted is None:
        return formula
    return formula * counted / _by_formula(block, shape, Layout(), job)


def _by_formula(block: Block, shape: ModelShape, layout: Layout, job: Job) -> float:
    terms = activation_terms(block, shape.hidden, "transformers", job.width, stream=job.stored)
    total = kept_bytes(terms, layout, job.seq, job.recompute) + _copies_of_shared_heads(block, layout, job)
    if job.autocast and not layout.sequence_parallel:  # each product lowers its input for itself
        readers = sum(m.count for m in block.matrices if m.split == "column" and m.inputs == shape.hidden)
        total += max(0, readers - 2) * job.width * shape.hidden
    if job.lora and job.recompute != "full" and job.stored < ADAPTER_WIDTH:
        total += _inputs_of_adapters(block, shape, layout, job)
    return total


def _inputs_of_adapters(block: Block, shape: ModelShape, layout: Layout, job: Job) -> float:
    """Each adapter keeps its input in fp32, gathered; what it stands beside is frozen and keeps none."""
    parts = layout.tp if layout.sequence_parallel else 1
    of_base = 2 * shape.hidden / parts + block.inner / layout.tp
    cut = [m.inputs * m.count / (layout.tp if m.split == "row" else 1) for m in adapted(block)]
    return ADAPTER_WIDTH * sum(cut) - job.width * of_base


def _copies_of_shared_heads(block: Block, layout: Layout, job: Job) -> float:
    """Where several ranks share a key and value head, each holds all of it, before and after it is picked out."""
    more = (max(0, layout.tp / part.kv_heads - 1) * part.kv_heads * part.qk_width for part in block.attentions)
    return 4 * job.width * sum(more) / layout.tp


def counted_as(precision: str, lora: int) -> str:
    """The name under which a block knows what it keeps."""
    return f"{precision}, adapters" if lora else precision


def count_activations(
    shape: ModelShape, model: Any, precision: str, adapt: Callable[[Any], None] | None = None
) -> ModelShape:
    """The shape with what its blocks really keep for their backward, from two dry runs of one process.

    Models whose layers differ stay as they are: for them the formula holds.

    Args:
        adapt: see `dry_run`; what is counted then holds for jobs with adapters.
    """
    from hf_parallel.planner.dry_run import PRECISIONS, dry_run

    if len(set(shape.blocks)) != 1 or shape.layers < 2 or precision not in PRECISIONS:
        return shape
    # So many tokens that nothing but activations decides when memory is fullest; fake ones cost nothing.
    seq = 256 if shape.blocks[0].attentions else 8  # a recurrence may go token by token
    given: dict[str, Any] = {"rows": _MANY // seq, "seq": seq, "precision": precision, "optimizer": "sgd"}
    runs = [dry_run(model, "dp_shard=1", layers=layers, adapt=adapt, **given) for layers in (2, 3)]
    kept = (runs[1].peak["activations"] - runs[0].peak["activations"]) / _MANY
    if PRECISIONS[precision][1] is not None:  # the copies of weights do not grow with the tokens
        kept -= 2 * lowered_of(shape.blocks[0], Layout()) / _MANY
    known = (*shape.blocks[0].kept, (counted_as(precision, adapt is not None), kept))
    block = dataclasses.replace(shape.blocks[0], kept=known)
    return dataclasses.replace(shape, blocks=(block,) * shape.layers)
