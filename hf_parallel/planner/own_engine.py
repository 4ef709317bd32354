"""What this package's own engine keeps on a rank: the code of rewrite, sharding and pipeline as arithmetic.

It differs from Megatron-LM and DeepSpeed, whose formulas are in `memory.py`, in what a dry run shows:

    weights, gradients, moments   all of the weights' own dtype, no fp32 master copy unless the weights are fp32
    autocast                      fp32 weights, and whole 16-bit copies of them between forward and backward, however
                                  ZeRO shards; in a pipeline for each micro-batch in flight
    FSDP2, reshard                embedding, norm and head stay whole, and one layer; without it all weights
    accumulation                  gradients stay whole between the calls of a step, and in a pipeline between
                                  micro-batches: they are reduced once; FSDP2 adds them up, and reduces them, in fp32
    pipeline                      a buffer per micro-batch for what arrives, from either side
    loss                          12 bytes per logit in the fullest moment, 10 if the vocabulary is split

Checked against dry runs in tests/planner/test_own_engine.py.
"""

from __future__ import annotations

import dataclasses

from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import EIGHT_BIT_MOMENTS, GIB, HABITS, RankMemory
from hf_parallel.planner.model_shape import ModelShape
from hf_parallel.planner.own_layers import (
    ADAPTER_WIDTH,
    adapters_of,
    kept_of,
    lowered_of,
    outputs_of,
    parameters_of,
    summed_width,
)
from hf_parallel.planner.pipeline_memory import Moment, StageBytes, fullest_moment
from hf_parallel.planner.stages import Stage, neighbours_elsewhere
from hf_parallel.planner.step_time import schedule_order, simulated_batches

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
        self.sharded = layout.dp * layout.cp > 1  # FSDP2 is there
        experts = sum(stage.expert_parameters(layout.ep) for stage in stages)  # ZeRO has the ranks that ep leaves
        self.mine = (self.parameters - experts) / self.shards + experts / max(1, self.shards // layout.ep)
        self.summed = summed_width(layout, job) if self.sharded else self.width
        self.reshards = self.sharded and layout.zero_stage == 3 and layout.pp == 1

    # ---- states --------------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, float]:
        moments = own_moments(self.job) * (self.adapters / self.shards if self.job.lora else self.mine)
        weights = self.mine * self.width + self.adapters * ADAPTER_WIDTH / self.shards
        return {"weights": weights, "optimizer": moments if self.job.offload == "none" else 0.0}

    def _adapters_of(self, stage: Stage) -> float:
        return sum(count * adapters_of(block, self.layout, self.job.lora) for block, count in stage.counts)

    @property
    def _accumulates(self) -> bool:
        return self.layout.pp > 1 or self.job.micro_batches > 1

    def _of_earlier_calls(self) -> float:
        """A pipeline reduces in each call, and adds to what it put aside."""
        return self._reduced() if self.job.calls > 1 else 0.0

    def _reduced(self) -> float:
        """The gradients that this rank keeps."""
        return self._gradients() / self.shards if self.job.lora else self.mine * self.width

    def _whole_gradients(self) -> float:
        return self._gradients() if self._accumulates else 0.0

    def _gradients(self) -> float:
        return sum(map(self._gradients_of, self.stages))

    def _gradients_of(self, stage: Stage) -> float:
        if self.job.lora:
            return ADAPTER_WIDTH * self._adapters_of(stage)
        layers = sum(parameters_of(block, self.shape, self.layout) * count for block, count in stage.counts)
        return (layers + (stage.embedding + stage.head) / self.layout.tp) * self.summed

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
        whole = self.ends * (self.width if self.job.lora else 2 * self.width + self.summed) if self.sharded else 0.0
        if self.sharded and self._accumulates:
            whole = self.ends * self.width + self._gradients()
        return {
            **self._states(),
            "gradients": self._reduced(),
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
