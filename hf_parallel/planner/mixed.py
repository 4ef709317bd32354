"""Layouts over groups of unlike GPUs: shares of a batch, stages by speed, or a group left out; which is faster.

    shares    every data rank lies in one group and has examples by its speed: `batch_shares=3:3:1:1`
    stages    every stage of a pipeline lies in one group and has layers by its speed: `pipeline_split=[24,8]`
    even      what shares are compared with
    alone     one group by itself, the others stand still

Data ranks walk through layers in lock-step, so a step takes as long as that of the slowest group with its examples.
Whale (Jia et al., 2022, ATC, section 3.3) balances by the same two levers.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.data import parameters_rest
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.balance import find_best_split
from hf_parallel.planner.candidates import (
    MOST_CALL,
    Goal,
    choose_context_of,
    iterate_layouts,
    list_divisors,
    list_micro_batches,
    list_sizes_of,
    list_ways_of,
    make_config,
    to_job,
    to_layout,
)
from hf_parallel.planner.choices import TELLS, Choice, TooLarge, try_layout
from hf_parallel.planner.groups import Group, MixedCluster
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.ledger import compute_sending_seconds
from hf_parallel.planner.memory import GIB, count_host_gib, rank_memory
from hf_parallel.planner.pipeline import Stage, compute_pipeline_seconds
from hf_parallel.planner.predict import compute_seconds_after_schedule, compute_stage_times
from hf_parallel.planner.search import search

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARES, STAGES, EVEN, ALONE = "shares", "stages", "even", "alone"
_BEYOND = ("tp_size", "cp_size", "pp_size", "ep_size")


@dataclass(frozen=True)
class Load:
    """The load of a group in a step.

    `examples`: of a micro-step on each of its data ranks. `layers`: of each of its stages. `busy`: seconds of the step
    in which its ranks do not wait for another group. `needed_gib`: of its fullest GPU.
    """

    group: Group
    needed_gib: float
    busy: float
    examples: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class MixedChoice:
    """A layout of some groups, in the order in which their nodes are started.

    `rows`, `accumulation`: per_device_train_batch_size and gradient_accumulation_steps.
    """

    kind: str
    config: ParallelConfig
    step_time_s: float
    rows: int
    accumulation: int
    loads: tuple[Load, ...]
    bubble: float = 0.0

    @property
    def seconds_per_row(self) -> float:
        """Seconds of a step over its sequences: layouts of a script whose batch grows with data ranks compare so."""
        return self.step_time_s / (self.rows * self.accumulation * self.config.data_parallel_size)

    @property
    def ranked_seconds(self) -> float:
        """Seconds per sequence, `TELLS` times more for each axis beyond data and for each group beyond the first.

        A gain that the planner cannot tell is not worth machines that could do something else.
        """
        axes = sum(getattr(self.config, name) > 1 for name in _BEYOND)
        return self.seconds_per_row * TELLS ** (axes + len(self.loads) - 1)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups at work."""
        return tuple(load.group.name for load in self.loads)

    def where(self) -> str:
        """Say what each group does, and who waits."""
        if self.kind == ALONE:
            return f"{self.groups[0]} alone"
        if self.kind == STAGES:
            first, said = 0, []
            for load in self.loads:
                last = first + len(load.layers) - 1
                stages = f"stage {first}" if last == first else f"stages {first}-{last}"
                said.append(f"{stages} on {load.group.name}")
                first = last + 1
            return f"{', '.join(said)}; {self.bubble:.0%} idle"
        each = [(load.group.name, sorted(set(load.examples), reverse=True)) for load in self.loads]
        counts = ", ".join(f"{' or '.join(map(str, examples))} on {name}" for name, examples in each)
        waits = [(1 - load.busy / self.step_time_s, load.group.name) for load in self.loads]
        longest, name = max(waits)
        return f"{counts}; {name} waits {longest:.0%}" if longest >= 0.02 else counts

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "spec": self.config.to_spec(),
            "kind": self.kind,
            "where": self.where(),
            "groups": list(self.groups),
            "step_time_s": self.step_time_s,
            "bubble": self.bubble,
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "needed_gib": {load.group.name: load.needed_gib for load in self.loads},
            "examples": {load.group.name: list(load.examples) for load in self.loads},
            "layers": {load.group.name: list(load.layers) for load in self.loads},
        }


