"""A layout with its batch, predicted: with growing micro-batches while it fits, saving memory only where it must.

Activation checkpointing costs a third of the compute, offloading waits for PCIe and the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.data import parameters_rest
from hf_parallel.planner.activations import FLASH
from hf_parallel.planner.candidates import Goal, choose_context_of, list_micro_batches, make_config, to_job, to_layout
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.memory import GIB, count_fewest_bytes, count_host_gib, predict_fullest_rank
from hf_parallel.planner.pipeline import Stage, group_stages_by_rank, make_stages
from hf_parallel.planner.predict import compute_stage_times, predict_step
from hf_parallel.planner.prediction import Prediction


@dataclass(frozen=True)
class Choice:
    """A layout with its batch: `rows` of one call of the model on a data rank, `accumulation` calls per step."""

    config: ParallelConfig
    prediction: Prediction
    rows: int
    accumulation: int
    warnings: tuple[str, ...] = ()

    @property
    def needed_gib(self) -> float:
        """GiB that the fullest rank must have; its allocator may hold more, which it gives back before it fails."""
        return self.prediction.needed_gib

    @property
    def free_gib(self) -> float:
        """GiB of a GPU that are left beside what its fullest rank must have."""
        return self.prediction.cluster.gpu.memory_gib - self.needed_gib

    @property
    def host_gib(self) -> float:
        """GiB of a node's memory for what its ranks offload."""
        p = self.prediction
        return count_host_gib(make_stages(p.shape, p.layout, p.job), p.layout, p.job, p.cluster)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds per optimizer step."""
        return self.prediction.step_time_s

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.rows * self.accumulation * self.config.data_parallel_size

    @property
    def seconds_per_row(self) -> float:
        """Predicted seconds per step over all rows of it: what layouts are ranked by."""
        return self.prediction.step_time_s / self.batch

    def steps_factor(self, critical_batch: float) -> float:
        """Return steps to a loss in multiples of the fewest: 1 + critical / batch (arXiv:1812.06162, eq. 2.11)."""
        return 1 + critical_batch / self.batch

    def seconds_to_loss(self, critical_batch: float) -> float:
        """Return predicted seconds to a loss, for each of the fewest steps to it."""
        return self.step_time_s * self.steps_factor(critical_batch)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        p = self.prediction
        rates = ("step_time_s", "uncertainty", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits", "bubble")
        return {
            "spec": self.config.to_spec(),
            "sequences_per_step": self.batch,
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            **{name: getattr(p, name) for name in rates},
            **{name: getattr(p, name) for name in ("needed_gib", "allocated_gib", "reserved_gib")},
            "free_gib": self.free_gib,
            "host_gib": self.host_gib,
            **{name: getattr(p.breakdown, name) for name in ("memory", "time", "bytes_by_axis")},
            "warnings": list(self.warnings),
        }


#: Times as fast must a layout be as another, or the planner cannot tell them apart.
TELLS = 1.05


def rank_seconds(choice: Choice, critical_batch: float | None = None) -> float:
    """Return seconds per row, `TELLS` times more for each axis beyond data: few axes are easier to live with.

    Args:
        critical_batch: sequences; seconds are then those to a loss, so that batches can be compared.
    """
    config = choice.config
    beyond = sum(size > 1 for size in (config.tp_size, config.cp_size, config.pp_size, config.ep_size))
    seconds = choice.seconds_per_row if critical_batch is None else choice.seconds_to_loss(critical_batch)
    return seconds * TELLS**beyond


def find_leanest(choices: Sequence[Choice], fastest: float | None = None) -> Choice:
    """Return the choice that needs least memory of those that the planner cannot tell from the fastest.

    Args:
        fastest: ranked seconds of the fastest; default, and where none of `choices` is near: of the fastest of them.
    """
    own = min(map(rank_seconds, choices))
    pace = own if fastest is None or own > TELLS * fastest else fastest
    near = [choice for choice in choices if rank_seconds(choice) <= TELLS * pace]
    return min(near, key=lambda choice: (choice.needed_gib, rank_seconds(choice)))


@dataclass(frozen=True)
class Found:
    """The best layouts, in order; what else one would expect and why it is not first; how many were looked at."""

    goal: Goal
    choices: list[Choice]
    why_not: list[tuple[str, str]] = field(default_factory=list)
    looked_at: int = 0
    advice: str = ""  # if nothing fits
    notes: list[str] = field(default_factory=list)  # of the plan as a whole
    suggestions: list[str] = field(default_factory=list)  # what would be faster, and change the numbers
    measured: dict[str, float] = field(default_factory=dict)  # seconds of steps that ran on this machine, by spec

    @property
    def best(self) -> Choice | None:
        """The first, if any fits."""
        return self.choices[0] if self.choices else None

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        goal, critical, layouts = self.goal, self.goal.critical_batch, list[dict[str, object]]()
        for choice in self.choices:
            said, took = choice.to_dict(), self.measured.get(choice.config.to_spec())
            if took is not None:
                said["measured_here_s"] = took
            if critical is not None:
                said["steps_factor"] = choice.steps_factor(critical)
                said["seconds_to_loss"] = choice.seconds_to_loss(critical)
            layouts.append(said)
        return {
            "model": goal.shape.name,
            "parameters": goal.shape.parameters,
            "gpu": goal.cluster.gpu.name,
            "gpus": goal.cluster.gpus,
            "gpus_per_node": goal.cluster.per_node,
            "seq": goal.seq,
            "global_batch": goal.global_batch,
            "headroom": goal.headroom,
            "critical_batch": goal.critical_batch,
            "layouts_looked_at": self.looked_at,
            "layouts": layouts,
            "why_not": dict(self.why_not),
            "advice": self.advice,
            "notes": self.notes,
            "attention": {"kernel": goal.attention.name, "why": goal.attention.why},
            "suggestions": self.suggestions,
        }


# ---- trying ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TooLarge:
    """A layout that needs `gib` on its fullest rank, or in its node's memory, which is more than there is."""

    config: ParallelConfig
    size: int
    gib: float


