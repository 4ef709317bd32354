"""The planner's expectation of the layout in force, and by how much the run differs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.monitor import session
from hf_parallel.monitor.meter import RankRow, round_to_significant
from hf_parallel.planner.candidates import Goal, make_config
from hf_parallel.planner.choices import predict_choice
from hf_parallel.planner.groups import MixedCluster
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu, Host, Link
from hf_parallel.planner.memory import GIB
from hf_parallel.planner.prediction import Prediction
from hf_parallel.planner.shape import ModelShape, shape_of
from hf_parallel.ranks.mesh import compute_data_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: How far step time or memory may be from the plan before a line says so.
TOLERATED = 0.15
#: What the plan does not count: workspaces of matrix products and of other libraries, 0.2 GiB on an H100.
UNCOUNTED_GIB = 0.5
TERMS = COMPUTE, COMMUNICATION, BUBBLE, OTHER = ("compute", "communication", "bubble", "other")
_COMMUNICATION = ("gradients' reduction", "gathering updated weights")
_OTHER = ("optimizer", "host, per step", "stragglers", "gradients to the host")


@dataclass(frozen=True)
class Batch:
    """The batch of a data rank in one step: `calls` of the model with `rows` of `seq` tokens, and how."""

    rows: int
    calls: int
    seq: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora: int = 0


def expect(shape: ModelShape, config: ParallelConfig, cluster: Cluster, batch: Batch) -> Prediction:
    """Return the planner's prediction of a step.

    Raises:
        SpecError: a batch that the layout's pipeline cannot cut.
    """
    pieces = count_micro_batches(batch.rows, config) if config.pp_size > 1 else 1
    goal = Goal(shape, cluster, batch.seq, None, batch.precision, batch.optimizer, batch.lora, batch.rows, batch.calls)
    return predict_choice(goal, config, batch.rows // pieces).prediction


@dataclass(frozen=True)
class GroupPlan:
    """The prediction of a step if all GPUs were as those of `ranks`, with the largest batch that one of these has.

    Data ranks wait for each other in every layer, so that the slowest group's holds for the whole.
    """

    ranks: range
    batch: Batch
    prediction: Prediction


def expect_of_groups(
    shape: ModelShape, config: ParallelConfig, machines: Cluster | MixedCluster, batch: Batch, examples: Sequence[int]
) -> list[GroupPlan]:
    """Return the plan of each group of GPUs of one kind, the slowest first.

    Args:
        examples: of a micro-step on each data rank.

    Raises:
        SpecError: the stages of a pipeline lie on unlike GPUs; or as `expect`.
    """
    if isinstance(machines, MixedCluster) and config.pp_size > 1:
        why = "stages on unlike GPUs are predicted before a training alone"
        refuse(f"pp_size={config.pp_size}", why, do="hf-parallel plan --cluster FILE.yaml says what they take")
    clusters = [machines] if isinstance(machines, Cluster) else [group.cluster for group in machines.groups]
    seen = [machines] if isinstance(machines, Cluster) else [machines.seen_from(group) for group in machines.groups]
    tokens = sum(examples) * batch.calls * batch.seq / config.world_size
    peak = sum(cluster.gpus * cluster.gpu.peak("bf16") for cluster in clusters) / config.world_size
    found, first = list[GroupPlan](), 0
    for own, whole in zip(clusters, seen, strict=True):
        ranks = range(first, first + own.gpus)
        rows = dataclasses.replace(batch, rows=max(examples[compute_data_rank(config, rank)] for rank in ranks))
        # Ranks that alone save memory are planned as `to_job` takes them
        recompute = {config.recompute_way_on(rank) for rank in ranks}
        saving = {config.offload_ranks is None or rank in config.offload_ranks for rank in ranks}
        changes = {"activation_checkpointing": recompute.pop()} if len(recompute) == 1 else {}
        if config.offload_ranks is not None and len(saving) == 1:
            changes["offload"] = config.offload_way if saving.pop() else "none"
        one = expect(shape, make_config(config, **changes), whole, rows)
        rate = tokens / one.step_time_s
        mfu = one.mfu * rate / one.tokens_per_s_per_gpu * own.gpu.peak("bf16") / peak
        found.append(GroupPlan(ranks, rows, dataclasses.replace(one, tokens_per_s_per_gpu=rate, mfu=mfu)))
        first = ranks.stop
    return sorted(found, key=lambda plan: -plan.prediction.step_time_s)


def sum_by_term(kinds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a prediction's kinds, by what the monitor measures."""
    found = dict.fromkeys(TERMS, 0.0)
    for kind, seconds in kinds.items():
        found[find_term_of(kind)] += seconds
    return found


