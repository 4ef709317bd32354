"""Every layout that a model, a cluster and a batch allow: all axes and settings of the grammar, within reason."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.axes import AUTO, RING
from hf_parallel.axes.adapters.four_bit import BLOCK
from hf_parallel.axes.chunked_loss import find_reason_against_chunks
from hf_parallel.axes.context.choose import choose_by_cost
from hf_parallel.axes.pipeline.part import does_recompute_in_parts
from hf_parallel.axes.precision import can_gather_codes, name_scaling
from hf_parallel.planner.activations import Planned
from hf_parallel.planner.hardware import HEADROOM, Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.pipeline import list_adapted
from hf_parallel.planner.shape import ModelShape

_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
_MOST_STAGES = 64
_LEAST_GRID, _COLUMNS = 16, (2, 4)  # ranks of tp from which a grid sends less, and columns that do
_LEAST_TOKENS = 1024  # of a rank under cp: shorter parts of a row leave its GPU idle
MOST_CALL = 65536  # tokens of a micro-batch: larger ones are no faster
#: quantize_weights and quantize_gradients that the search knows: the widest codes of each, and the fewest bits.
ROUNDED = (("int8", "none"), ("none", "int8"), ("int8", "int4"))
#: How a layout may save memory, the cheapest first: what each costs is worth it only where nothing before it fits.
WAYS: tuple[dict[str, str], ...] = tuple(
    {"offload": offload, "activation_checkpointing": recompute}
    for offload in ("none", "optimizer", "cpu", "nvme:PATH", "nvme_all:PATH")
    for recompute in ("none", "selective", "full")
)
#: More ways for sequences of `LONG` tokens or more, after those that offload nothing: what layers keep goes to the
#: host, and MLPs run over pieces of the sequence. Both cost little where attention takes most of a step.
LONG = 131072
LONG_WAYS: tuple[dict[str, Any], ...] = (
    {**WAYS[2], "tiled_mlp": True},
    {**WAYS[2], "tiled_mlp": True, "activation_offload": True},
)


def list_ways_of(goal: Goal) -> list[dict[str, Any]]:
    """Return the ways in which a layout of this goal may save memory, the cheapest first."""
    long = goal.seq >= LONG and goal.eight_bit == AUTO  # a scale of 8 bits holds for all tokens of a product
    return [*WAYS[:3], *(LONG_WAYS if long else ()), *WAYS[3:]]


@dataclass(frozen=True)
class Goal:
    """The wishes that all candidates share. Without a `global_batch` it follows from `rows` and `accumulation`."""

    shape: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int | None
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: int = 0
    rows: int | None = None  # of a call, if the script fixes it
    accumulation: int = 1  # calls per step, where the script fixes both
    attention: Planned = Planned()
    eight_bit: str = "auto"  # precision of the candidates' linears
    quantized: bool = False  # are transfers that round allowed?
    whole_logits: bool = False  # does the script read them?
    headroom: float = HEADROOM  # percent of each GPU's memory that stays free
    critical_batch: float | None = None  # sequences; layouts are then ranked by time to a loss
    four_bit: bool = False  # does bitsandbytes pack the base?

    @property
    def room_gib(self) -> float:
        """GiB of each GPU that a layout may need."""
        return self.cluster.gpu.compute_room_gib(self.headroom)

    @property
    def where(self) -> str:
        """Machines and length of rows, for headings."""
        return f"{self.cluster.gpus} x {self.cluster.gpu.name}, {self.seq} tokens per row"

    @property
    def settings(self) -> dict[str, object]:
        """The settings of every candidate."""
        return {"precision": self.eight_bit, "attention": self.attention.asked}

    def share(self, config: ParallelConfig) -> int | None:
        """Return the rows per step of one data rank; None: the batch does not divide."""
        ranks = config.data_parallel_size
        if self.global_batch is None:
            return (self.rows or 1) * self.accumulation
        return None if self.global_batch % ranks else self.global_batch // ranks


def make_config(base: ParallelConfig | None = None, /, **settings: Any) -> ParallelConfig:
    """Return a config with these settings changed."""
    return dataclasses.replace(base or ParallelConfig(), **settings)


def list_sizes_of(config: ParallelConfig) -> tuple:
    """Return the sizes of all axes, how cp shares attention, and ZeRO's stage."""
    names = ("dp_replicate_size", "dp_shard_size", "pp_size", "cp_size", "tp_size", "ep_size")
    sizes = (getattr(config, name) for name in names)
    rounded = config.quantize_weights, config.quantize_gradients
    return (*sizes, config.tp_mesh, config.context_parallel, config.zero_stage, config.hierarchical_shard, *rounded)


