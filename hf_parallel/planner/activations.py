"""The bytes per token that a block keeps for its backward on one rank, and a pipeline's fullest moment.

The terms are those of Korthikanti et al. (2022, arXiv:2205.05198, section 4) under flash attention, or those of
Transformers' modules (docs/activation_memory.md). Where a dry run counted a block, its number stands for their sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.layers import AUTO, TORCH_FLASH
from hf_parallel.axes.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    flatten_overlaps,
)
from hf_parallel.axes.recompute import THIN, WIDER
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.pipeline import is_shared, list_adapted
from hf_parallel.planner.shape import Attention, Block, ModelShape
from hf_parallel.planner.states import ADAPTER_WIDTH, count_adapter_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.planner.hardware import Gpu


# ---- Which attention a plan assumes: what `attention=auto` would be on its GPUs, by the same rules as in a run
# kind     kernels                                         holds of each layer             computes
# flash    torch_flash, flash_attention_2, …; those of cp  no scores                       keys that are seen
# sdpa     sdpa on rows of one document                    no scores; of a window a mask   the same; of a window all
# masked   sdpa on padded rows or packs                    a mask of queries by keys       all keys
# eager    eager                                           scores in 32 and 16 bits        all keys; reads scores


FLASH, SDPA, MASKED, EAGER = "flash", "sdpa", "masked", "eager"
_DTYPES = {"bf16": "bfloat16", "fp8": "bfloat16"}  # of the weights; else fp32
_LOWERED = {"mixed": "bfloat16", "fp16": "float16"}  # what autocast lowers products to


@dataclass(frozen=True)
class Planned:
    """The attention of a plan.

    Attributes:
        auto: what `attention=auto` would be.
        why: the reason, for people.
        asked: what the plan's specs say.
        documents: are rows padded, or packs of documents, so that sdpa needs a mask?
        counted: the kernel that a dry run of the model has, when what its layers keep is counted.
    """

    auto: str = TORCH_FLASH
    why: str = "no model, only its numbers: flash attention is assumed"
    asked: str = AUTO
    documents: bool = False
    counted: str = SDPA

    @property
    def name(self) -> str:
        """The kernel that the plan's layouts run."""
        return self.auto if self.asked == AUTO else self.asked

    def kind(self, config: ParallelConfig) -> str:
        """Return what this layout's attention is to the formulas; cp has kernels of its own."""
        if config.cp_size > 1:
            return FLASH
        name = self.auto if config.attention == AUTO else config.attention
        if name == SDPA:
            return MASKED if self.documents else SDPA
        return EAGER if name == EAGER else FLASH


def has_mask(attention: Attention, seq: int, kind: str) -> bool:
    """Return whether sdpa gets a mask of queries by keys. Without one it takes a flash kernel."""
    return kind == MASKED or (kind == SDPA and attention.window is not None and attention.window < seq)


def assume_planned(
    model: PreTrainedModel, gpu: Gpu, precision: str, seq: int, own: str | None = None, documents: bool = False
) -> Planned:
    """Return what is assumed of a model, on GPUs that need not be here.

    Args:
        model: a config; of mere numbers flash attention is assumed, or `own`.
        own: the kernel that the script asks for; default: what transformers chooses.
        documents: are rows padded, or packs?
    """
    import torch

    from hf_parallel.axes.attention_kernel import (
        choose_kernel_for_auto,
        find_reason_against_torch_flash,
        read_attention,
    )
    from hf_parallel.model.anatomy import build_on_meta

    known = None
    if not isinstance(model, (Mapping, ModelShape)):  # a config, or a model that is there
        known = read_attention(build_on_meta(model) if hasattr(model, "model_type") else model, ParallelConfig())
    if known is None or not known.head_size:
        asked = {} if own is None else {"auto": own, "why": "the script's own choice"}
        return Planned(documents=documents, **asked)
    facts = dataclasses.replace(  # on the GPUs of the plan, in its precision
        known,
        own=own or known.own,
        device="cpu" if gpu.capability == (0, 0) else "cuda",
        capability=gpu.capability,
        dtype=getattr(torch, _DTYPES.get(precision, "float32")),
        here=known.device == "cuda" and known.capability == gpu.capability,
    )
    kernel = choose_kernel_for_auto(ParallelConfig(), facts)
    assert kernel is not None
    counted = EAGER if known.own == EAGER else SDPA
    found = Planned(kernel.name, kernel.why or "", documents=documents, counted=counted)
    masked = documents or (facts.window is not None and facts.window < seq)
    lowered = dataclasses.replace(facts, dtype=getattr(torch, _LOWERED.get(precision, "float32")))
    if kernel.own and masked and precision in _LOWERED and find_reason_against_torch_flash(lowered) is None:
        why = "products are in 16 bits under autocast, and sdpa would get a mask of queries by keys"
        return dataclasses.replace(found, asked=TORCH_FLASH, why=why)
    return found


