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
from typing import Any

from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import GIB, HABITS, RankMemory, activation_terms, kept_bytes, lora_share
from hf_parallel.planner.model_shape import Block, ModelShape
from hf_parallel.planner.stages import Stage

_MANY = 65536  # tokens
_LOGIT_BYTES, _SPLIT_LOGIT_BYTES = 12.0, 10.0


def own_memory(shape: ModelShape, stages: list[Stage], live: int, layout: Layout, job: Job, rank: int) -> RankMemory:
    """Memory of a pipeline rank that holds `stages` in the fullest of three moments around its backward pass.

    Args:
        live: how many forwards of one stage are held at a time, at most.
    """
    rank_of = _Rank(shape, stages, live, layout, job)
    moments = rank_of.end_of_forward(), rank_of.begin_of_backward(), rank_of.in_backward()
    kinds = max(moments, key=lambda kinds: sum(kinds.values()))
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
    habits = HABITS["hf_parallel"]
    kinds |= {"context": habits.context_gib * GIB, "communication buffers": axes * habits.communicator_gib * GIB}
    passing = kinds["activations"] + kinds["temporaries"] + kinds["gathered"]
    return RankMemory(rank, kinds, habits.fragmentation * passing)


class _Rank:
    def __init__(self, shape: ModelShape, stages: list[Stage], live: int, layout: Layout, job: Job) -> None:
        self.shape, self.stages, self.live, self.layout, self.job = shape, stages, live, layout, job
        self.width, self.tokens = job.stored, job.micro_batch * job.seq / layout.cp
        self.parts = layout.tp if layout.sequence_parallel else 1  # of the residual stream
        each = [(parameters_of(block, shape, layout), count) for stage in stages for block, count in stage.counts]
        self.layer = max(size for size, _ in each)
        self.ends = sum((stage.embedding + stage.head) / layout.tp for stage in stages)
        self.parameters = self.ends + sum(size * count for size, count in each)
        self.trained = lora_share(stages, job.lora) if job.lora else 1.0
        self.shards = layout.shards if layout.zero_stage else 1
        self.sharded = layout.dp > 1  # FSDP2 is there
        self.reshards = self.sharded and layout.zero_stage == 3 and layout.pp == 1

    # ---- states --------------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, float]:
        mine = self.parameters / self.shards
        moments = mine * self.trained * own_moments(self.job)
        return {"weights": mine * self.width, "optimizer": moments if self.job.offload == "none" else 0.0}

    @property
    def _accumulates(self) -> bool:
        return self.layout.pp > 1 or self.job.micro_batches > 1

    def _whole_gradients(self) -> float:
        return self.parameters * self.trained * self.width if self._accumulates else 0.0

    # ---- moments of a step ---------------------------------------------------------------------------------------

    def end_of_forward(self) -> dict[str, float]:
        """Autocast holds a copy of every weight until the forward is over, also of layers that are recomputed."""
        if not self.job.autocast or self.job.recompute != "full" or self.layout.pp > 1:
            return {}
        kinds = self.begin_of_backward()
        logits = self.tokens * self.shape.head_outputs / self.layout.tp
        kinds["temporaries"] = self._loss() - 2 * logits  # the gradient is not there yet
        return {**kinds, "activations": kinds["activations"] + self._lowered_layers()}

    def begin_of_backward(self) -> dict[str, float]:
        """All activations, the logits, and what is gathered."""
        gathered = (self.ends + self.layer if self.reshards else self.parameters) * self.width if self.sharded else 0.0
        whole = self._whole_gradients()
        return {
            **self._states(),
            "gradients": 0.0 if self.sharded else whole,
            "gathered": gathered + (whole if self.sharded else 0.0),
            "activations": self._kept() + self._received() + self._lowered(),
            "temporaries": max(self._loss(), self._layer_again()),
        }

    def in_backward(self) -> dict[str, float]:
        """At its end: all gradients, those of embedding and head still whole under FSDP2."""
        whole = 3 * self.ends * self.width if self.sharded and not self._accumulates else 0.0
        if self.sharded and self._accumulates:
            whole = (self.ends + self.parameters * self.trained) * self.width
        return {
            **self._states(),
            "gradients": self.parameters * self.trained * self.width / self.shards,
            "gathered": whole,
            "activations": self._received() + self.tokens * self.shape.hidden * self.width / self.parts,
            "temporaries": 0.0,
        }

    # ---- activations ---------------------------------------------------------------------------------------------

    def _kept(self) -> float:
        layers = sum(
            count * kept_of(block, self.shape, self.layout, self.job)
            for stage in self.stages
            for block, count in stage.counts
        )
        return self.live * layers * self.tokens / len(self.stages)

    def _lowered(self) -> float:
        """16-bit copies of weights that products under autocast keep for their backward, of each forward in flight."""
        if not self.job.autocast or self.job.recompute == "full":
            return self._lowered_head()
        return self._lowered_head() + self.live * self._lowered_layers() / len(self.stages)

    def _lowered_layers(self) -> float:
        each = (lowered_of(block, self.layout) * count for stage in self.stages for block, count in stage.counts)
        return self.job.width * sum(each)

    def _lowered_head(self) -> float:
        has_head = self.job.autocast and self.layout.tp == 1 and any(stage.is_last for stage in self.stages)
        return self.job.width * self.shape.head_outputs * self.shape.hidden if has_head else 0.0

    def _received(self) -> float:
        """A pipeline's buffers: one per micro-batch and neighbour that sends."""
        if self.layout.pp == 1:
            return 0.0
        stream = self.tokens * self.shape.hidden * self.width / self.parts
        sides = sum(2 - stage.is_first - stage.is_last for stage in self.stages)
        return sides * self.job.micro_batches * stream

    def _loss(self) -> float:
        if not any(stage.is_last for stage in self.stages):
            return 0.0
        split = self.layout.tp > 1
        logits = self.shape.head_outputs / self.layout.tp * (_SPLIT_LOGIT_BYTES if split else _LOGIT_BYTES)
        norm = (4 + 2 * self.width) * self.shape.hidden / self.parts
        return self.tokens * (logits + norm + (self.width * self.shape.hidden if split else 0.0))

    def _layer_again(self) -> float:
        """A checkpointed layer's activations, computed again, and the gradients of its widest part."""
        if self.job.recompute != "full":
            return 0.0
        whole = dataclasses.replace(self.job, recompute="none")
        block = max((block for stage in self.stages for block, _ in stage.counts), key=lambda block: block.inner)
        kept = kept_of(block, self.shape, self.layout, whole)
        lowered = self.job.width * lowered_of(block, self.layout) if self.job.autocast else 0.0
        return self.tokens * (kept + 2 * self.width * block.inner / self.layout.tp) + lowered


