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
from hf_parallel.dryrun.run import PRECISIONS, dry_run
from hf_parallel.planner.activations import counted_as, lowered_parameters
from hf_parallel.planner.advice import (
    MUCH_BETTER,
    better_but_refused,
    notes_about,
    nothing_fits,
    warnings_about,
    why_not_expected,
    why_not_usual,
)
from hf_parallel.planner.candidates import (
    WAYS,
    Goal,
    configured,
    layouts,
    other_schedules,
    runnable_part,
    runs,
    sizes_of,
)
from hf_parallel.planner.choices import Choice, Found, predicted, variants
from hf_parallel.planner.hardware import Cluster, make_cluster
from hf_parallel.planner.layout import Layout, known_precision
from hf_parallel.planner.shape import ModelShape, shape_of

_TOKENS = 65536  # of a dry run: so many that nothing but activations decides when memory is fullest
_RESCHEDULED = 8  # layouts that the other schedules are tried for
_MORE_GPUS = (2, 4, 8, 16)  # times as many, tried where nothing fits
_WORTH = 1.6  # a layout that cannot be faster than this many times the best is not looked at further
_NEAR = 1.2  # the same for layouts that this version does not run


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
    include_unsupported: bool = False,
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
        include_unsupported: rank what this version of the engine does not run, too; such choices say so.
        adapt: puts adapters into a model, to count what they keep: see `dry_run`.

    Raises:
        SpecError: the batch cannot be divided among any number of data ranks, or a name is not known.
    """
    if memory_gib is not None:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=memory_gib))
    precision, rank = known_precision(precision), 16 if lora is True else int(lora)
    shape = measured_shape(model, precision, adapt)
    goal = Goal(shape, cluster, seq, global_batch, precision, optimizer, rank, rows, accumulation)
    looking = _Search(goal, accept)
    ranked = looking.run()
    looked_at, best = looking.looked_at, ranked[0] if ranked else None
    wanted = _NEAR if include_unsupported else 1 / MUCH_BETTER
    others = looking.beyond(_pace(best) * wanted if best else math.inf)
    lines = better_but_refused(others, best, looking.accepts)
    if not looked_at and not (include_unsupported and others):
        raise SpecError("; ".join([_cannot_share(goal), *lines]))
    shown = sorted([*ranked, *others], key=_pace) if include_unsupported else ranked
    shown = list(itertools.islice(filter(looking.accepts, shown), max(1, top)))
    yours = [] if expected is None else [why_not_expected(goal, expected, best)]
    return Found(
        goal,
        [dataclasses.replace(choice, warnings=tuple(warnings_about(choice, goal))) for choice in shown],
        best,
        why_not=[*yours, *why_not_usual(goal, best)],
        looked_at=looking.looked_at,
        advice="" if best else nothing_fits(goal, looking.leanest, list(_what_would_fit(goal, accept))),
        beyond=lines,
        notes=list(notes_about(goal, getattr(model, "max_position_embeddings", None))),
    )


def _what_would_fit(goal: Goal, accept: Any) -> Iterator[tuple[str, Choice | None]]:
    """The usual ways out, each searched: adapters, an 8-bit optimizer, more GPUs."""

    def best(**changes: Any) -> Choice | None:
        return next(iter(_Search(dataclasses.replace(goal, **changes), accept).run()), None)

    if not goal.lora:
        yield "adapters only (--lora)", best(lora=16)
    if goal.optimizer == "adamw" and not goal.lora:
        yield "--optimizer adamw_8bit", best(optimizer="adamw_8bit")
    for factor in _MORE_GPUS:
        gpus = factor * goal.cluster.gpus
        rows = None if goal.global_batch is None else math.lcm(goal.global_batch, gpus)
        found = best(cluster=dataclasses.replace(goal.cluster, gpus=gpus), global_batch=rows)
        if found or factor == _MORE_GPUS[-1]:
            yield f"{gpus} GPUs", found
            return


def _pace(choice: Choice) -> float:
    return choice.seconds_per_row


class _Search:
    """Two sweeps over the layouts: what this version runs, then what it does not, which must be better to be seen."""

    def __init__(self, goal: Goal, accept: Callable[[ParallelConfig], bool] | None) -> None:
        self.goal, self.accept = goal, accept
        self.looked_at, self.leanest = 0, math.inf
        self.plain: set[tuple] = set()  # sizes that fit without saving memory
        ways = [way for way in WAYS if way["offload"] == "none" or not goal.lora]  # adapters leave nothing to offload
        self.runnable = [way for way in ways if runs(configured(**way))]
        self.refused = [way for way in ways if way not in self.runnable]

    def accepts(self, choice: Choice) -> bool:
        """Whether the engine takes the layout for this model, as far as this version runs it."""
        return self.accept is None or self.accept(runnable_part(choice.config))

    def run(self) -> list[Choice]:
        """The best of each sizes that this version runs, fastest first; other schedules tried for the leading ones."""
        best: dict[tuple, Choice] = {}
        limit = math.inf
        for config in filter(runs, layouts(self.goal)):
            for choice in self._tried(config, self.runnable, limit):
                if _pace(choice) * _WORTH < limit and not self.accepts(choice):
                    break  # one that the model forbids must not set the pace
                if self._keep(best, choice) and choice.config.activation_checkpointing == "none":
                    self.plain.add(sizes_of(config))
                limit = min(limit, _pace(choice) * _WORTH)
        for choice in sorted(best.values(), key=_pace)[:_RESCHEDULED]:
            size = choice.prediction.job.micro_batch
            for config in other_schedules(self.goal, choice.config, choice.rows // size):
                other = predicted(self.goal, config, size)
                self.looked_at += 1
                if isinstance(other, Choice) and self.accepts(other):
                    self._keep(best, other)
        return sorted(best.values(), key=_pace)

    def beyond(self, limit: float) -> list[Choice]:
        """The best of each sizes and settings that this version does not run, in less than `limit` per row."""
        best: dict[tuple, Choice] = {}
        for config in layouts(self.goal):
            if not runs(config):
                for choice in self._tried(config, self.runnable, limit, also=False):
                    limit = min(limit, _pace(choice) * _NEAR)
                    self._keep(best, choice)
                    if choice.config.activation_checkpointing == "none":
                        self.plain.add(sizes_of(config))
            if sizes_of(config) not in self.plain:
                for choice in self._tried(config, self.refused, limit, also=False):
                    limit = min(limit, _pace(choice) * _NEAR)
                    self._keep(best, choice)
        return sorted(best.values(), key=_pace)

    def _tried(
        self, config: ParallelConfig, ways: list[dict[str, Any]], limit: float, also: bool = True
    ) -> Iterator[Choice]:
        """What fits; `also`: what does not counts for the leanest."""
        for choice in variants(self.goal, config, limit, ways):
            self.looked_at += 1
            if isinstance(choice, Choice):
                yield choice
            elif also:
                self.leanest = min(self.leanest, choice.gib)

    def _keep(self, best: dict[tuple, Choice], choice: Choice) -> bool:
        """Whether it is the fastest of its sizes and settings."""
        key = (sizes_of(choice.config), tuple(choice.not_built))
        if key in best and _pace(best[key]) <= _pace(choice):
            return False
        best[key] = choice
        return True


def measured_shape(model: Any, precision: str, adapt: Callable[[Any], None] | None = None) -> ModelShape:
    """The shape of a model; of one of Transformers also what its layers keep, if this process can run it."""
    import torch.distributed as dist

    shape = shape_of(model)
    if isinstance(model, (ModelShape, Mapping)) or dist.is_initialized():
        return shape
    try:
        return count_activations(shape, model, precision, adapt)
    except Exception:  # whatever its own code raises on rows of tokens that have no values: the formula holds
        return shape


def count_activations(
    shape: ModelShape, model: Any, precision: str, adapt: Callable[[Any], None] | None = None
) -> ModelShape:
    """The shape with what its blocks really keep for their backward, from two dry runs of one process.

    Models whose layers differ stay as they are: for them the formula holds.

    Args:
        adapt: see `dry_run`; what is counted then holds for jobs with adapters.
    """
    if len(set(shape.blocks)) != 1 or shape.layers < 2 or precision not in PRECISIONS:
        return shape
    seq = 256 if shape.blocks[0].attentions else 8  # a recurrence may go token by token
    given: dict[str, Any] = {"rows": _TOKENS // seq, "seq": seq, "precision": precision, "optimizer": "sgd"}
    runs = [dry_run(model, "dp_shard=1", layers=layers, adapt=adapt, **given) for layers in (2, 3)]
    kept = (runs[1].peak["activations"] - runs[0].peak["activations"]) / _TOKENS
    if PRECISIONS[precision][1] is not None:  # the copies of weights do not grow with the tokens
        kept -= 2 * lowered_parameters(shape.blocks[0], Layout()) / _TOKENS
    known = (*shape.blocks[0].kept, (counted_as(precision, adapt is not None), kept))
    block = dataclasses.replace(shape.blocks[0], kept=known)
    shape = dataclasses.replace(shape, blocks=(block,) * shape.layers)
    # Data ranks gather fp32 weights, and adapters, in 16 bits: see `computed_job`.
    lowered = None if adapt is None else _lowered(adapt)
    return shape if PRECISIONS[precision][1] is None else count_activations(shape, model, "bf16", lowered)


def _lowered(adapt: Callable[[Any], None]) -> Callable[[Any], None]:
    """`adapt` with adapters of 16 bits."""

    def lower(model: Any) -> None:
        adapt(model)
        model.bfloat16()

    return lower


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


def _cannot_share(goal: Goal) -> str:
    gpus, batch = goal.cluster.gpus, goal.global_batch
    return f"global_batch={batch}: no layout of {gpus} GPUs can share it out; global_batch={4 * gpus} works"