#: Bytes per score of an eager backward, and what `_list_terms_beside_flash` adds.
_SCORE_GRADIENT = 6
_OF_EAGER = ("copies of keys and values", "scores after the softmax", "no log-sum-exp")
#: What attention gives: kept where it is not run again, as over cp ranks.
_OF_ATTENTION = ("output of attention", "log-sum-exp of the scores")


@dataclass(frozen=True)
class Term:
    """Bytes per token that a block keeps for its backward.

    `cut`: by which axes: "sp" (tp if sequence parallel), "entered" (else by columns of a grid), "tp", "none".
    `product`: a matrix product.
    """

    name: str
    bytes: float
    cut: str = "tp"
    product: bool = False
    squared: float = 0.0  # bytes per token and key


def list_terms_of(block: Block, hidden: int, job: Job) -> list[Term]:
    """Return what a block keeps of each token under a job's kernels and precision, in the order of its forward."""
    c, fused = job.width, job.habits.fused
    norm = job.stored * hidden if fused else (4 + job.stored + 4 / hidden) * hidden
    # The input, the input in fp32, and the normalised before the weight; selective checkpointing makes them again.
    if not job.fused_norms and fused and job.each_recomputed != "selective":
        norm = (4 + 2 * job.stored) * hidden
    heads = sum(part.heads for part in block.attentions)
    query = sum(part.heads * part.qk_width for part in block.attentions)
    keys = sum(part.key_numbers for part in block.attentions)
    output = sum(part.heads * part.v_width for part in block.attentions)
    inner = c * block.inner
    # The gate's activation is computed again in the backward.
    in_product = job.habits.transformer_engine or (job.compiled and fused)
    rotated = query + sum(part.kv_heads * part.qk_width for part in block.attentions)
    # Latent attention (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1), whose models route in fp32.
    known = block.attentions and not fused
    latents = [m for m in block.matrices if known and m.split == "column" and m.inputs != hidden]
    expanded = sum(m.outputs * m.count for m in latents) - output - query * any(m.outputs == query for m in latents)
    entered = "none" if job.habits.keeps_gathered or latents else "entered"
    terms = [
        Term("input of the attention's norm", norm, "sp"),
        Term("input of q, k, v", c * hidden, entered),
        Term("q", c * query, product=True),
        Term("k and v", c * keys, product=True),
        Term("latents, and norms of them", (4 + 2 * c) * sum(m.inputs * m.count for m in latents), "none"),
        Term("keys before those with positions join them", c * max(0, expanded) if latents else 0),
        Term("log-sum-exp of the scores", 4 * heads),
        Term("q and k before they are rotated", c * rotated * job.habits.packed_attention),
        Term("output of attention", c * output),
        Term("output of attention in order", c * output * (job.habits.packed_attention and job.micro_batch > 1)),
        Term("input of the MLP's norm", norm, "sp"),
        Term("input of the MLP", c * hidden, entered),
        Term("MLP, first half", (2 if block.gated else 1) * inner, product=True),
        Term("activation of the gate", inner if block.gated and not in_product else 0),
        Term("input of the MLP's second half", inner),
        Term("input of the router in fp32", 4 * hidden if latents and block.top_k else 0, "sp"),
        Term("tokens sent to experts and back", 2 * c * block.top_k * hidden, "sp"),
    ]
    return terms if job.attention == FLASH else [*terms, *_list_terms_beside_flash(block, job)]


#: What an MLP keeps that is as wide as its inside: of one piece alone where it runs in pieces.
_WIDE = ("MLP, first half", "activation of the gate", "input of the MLP's second half")