@dataclass(frozen=True)
class MixedFound:
    """The best layouts of a mixed cluster, in order; `kernels`: what computes attention in each group."""

    goal: Goal
    mixed: MixedCluster
    choices: list[MixedChoice]
    looked_at: int
    kernels: dict[str, str]

    @property
    def best(self) -> MixedChoice | None:
        """The first, if any fits."""
        return self.choices[0] if self.choices else None

    def fastest_of(self, kind: str) -> MixedChoice | None:
        """Return the fastest layout of a kind."""
        return min((c for c in self.choices if c.kind == kind), key=lambda c: c.seconds_per_row, default=None)

    @property
    def started(self) -> list[MixedChoice]:
        """The layouts of all groups as their ranks follow each other: those that running processes can take."""
        names = tuple(group.name for group in self.mixed.groups)
        return [choice for choice in self.choices if choice.groups == names]

    def reasons(self) -> Iterator[str]:
        """Say how much faster the first is than what one would expect, and why a group is left out."""
        best = self.best
        if best is None:
            return
        idle = [group.name for group in self.mixed.groups if group.name not in best.groups]
        whole = [choice for choice in self.choices if len(choice.groups) == len(self.mixed.groups)]
        if idle and whole:
            other = min(whole, key=lambda choice: choice.seconds_per_row)
            ratio, names = other.seconds_per_row / best.seconds_per_row, " and ".join(idle)
            doubt = ", a gain that is not worth it" if ratio < 1 else ""
            yield f"leave {names} out: over all groups the best takes {ratio:.2f} x the time{doubt} ({other.where()})"
        elif idle:
            yield f"leave {' and '.join(idle)} out: no layout over all groups fits"
        for kind, name in ((EVEN, "even shares"), (SHARES, "shares by speed"), (STAGES, "stages by speed")):
            fastest = self.fastest_of(kind)
            if fastest is not None and kind != best.kind:
                yield f"{name} take {fastest.seconds_per_row / best.seconds_per_row:.2f} x the time of the first"
        if self.fastest_of(EVEN) is None:
            yield "even shares do not fit"
        for group in self.mixed.groups:
            alone = next((c for c in self.choices if c.kind == ALONE and c.groups == (group.name,)), None)
            if alone is None:
                yield f"{group.name} alone: nothing fits"
            elif alone is not best:
                ratio = alone.seconds_per_row / best.seconds_per_row
                yield f"{group.name} alone takes {ratio:.2f} x the time of the first"

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "model": self.goal.shape.name,
            "parameters": self.goal.shape.parameters,
            "cluster": self.mixed.to_dict(),
            "seq": self.goal.seq,
            "global_batch": self.goal.global_batch,
            "headroom": self.goal.headroom,
            "layouts_looked_at": self.looked_at,
            "layouts": [choice.to_dict() for choice in self.choices],
            "reasons": list(self.reasons()),
            "attention": self.kernels,
        }


def search_groups(
    *,
    model: PreTrainedModel,
    mixed: MixedCluster,
    seq: int,
    global_batch: int | None,
    top: int = 10,
    in_order: bool = False,
    **options: Any,
) -> MixedFound:
    """Return the best layouts of all groups, of some of them, and of each alone.

    Args:
        global_batch: sequences per step; None: `rows` x `accumulation` on each data rank, as `search` has it.
        in_order: processes run already, so that the best layouts that they can take are among those returned.
        options: those of `search`, but what holds for one kind of GPU: `memory_gib`, `expected`, `quantized`.

    Raises:
        SpecError: as `search`, of a group alone; or the batch divides among no number of data ranks of all groups.
    """
    accept = options.get("accept") or (lambda config: True)
    founds = {
        group.name: search(model=model, cluster=group.cluster, seq=seq, global_batch=global_batch, top=1, **options)
        for group in mixed.groups
    }
    found = list[MixedChoice]()
    for group in mixed.groups:
        for one in founds[group.name].choices[:1]:
            sizes = one.config, one.step_time_s, one.rows, one.accumulation
            load = Load(group, one.needed_gib, one.step_time_s)
            found.append(MixedChoice(ALONE, *sizes, (load,), one.prediction.bubble))
    looked_at = sum(one.looked_at for one in founds.values())
    for size in range(2, len(mixed.groups) + 1):
        for groups in itertools.combinations(mixed.groups, size):
            looking = _Search(
                dataclasses.replace(mixed, groups=groups), {group.name: founds[group.name].goal for group in groups}
            )
            found += looking.run()
            looked_at += looking.looked_at
    if looked_at == sum(one.looked_at for one in founds.values()):
        why = f"no layout of {mixed.gpus} GPUs in {len(mixed.groups)} groups can share it out"
        refuse(f"global_batch={global_batch}", why, f"global_batch={4 * mixed.gpus}")
    chosen = _choose_best_of_kinds(found, max(1, top), accept)
    if in_order:
        names = tuple(group.name for group in mixed.groups)
        of_all = _choose_best_of_kinds([choice for choice in found if choice.groups == names], 1, accept)
        chosen += [choice for choice in of_all if not any(choice is other for other in chosen)]
        chosen.sort(key=lambda choice: choice.ranked_seconds)
    goal = founds[mixed.groups[0].name].goal
    return MixedFound(goal, mixed, chosen, looked_at, {name: one.goal.attention.name for name, one in founds.items()})