def iterate_layouts(goal: Goal) -> Iterator[ParallelConfig]:
    """Yield sizes of all axes that fill the GPUs, tp inside a node; ZeRO-0 is what replicas alone are."""
    gpus, shape = goal.cluster.gpus, goal.shape
    inside = min(goal.cluster.per_node, gpus)
    linears = [matrix for block in set(shape.blocks) for matrix in list_adapted(block)]
    widths = {m.outputs if m.split == "row" else m.inputs for m in linears}
    for tp in list_divisors(inside):
        if not do_heads_divide(shape, tp) or gpus % tp:
            continue
        # Rows of linears, and parts of rows that tp cuts, are whole blocks of 4-bit weights.
        if goal.four_bit and any(m.inputs % (BLOCK * (tp if m.split == "row" else 1)) for m in linears):
            continue
        # No grid; from 16 ranks on, few columns: fewer ranks send more over one (docs/tensor_meshes.md).
        meshes: list[str | None] = [None]
        for columns in _COLUMNS if tp >= _LEAST_GRID and goal.eight_bit == AUTO and not goal.four_bit else ():
            if tp % columns == 0 and all(width % columns == 0 for width in widths):
                meshes.append(f"{tp // columns}x{columns}")
        # A ring cuts a row in twice as many parts as it has ranks, Ulysses needs a head for each of them.
        contexts = [(1, "auto")]
        for cp in list_divisors(gpus // tp)[1:]:
            if goal.seq % (2 * cp) == 0 and goal.seq // cp >= _LEAST_TOKENS:
                contexts += [(cp, "ring"), *([(cp, "ulysses")] if do_heads_divide(shape, tp * cp) else [])]
        for (cp, kind), mesh in itertools.product(contexts, meshes):
            for pp in list_divisors(gpus // tp // cp):
                if pp > min(shape.layers, _MOST_STAGES):
                    break
                data = gpus // tp // cp // pp
                if goal.global_batch is None or goal.global_batch % data == 0:
                    sizes: dict[str, Any] = {
                        "tp_size": tp,
                        "cp_size": cp,
                        "pp_size": pp,
                        "context_parallel": kind,
                        "tp_mesh": mesh,
                    }
                    sizes |= goal.settings | ({"attention": AUTO} if cp > 1 else {})  # cp has kernels of its own
                    yield from _iterate_data_layouts(goal, sizes, data)


def _iterate_data_layouts(goal: Goal, sizes: dict, data: int) -> Iterator[ParallelConfig]:
    """Yield replicas and shards, ZeRO's stage, experts."""
    inner = sizes["tp_size"] * sizes["cp_size"]
    # Everything sharded; shards of a node, or of a few; everything replicated.
    inside = max(1, goal.cluster.per_node // inner)
    parts = {data, 1} | {n for n in (inside, 4 * inside) if data % n == 0 and n < data}
    # Over how many ranks of one replica experts are spread: all on each, or whole groups of `inner`.
    numbers = {matrix.count for block in goal.shape.blocks for matrix in block.matrices if matrix.split == "expert"}
    counts = [n for n in list_divisors(min(numbers, default=1)) if all(m % n == 0 for m in numbers)]
    for replicate in sorted({data // part for part in parts}):
        shards = data // replicate
        for experts in (n for n in counts if n == 1 or (n % inner == 0 and shards * inner % n == 0)):
            # In a pipeline weights stay gathered between micro-batches, whatever the stage.
            for stage in (3,) if shards == 1 or sizes["pp_size"] > 1 else (3, 2, 1):
                chosen = {"dp_replicate_size": replicate, "dp_shard_size": shards, "zero_stage": stage}
                config = make_config(**sizes, **chosen, ep_size=experts)
                yield from iterate_compressed(goal, config)
                if stage == 3 and sizes["pp_size"] == sizes["cp_size"] == 1 < inside < shards and shards % inside == 0:
                    yield from iterate_compressed(goal, make_config(config, hierarchical_shard=inside))


def iterate_compressed(goal: Goal, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield the config, and where transfers may round, with weights, gradients and both in fewer bits.

    Of a LoRA run adapters travel as they are, so that only weights have something to round.
    """
    yield config
    if not goal.quantized or config.dp_shard_size == 1 or config.pp_size > 1:
        return
    for weights, gradients in ROUNDED[: 1 if goal.lora else None]:
        yield make_config(config, quantize_weights=weights, quantize_gradients=gradients)


def do_heads_divide(shape: ModelShape, tp: int) -> bool:
    """Do the heads divide? Keys and values are shared by ranks where there are fewer."""
    return all(
        attention.heads % tp == 0 and (attention.kv_heads % tp == 0 or tp % attention.kv_heads == 0)
        for block in set(shape.blocks)
        for attention in block.attentions
    )


def list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def list_micro_batches(goal: Goal, share: int, config: ParallelConfig) -> list[int]:
    """Return sizes of a micro-batch: the script's, or powers of two up to 64 k tokens; a pipeline cuts a call."""
    if goal.rows is not None and share % goal.rows:
        return []
    if goal.rows is not None and config.pp_size == 1:
        return [goal.rows]
    call, tokens = goal.rows or share, goal.seq // config.cp_size
    sizes = [n for n in list_divisors(call) if n == 1 or (n & (n - 1) == 0 and n * tokens <= MOST_CALL)]
    if config.pp_size == 1 and share * tokens <= MOST_CALL:
        sizes = sorted({*sizes, share})
    return [n for n in sizes if call // n >= config.pp_size]


def iterate_other_schedules(goal: Goal, config: ParallelConfig, micro_batches: int) -> Iterator[ParallelConfig]:
    """Yield the sizes under schedules that may shorten the bubble of `micro_batches` per call."""
    if config.pp_size == 1 or goal.shape.layers < 2 * config.pp_size or micro_batches % config.pp_size:
        return
    for name in _SCHEDULES:
        tied_v = name == "zbv_zero_bubble" and goal.shape.tied and config.sharing_size > 1
        if not does_recompute_in_parts(config, name) and not tied_v:
            yield make_config(config, pipeline_schedule=name)


# ---- what a config is to the formulas -------------------------------------------------------------------------------


def choose_context_of(config: ParallelConfig, goal: Goal, micro_batch: int) -> str:
    """Return how cp will attend: what the engine takes for whole rows of this length (`axes/context/choose.py`)."""
    if config.context_parallel != AUTO:
        return config.context_parallel
    attentions = [attention for block in goal.shape.blocks for attention in block.attentions]
    if config.cp_size == 1 or not attentions or any(attention.window for attention in attentions):
        return RING
    heads = attentions[0].heads, attentions[0].kv_heads
    found = choose_by_cost(config.cp_size, heads, attentions[0].qk_width, config.tp_size, goal.cluster.per_node)
    return found.of(micro_batch * goal.seq, goal.seq)


def to_layout(config: ParallelConfig, context: str | None = None) -> Layout:
    """Translate a config for the planner: in a pipeline weights stay whole, as they do in ZeRO-2.

    Args:
        context: how cp attends, by `choose_context_of`; default: what the config says, a ring for `auto`.
    """
    own = RING if config.context_parallel == AUTO else config.context_parallel
    sharded = config.dp_shard_size * config.cp_size > 1
    stage = 0 if not sharded else min(2, config.zero_stage) if config.pp_size > 1 else config.zero_stage
    return Layout(
        tp=config.tp_size,
        pp=config.pp_size,
        dp=config.data_parallel_size,
        cp=config.cp_size,
        ep=config.ep_size,
        zero_stage=stage,
        virtual_stages=config.stages_per_rank,
        sequence_parallel=config.tp_size > 1 and config.sequence_parallel is not False,
        tp_overlap=config.tp_overlap,
        dp_replicate=config.dp_replicate_size if sharded else 1,
        schedule=config.pipeline_schedule,
        context=context or own,
        split=config.split_layers,
        reduces_each=config.reduces_each_micro_batch,
        reduces_each_run=config.reduces_each_run,
        hierarchical_shard=config.hierarchical_shard or 1,
        quantize_weights="fp8" if can_gather_codes(config) else config.quantize_weights,
        quantize_gradients=config.quantize_gradients,
        gradient_error_feedback=config.gradient_error_feedback,
        partition_activations=config.partition_activations,
        tp_columns=config.tp_col_size,
        fills_bubbles=config.fills_bubbles,
    )


def to_job(goal: Goal, config: ParallelConfig, micro_batch: int, count: int) -> Job:
    """Translate a config and a batch for the planner."""
    # Where ranks differ, the fullest are those that save nothing.
    recompute = config.recompute_way if config.recompute_ranks is None else "none"
    offload = config.offload.partition(":")[0] if config.offload_ranks is None else "none"
    in_a_call = config.pipeline_microbatches if config.pp_size > 1 else None
    return Job(
        goal.seq,
        micro_batch,
        count,
        recompute=recompute,
        precision=goal.precision,
        lora=goal.lora,
        four_bit="nf4" if goal.four_bit else "none",
        optimizer=goal.optimizer,
        offload=offload,
        attention=goal.attention.kind(config),
        eight_bit=config.precision,
        eight_bit_scaling=name_scaling(config),
        engine="hf_parallel",
        calls=count // (in_a_call or count),
        activation_offload=config.activation_offload,
        tiled_mlp=config.tiled_mlp,
        compiled=config.compile != "none",
        lean_loss=config.lean_loss != "false" and not goal.whole_logits and find_reason_against_chunks(config) is None,
    )
