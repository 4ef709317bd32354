"""Every layout this package can run, ranked by predicted step time: which, how fast, will it fit, and why not another.

    found = search(model=config, gpu="h100-80gb", gpus=1024, seq=4096, global_batch=1024)
    found.choices[0].config.to_spec()      # "pp=4,tp=8,dp_shard=32,…": what --parallel takes

A layout is tried with growing micro-batches while it fits, without activation checkpointing first: checkpointing
costs a third of the compute and is worth it only where the activations do not fit. Other schedules than 1F1B are
simulated for the best layouts alone: what they can gain is the bubble.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.planner.advice import nothing_fits, warnings_about, why_not
from hf_parallel.planner.hardware import Cluster, make_cluster
from hf_parallel.planner.layout import Job, Layout, known_precision
from hf_parallel.planner.memory import GIB, fits, fullest
from hf_parallel.planner.model_shape import ModelShape, shape_of
from hf_parallel.planner.predict import Prediction, memory_of_ranks, predict_step
from hf_parallel.planner.stages import make_stages, stages_of_rank
from hf_parallel.planner.step_time import stage_times

_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
_RESCHEDULED = 8  # layouts that the other schedules are tried for
_WORTH = 1.6  # a layout whose compute alone takes this many times the best step is not looked at further
_MOST_STAGES = 64


@dataclass(frozen=True)
class Choice:
    """A layout with its batch: `rows` of one call of the model on a data rank, `accumulation` calls per step."""

    config: ParallelConfig
    prediction: Prediction
    rows: int
    accumulation: int
    warnings: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Predicted seconds per optimizer step."""
        return self.prediction.step_time_s

    @property
    def seconds_per_row(self) -> float:
        """Predicted seconds per step over all rows of it: what layouts are ranked by."""
        return self.prediction.step_time_s / (self.rows * self.accumulation * self.config.data_parallel_size)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        p = self.prediction
        return {
            "spec": self.config.to_spec(),
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "step_time_s": p.step_time_s,
            "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
            "mfu": p.mfu,
            "memory_gib": p.memory_gib,
            "fits": p.fits,
            "bubble": p.bubble,
            "memory": p.breakdown.memory,
            "time": p.breakdown.time,
            "bytes_by_axis": p.breakdown.bytes_by_axis,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Found:
    """The best layouts, fastest first; what else one would expect and why it is not first; how many were looked at."""

    shape: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int | None
    choices: list[Choice]
    why_not: list[tuple[str, str]] = field(default_factory=list)
    looked_at: int = 0
    advice: str = ""  # if nothing fits

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "gpus_per_node": self.cluster.per_node,
            "seq": self.seq,
            "global_batch": self.global_batch,
            "layouts_looked_at": self.looked_at,
            "layouts": [choice.to_dict() for choice in self.choices],
            "why_not": dict(self.why_not),
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Goal:
    """What every candidate has in common. Without a `global_batch` it follows from `rows` and `accumulation`."""

    shape: ModelShape
    cluster: Cluster
    seq: int
    global_batch: int | None
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: int = 0
    rows: int | None = None  # of a call, if the script fixes it
    accumulation: int = 1  # calls per step, where the script fixes both

    def share(self, config: ParallelConfig) -> int | None:
        """Rows per step of one data rank; None: the batch does not divide."""
        ranks = config.data_parallel_size
        if self.global_batch is None:
            return (self.rows or 1) * self.accumulation
        return None if self.global_batch % ranks else self.global_batch // ranks


def search(
    *,
    model: Any,
    cluster: Cluster,
    seq: int,
    global_batch: int | None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    lora: bool | int = False,
    rows: int | None = None,
    accumulation: int = 1,
    memory_gib: float | None = None,
    top: int = 10,
    accept: Callable[[ParallelConfig], bool] | None = None,
    expected: ParallelConfig | str | None = None,
) -> Found:
    """The `top` fastest layouts that fit.

    Args:
        model: what `shape_of` takes.
        global_batch: rows per step; None: `rows` x `accumulation` on each data rank, as scripts have it, whatever
            their number. Layouts are then ranked by time per row.
        rows: per_device_train_batch_size, if it is given; default: what is fastest.
        memory_gib: of a GPU, if it shall not be filled.
        accept: asked about the layouts that are about to be returned, fastest first; those it does not take are left
            out.
        expected: a layout to compare with the best.

    Raises:
        SpecError: the batch cannot be divided among any number of data ranks, or a name is not known.
    """
    if memory_gib is not None:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=memory_gib))
    rank = 16 if lora is True else int(lora)
    goal = Goal(
        shape_of(model), cluster, seq, global_batch, known_precision(precision), optimizer, rank, rows, accumulation
    )
    best: dict[tuple, Choice] = {}
    looked_at, fastest, leanest = 0, math.inf, math.inf
    for config in layouts(goal):
        for choice in _variants(goal, config, fastest * _WORTH):
            looked_at += 1
            if isinstance(choice, TooLarge):
                leanest = min(leanest, choice.gib)
                continue
            key = _sizes(config)
            if key not in best or choice.seconds_per_row < best[key].seconds_per_row:
                best[key] = choice
            fastest = min(fastest, choice.seconds_per_row)
    ranked = sorted(best.values(), key=lambda choice: choice.seconds_per_row)
    for choice in list(ranked[:_RESCHEDULED]):
        for other in _other_schedules(goal, choice):
            looked_at += 1
            if other.seconds_per_row < best[_sizes(choice.config)].seconds_per_row:
                best[_sizes(choice.config)] = other
    ranked = sorted(best.values(), key=lambda choice: choice.seconds_per_row)
    if not looked_at:
        raise SpecError(
            f"global_batch={global_batch}: no layout of {cluster.gpus} GPUs can share it out; "
            f"global_batch={4 * cluster.gpus} works"
        )
    taken = (choice for choice in ranked if accept is None or accept(choice.config))
    ranked = [
        dataclasses.replace(choice, warnings=tuple(warnings_about(choice, goal)))
        for choice in itertools.islice(taken, max(1, top))
    ]
    found = Found(goal.shape, cluster, seq, global_batch, ranked, [], looked_at)
    wanted = [] if expected is None else [ParallelConfig.parse(expected).resolve(cluster.gpus)]
    yours = [(f"yours ({config.to_spec()})", explain_absence(goal, config, ranked)) for config in wanted]
    advice = "" if ranked else nothing_fits(goal, leanest)
    return dataclasses.replace(found, why_not=[*yours, *_why_not(goal, found)], advice=advice)