def own_moments(job: Job) -> float:
    """Bytes per parameter of the optimizer's state, which has the weights' dtype unless it is an 8-bit one."""
    return {"adamw": 2.0 * job.stored, "adamw_8bit": 2.0, "sgd": 0.0, "sgd_momentum": 1.0 * job.stored}[job.optimizer]


def parameters_of(block: Block, shape: ModelShape, layout: Layout) -> float:
    """On one rank; where ranks share a key and value head, each has the projections of all of them."""
    split = Stage(((block, 1),), 0, 0, False, False).dense_parameters(layout.tp) + block.expert_parameters / layout.ep
    shared = [part for part in block.attentions if part.kv_heads < layout.tp]
    whole = sum(shape.hidden * part.kv_heads * (part.qk_width + part.v_width) for part in shared)
    return split + whole * (1 - 1 / layout.tp)


def lowered_of(block: Block, layout: Layout) -> float:
    """Weights of a block that autocast keeps a copy of on one rank.

    Products that gather their input, as columns under sequence parallelism, lower their weight again in the backward.
    Grouped products of experts it does not lower.
    """
    lowered = [m for m in block.matrices if m.split != "expert"]
    kept = [m for m in lowered if m.split == "row" or not layout.sequence_parallel]
    return sum(m.parameters / (1 if m.split == "whole" else layout.tp) for m in kept)


def kept_of(block: Block, shape: ModelShape, layout: Layout, job: Job) -> float:
    """Bytes per token that a rank keeps of one block: counted from the model if it was, else by formula."""
    if job.recompute == "full":
        parts = layout.tp if layout.sequence_parallel else 1
        return job.stored * shape.hidden / parts
    formula = _by_formula(block, shape, layout, job)
    counted = dict(block.kept).get(job.precision)
    if counted is None:
        return formula
    return formula * counted / _by_formula(block, shape, Layout(), job)


def _by_formula(block: Block, shape: ModelShape, layout: Layout, job: Job) -> float:
    terms = activation_terms(block, shape.hidden, "transformers", job.width, stream=job.stored)
    total = kept_bytes(terms, layout, job.seq, job.recompute) + _copies_of_shared_heads(block, layout, job)
    if job.autocast and not layout.sequence_parallel:  # each product lowers its input for itself
        readers = sum(m.count for m in block.matrices if m.split == "column" and m.inputs == shape.hidden)
        total += max(0, readers - 2) * job.width * shape.hidden
    return total


def _copies_of_shared_heads(block: Block, layout: Layout, job: Job) -> float:
    """Where several ranks share a key and value head, each holds all of it, before and after it is picked out."""
    more = (max(0, layout.tp / part.kv_heads - 1) * part.kv_heads * part.qk_width for part in block.attentions)
    return 4 * job.width * sum(more) / layout.tp


def count_activations(shape: ModelShape, model: Any, precision: str) -> ModelShape:
    """The shape with what its blocks really keep for their backward, from two dry runs of one process.

    Models whose layers differ stay as they are: for them the formula holds.
    """
    from hf_parallel.planner.dry_run import PRECISIONS, dry_run

    if len(set(shape.blocks)) != 1 or shape.layers < 2 or precision not in PRECISIONS:
        return shape
    # So many tokens that nothing but activations decides when memory is fullest; fake ones cost nothing.
    seq = 256 if shape.blocks[0].attentions else 8  # a recurrence may go token by token
    given: dict[str, Any] = {"rows": _MANY // seq, "seq": seq, "precision": precision, "optimizer": "sgd"}
    runs = [dry_run(model, "dp_shard=1", layers=layers, **given) for layers in (2, 3)]
    kept = (runs[1].peak["activations"] - runs[0].peak["activations"]) / _MANY
    if PRECISIONS[precision][1] is not None:  # the copies of weights do not grow with the tokens
        kept -= 2 * lowered_of(shape.blocks[0], Layout()) / _MANY
    block = dataclasses.replace(shape.blocks[0], kept=((precision, kept),))
    return dataclasses.replace(shape, blocks=(block,) * shape.layers)