def iterate_variants(
    goal: Goal, config: ParallelConfig, limit: float, ways: Iterable[dict[str, Any]], hopeless: float = math.inf
) -> Iterator[Choice | TooLarge]:
    """Yield growing micro-batches in each of `ways`, up to the first in which any fits.

    A larger one may fit where a smaller does not: the last needs no accumulation, which holds whole gradients.

    Args:
        hopeless: GiB; a way that takes more, whatever its micro-batch is, is left out.
    """
    share = goal.share(config)
    sizes = list_micro_batches(goal, share, config) if share else []
    fewest, too_large = dict[tuple[bool, bool], float](), set[tuple[object, ...]]()
    slow = set[int]()  # a way to save memory makes nothing faster
    for way in ways:
        offload = way["offload"]
        if slow.issuperset(sizes):
            return
        if parameters_rest(offload) and config.data_parallel_size == 1:
            continue  # FSDP2 gathers parameters from the host, and one data rank has none of it
        rests = offload != "none", parameters_rest(offload)  # a GPU holds as much, be it the host or its NVMe
        alike = (*rests, *(value for key, value in way.items() if key != "offload"))
        if alike in too_large or fewest.get(rests, 0.0) > hopeless:
            continue
        saving, tried = make_config(config, **way), list[Choice | TooLarge | None]()
        if rests not in fewest:
            _, layout, job = _read_asked_layout(goal, saving, sizes[0])
            fewest[rests] = count_fewest_bytes(make_stages(goal.shape, layout, job), layout, job) / GIB
            if fewest[rests] > hopeless:
                continue
        for at, size in enumerate(sizes):  # until one is too large; then the last alone
            tried.append(try_layout(goal, saving, size, limit, slow, hopeless))
            if isinstance(tried[-1], TooLarge):
                tried += [try_layout(goal, saving, sizes[-1], limit, slow, hopeless)] if at < len(sizes) - 1 else []
                break
        yield from (choice for choice in tried if choice is not None)
        if any(isinstance(choice, Choice) for choice in tried):
            return
        if all(isinstance(choice, TooLarge) and choice.gib > hopeless for choice in tried):
            too_large.add(alike)


def try_layout(
    goal: Goal,
    config: ParallelConfig,
    size: int,
    limit: float = math.inf,
    slow: set[int] | None = None,
    hopeless: float = math.inf,
) -> Choice | TooLarge | None:
    """Try a layout with micro-batches of `size` rows; None if it cannot be as fast as `limit` seconds per row.

    Args:
        slow: sizes known to be too slow; `size` joins them if it stays so when more is recomputed or offloaded.
        hopeless: GiB; of a layout that needs more it does not matter how much more.
    """
    if slow is not None and size in slow:
        return None
    config, layout, job = _read_asked_layout(goal, config, size)
    stages = make_stages(goal.shape, layout, job)
    # Memory takes less time to count. That a layout is slow in all ways shows in the first, which saves no memory.
    saves = job.recompute != "none" or job.offload != "none"
    needed = _count_too_much(goal, stages, layout, job, hopeless) if saves else None
    if needed is None and limit < math.inf:
        most = limit * job.micro_batch * job.micro_batches * layout.dp
        least, even = _compute_least_seconds(goal.cluster, stages, layout, job)
        if least > most:
            if slow is not None and even > most:
                slow.add(size)
            return None
    needed = needed if saves else _count_too_much(goal, stages, layout, job, hopeless)
    if needed is not None:
        return TooLarge(config, size, needed)
    return _make_choice_of(config, predict_step(goal.shape, goal.cluster, layout, job, goal.headroom))


