"""How many bytes each rank holds, by kind: states by ZeRO's table 1, activations term by term.

zero_states(7.5e9, shards=64, stage=3)      # 1.9e9 bytes: Rajbhandari et al., 2020 (arXiv:1910.02054), figure 1
activation_terms(block, hidden, "paper")    # Korthikanti et al., 2022 (arXiv:2205.05198): 34 sbh + 5 a s^2 b
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import Block, ModelShape
from hf_parallel.planner.stages import Stage

GIB = 2**30
#: Of two 8-bit moments, with a scale in fp32 for each block of 256 (Dettmers et al., 2022, arXiv:2110.02861).
EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)
#: Bytes per element of what an optimizer keeps besides master weights: two fp32 moments, two 8-bit ones, none.
MOMENTS = {"adamw": 8.0, "adamw_8bit": EIGHT_BIT_MOMENTS, "sgd": 0.0, "sgd_momentum": 4.0}


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of weights that compute, of gradients, and of what the optimizer alone reads (K)."""

    weights: float = 2.0
    gradients: float = 2.0
    optimizer: float = 12.0


def zero_states(parameters: float, shards: int, stage: int, state: StateBytes | None = None) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer on each of `shards` ranks: ZeRO's table 1.

    Stage 0 holds (2 + 2 + K) x parameters, 1 divides K by the shards, 2 the gradients too, 3 everything.
    """
    state = state or StateBytes()
    return {
        "weights": parameters * state.weights / (shards if stage >= 3 else 1),
        "gradients": parameters * state.gradients / (shards if stage >= 2 else 1),
        "optimizer": parameters * state.optimizer / (shards if stage >= 1 else 1),
    }


def state_bytes(job: Job, zero_stage: int) -> StateBytes:
    """What mixed precision keeps per parameter.

    bf16 reduces and accumulates gradients in fp32 (Megatron-LM, FSDP2), fp16 in fp16 behind its loss scale. Under
    ZeRO-3 the sharded master copy is the only one: the 16-bit weights exist in gathered layers alone. Autocast keeps
    fp32 weights and, beside these states, whole 16-bit copies of them: see `autocast_copies`.
    """
    moments = MOMENTS[job.optimizer]
    if job.precision == "fp32" or job.autocast:
        return StateBytes(4, 4, moments)
    gradients = 2 if job.precision == "fp16" else HABITS[job.engine].gradient_bytes if zero_stage < 3 else 4
    return StateBytes(0 if zero_stage == 3 else 2, gradients, 4 + moments)


# ---- activations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """Bytes per token that a block keeps for its backward; `cut`: by which axes: "sp" (tp if sequence parallel), "tp".

    `core`: part of the attention core, which Korthikanti's selective recomputation drops. `product`: a matrix product.
    """

    name: str
    bytes: float
    cut: str = "tp"
    core: bool = False
    product: bool = False
    squared: float = 0.0  # bytes per token and key


def activation_terms(
    block: Block, hidden: int, kernels: str = "fused", width: int = 2, dropout: bool = False, stream: int | None = None
) -> list[Term]:
    """What a block keeps of each token, in the order of its forward.

    Args:
        width: bytes of what matrix products read and write.
        stream: bytes of the residual stream, which norms read; default: the same.
        kernels: "paper": attention scores in memory, as in arXiv:2205.05198; "fused": flash attention, norms and
            gated activations that keep their inputs only; "transformers": modules as Transformers writes them, see
            docs/activation_memory.md.
    """
    c, e = width, stream or width
    norm = {"paper": e, "fused": e, "transformers": 4 + e + 4 / hidden}[kernels]
    heads = sum(part.heads for part in block.attentions)
    query = sum(part.heads * part.qk_width for part in block.attentions)
    keys = sum(part.kv_heads * (part.qk_width + part.v_width) for part in block.attentions)
    output = sum(part.heads * part.v_width for part in block.attentions)
    mask = 1.0 if dropout else 0.0
    terms = [Term("input of the attention's norm", norm * hidden, "sp")]
    terms += [
        Term("input of q, k, v", c * hidden, "sp"),
        Term("q", c * query, product=True),
        Term("k and v", c * keys, product=True),
        Term("attention scores", 0, core=True, squared=heads * (c + (1 + c) * mask) if kernels == "paper" else 0),
        Term("log-sum-exp of the scores", 0 if kernels == "paper" else 4 * heads),
        Term("output of attention", c * output),
        Term("dropout after attention", mask * hidden, "sp"),
        Term("input of the MLP's norm", norm * hidden, "sp"),
        Term("input of the MLP", c * hidden, "sp"),
    ]
    inner = c * block.inner
    terms += [Term("MLP, first half", (2 if block.gated else 1) * inner, product=True)]
    if kernels == "transformers" and block.gated:
        terms += [Term("activation of the gate", inner)]
    terms += [Term("input of the MLP's second half", inner), Term("dropout after the MLP", mask * hidden, "sp")]
    if block.top_k:
        terms += [Term("tokens sent to experts and back", 2 * c * block.top_k * hidden, "sp")]
    return terms


def kept_bytes(terms: list[Term], layout: Layout, length: int, recompute: str = "none") -> float:
    """Bytes per token that a rank keeps of one block.

    `selective` drops the attention core where scores are in memory (arXiv:2205.05198, section 5); where they are not
    (flash attention) it keeps the block's input, attention's output and every second matrix product (as torchtitan).
    """
    has_scores = any(term.squared for term in terms)
    if recompute == "full":
        return _cut(terms[0], layout, length)
    if recompute == "selective" and has_scores:
        return sum(_cut(term, layout, length) for term in terms if not term.core)
    if recompute == "selective":
        kept = [term for term in terms if term.name in ("output of attention", "log-sum-exp of the scores")]
        products = [term for term in terms if term.product]
        outputs = sum(_cut(term, layout, length) for term in products) + 2 * _cut(terms[0], layout, length)
        return _cut(terms[0], layout, length) + sum(_cut(term, layout, length) for term in kept) + outputs / 2
    return sum(_cut(term, layout, length) for term in terms)


def _cut(term: Term, layout: Layout, length: int) -> float:
    parts = layout.tp if term.cut == "tp" or layout.sequence_parallel else 1
    return (term.bytes + term.squared * length) / parts


# ---- a rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Habits:
    """Numbers of an engine that are not in a paper; fitted once over all published rows, see docs/planner.md."""

    logit_bytes: float = 8.0  # per logit: 16-bit, fp32, gradient
    fragmentation: float = 0.35  # of activations and temporaries, held beyond them
    context_gib: float = 1.0  # CUDA, kernels, communicators: outside the allocator's count
    ahead: float = 2.0  # layers of gathered weights alive at a time under ZeRO-3
    communicator_gib: float = 1.5  # buffers of each axis's communicators
    bucket_gib: float = 1.5  # in which ZeRO-1 and 2 reduce and gather
    gradient_bytes: float = 6.0  # bf16 training without ZeRO-3: the fp32 sum, and the 16-bit gradients beside it
    boundary: float = 1.0  # copies of a stage's input that a pipeline holds per micro-batch in flight
    kernels: str = "fused"


HABITS = {
    "standard": Habits(),
    "hf_parallel": Habits(kernels="transformers", boundary=1.0, communicator_gib=0.5, bucket_gib=0.0),
}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by kind, at the peak of a step.

    `slack`: what the allocator holds beyond what is in use. It gives that back before it fails.
    """

    rank: int
    kinds: dict[str, float] = field(hash=False)
    slack: float = 0.0

    @property
    def needed(self) -> float:
        """What must be there at the same time."""
        return sum(self.kinds.values())

    def held(self, capacity: float = math.inf) -> float:
        """What a monitor shows on a GPU of `capacity` bytes."""
        return max(self.needed, min(self.needed + self.slack, capacity))