def plan(
    model: Any,
    *,
    gpu: str = "h100-80gb",
    gpus: int = 8,
    gpus_per_node: int = 8,
    network: str | None = None,
    seq: int = 4096,
    global_batch: int = 256,
    **options: Any,
) -> Found:
    """`search` on GPUs of the catalogue; `options` are its own."""
    cluster = make_cluster(gpu, gpus, gpus_per_node, network)
    return search(model=model, cluster=cluster, seq=seq, global_batch=global_batch, **options)


def _sizes(config: ParallelConfig) -> tuple:
    return config.dp_replicate_size, config.dp_shard_size, config.pp_size, config.tp_size, config.zero_stage


# ---- which layouts there are -----------------------------------------------------------------------------------------


def layouts(goal: Goal) -> Iterator[ParallelConfig]:
    """Every layout of the GPUs that the engine takes for this model and batch, tp inside a node."""
    gpus, shape = goal.cluster.gpus, goal.shape
    inside = min(goal.cluster.per_node, gpus)
    for tp in _divisors(inside):
        if not _splits(shape, tp) or gpus % tp:
            continue
        for pp in _divisors(gpus // tp):
            if pp > min(shape.layers, _MOST_STAGES):
                break
            data = gpus // tp // pp
            if goal.global_batch is not None and goal.global_batch % data:
                continue
            for replicate in _replicas(data, tp, goal.cluster):
                for stage in _zero_stages(data // replicate, pp):
                    yield ParallelConfig(
                        dp_replicate_size=replicate,
                        dp_shard_size=data // replicate,
                        pp_size=pp,
                        tp_size=tp,
                        zero_stage=stage,
                    )


def _splits(shape: ModelShape, tp: int) -> bool:
    """Do the heads divide? Keys and values are shared by ranks where there are fewer."""
    return all(
        attention.heads % tp == 0 and (attention.kv_heads % tp == 0 or tp % attention.kv_heads == 0)
        for block in set(shape.blocks)
        for attention in block.attentions
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _replicas(data: int, tp: int, cluster: Cluster) -> list[int]:
    """Everything sharded; shards of a node, or of a few; everything replicated."""
    inside = max(1, cluster.per_node // tp)
    shards = {data, 1} | {n for n in (inside, 4 * inside) if data % n == 0 and n < data}
    return sorted({data // shard for shard in shards})


def _zero_stages(shards: int, pp: int) -> tuple[int, ...]:
    return (3,) if shards == 1 or pp > 1 else (3, 2)  # in a pipeline weights stay gathered between micro-batches


# ---- one layout ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs `gib` on its fullest rank, which is more than there is."""

    config: ParallelConfig
    size: int
    gib: float


def _variants(goal: Goal, config: ParallelConfig, limit: float) -> Iterator[Choice | TooLarge]:
    """Growing micro-batches, without checkpointing while that fits, else with it; up to the first that is too large."""
    share = goal.share(config)
    for recompute in ("none", "full"):
        fitted = False
        for size in _micro_batches(goal, share, config) if share else ():
            choice = _choice(goal, dataclasses.replace(config, activation_checkpointing=recompute), size, limit)
            if choice is None:
                continue
            yield choice
            if isinstance(choice, TooLarge):
                break
            fitted = True
        if fitted:
            return


def _micro_batches(goal: Goal, share: int, config: ParallelConfig) -> list[int]:
    """Rows of a micro-batch: what the script gives, or powers of two up to 64 k tokens; a pipeline cuts a call."""
    if goal.rows is not None and share % goal.rows:
        return []
    if goal.rows is not None and config.pp_size == 1:
        return [goal.rows]
    call = goal.rows or share
    sizes = [n for n in _divisors(call) if n == 1 or (n & (n - 1) == 0 and n * goal.seq <= 65536)]
    if config.pp_size == 1 and share * goal.seq <= 65536:
        sizes = sorted({*sizes, share})
    return [n for n in sizes if call // n >= config.pp_size]


def _choice(
    goal: Goal, config: ParallelConfig, size: int, limit: float = math.inf, measure: bool = False
) -> Choice | TooLarge | None:
    """One layout with micro-batches of `size` rows; None if it cannot be as fast as `limit`.

    Args:
        measure: predict the time of what does not fit, too.
    """
    share = goal.share(config)
    assert share is not None
    count = share // size
    rows = size if config.pp_size == 1 else goal.rows or share  # a pipeline gets all of a step in one call
    accumulation = share // rows
    if config.pp_size > 1:
        config = dataclasses.replace(config, pipeline_microbatches=rows // size)
    layout, job = to_layout(config), to_job(goal, config, size, count)
    stages = make_stages(goal.shape, layout, job)
    if limit < math.inf and _least_seconds(goal, stages, layout, job) > limit * share * layout.dp:
        return None
    peak = fullest(memory_of_ranks(goal.shape, stages, layout, job))
    if not measure and not fits(peak, goal.cluster):
        return TooLarge(config, size, peak.needed / GIB)
    return Choice(config, predict_step(goal.shape, goal.cluster, layout, job), rows, accumulation)


def _least_seconds(goal: Goal, stages: tuple, layout: Layout, job: Job) -> float:
    """No schedule of one stage per rank is faster: the slowest rank computes, the others fill and drain its pipeline."""
    each = [stage_times(goal.shape, stage, layout, job, goal.cluster) for stage in stages]
    busy = [sum(t.forward.values()) + sum(t.backward.values()) for t in each]
    ranks = [sum(busy[index] for index in stages_of_rank(layout, rank)) for rank in range(layout.pp)]
    filling = (sum(ranks) - max(ranks)) / layout.virtual_stages if layout.schedule == "1f1b" else 0.0
    return job.micro_batches * max(ranks) + filling


def to_layout(config: ParallelConfig) -> Layout:
    """What the planner calls this config. In a pipeline, and with replicas alone, weights are whole while they compute."""
    sharded = config.dp_shard_size > 1
    stage = 0 if not sharded else 2 if config.pp_size > 1 else config.zero_stage
    return Layout(
        tp=config.tp_size,
        pp=config.pp_size,
        dp=config.data_parallel_size,
        zero_stage=stage,
        virtual_stages=config.stages_per_rank,
        sequence_parallel=config.tp_size > 1 and config.sequence_parallel is not False,
        dp_replicate=config.dp_replicate_size if sharded else 1,
        schedule=config.pipeline_schedule,
        split=config.pipeline_split,
    )


def to_job(goal: Goal, config: ParallelConfig, micro_batch: int, count: int) -> Job:
    """What a config and a batch are to the planner."""
    return Job(
        goal.seq,
        micro_batch,
        count,
        recompute=config.activation_checkpointing,
        precision=goal.precision,
        lora=goal.lora,
        optimizer=goal.optimizer,
        engine="hf_parallel",
    )


def _other_schedules(goal: Goal, choice: Choice) -> Iterator[Choice]:
    config, size = choice.config, choice.prediction.job.micro_batch
    if config.pp_size == 1:
        return
    micro_batches = choice.rows // size
    for name in _SCHEDULES:
        tied_v = name == "zbv_zero_bubble" and goal.shape.tied and config.data_parallel_size > 1
        enough = goal.shape.layers >= 2 * config.pp_size
        if enough and not tied_v and micro_batches % config.pp_size == 0:
            other = _choice(goal, dataclasses.replace(config, pipeline_schedule=name), size)
            if isinstance(other, Choice):
                yield other


# ---- why not ---------------------------------------------------------------------------------------------------------


def _why_not(goal: Goal, found: Found) -> Iterator[tuple[str, str]]:
    """The layouts that people ask about first, and what keeps them from being the best."""
    gpus, inside = goal.cluster.gpus, min(goal.cluster.per_node, goal.cluster.gpus)
    asked = {
        "plain data parallelism": {"dp_replicate": gpus},
        "ZeRO-3 over all GPUs": {"dp_shard": gpus},
        "tensor parallelism in the node": {"tp": inside, "dp_shard": gpus // inside},
        "tensor parallelism across nodes": {"tp": min(2 * inside, gpus), "dp_shard": gpus // min(2 * inside, gpus)},
        "hybrid sharding in the node": {"dp_replicate": gpus // inside, "dp_shard": inside},
    }
    seen = {_sizes(found.choices[0].config)} if found.choices else set()
    for name, sizes in asked.items():
        config = ParallelConfig.from_mapping(sizes).resolve(gpus)
        if _sizes(config) not in seen and (config.tp_size <= inside or goal.cluster.nodes > 1):
            seen.add(_sizes(config))
            yield f"{name} ({config.to_spec()})", explain_absence(goal, config, found.choices)


def explain_absence(goal: Goal, config: ParallelConfig, best: list[Choice]) -> str:
    """In one line what keeps a layout from being first."""
    if not _splits(goal.shape, config.tp_size):
        return f"tp={config.tp_size} does not divide the attention heads"
    if config.pp_size > goal.shape.layers:
        return f"pp={config.pp_size}: the model has {goal.shape.layers} layers"
    if goal.share(config) is None:
        ranks = config.data_parallel_size
        return f"a global batch of {goal.global_batch} does not divide among {ranks} data ranks"
    variants = list(_variants(goal, config, math.inf))
    if not variants:
        return f"a global batch of {goal.global_batch} leaves too few micro-batches"
    fitting = [choice for choice in variants if isinstance(choice, Choice)]
    if fitting:
        chosen: Any = min(fitting, key=lambda choice: choice.seconds_per_row)
    else:
        least = min((choice for choice in variants if isinstance(choice, TooLarge)), key=lambda choice: choice.gib)
        chosen = _choice(goal, least.config, least.size, measure=True)
    return why_not(chosen, best[0] if best else None)