def _choose_best_of_kinds(
    found: list[MixedChoice], top: int, accept: Callable[[ParallelConfig], bool]
) -> list[MixedChoice]:
    """Return the best of each kind and set of groups, and more up to `top` with the best of other sizes, in order.

    What the engine does not take is left out.
    """
    ranked = sorted(found, key=lambda choice: choice.ranked_seconds)
    chosen: dict[tuple, MixedChoice] = {}
    for of_way in (True, False):
        for choice in ranked:
            way = (choice.kind, frozenset(choice.groups))
            sizes = (*way, choice.groups, list_sizes_of(choice.config))
            known = way in chosen if of_way else sizes in chosen or len(chosen) >= top
            if not known and accept(choice.config):
                chosen[way if of_way else sizes] = choice
    once = {id(choice): choice for choice in chosen.values()}
    return sorted(once.values(), key=lambda choice: choice.ranked_seconds)


@dataclass(frozen=True)
class Levers:
    """A way to save memory, of `list_ways_of`, and the groups that take it; the others save nothing."""

    way: dict[str, Any]
    names: frozenset[str]

    def of(self, config: ParallelConfig, group: Group) -> ParallelConfig:
        """Return the config as it is on the ranks of a group."""
        return make_config(config, **self.way) if group.name in self.names else config

    def spelled(self, config: ParallelConfig, groups: Iterable[Group]) -> ParallelConfig:
        """Return the config of all ranks, with the ranks that save memory by name if they are not all.

        Args:
            groups: in the order of their ranks.
        """
        ranks, first = list[str](), 0
        for group in groups:
            last = first + group.cluster.gpus - 1
            if group.name in self.names:
                ranks.append(str(first) if first == last else f"{first}-{last}")
            first = last + 1
        at = "" if len(self.names) == len(list(groups)) else f"@{':'.join(ranks)}"
        listed = {key: value + at for key, value in self.way.items() if isinstance(value, str) and value != "none"}
        return make_config(config, **self.way | listed)