def find_term_of(kind: str) -> str:
    """Return the term that a kind of a prediction's seconds belongs to."""
    if kind == BUBBLE:
        return kind
    if "communication" in kind or kind in _COMMUNICATION:
        return COMMUNICATION
    return OTHER if kind in _OTHER else COMPUTE


def measure_terms(rows: list[RankRow]) -> dict[str, float]:
    """Return the terms as measured, data among the rest: of the mean rank, in seconds of a step."""
    parts = {"compute": "compute", "communication": "communication", "bubble": "pp", "other": "rest", "data": "data"}
    return {name: sum(getattr(row, part) for row in rows) / len(rows) for name, part in parts.items()}


def describe_prediction(prediction: Prediction, config: ParallelConfig, batch: Batch) -> dict[str, object]:
    """JSON-ready: what the record carries, and what calibration starts from."""
    parts = prediction.breakdown
    rates = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "bubble")
    return {
        "spec": config.to_spec(),
        "batch": dataclasses.asdict(batch),
        **{name: round_to_significant(getattr(prediction, name)) for name in rates},
        "tensors_gib": round_to_significant(prediction.allocated_gib),
        "terms": {name: round_to_significant(seconds) for name, seconds in sum_by_term(parts.time).items()},
        "time": {name: round_to_significant(seconds) for name, seconds in parts.time.items()},
        "memory": {name: round_to_significant(size) for name, size in parts.memory.items()},
        "bytes_by_axis": parts.bytes_by_axis,
        "cluster": dataclasses.asdict(prediction.cluster),
    }


def list_deviations_of_groups(plans: Sequence[GroupPlan], rows: list[RankRow]) -> list[str]:
    """Return lines about the step of the slowest group, for which all wait, and about the memory of each."""
    lines = list[str]()
    for plan in plans:
        own = [rows[rank] for rank in plan.ranks]
        found = list_deviations if plan is plans[0] else list_memory_deviations
        where = f" on {plan.prediction.cluster.gpu.name}" if len(plans) > 1 else ""
        lines += [f"{line}{where}" for line in found(plan.prediction, own)]
    return lines


def list_deviations(prediction: Prediction, rows: list[RankRow]) -> list[str]:
    """Return lines about step time and memory that are off the plan by more than tolerated, with the term at fault."""
    lines = []
    step, planned = max(row.step for row in rows), prediction.step_time_s
    if planned > 0 and abs(step / planned - 1) > TOLERATED:
        terms, own = sum_by_term(prediction.breakdown.time), measure_terms(rows)
        term = max(own, key=lambda name: abs(own[name] - terms.get(name, 0.0)))
        lines.append(
            f"a step takes {step:.3g} s, planned {planned:.3g} s ({step / planned - 1:+.0%}); most of the "
            f"difference is {term}: {own[term]:.3g} s, planned {terms.get(term, 0.0):.3g} s"
        )
    return lines + list_memory_deviations(prediction, rows)


def list_memory_deviations(prediction: Prediction, rows: list[RankRow]) -> list[str]:
    """Return a line about tensors of the fullest rank that are further from the plan than tolerated, if they are."""
    peak, tensors = max(row.memory_peak for row in rows) / GIB, prediction.allocated_gib
    is_off = tensors > 0 and abs(peak / tensors - 1) > TOLERATED
    if not is_off or abs(peak - tensors) <= UNCOUNTED_GIB:
        return []
    return [f"tensors take {peak:.3g} GiB, planned {tensors:.3g} GiB ({peak / tensors - 1:+.0%})"]


# ---- A cluster as a training has found it: the planner's efficiencies and links scaled to what its record says
#     cluster = calibrated("OUTPUT_DIR")      # then `plan` with it
#
# Compute, communication and the rest of a step are fitted until the planner predicts each as it was measured for the
# layout that ran: one factor for all efficiencies of the GPU, one for all links, and what the host adds to a step.


#: Rounds of scaling: what is hidden behind compute changes with it, and slower links leave Python time, so that one
#: factor moves two terms. Each round goes half of the way, by the logarithm: whole steps would swing around the end.
_ROUNDS, _OF_THE_WAY = 20, 0.5
#: A factor beyond this says that something else is wrong than the numbers of the hardware.
_MOST = 1000.0
_RATES = ("gemm", "attention", "flash", "cudnn", "memory")


@dataclass(frozen=True)
class Measured:
    """The last run of a record: the layout, its batch, the cluster as planned, seconds of a step by term."""

    config: ParallelConfig
    batch: Batch
    cluster: Cluster
    step: float
    terms: dict[str, float]