def count_wide_bytes(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token that the inside of a block's MLP keeps; an adapter has its input in its own width."""
    wide = _sum_kept_bytes((term for term in list_terms_of(block, hidden, job) if term.name in _WIDE), layout, job)
    copied = job.lora and job.stored < count_adapter_width(job)
    return wide + (count_adapter_width(job) - job.width) * block.inner / layout.tp if copied else wide


def count_parts(term: Term, layout: Layout) -> int:
    """In how many parts tp ranks have it."""
    if term.cut == "tp" or (term.cut != "none" and layout.sequence_parallel):
        return layout.tp
    return layout.tp_columns if term.cut == "entered" else 1


def _sum_kept_bytes(terms: Iterable[Term], layout: Layout, job: Job) -> float:
    """Return the bytes per token of all terms on one rank."""
    return sum((term.bytes + term.squared * job.seq) / count_parts(term, layout) for term in terms)


def count_kept_beside_flash(block: Block, layout: Layout, job: Job) -> float:
    """Return the bytes per token that a job's kernel keeps of a block, and flash attention does not."""
    return _sum_kept_bytes(_list_terms_beside_flash(block, job), layout, job) if job.attention != FLASH else 0.0


def _list_terms_beside_flash(block: Block, job: Job) -> list[Term]:
    """Return what other kernels keep as well, as Transformers calls them: copies of shared heads, scores or a mask."""
    c, eager = job.width, job.attention == EAGER
    masked = [part for part in block.attentions if eager or has_mask(part, job.seq, job.attention)]
    shared = sum((part.heads - part.kv_heads) * (part.qk_width + part.v_width) for part in masked)
    terms = [Term("copies of keys and values", c * shared)]
    if not eager:
        return [*terms, Term("mask of queries by keys", 0, "none", squared=c * len(masked))]
    heads = sum(part.heads for part in masked)
    scores = Term("scores after the softmax", 0, squared=heads * (4 + c * (c < 4)))
    return [*terms, scores, Term("no log-sum-exp", -4 * heads)]


def count_score_gradients(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token, beyond what the layer keeps, while an eager layer's scores have gradients.

    They are in 32 bits and in those of the products (measured); the layer's MLP is done by then.
    """
    squared = _SCORE_GRADIENT * sum(part.heads for part in block.attentions) * job.seq / layout.tp
    if job.each_recomputed == "selective":  # what is kept of the layer stays until its backward ends
        return squared
    terms = list_terms_of(block, hidden, job)
    names = [term.name for term in terms]
    mlp = terms[names.index("input of the MLP's norm") :]
    return squared - _sum_kept_bytes((term for term in mlp if term.name not in _OF_EAGER), layout, job)


@functools.lru_cache(maxsize=4096)
def count_kept_bytes(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token that a rank keeps of one block on average: counted from the model, or by formula."""
    if job.recompute.startswith("every:"):
        checkpointed, plain = (
            count_kept_bytes(block, hidden, layout, replace(job, recompute=way)) for way in ("full", "none")
        )
        return job.recomputed_share * checkpointed + (1 - job.recomputed_share) * plain
    if job.tiled_mlp and job.recompute == "none":
        whole = count_kept_bytes(block, hidden, layout, replace(job, tiled_mlp=False))
        return whole - count_wide_bytes(block, hidden, layout, job)
    if job.recompute == "selective" and job.habits.keeps_products:
        return _count_all_products(block, hidden, layout, job)
    if job.recompute == "full":
        parts = layout.tp if layout.partition_activations else layout.stream_parts
        given = [term for term in list_terms_of(block, hidden, job) if layout.cp > 1 and term.name in _OF_ATTENTION]
        return job.stored * hidden / parts + _sum_kept_bytes(given, layout, job)
    if job.attention != FLASH:
        return count_kept_beside_flash(block, layout, job) + count_kept_bytes(
            block, hidden, layout, replace(job, attention=FLASH)
        )
    formula = _count_by_formula(block, hidden, layout, job)
    counted = None if job.habits.fused else dict(block.kept).get(name_counted_as(job.precision, job.lora))
    return formula if counted is None else formula * counted / _count_by_formula(block, hidden, Layout(), job)


def count_offloaded_bytes(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token of one block that `activation_offload` sends to the host, on average.

    Products that `selective` keeps stay on the device.
    """
    return count_kept_bytes(
        block, hidden, layout, replace(job, recompute="full") if job.recompute == "selective" else job
    )


def _count_all_products(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the block's input, what attention gives, and outputs of products: of row-parallel ones after their sum.

    With queries, keys and values that ranks have sent each other to share heads, and products of adapters.
    """
    attention = () if job.attention == EAGER else _OF_ATTENTION
    terms = [t for t in list_terms_of(block, hidden, job) if t.product or t.name in attention]
    stream = hidden / layout.stream_parts
    heads = sum(part.heads * part.qk_width + part.key_numbers for part in block.attentions)
    sent = job.width * heads / layout.tp if layout.heads_over > 1 else 0.0
    kept = _sum_kept_bytes(terms, layout, job) + _count_products_of_adapters(block, layout, job)
    rows = 2 if job.habits.fused else sum(m.split == "row" for m in block.matrices)  # whose outputs are the stream's
    # Of each expert the product that leads back; of those on other ranks what has arrived, there and back, too.
    routed = _count_routed_bytes(block, hidden, layout, job) * (3 if layout.ep > 1 else 1)
    return (job.stored + rows * job.width) * stream + sent + kept + routed


def _count_routed_bytes(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token of a copy for each of its experts, as Transformers makes them; 0 if not known."""
    if job.habits.fused:
        return 0.0
    return job.width * block.top_k * hidden / (layout.tp if layout.ep > 1 else layout.stream_parts)


def count_routed_again(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    """Return the bytes per token beyond those of a layer without checkpointing, as one with experts runs again.

    It is fullest as products are back in order (`grouped_mm_experts_forward`): of each pair of a token and an expert
    there are five copies, what arrived, sorted, its product, weighted, unsorted, where a layer keeps two. Without ep
    nothing arrives, but in the backward pass the gradient that came is spread over pairs. What `selective` kept of
    the way back is a sixth. Beside them are what the checkpoint kept, the residual, the gradient in fp32, and what
    shared experts made of each token.
    """
    if not block.top_k or job.habits.fused:
        return 0.0
    selective, stream = job.each_recomputed == "selective", hidden / layout.stream_parts
    rows = sum(m.split == "row" for m in block.matrices)
    copies = 3 + (selective or layout.ep == 1)
    beside = job.stored + job.width * (1 + (rows > 1)) + 4 + rows * job.width * selective
    return copies * _count_routed_bytes(block, hidden, layout, job) + beside * stream


def _count_products_of_adapters(block: Block, layout: Layout, job: Job) -> float:
    """Count outputs of adapters that are kept: of each A, and of each B that is not wide (`recompute.py`).

    Of a row-parallel layer the sum over ranks is kept in place of what B adds to it.
    """
    if not job.lora:
        return 0.0
    width, numbers = job.width if job.autocast else count_adapter_width(job), 0.0
    for matrix in list_adapted(block):
        of_rows = matrix.split == "row" and layout.tp > 1
        outputs = matrix.outputs if is_shared(matrix, block, layout.tp) else matrix.outputs / layout.tp_rows
        wide = job.lora <= THIN and WIDER * job.lora <= outputs
        numbers += matrix.count * (job.lora + (0.0 if wide or of_rows else outputs))
    return width * numbers


def count_adapted_again(block: Block, hidden: int, layout: Layout, job: Job, of_loss: float = 0.0) -> float:
    """Return the bytes per token at the fullest moment of a checkpointed layer with adapters that runs again.

    Its forward is fullest where an adapter of the MLP's first half is added: the base's product, B's and B's scaled
    are there, what the layer has kept so far, the MLP's input and the residual, which wait, and the gradient that
    came. A product that `selective` kept gives back no more than itself: with the adapter's part it is a new tensor.

    Args:
        of_loss: bytes per token of the loss's own gradient, which its forward finds, and its backward does not.
    """
    selective = job.each_recomputed == "selective"
    given = _OF_ATTENTION if (selective or layout.cp > 1) and job.attention != EAGER else ()
    terms = (term for term in list_terms_of(block, hidden, job) if term.name in given)
    kept = count_kept_bytes(block, hidden, layout, replace(job, recompute="none"))
    kept -= _sum_kept_bytes(terms, layout, job)
    kept -= _count_products_of_adapters(block, layout, job) if selective else 0.0
    stream, inner, width = hidden / layout.stream_parts, block.inner / layout.tp, job.width
    # Sequence parallelism gathers the MLP's input; of the last stage also the loss's input, and its gradient.
    joined = hidden * (1 + 2 * (of_loss > 0)) if layout.stream_parts > 1 else 0.0
    waiting = 4 if count_adapter_width(job) > width else 3  # as wide as adapters the MLP's input is kept by them
    forward = width * (waiting * stream + joined) + (count_adapter_width(job) - width * selective) * inner
    return kept + max(forward, width * (2 * inner + stream) - of_loss)


def _count_by_formula(block: Block, hidden: int, layout: Layout, job: Job) -> float:
    terms = list_terms_of(block, hidden, job)
    if job.recompute == "selective":  # as torchtitan has it: every second product, the input, what attention gives
        stream = _sum_kept_bytes(terms[:1], layout, job)
        attention = _sum_kept_bytes((term for term in terms if term.name in _OF_ATTENTION), layout, job)
        products = _sum_kept_bytes((term for term in terms if term.product), layout, job) + 2 * stream
        total = stream + attention + products / 2
    else:
        total = _sum_kept_bytes(terms, layout, job)
    # Where several ranks share a key and value head, each holds all of it, before and after it is picked out.
    more = (max(0, layout.tp / part.kv_heads - 1) * part.kv_heads * part.qk_width for part in block.attentions)
    total += 4 * job.width * sum(more) / layout.tp
    lowered_once = layout.tp > 1 and (layout.sequence_parallel or job.habits.lowers_inputs)
    if job.autocast and not lowered_once:  # each product lowers its input for itself
        readers = sum(m.count for m in block.matrices if m.split == "column" and m.inputs == hidden)
        total += max(0, readers - 2) * job.width * hidden
    # Each adapter keeps its input in fp32, gathered; what it stands beside is frozen and keeps none.
    if job.lora and job.stored < count_adapter_width(job):
        of_base = 2 * hidden / layout.stream_parts + block.inner / layout.tp
        cut = [
            m.inputs * m.count / (layout.tp if m.split == "row" else layout.tp_columns) for m in list_adapted(block)
        ]
        total += ADAPTER_WIDTH * sum(cut) - job.width * of_base
    return total


def name_counted_as(precision: str, lora: int | bool) -> str:
    """Return the name under which a block knows what it keeps."""
    return f"{precision}, adapters" if lora else precision


def count_output_numbers(block: Block, hidden: int, layout: Layout) -> float:
    """Return the numbers per token of all outputs of a block's products and of its two norms, on one rank."""
    column = sum(m.outputs * m.count * m.share for m in block.matrices if m.split != "row")
    rows = sum(1 for m in block.matrices if m.split == "row")
    return column / layout.tp + (rows + 2) * hidden / layout.stream_parts


def count_lowered_parameters(block: Block, layout: Layout) -> float:
    """Return the weights of a block that one rank holds a 16-bit copy of; grouped products of experts have none."""
    lowered = [m for m in block.matrices if m.split != "expert"]
    return sum(m.parameters / (1 if m.split == "whole" else layout.tp) for m in lowered)


# ---- a pipeline's schedule ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch on one stage.

    kept: by its forward. between: gradients of outputs, from one half of a backward to the other. begin, end: what
    else a backward needs when it begins, and its first half at its end. gradients: of weights, from the first
    backward on. late: those that a second half leaves beside them, until the next backward widens and adds them; 0: it
    adds them itself.
    """

    kept: float
    between: float
    begin: float
    end: float
    gradients: float
    late: float = 0.0


class Moment(NamedTuple):
    """Bytes at one moment: activations held, needed in passing, gradients of weights."""

    held: float = 0.0
    passing: float = 0.0
    gradients: float = 0.0


def find_fullest_moment(actions: Iterable[Action], stages: dict[int, StageBytes]) -> Moment:
    """Find the moment at which a rank needs most.

    A backward in one piece frees a stage's activations as it goes. Of one in two halves (Qi et al., 2023) the first
    frees nothing, since the graph is needed once more, and leaves the gradient of every output beside it.

    Args:
        actions: of the rank, in order.
        stages: of the rank, by index.
    """
    held, most = 0.0, Moment()
    summed: set[int] = set()
    waiting: set[int] = set()
    for action in flatten_overlaps(actions):
        stage = stages[action.stage]
        whole = sum(stages[index].gradients for index in summed) + sum(stages[index].late for index in waiting)
        if action.kind == FORWARD:
            held += stage.kept
            most = max(most, Moment(held, 0.0, whole), key=sum)
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            most = max(most, Moment(held, stage.begin, whole), key=sum)
        if action.kind == BACKWARD_INPUT:
            held += stage.between
            most = max(most, Moment(held, stage.end, whole), key=sum)
        if action.kind == BACKWARD_WEIGHT:
            held -= stage.between
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            held -= stage.kept
            (waiting if stage.late and action.kind == BACKWARD_WEIGHT else summed).add(action.stage)
        if action.kind in (BACKWARD, BACKWARD_INPUT) and action.stage in waiting:
            waiting.remove(action.stage)
            summed.add(action.stage)
    return most
