"""What one block of a model keeps in this package's own engine: parameters, adapters, activations, copies of autocast.

Activations are counted by running the model itself where that is possible (`count_activations`), else by the formula
of docs/activation_memory.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hf_parallel.axes.pipeline.axis import SPLIT_BACKWARD
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import activation_terms, kept_bytes
from hf_parallel.planner.model_shape import Block, Matrix, ModelShape
from hf_parallel.planner.stages import Stage

ADAPTER_WIDTH = 4  # bytes: peft keeps adapters in fp32 beside a 16-bit base
_MANY = 65536  # tokens


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


def summed_width(layout: Layout, job: Job) -> float:
    """Bytes per gradient while data ranks and micro-batches add to it: 16 bits are widened, but between two halves."""
    split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
    return job.stored if split else max(4.0, job.stored)