def _count_too_much(goal: Goal, stages: tuple[Stage, ...], layout: Layout, job: Job, hopeless: float) -> float | None:
    """Return the GiB that a layout's fullest rank needs if that, or what the host is given, does not fit.

    If they are more than `hopeless` they are at least what is returned.
    """
    needed = predict_fullest_rank(stages, layout, job, hopeless * GIB).needed / GIB
    if needed > hopeless:
        return needed
    on_host, room = count_host_gib(stages, layout, job, goal.cluster), goal.cluster.gpu.host.memory_gib
    return needed if needed > goal.room_gib or on_host > room else None


def predict_choice(goal: Goal, config: ParallelConfig, size: int) -> Choice:
    """Predict a layout with micro-batches of `size` rows, whether it fits or not."""
    config, layout, job = _read_asked_layout(goal, config, size)
    return _make_choice_of(config, predict_step(goal.shape, goal.cluster, layout, job, goal.headroom))


def _make_choice_of(config: ParallelConfig, prediction: Prediction) -> Choice:
    job = prediction.job
    if config.pp_size == 1:
        return Choice(config, prediction, job.micro_batch, job.micro_batches)
    return Choice(config, prediction, job.micro_batch * job.micro_batches_per_call, job.calls)


def _read_asked_layout(goal: Goal, config: ParallelConfig, size: int) -> tuple[ParallelConfig, Layout, Job]:
    share = goal.share(config)
    assert share is not None
    if config.pp_size > 1:  # a pipeline gets all of a step in one call
        config = make_config(config, pipeline_microbatches=(goal.rows or share) // size)
    return config, to_layout(config, choose_context_of(config, goal, size)), to_job(goal, config, size, share // size)


def _compute_least_seconds(
    cluster: Cluster, stages: tuple[Stage, ...], layout: Layout, job: Job
) -> tuple[float, float]:
    """Return seconds that no schedule undercuts, and those that no other cut into stages undercuts either.

    The slowest stage computes, the others fill and drain its pipeline; or all ranks compute evenly, without a bubble.
    """
    seconds = {
        stage: sum(compute_stage_times(stage, layout, job, cluster).totals) for stage in set(stages)
    }  # few differ
    ranks = [sum(seconds[stage] for stage in mine) for mine in group_stages_by_rank(stages, layout)]
    filling = (sum(ranks) - max(ranks)) / layout.virtual_stages if layout.schedule == "1f1b" else 0.0
    return job.micro_batches * max(ranks) + filling, job.micro_batches * sum(ranks) / len(ranks)


# ---- padding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padding:
    """`share` of the tokens that is padding; `ratio` of the step time without it, which `fits` or not."""

    share: float
    ratio: float = 1.0
    fits: bool = True


def share_of(lengths: Sequence[int], size: int) -> tuple[float, float, float]:
    """Return the share of padding in batches of `size` rows, the mean length of rows, and that of padded rows."""
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    mean = sum(lengths) / len(lengths)
    padded = sum(max(part) * len(part) for part in parts) / len(lengths)
    return 1 - mean / padded, mean, padded


def compare_padding_of(goals: Sequence[Goal], config: ParallelConfig, lengths: Sequence[int], size: int) -> Padding:
    """Return what the planner says of joining each batch; of unlike GPUs the slowest sets the pace, and all must fit.

    A flash kernel takes row by row what is joined; others are given a mask of all tokens by all tokens.

    Args:
        goals: one for each kind of GPU.
        size: rows of a batch of one data rank.
    """
    share, mean, padded = share_of(lengths, size)
    before, after = list[Choice](), list[Choice]()
    for goal in goals:
        alone = dataclasses.replace(goal.attention, documents=True)
        joined = (size, mean) if goal.attention.kind(config) == FLASH else (1, size * mean)
        for steps, (rows, tokens) in ((before, (size, padded)), (after, joined)):
            batch = dataclasses.replace(goal, rows=rows, seq=max(1, round(tokens)), global_batch=None, attention=alone)
            steps.append(predict_choice(batch, config, rows))
    padded_s, joined_s = (max(choice.step_time_s for choice in each) for each in (before, after))
    return Padding(share, joined_s / padded_s, all(choice.prediction.fits for choice in after))
