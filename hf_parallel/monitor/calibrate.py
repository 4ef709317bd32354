"""A cluster as a training has found it: the planner's efficiencies and links scaled to what its record says.

    cluster = calibrated("OUTPUT_DIR")      # then `plan` with it

Compute, communication and the rest of a step are fitted until the planner predicts each as it was measured for the
layout that ran: one factor for all efficiencies of the GPU, one for all links, and what the host adds to a step.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.config import ParallelConfig
from hf_parallel.monitor import record
from hf_parallel.monitor.expected import TERMS, Batch, expect, measured_terms, terms
from hf_parallel.monitor.figures import RankRow
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu, Host, Link
from hf_parallel.planner.shape import ModelShape, shape_of
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Rounds of scaling: what is hidden behind compute changes with it, so that one factor moves two terms.
_ROUNDS = 8
#: A factor beyond this says that something else is wrong than the numbers of the hardware.
_MOST = 1000.0
_RATES = ("gemm", "attention", "memory")


@dataclass(frozen=True)
class Measured:
    """What a record says of its last run: the layout, its batch, the cluster as planned, seconds of a step by term."""

    config: ParallelConfig
    batch: Batch
    cluster: Cluster
    step: float
    terms: dict[str, float]


def calibrated(folder: str, model: PreTrainedModel) -> tuple[Cluster, list[str]]:
    """The cluster of the record in `folder`, as the run of `model` has found it, and lines that say what was changed.

    Raises:
        SpecError: no record, or none with a plan and a step after the first ones.
    """
    shape = shape_of(model)
    try:
        found = _measured(folder)
    except (KeyError, TypeError) as error:
        refuse(
            folder, "its record is damaged, or of another version", do="train a few times logging_steps", cause=error
        )
    before = expect(shape, found.config, found.cluster, found.batch)
    cluster, factors = _fit(shape, found)
    after = expect(shape, found.config, cluster, found.batch)
    said = [f"{name} x {factor:.3g}" for name, factor in factors.items()]
    host = cluster.gpu.efficiency.step_ms
    return cluster, [
        f"calibrated by {folder} ({found.config.to_spec()}): measured {found.step:.3g} s per step, planned "
        f"{before.step_time_s:.3g} s before, {after.step_time_s:.3g} s now",
        f"seconds of {', '.join(said)}; {host:.3g} ms of the host per step",
    ]


def _measured(folder: str) -> Measured:
    lines = record.read(folder)
    runs = [i for i, line in enumerate(lines) if line["kind"] == "run"]
    last = lines[runs[-1] :] if runs else []
    plan = last[0]["plan"] if last else None
    steps = [[RankRow(**row) for row in line["ranks"]] for line in last if line["kind"] == "metrics"]
    if plan is None:
        refuse(folder, f"its record has no plan to calibrate ({(last or [{}])[0].get('why_no_plan', 'no run')})")
    if not steps:
        refuse(folder, "its record has no step", do="train a few times logging_steps")
    warm = steps[1:] or steps  # the first one holds what happens once
    logs = [measured_terms(ranks) for ranks in warm]
    values = {name: statistics.median(log[name] for log in logs) for name in TERMS}
    step = statistics.median(max(rank.step for rank in ranks) for ranks in warm)
    config = ParallelConfig.parse(plan["spec"])
    return Measured(config, Batch(**plan["batch"]), read_cluster(plan["cluster"]), step, values)


def read_cluster(saved: dict) -> Cluster:
    """The cluster of a plan in a record."""
    gpu = saved["gpu"]
    parts = {"efficiency": Efficiency(**gpu["efficiency"]), "host": Host(**gpu["host"])}
    gpu = Gpu(**{**gpu, **parts, "capability": tuple(gpu["capability"])})
    return Cluster(**{**saved, "gpu": gpu, "inside": Link(**saved["inside"]), "between": Link(**saved["between"])})


def _fit(shape: ModelShape, found: Measured) -> tuple[Cluster, dict[str, float]]:
    """Scale what each term depends on until it is as measured; a bubble follows from the compute."""
    cluster, total = found.cluster, dict.fromkeys(_SCALE, 1.0)
    for _ in range(_ROUNDS):
        now = terms(expect(shape, found.config, cluster, found.batch).breakdown.time)
        for name, slower in _SCALE.items():
            factor = _factor(found.terms[name], now[name], total[name])
            total[name] *= factor
            cluster = slower(cluster, factor)
        cluster = _with_host(cluster, found.terms["other"] - now["other"])
    return cluster, total


def _factor(measured: float, predicted: float, so_far: float) -> float:
    """How much slower than now; 1 where nothing is planned or nothing was seen, which no factor would mend."""
    if measured <= 0 or predicted <= 0:
        return 1.0
    wanted = so_far * measured / predicted
    return min(_MOST, max(1 / _MOST, wanted)) / so_far


def _slower_compute(cluster: Cluster, factor: float) -> Cluster:
    e = cluster.gpu.efficiency
    scaled = {name: getattr(e, name) / factor for name in _RATES}
    gpu = dataclasses.replace(cluster.gpu, efficiency=dataclasses.replace(e, **scaled, kernel_us=e.kernel_us * factor))
    return dataclasses.replace(cluster, gpu=gpu)


def _slower_links(cluster: Cluster, factor: float) -> Cluster:
    e = cluster.gpu.efficiency
    gpu = dataclasses.replace(cluster.gpu, efficiency=dataclasses.replace(e, wait_us=e.wait_us * factor))
    return dataclasses.replace(
        cluster, gpu=gpu, inside=_slower(cluster.inside, factor), between=_slower(cluster.between, factor)
    )


def _slower(link: Link, factor: float) -> Link:
    return dataclasses.replace(
        link,
        bandwidth=link.bandwidth / factor,
        latency=link.latency * factor,
        source=f"{link.source}, calibrated" if not link.source.endswith("calibrated") else link.source,
    )


def _with_host(cluster: Cluster, seconds: float) -> Cluster:
    """With so much more of the host in each step."""
    e = cluster.gpu.efficiency
    efficiency = dataclasses.replace(e, step_ms=max(0.0, e.step_ms + 1e3 * seconds))
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, efficiency=efficiency))


_SCALE = {"compute": _slower_compute, "communication": _slower_links}