class _Search:
    """A sweep over the layouts of all groups of a cluster."""

    def __init__(self, mixed: MixedCluster, goals: dict[str, Goal]) -> None:
        self.mixed = mixed
        self.goals = {
            group.name: dataclasses.replace(goals[group.name], cluster=mixed.seen_from(group))
            for group in mixed.groups
        }
        self.any_goal = self.goals[mixed.groups[0].name]
        self.looked_at = 0
        self._known: dict[tuple, Choice | TooLarge | None] = {}
        self.ways = [way for way in list_ways_of(self.any_goal) if way["offload"] == "none" or not self.any_goal.lora]

    def run(self) -> list[MixedChoice]:
        """Return every layout that fits, in the cheapest way to save memory, on all groups or on some of them."""
        nodes = min(group.cluster.per_node for group in self.mixed.groups)
        goal = self.any_goal
        goal = dataclasses.replace(goal, cluster=dataclasses.replace(goal.cluster, per_node=nodes))
        found: list[MixedChoice] = []
        for config in iterate_layouts(goal):
            even, shared = (functools.partial(self._iterate_shared, kind) for kind in (EVEN, SHARES))
            for choices_of in (even, shared, self._iterate_staged):
                for way in self.ways:
                    if parameters_rest(way["offload"]) and config.data_parallel_size == 1:
                        continue
                    choices = [choice for levers in self._levers(config, way) for choice in choices_of(config, levers)]
                    found += choices
                    if choices:
                        break
        return found

    def _levers(self, config: ParallelConfig, way: dict[str, Any]) -> Iterator[Levers]:
        """Yield the sets of groups that may save memory in a way, few groups first.

        Ranks that hold copies of a parameter step in one place, and experts get their tokens again from all ranks.
        `activation_offload` and `tiled_mlp` hold for all ranks.
        """
        names = [group.name for group in self.mixed.groups]
        copies = config.dp_replicate_size > 1 or (config.pp_size > 1 and self.any_goal.shape.tied)
        alike = way["offload"] not in ("none", "optimizer") or (way["offload"] == "optimizer" and copies)
        alike |= way["activation_checkpointing"] != "none" and config.ep_size > 1
        alike |= not way.keys() <= {"offload", "activation_checkpointing"}
        if alike or set(way.values()) == {"none"}:
            yield Levers(way, frozenset(names))
            return
        for size in range(1, len(names) + 1):
            yield from (Levers(way, frozenset(some)) for some in itertools.combinations(names, size))

    # ---- shares --------------------------------------------------------------------------------------------------

    def _iterate_shared(self, kind: str, config: ParallelConfig, levers: Levers) -> Iterator[MixedChoice]:
        """Yield the fastest layout with as many examples on each data rank, or with examples by speed (`SHARES`).

        None where a data rank would lie in several groups, or where unlike numbers of micro-batches meet at experts.
        """
        ranks, gpus = config.data_parallel_size, self.mixed.gpus
        together = config.tp_size * config.cp_size if config.pp_size == 1 else gpus // config.dp_replicate_size
        of_groups = [group.cluster.gpus for group in self.mixed.groups]
        meets = kind == SHARES and config.pp_size > 1 and config.ep_size > config.cp_size * config.tp_size
        if meets or any(own % together for own in of_groups):
            return
        of_groups, found = [own * ranks // gpus for own in of_groups], list[MixedChoice | None]()
        for calls, examples in self._iterate_micro_steps(config):
            counts = None
            if kind == SHARES:
                seconds = functools.partial(self._compute_seconds, config, levers, calls)
                counts = deal_examples(examples, of_groups, seconds)
            elif examples % ranks == 0:
                counts = [[examples // ranks] * own for own in of_groups]
            if counts and (kind == EVEN or len(set(itertools.chain(*counts))) > 1):
                found.append(self._with_counts(kind, config, levers, calls, counts))
        yield from sorted(filter(None, found), key=lambda choice: choice.step_time_s)[:1]

    def _iterate_micro_steps(self, config: ParallelConfig) -> Iterator[tuple[int, int]]:
        """Yield numbers of micro-steps of a step, or of micro-batches of a pipeline, and examples of each."""
        goal, ranks = self.any_goal, config.data_parallel_size
        share = goal.share(config)
        if share is None or (goal.rows and (share != goal.rows if config.pp_size > 1 else share % goal.rows)):
            return
        most = max(1, MOST_CALL * config.cp_size // goal.seq)
        batch = share * ranks
        for calls in list_divisors(share if config.pp_size == 1 else batch):
            examples = batch // calls
            fits = ranks <= examples <= ranks * most and calls >= config.pp_size
            if goal.rows and config.pp_size == 1:
                fits = examples == ranks * goal.rows
            if fits:
                yield calls, examples

    def _compute_seconds(self, config: ParallelConfig, levers: Levers, calls: int, group: int, examples: int) -> float:
        """Return seconds of a step of all GPUs if they were of a group's kind; infinite where it does not fit."""
        kind = self.mixed.groups[group]
        found = self._try_layout(levers.of(config, kind), calls, kind.name, examples)
        return found.step_time_s if isinstance(found, Choice) else math.inf

    def _try_layout(self, config: ParallelConfig, calls: int, name: str, examples: int) -> Choice | TooLarge | None:
        asked = (config, calls, name, examples)
        if asked not in self._known:
            self.looked_at += 1
            batch = examples * calls * config.data_parallel_size
            goal = dataclasses.replace(self.goals[name], global_batch=batch, rows=None)
            self._known[asked] = try_layout(goal, config, examples)
        return self._known[asked]

    def _with_counts(
        self, kind: str, config: ParallelConfig, levers: Levers, calls: int, counts: list[list[int]]
    ) -> MixedChoice | None:
        """Return the choice of so many examples of a micro-step on each data rank of each group, if it fits."""
        loads = []
        for group, own in zip(self.mixed.groups, counts, strict=True):
            found = self._try_layout(levers.of(config, group), calls, group.name, max(own))
            if not isinstance(found, Choice):
                return None
            loads.append(Load(group, found.needed_gib, found.step_time_s, tuple(own)))
        ranks = list(itertools.chain(*counts))
        rows = sum(ranks) * calls // config.data_parallel_size
        config = levers.spelled(config, self.mixed.groups)
        if kind == SHARES:
            shares = [(one // math.gcd(*ranks), len(list(same))) for one, same in itertools.groupby(ranks)]
            said = (f"{share}x{times}" if times > 1 else str(share) for share, times in shares)
            config = make_config(config, batch_shares=":".join(said))
        if config.pp_size > 1:
            config = make_config(config, pipeline_microbatches=calls)
        seconds = max(load.busy for load in loads)
        calls_of_model = 1 if config.pp_size > 1 else calls
        return MixedChoice(kind, config, seconds, rows // calls_of_model, calls_of_model, tuple(loads))

    # ---- stages --------------------------------------------------------------------------------------------------

    def _iterate_staged(self, config: ParallelConfig, levers: Levers) -> Iterator[MixedChoice]:
        """Yield the fastest pipeline of these sizes for each order of groups, where each stage lies in one group."""
        if config.pp_size == 1 or config.dp_replicate_size > 1:
            return
        width, share = self.mixed.gpus // config.pp_size, self.any_goal.share(config)
        if share is None or any(group.cluster.gpus % width for group in self.mixed.groups):
            return
        sizes = list_micro_batches(self.any_goal, share, config)
        for order in itertools.permutations(self.mixed.groups):
            groups = [group for group in order for _ in range(group.cluster.gpus // width)]
            found = (self._find_pipeline(config, levers, groups, size, share) for size in sizes)
            yield from sorted(filter(None, found), key=lambda choice: choice.step_time_s)[:1]

    def _find_pipeline(
        self, config: ParallelConfig, levers: Levers, groups: list[Group], size: int, share: int
    ) -> MixedChoice | None:
        """Return the pipeline with the split whose slowest stage is fastest among those that fit; None: none fits.

        Args:
            groups: of each stage.
            size: rows of a micro-batch.
            share: rows of a data rank in a step.
        """
        goal, names = self.any_goal, [group.name for group in groups]
        config = make_config(config, pipeline_microbatches=(goal.rows or share) // size)
        layout = to_layout(config, choose_context_of(config, goal, size))
        own = {group.name: levers.of(config, group) for group in groups}
        jobs = {name: to_job(self.goals[name], one, size, share // size) for name, one in own.items()}
        stages = _Stages(self.goals, groups, layout, jobs)
        self.looked_at += 1
        slowest, split = find_best_split(len(goal.shape.blocks), len(groups), stages.cost, max)
        if slowest == math.inf:
            return None
        spans = list(itertools.pairwise(itertools.accumulate(split, initial=0)))
        cut = tuple(stages.make_stage(at, *span) for at, span in enumerate(spans))
        for name, job in jobs.items():  # has each group's host the room for what its GPUs offload?
            cluster = self.goals[name].cluster
            if count_host_gib(cut, layout, job, cluster) > cluster.gpu.host.memory_gib:
                return None
        seconds, bubble = stages.compute_step_seconds(spans, goal.cluster)
        loads = []
        for group in dict.fromkeys(groups):
            places = [at for at, name in enumerate(names) if name == group.name]
            busy = max(sum(stages.seconds(group.name, *spans[at])) for at in places) * jobs[group.name].micro_batches
            fullest = max(stages.needed(at, *spans[at]) for at in places)
            loads.append(Load(group, fullest, busy, layers=tuple(split[at] for at in places)))
        config = make_config(levers.spelled(config, dict.fromkeys(groups)), pipeline_split=split)
        calls = 1 if goal.rows is None else share // goal.rows
        return MixedChoice(STAGES, config, seconds, share // calls, calls, tuple(loads), bubble)


class _Stages:
    """The stages of a pipeline whose layers are shared out among groups of unlike GPUs.

    Args:
        goals: of each group, whose cluster is all GPUs as if they were of its kind.
        groups: of each stage.
        jobs: of each group.
    """

    def __init__(self, goals: dict[str, Goal], groups: list[Group], layout: Layout, jobs: dict[str, Job]) -> None:
        self.goals, self.names, self.layout, self.jobs = goals, [group.name for group in groups], layout, jobs
        self.shape = goals[self.names[0]].shape
        gpus = goals[self.names[0]].cluster.gpus
        self.clusters = {group.name: dataclasses.replace(group.cluster, gpus=gpus) for group in groups}
        self.alike = len(set(self.shape.blocks)) == 1
        self.seconds = functools.cache(self._compute_seconds)
        self.needed = functools.cache(  # the GiB of a GPU that has the layers from `first` to before `last` at a place
            lambda at, first, last: (
                rank_memory([self.make_stage(at, first, last)], layout, jobs[self.names[at]], at).needed / GIB
            )
        )

    def make_stage(self, at: int, first: int, last: int) -> Stage:
        """Return the stage at a place with the layers from `first` to before `last`."""
        counts = tuple(Counter(self.shape.blocks[first:last]).items())
        return Stage(self.shape, counts, first == 0, last == len(self.shape.blocks), at)

    def _compute_seconds(self, name: str, first: int, last: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward of these layers on a group's GPU."""
        stage = self.make_stage(0, first, last)
        return compute_stage_times(stage, self.layout, self.jobs[name], self.clusters[name]).totals

    def cost(self, at: int, first: int, last: int) -> float:
        """Return seconds of a micro-batch at a place with these layers; infinite where they do not fit."""
        if self.alike and first > 0 and last < len(self.shape.blocks):  # the same layers elsewhere
            first, last = 1, 1 + last - first
        fits = self.needed(at, first, last) <= self.goals[self.names[at]].room_gib
        return sum(self.seconds(self.names[at], first, last)) if fits else math.inf

    def compute_step_seconds(self, spans: list[tuple[int, int]], whole: Cluster) -> tuple[float, float]:
        """Return seconds of a step, and which part of its schedule is bubble.

        Args:
            spans: the first layer of each stage, and the one after its last.
            whole: all GPUs, whose slowest link joins stages.
        """
        layout = dataclasses.replace(self.layout, split=tuple(last - first for first, last in spans))
        job = self.jobs[self.names[0]]
        totals = [self.seconds(name, *span) for name, span in zip(self.names, spans, strict=True)]
        sending = compute_sending_seconds(self.shape.hidden, layout, job, whole)
        duration, bubble = compute_pipeline_seconds(layout, job, totals, sending)
        rest = []
        for at, (name, span) in enumerate(zip(self.names, spans, strict=True)):
            stage, cluster = self.make_stage(at, *span), self.clusters[name]
            kinds = compute_seconds_after_schedule([[stage]], layout, self.jobs[name], cluster, totals[at][1])
            after = sum(kinds.values())
            noise = cluster.gpu.efficiency.node_noise * math.log2(max(1, cluster.nodes))
            rest.append(after + noise * (duration + after))
        return duration + max(rest), bubble


def deal_examples(examples: int, ranks: list[int], seconds: Callable[[int, int], float]) -> list[list[int]] | None:
    """Return the examples of each rank of each group, dealt one by one to the rank that would be done with it first.

    Args:
        ranks: number of ranks of each group; each has an example at least.
        seconds: of a group's rank with so many examples, `seconds(group, examples)`; infinite where they do not fit.

    Returns:
        None: they do not all fit.
    """
    counts = [[1] * number for number in ranks]
    if examples < sum(ranks) or any(seconds(group, 1) == math.inf for group in range(len(ranks))):
        return None
    queue = [(seconds(group, 2), group, rank) for group, number in enumerate(ranks) for rank in range(number)]
    heapq.heapify(queue)
    for _ in range(examples - sum(ranks)):
        done, group, rank = queue[0]
        if done == math.inf:
            return None
        counts[group][rank] += 1
        heapq.heapreplace(queue, (seconds(group, counts[group][rank] + 1), group, rank))
    return counts