def rank_memory(shape: ModelShape, stages: list[Stage], live: int, layout: Layout, job: Job, rank: int) -> RankMemory:
    """Memory of a pipeline rank that holds `stages`.

    Args:
        live: how many forwards of one stage are held at a time, at most.
    """
    habits = HABITS[job.engine]
    tokens = job.micro_batch * job.seq / layout.cp
    kernels = habits.kernels
    if job.attention != "flash":
        kernels = "paper"
    states = _states(stages, layout, job)
    per_stage = [_stage_activations(shape, stage, kernels, tokens, layout, job) for stage in stages]
    sent = habits.boundary * job.stored * tokens * shape.hidden if layout.pp > 1 else 0.0
    activations = live * (sum(per_stage) / len(stages) + sent)
    working = max(_working_set(shape, stage, kernels, tokens, layout, job) for stage in stages)
    logits = tokens * shape.head_outputs / layout.tp * habits.logit_bytes if any(s.is_last for s in stages) else 0.0
    kinds = {
        **states,
        "activations": activations,
        "temporaries": max(working, logits),
        "gathered weights": _gathered(shape, stages, layout, job, habits),
        "context": habits.context_gib * GIB,
        "communication buffers": _buffers(layout, habits),
        **({"autocast copies": autocast_copies(stages, layout, job)} if job.autocast else {}),
    }
    slack = habits.fragmentation * (activations + kinds["temporaries"] + kinds["gathered weights"])
    return RankMemory(rank, kinds, slack)


