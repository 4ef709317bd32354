"""What to change, with numbers: what the step waits for as measured, and what the planner predicts of other layouts.

Layouts are only predicted where the planner knows the hardware, with the speeds that this run has measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_parallel.axes.pipeline.schedules import micro_batch_count, predicted_bubble
from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.mesh import axis_ranks
from hf_parallel.monitor import calibrate
from hf_parallel.monitor.expected import Batch, expect
from hf_parallel.monitor.figures import AXES
from hf_parallel.monitor.report.facts import Facts, number
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.search import search
from hf_parallel.planner.shape import shape_of

if TYPE_CHECKING:
    from hf_parallel.planner.shape import ModelShape


#: Shares of a step from which they are worth a line, and how much faster a layout must be.
WAITS, BUBBLE, DATA, FASTER = 0.1, 0.15, 0.05, 1.1
#: Of the GPU's memory: more is close to its end, less is worth a larger batch.
FULL, EMPTY = 0.92, 0.5
#: What a step's time goes to, by what a rank has measured: key -> words.
PARTS = {
    "compute": "compute",
    **{axis: f"waits in {axis}" for axis in AXES},
    "all": "waits for all ranks",
    "pp": "waits for other stages (bubble)",
    "data": "reading data",
    "rest": "optimizer, callbacks",
}


def shares(facts: Facts) -> dict[str, float]:
    """Of the step, by part: means over ranks."""
    found = dict.fromkeys(PARTS, 0.0)
    for rank in facts.ranks:
        whole = sum(rank.get(part, 0.0) for part in PARTS)
        for part in PARTS:
            found[part] += rank.get(part, 0.0) / whole / len(facts.ranks) if whole else 0.0
    return found


def advice(facts: Facts) -> list[str]:
    """Lines, the most important first; none where nothing is known to be better."""
    config, part = facts.config, shares(facts)
    if config is None or not any(part.values()):
        return []
    cluster = _cluster(facts)
    lines, faster = [*_waiting(part, config, cluster), *_idle(facts, config, part)], list(_faster(facts, config))
    first = [f"{lines.pop(0).rstrip('.')}; {faster.pop()}"] if lines and faster else []
    return [*first, *faster, *lines, *_reading(part), *_memory(facts)]


def _waiting(part: dict[str, float], config: ParallelConfig, cluster: Cluster | None) -> Iterator[str]:
    for axis in sorted(AXES, key=lambda axis: -part[axis]):
        if part[axis] >= WAITS:
            yield f"{part[axis]:.0%} of the step waits in {axis}{_over(axis, config, cluster)}."


def _over(axis: str, config: ParallelConfig, cluster: Cluster | None) -> str:
    """Over which link, where that is known."""
    if cluster is None:
        return ""
    names = [name for name in AXES[axis] if config.sizes.get(name, 1) > 1]
    groups = [group for name in names for group in axis_ranks(config, name)]
    inside = all(len({rank // cluster.per_node for rank in group}) == 1 for group in groups)
    return f" over {(cluster.inside if inside else cluster.between).name}"


def _idle(facts: Facts, config: ParallelConfig, part: dict[str, float]) -> Iterator[str]:
    """Arithmetic of the schedule, which holds on any hardware."""
    if part["pp"] < BUBBLE or config.pp_size == 1:
        return
    line = f"{part['pp']:.0%} of the step waits for other stages."
    rows = number(facts.plan.get("batch", {}).get("rows"), 0)
    try:
        count = micro_batch_count(int(rows), config)
        layers = tuple([1] * config.pipeline_stages)
        now, then = (predicted_bubble(config, layers, micro) for micro in (count, 2 * count))
    except (SpecError, ValueError, KeyError):
        yield line
        return
    yield (
        f"{line} Of equal stages {config.pipeline_schedule} leaves {now:.0%} idle with {count} micro-batches and "
        f"{then:.0%} with {2 * count}: a larger batch, or fewer stages, waits less."
    )


def _reading(part: dict[str, float]) -> Iterator[str]:
    if part["data"] >= DATA:
        yield f"{part['data']:.0%} of the step reads data: more --dataloader_num_workers read it meanwhile."


def _memory(facts: Facts) -> Iterator[str]:
    """Of a GPU; on a CPU the measured number is that of the whole process."""
    there = number(facts.plan.get("cluster", {}).get("gpu", {}).get("memory_gib"), 0.0)
    peak = max((rank.get("memory_peak", 0.0) for rank in facts.ranks), default=0.0) / 2**30
    if not facts.is_predicted or not there or not peak:
        return
    if peak > FULL * there:
        yield f"Tensors take {peak:.1f} of {there:.0f} GiB: activation_checkpointing=selective makes room."
    elif peak < EMPTY * there:
        yield f"Tensors take {peak:.1f} of {there:.0f} GiB: there is room for a larger batch on each rank."


# ---- other layouts --------------------------------------------------------------------------------------------------


def _cluster(facts: Facts) -> Cluster | None:
    """The hardware, where the planner knows it."""
    try:
        return calibrate.read_cluster(facts.plan["cluster"]) if facts.is_predicted else None
    except (KeyError, TypeError, AttributeError):
        return None


def _faster(facts: Facts, config: ParallelConfig) -> Iterator[str]:
    """The planner's best layout for the same batch, if it is faster than this one."""
    cluster, shape = _cluster(facts), _shape(facts.folder)
    if cluster is None or shape is None:
        return
    try:
        batch, measured = Batch(**facts.plan["batch"]), ""
        try:
            cluster, _ = calibrate.calibrated(facts.folder, shape)
            measured = ", with the speeds that this run has measured"
        except SpecError:
            pass  # its prediction stays that of the catalogue
        here = expect(shape, config, cluster, batch).step_time_s
        rows = batch.rows * batch.calls * config.data_parallel_size
        best = search(
            model=shape,
            cluster=cluster,
            seq=batch.seq,
            global_batch=rows,
            precision=batch.precision,
            optimizer=batch.optimizer,
            lora=batch.lora,
            top=1,
        ).best
    except (SpecError, KeyError, TypeError, ValueError):
        return
    if best is not None and here > FASTER * best.step_time_s:
        yield (
            f"{_named(best.config, config)} is predicted {here / best.step_time_s:.1f} x faster: "
            f"{best.step_time_s:.3g} s per step instead of {here:.3g} s for the same {rows} rows "
            f"(per_device_train_batch_size={best.rows}, gradient_accumulation_steps={best.accumulation}){measured}."
        )


def _named(config: ParallelConfig, instead_of: ParallelConfig) -> str:
    """Its spec, without sizes of 1 but for those that are larger now."""
    changed = [f"{axis}=1" for axis, size in config.sizes.items() if size == 1 < instead_of.sizes[axis]]
    return ",".join([*changed, *(part for part in config.to_spec().split(",") if not part.endswith("=1"))])


def _shape(folder: str) -> ModelShape | None:
    """The model's, from the config that was saved with it."""
    import transformers

    places = [folder, *(os.path.join(folder, name) for name in sorted(os.listdir(folder)) if "checkpoint-" in name)]
    for place in places:
        if os.path.isfile(os.path.join(place, "config.json")):
            try:
                return shape_of(transformers.AutoConfig.from_pretrained(place, trust_remote_code=False))
            except (SpecError, OSError, ValueError, KeyError, AttributeError, TypeError):
                continue
    return None