def calibrated(folder: str, model: PreTrainedModel) -> tuple[Cluster, list[str]]:
    """Return the cluster of the record in `folder`, as the run of `model` found it, and lines about what was changed.

    Raises:
        SpecError: no record, or none with a plan and a step after the first ones.
    """
    shape = shape_of(model)
    try:
        lines = session.read_records(folder)
        runs = [i for i, line in enumerate(lines) if line["kind"] == "run"]
        last = lines[runs[-1] :] if runs else []
        plan = last[0]["plan"] if last else None
        if plan is None:
            refuse(folder, f"its record has no plan to calibrate ({(last or [{}])[0].get('why_no_plan', 'no run')})")
        planned = slice(*plan.get("ranks", (None,)))  # of unlike GPUs, those of the slowest kind
        steps = [[RankRow(**row) for row in line["ranks"][planned]] for line in last if line["kind"] == "metrics"]
        if not steps:
            refuse(folder, "its record has no step", do="train a few times logging_steps")
        warm = steps[1:] or steps  # the first one holds what happens once
        logs = [measure_terms(ranks) for ranks in warm]
        values = {name: statistics.median(log[name] for log in logs) for name in TERMS}
        step = statistics.median(max(rank.step for rank in ranks) for ranks in warm)
        config = ParallelConfig.parse(plan["spec"])
        found = Measured(config, Batch(**plan["batch"]), read_cluster(plan["cluster"]), step, values)
    except (AttributeError, KeyError, TypeError) as error:
        refuse(
            folder, "its record is damaged, or of another version", do="train a few times logging_steps", cause=error
        )
    before = expect(shape, found.config, found.cluster, found.batch)
    cluster, factors = _fit_to_measured(shape, found)
    after = expect(shape, found.config, cluster, found.batch)
    said = [f"{name} x {factor:.3g}" for name, factor in factors.items()]
    host = cluster.gpu.efficiency.eager_step_ms
    return cluster, [
        f"calibrated by {folder} ({found.config.to_spec()}): measured {found.step:.3g} s per step, planned "
        f"{before.step_time_s:.3g} s before, {after.step_time_s:.3g} s now",
        f"seconds of {', '.join(said)}; {host:.3g} ms of the host per step",
    ]


def read_cluster(saved: dict) -> Cluster:
    """Return the cluster of a plan in a record."""
    gpu = saved["gpu"]
    parts = {"efficiency": Efficiency(**gpu["efficiency"]), "host": Host(**gpu["host"])}
    gpu = Gpu(**{**gpu, **parts, "capability": tuple(gpu["capability"])})
    links = {name: {"measured": (), **saved[name]} for name in ("inside", "between")}
    inside, between = (Link(**{**link, "measured": tuple(map(tuple, link["measured"]))}) for link in links.values())
    return Cluster(**{**saved, "gpu": gpu, "inside": inside, "between": between})


def _fit_to_measured(shape: ModelShape, found: Measured) -> tuple[Cluster, dict[str, float]]:
    """Scale what each term depends on until it is as measured; a bubble follows from the compute."""
    cluster, total = found.cluster, {COMPUTE: 1.0, COMMUNICATION: 1.0}
    for _ in range(_ROUNDS):
        now = sum_by_term(expect(shape, found.config, cluster, found.batch).breakdown.time)
        factors = dict.fromkeys(total, 1.0)  # of 1 where nothing is planned or seen, which no factor would mend
        for name, so_far in total.items():
            if found.terms[name] > 0 and now[name] > 0:
                wanted = so_far * found.terms[name] / now[name]
                factors[name] = (min(_MOST, max(1 / _MOST, wanted)) / so_far) ** _OF_THE_WAY
        total = {name: so_far * factors[name] for name, so_far in total.items()}
        e, compute, links = cluster.gpu.efficiency, factors[COMPUTE], factors[COMMUNICATION]
        efficiency = dataclasses.replace(
            e,
            **{name: getattr(e, name) / compute for name in _RATES},
            kernel_us=e.kernel_us * compute,
            eager_us=e.eager_us * compute,
            wait_us=e.wait_us * links,
            eager_step_ms=max(0.0, e.eager_step_ms + 1e3 * (found.terms[OTHER] - now[OTHER])),
        )
        gpu = dataclasses.replace(cluster.gpu, efficiency=efficiency)
        inside, between = (
            dataclasses.replace(
                link,
                bandwidth=link.bandwidth / links,
                latency=link.latency * links,
                measured=tuple((name, seconds * links, width / links) for name, seconds, width in link.measured),
                source=f"{link.source}, calibrated" if not link.source.endswith("calibrated") else link.source,
            )
            for link in (cluster.inside, cluster.between)
        )
        cluster = dataclasses.replace(cluster, gpu=gpu, inside=inside, between=between)
    return cluster, total