def _buffers(layout: Layout, habits: Habits) -> float:
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
    buckets = habits.bucket_gib if layout.zero_stage in (1, 2) and layout.dp > 1 else 0.0
    return (axes * habits.communicator_gib + buckets) * GIB


def _states(stages: list[Stage], layout: Layout, job: Job) -> dict[str, float]:
    per = state_bytes(job, layout.zero_stage)
    total = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for parameters, shards in _sharded(stages, layout):
        trained = 1.0
        if job.lora:
            frozen = StateBytes(job.stored, 0, 0)
            states = zero_states(parameters, shards, layout.zero_stage, frozen)
            trained = lora_share(stages, job.lora)
            total = {kind: total[kind] + states[kind] for kind in total}
        states = zero_states(parameters * trained, shards, layout.zero_stage, per)
        total = {kind: total[kind] + states[kind] for kind in total}
    if job.offload != "none":
        total["optimizer"] = total["gradients"] = 0.0
        total["weights"] = max(total["weights"], sum(2 * n / s for n, s in _sharded(stages, layout)))
    return total


def autocast_copies(stages: list[Stage], layout: Layout, job: Job) -> float:
    """What autocast makes of fp32 weights and products keep for their backward: whole ones, however ZeRO shards."""
    return job.width * sum(stage.dense_parameters(layout.tp) + stage.expert_parameters(layout.ep) for stage in stages)


def _sharded(stages: list[Stage], layout: Layout) -> list[tuple[float, int]]:
    """Parameters on a rank before ZeRO, and over how many ranks ZeRO spreads them: of experts, and of the rest."""
    dense = sum(stage.dense_parameters(layout.tp) for stage in stages)
    experts = sum(stage.expert_parameters(layout.ep) for stage in stages)
    return [(dense, layout.shards), (experts, max(1, layout.shards * layout.tp // layout.ep))]


def lora_share(stages: list[Stage], rank: int) -> float:
    matrices = [matrix for stage in stages for block in stage.blocks for matrix in block.matrices]
    adapters = sum(rank * (matrix.inputs + matrix.outputs) * matrix.count for matrix in matrices)
    return adapters / max(1, sum(block.parameters for stage in stages for block in stage.blocks))


def _stage_activations(
    shape: ModelShape, stage: Stage, kernels: str, tokens: float, layout: Layout, job: Job
) -> float:
    length = job.seq
    total = 0.0
    for block, count in stage.counts:
        terms = _terms(shape, block, kernels, job)
        total += count * tokens * kept_bytes(terms, layout, length, job.recompute)
    return total


def _terms(shape: ModelShape, block: Block, kernels: str, job: Job) -> list[Term]:
    dropout = shape.dropout and kernels == "paper"
    return activation_terms(block, shape.hidden, kernels, job.width, dropout, job.stored)


def _working_set(shape: ModelShape, stage: Stage, kernels: str, tokens: float, layout: Layout, job: Job) -> float:
    """What one block's backward needs on top: its recomputed activations and gradients of the widest of them."""
    if not stage.counts:
        return 0.0
    block = max((block for block, _ in stage.counts), key=lambda block: block.inner)
    terms = _terms(shape, block, kernels, job)
    again = kept_bytes(terms, layout, job.seq) - kept_bytes(terms, layout, job.seq, job.recompute)
    gradients = job.width * (2 * block.inner / layout.tp + 2 * shape.hidden)
    return tokens * (again + gradients)


def _gathered(shape: ModelShape, stages: list[Stage], layout: Layout, job: Job, habits: Habits) -> float:
    """Weights of the layers at work under ZeRO-3, and gradients of one of them before they are reduced."""
    if layout.zero_stage < 3 or layout.shards == 1:
        return 0.0
    blocks = [block for stage in stages for block, _ in stage.counts]
    largest = max(block.parameters for block in blocks)
    ends = max(shape.embedding_parameters, shape.head_parameters)
    unit = max(largest, ends if any(s.is_first or s.is_last for s in stages) else 0) / layout.tp
    return (habits.ahead * job.stored * largest / layout.tp) + unit * (job.stored + 2.0)


def fullest(memories: list[RankMemory]) -> RankMemory:
    """The rank that needs most."""
    return max(memories, key=lambda memory: memory.needed)


def fits(memory: RankMemory, cluster: Cluster) -> bool:
    """Whether a rank's peak is within what the driver reports of the GPU's memory."""
    return memory.needed <= cluster.gpu.memory_gib * GIB
