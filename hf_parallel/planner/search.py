"""Every layout this package can run, ranked by predicted step time: which, how fast, will it fit, and why not another.

    found = search(model=config, cluster=make_cluster("h100-80gb", 1024), seq=4096, global_batch=1024)
    found.choices[0].config.to_spec()      # "pp=4,tp=8,dp_shard=32,…": what --parallel takes

Other schedules than 1F1B are simulated for the best layouts alone: what they can gain is the bubble.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.planner.advice import nothing_fits, warnings_about, why_not
from hf_parallel.planner.candidates import (
    TooLarge,
    heads_divide,
    layouts,
    other_schedules,
    predicted,
    variants,
)
from hf_parallel.planner.choices import Choice, Found, Goal
from hf_parallel.planner.hardware import Cluster, make_cluster
from hf_parallel.planner.layout import known_precision
from hf_parallel.planner.model_shape import ModelShape, shape_of
from hf_parallel.planner.own_layers import count_activations

_RESCHEDULED = 8  # layouts that the other schedules are tried for
_WORTH = 1.6  # a layout that cannot be faster than this many times the best is not looked at further


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
    adapt: Callable[[Any], None] | None = None,
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
        adapt: puts adapters into a model, to count what they keep: see `dry_run`.

    Raises:
        SpecError: the batch cannot be divided among any number of data ranks, or a name is not known.
    """
    if memory_gib is not None:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=memory_gib))
    rank = 16 if lora is True else int(lora)
    goal = Goal(
        _counted(model, known_precision(precision), adapt),
        cluster,
        seq,
        global_batch,
        known_precision(precision),
        optimizer,
        rank,
        rows,
        accumulation,
    )
    best: dict[tuple, Choice] = {}
    looked_at, fastest, leanest = 0, math.inf, math.inf
    for config in layouts(goal):
        for choice in variants(goal, config, fastest * _WORTH):
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
        for other in other_schedules(goal, choice):
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


def _counted(model: Any, precision: str, adapt: Callable[[Any], None] | None) -> ModelShape:
    """The shape of a model; of one of Transformers also what its layers keep, from dry runs, if this process can."""
    import torch.distributed as dist

    shape = shape_of(model)
    if isinstance(model, (ModelShape, Mapping)) or dist.is_initialized():
        return shape
    try:
        return count_activations(shape, model, precision, adapt)
    except (SpecError, RuntimeError):  # its code needs values, or tensors of another kind: the formula holds
        return shape


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
    if not heads_divide(goal.shape, config.tp_size):
        return f"tp={config.tp_size} does not divide the attention heads"
    if config.pp_size > goal.shape.layers:
        return f"pp={config.pp_size}: the model has {goal.shape.layers} layers"
    if goal.share(config) is None:
        ranks = config.data_parallel_size
        return f"a global batch of {goal.global_batch} does not divide among {ranks} data ranks"
    found = list(variants(goal, config, math.inf))
    if not found:
        return f"a global batch of {goal.global_batch} leaves too few micro-batches"
    fitting = [choice for choice in found if isinstance(choice, Choice)]
    if fitting:
        chosen: Any = min(fitting, key=lambda choice: choice.seconds_per_row)
    else:
        least = min((choice for choice in found if isinstance(choice, TooLarge)), key=lambda choice: choice.gib)
        chosen = predicted(goal, least.config, least.size, measure=True)
    return why_not(chosen, best[0] if best else None)
