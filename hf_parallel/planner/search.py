"""Every layout this package can run, ranked by predicted step time: which, how fast, will it fit, and why not another.

    found = search(model=config, cluster=make_cluster("h100-80gb", 1024), seq=4096, global_batch=1024)
    found.choices[0].config.to_spec()      # "pp=4,tp=8,dp_shard=32,…": what --parallel takes

Other schedules than 1F1B are simulated for the best layouts alone: what they can gain is the bubble.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.activations import (
    SDPA,
    assume_planned,
    count_kept_beside_flash,
    count_lowered_parameters,
    name_counted_as,
)
from hf_parallel.planner.advice import (
    WORTH_ROUNDING,
    explain_absence,
    explain_nothing_fits,
    explain_usual_layouts,
    list_notes_about,
    list_warnings_about,
    suggest_rounding,
)
from hf_parallel.planner.candidates import (
    Goal,
    iterate_compressed,
    iterate_layouts,
    iterate_other_schedules,
    list_sizes_of,
    list_ways_of,
    make_config,
    to_job,
)
from hf_parallel.planner.choices import TELLS, Choice, Found, find_leanest, iterate_variants, rank_seconds, try_layout
from hf_parallel.planner.dryrun.run import PRECISIONS, count_alone, dry_run
from hf_parallel.planner.hardware import HEADROOM, Cluster, check_headroom
from hf_parallel.planner.layout import Job, Layout, normalise_precision
from hf_parallel.planner.predict import check_four_bit_job
from hf_parallel.planner.shape import ModelShape, shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 65536  # of a dry run: so many that nothing but activations decides when memory is fullest
_RESCHEDULED = 8  # layouts that the other schedules are tried for
_MORE_GPUS = (2, 4, 8, 16)  # times as many, tried where nothing fits
_WAITS = ("ZeRO-3 communication", "reduction", "gathering")
_WORTH = 1.6  # a layout that cannot be faster than this many times the best is not looked at further


def search(
    *,
    model: PreTrainedModel,
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
    adapt: Callable[[PreTrainedModel], None] | None = None,
    attention: str | None = None,
    documents: bool = False,
    quantized: bool = False,
    whole_logits: bool = False,
    headroom: float = HEADROOM,
    four_bit: bool = False,
) -> Found:
    """Return the `top` best layouts that fit: by speed, and by memory where the planner cannot tell speeds apart.

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
        attention: the kernel that the script asks for; default: what Transformers chooses.
        documents: are rows padded, or packs of documents?
        quantized: search layouts, too, whose transfers round, and so change the numbers.
        whole_logits: does the script read them, so that its loss is not computed in chunks?
        headroom: percent of each GPU's memory that stays free.
        four_bit: does bitsandbytes pack the base under the adapters (QLoRA)?

    Raises:
        SpecError: the batch cannot be divided among any number of data ranks, or a name is not known.
    """
    if memory_gib is not None:
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gib=memory_gib))
    check_headroom(headroom)
    script = {"adapt": adapt, "kernel": attention, "documents": documents, "whole_logits": whole_logits}
    batch = {"seq": seq, "global_batch": global_batch, "rows": rows, "accumulation": accumulation}
    trained = {"optimizer": optimizer, "lora": 16 if lora is True else int(lora), "four_bit": four_bit}
    wishes: dict[str, Any] = {**script, **batch, **trained, "quantized": quantized, "headroom": headroom}
    goal = make_goal(model=model, cluster=cluster, precision=precision, **wishes)
    check_four_bit_job(to_job(goal, make_config(precision=goal.eight_bit), 1, 1))
    looking = _Search(goal, accept)
    ranked = looking.run()
    if not looking.looked_at:
        refuse(
            f"global_batch={global_batch}",
            f"no layout of {cluster.gpus} GPUs can share it out",
            f"global_batch={4 * cluster.gpus}",
        )
    chosen = list(itertools.islice(looking.accepted(ranked), max(1, top)))
    best = chosen[0] if chosen else None
    yours = []
    if expected is not None:
        config = ParallelConfig.parse(expected).resolve(cluster.gpus)
        yours = [(f"yours ({config.to_spec()})", explain_absence(goal, config, best))]
    return Found(
        goal,
        [dataclasses.replace(choice, warnings=tuple(list_warnings_about(choice, goal))) for choice in chosen],
        why_not=[*yours, *explain_usual_layouts(goal, best)],
        looked_at=looking.looked_at,
        advice="" if best else explain_nothing_fits(goal, looking.leanest, looking.what_would_fit()),
        notes=list(list_notes_about(goal, getattr(model, "max_position_embeddings", None))),
        suggestions=[] if best is None or quantized else list(suggest_rounding(best, looking.rounding(best, ranked))),
    )


def make_goal(
    *,
    model: PreTrainedModel,
    cluster: Cluster,
    seq: int,
    precision: str,
    adapt: Callable[[PreTrainedModel], None] | None = None,
    kernel: str | None = None,
    documents: bool = False,
    **wishes: Any,
) -> Goal:
    """Return the goal for a model on these machines, with what its layers keep and the attention that they will run.

    Args:
        kernel: `attention` of `search`, as are the others.
        wishes: other fields of `Goal`.
    """
    precision = normalise_precision(precision)
    planned = assume_planned(model, cluster.gpu, precision, seq, kernel, documents)
    eight_bit, precision = ("fp8", "bf16") if precision == "fp8" else ("auto", precision)
    shape = measure_shape(model, precision, adapt, planned.counted)
    return Goal(
        shape=shape,
        cluster=cluster,
        seq=seq,
        precision=precision,
        attention=planned,
        eight_bit=eight_bit,
        **wishes,
    )


def search_batches(critical_batch: float, *, global_batch: int | None, top: int = 10, **options: Any) -> Found:
    """Return the best layouts by time to a loss, whose steps are in proportion to 1 + critical batch / batch.

    Args:
        critical_batch: sequences, as `monitor=noise` measures it (McCandlish et al., 2018, arXiv:1812.06162).
        global_batch: rows per step; None: batches from a quarter of the critical one to four times as many are tried.
        options: those of `search`.

    Raises:
        SpecError: as `search` does.
    """
    if critical_batch <= 0:
        refuse(f"critical_batch={critical_batch:g}", "is more than 0 sequences", "critical_batch=256")
    gpus, tried = options["cluster"].gpus, [global_batch] if global_batch is not None else list[int]()
    for times in () if tried else (0.25, 0.5, 1, 2, 4):  # batches that many data ranks can share
        wanted = max(1.0, critical_batch * times)
        tried.append(gpus * round(wanted / gpus) if wanted >= gpus else math.gcd(gpus, 2 ** round(math.log2(wanted))))
    tried = sorted(set(tried))
    each = [search(global_batch=batch, top=top, **options) for batch in tried]
    best: dict[tuple, Choice] = {}
    for choice in itertools.chain.from_iterable(found.choices for found in each):
        sizes = list_sizes_of(choice.config)
        if sizes not in best or choice.seconds_to_loss(critical_batch) < best[sizes].seconds_to_loss(critical_batch):
            best[sizes] = choice
    ranked = sorted(best.values(), key=lambda choice: rank_seconds(choice, critical_batch))
    pace = TELLS * rank_seconds(ranked[0], critical_batch) if ranked else math.inf
    near = [choice for choice in ranked if rank_seconds(choice, critical_batch) <= pace]
    ranked = [*sorted(near, key=lambda choice: choice.needed_gib), *ranked[len(near) :]][:top]
    first = next((one for one, batch in zip(each, tried, strict=True) if ranked and ranked[0].batch == batch), each[0])
    goal = dataclasses.replace(first.goal, critical_batch=critical_batch)
    return dataclasses.replace(first, goal=goal, choices=ranked, looked_at=sum(found.looked_at for found in each))


class _Search:
    """A sweep over the layouts, and what it saw. `accept`: does the engine take a layout for this model?"""

    def __init__(self, goal: Goal, accept: Callable[[ParallelConfig], bool] | None) -> None:
        self.goal, self.accept = goal, accept or (lambda config: True)
        self.looked_at, self.leanest = 0, math.inf
        # Adapters leave nothing to offload.
        self.ways = [way for way in list_ways_of(goal) if way["offload"] == "none" or not goal.lora]

    def run(self) -> list[Choice]:
        """Return the best of each sizes, in order; other schedules are tried for the leading ones."""
        found: dict[tuple, list[Choice]] = {}
        limit = math.inf
        for config in iterate_layouts(self.goal):
            hopeless = max(self.goal.room_gib, self.leanest)  # can be neither chosen nor the leanest
            for choice in iterate_variants(self.goal, config, limit, self.ways, hopeless):
                self.looked_at += 1
                if not isinstance(choice, Choice):
                    self.leanest = min(self.leanest, choice.gib)
                    continue
                pace = choice.seconds_per_row * _WORTH
                if pace < limit and not self.accept(choice.config):
                    break  # one that the model forbids must not set the pace
                found.setdefault(list_sizes_of(choice.config), []).append(choice)
                limit = min(limit, pace)
        best = (min(choices, key=rank_seconds) for choices in found.values())
        for choice in sorted(best, key=rank_seconds)[:_RESCHEDULED]:
            size = choice.prediction.job.micro_batch
            for config in iterate_other_schedules(self.goal, choice.config, choice.rows // size):
                other = try_layout(self.goal, config, size)
                self.looked_at += 1
                if isinstance(other, Choice) and self.accept(other.config):
                    found[list_sizes_of(config)].append(other)
        # By memory what the planner cannot tell from the fastest, then the rest.
        by_time = sorted(itertools.chain.from_iterable(found.values()), key=rank_seconds)
        fastest = next((rank_seconds(choice) for choice in self.accepted(by_time)), math.inf)
        each = sorted((find_leanest(choices, fastest) for choices in found.values()), key=rank_seconds)
        near = [choice for choice in each if rank_seconds(choice) <= TELLS * fastest]
        return [*sorted(near, key=lambda choice: choice.needed_gib), *each[len(near) :]]

    def accepted(self, ranked: Iterable[Choice]) -> Iterator[Choice]:
        """Yield candidates that the engine takes, checked lazily in order of predicted speed."""
        return (choice for choice in ranked if self.accept(choice.config))

    def rounding(self, best: Choice, ranked: list[Choice]) -> Choice | None:
        """Return the fastest of the same layouts with transfers that round, if that is worth a line."""
        enough, allowed = best.seconds_per_row / WORTH_ROUNDING, dataclasses.replace(self.goal, quantized=True)
        found = []
        for choice in ranked:
            times = choice.prediction.breakdown.time.items()
            waiting = sum(seconds for kind, seconds in times if any(word in kind for word in _WAITS))
            if waiting / choice.step_time_s < 1 - enough / choice.seconds_per_row:
                continue  # it would be too slow if nothing were sent to other data ranks
            for config in iterate_compressed(allowed, choice.config):
                other = try_layout(self.goal, config, choice.prediction.job.micro_batch)
                rounds = (config.quantize_weights, config.quantize_gradients) != ("none", "none")
                if rounds and isinstance(other, Choice) and other.seconds_per_row < enough:
                    found.append(other)
        return next(self.accepted(sorted(found, key=rank_seconds)), None)

    def what_would_fit(self) -> Iterator[tuple[str, Choice | None]]:
        """Yield the usual ways out, each searched: adapters, an 8-bit optimizer, more GPUs."""
        goal = self.goal

        def best(**changes: Any) -> Choice | None:
            other = _Search(dataclasses.replace(goal, **changes), self.accept)
            return next(other.accepted(other.run()), None)

        if self.leanest <= goal.cluster.gpu.memory_gib:
            yield "--headroom 0", best(headroom=0.0)
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


def measure_shape(
    model: PreTrainedModel, precision: str, adapt: Callable[[PreTrainedModel], None] | None = None, kernel: str = SDPA
) -> ModelShape:
    """Return the shape of a model; of one of Transformers also what its layers keep, if this process can run it."""
    shape = shape_of(model)
    if isinstance(model, (ModelShape, Mapping)):
        return shape
    try:
        return count_activations(shape, model, precision, adapt, kernel)
    except Exception:  # whatever its own code raises on rows of tokens that have no values: the formula holds
        return shape


def count_activations(
    shape: ModelShape,
    model: PreTrainedModel,
    precision: str,
    adapt: Callable[[PreTrainedModel], None] | None = None,
    kernel: str = SDPA,
) -> ModelShape:
    """Return the shape with what its blocks really keep for their backward, counted with two layers and three.

    Models whose layers differ stay as they are: for them the formula holds.

    Args:
        adapt: see `dry_run`; what is counted then holds for jobs with adapters.
        kernel: of the model's attention: what it keeps beyond flash attention is not counted.
    """
    import torch.distributed as dist

    if len(set(shape.blocks)) != 1 or shape.layers < 2 or precision not in PRECISIONS:
        return shape
    seq = 256 if shape.blocks[0].attentions else 8  # a recurrence may go token by token
    given: dict[str, Any] = {"rows": _TOKENS // seq, "seq": seq, "precision": precision, "adapt": adapt}
    if dist.is_initialized():  # as `auto` asks
        two, three = (count_alone(model, layers=layers, **given) for layers in (2, 3))
    else:
        whole = "dp_shard=1,lean_loss=false"  # the fullest moment is the loss, and not run in a hundred chunks
        runs = (dry_run(model, whole, layers=layers, optimizer="sgd", **given) for layers in (2, 3))
        two, three = (ran.peak["activations"] for ran in runs)
    kept = (three - two) / _TOKENS
    if PRECISIONS[precision][1] is not None:  # the copies of weights do not grow with the tokens
        kept -= 2 * count_lowered_parameters(shape.blocks[0], Layout()) / _TOKENS
    job = Job(seq, 1, 1, precision=precision, attention=kernel, engine="hf_parallel")
    kept -= count_kept_beside_flash(shape.blocks[0], Layout(), job)
    known = (*shape.blocks[0].kept, (name_counted_as(precision, adapt is not None), kept))
    block = dataclasses.replace(shape.blocks[0], kept=known)
    shape = dataclasses.replace(shape, blocks=(block,) * shape.layers)
    # Data ranks gather fp32 weights, and adapters, in 16 bits: see `computed_job`.
    lowered = None if adapt is None else functools.partial(_lower_shape, adapt)
    return shape if PRECISIONS[precision][1] is None else count_activations(shape, model, "bf16", lowered, kernel)


def _lower_shape(adapt: Callable[[PreTrainedModel], None], parallel: PreTrainedModel) -> None:
    adapt(parallel)
    parallel.bfloat16()
