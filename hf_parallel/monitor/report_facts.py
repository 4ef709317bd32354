"""The folder of a training: layout, logs, measurements, what was said, hangs, checkpoints, profiles.

Every file may lack, be cut off or of another version: what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import count_micro_batches, predict_bubble
from hf_parallel.monitor import expected, session
from hf_parallel.monitor.expected import Batch, expect
from hf_parallel.monitor.meter import AXES
from hf_parallel.monitor.noise import describe_critical_batch
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.search import search
from hf_parallel.planner.shape import shape_of
from hf_parallel.ranks.mesh import list_axis_ranks

if TYPE_CHECKING:
    from hf_parallel.planner.shape import ModelShape


_MOST_RANKS = 1 << 20  # a larger number is no layout
LAYOUT, STATE, HANGS = "hf_parallel.json", "trainer_state.json", "hangs"

Line: TypeAlias = dict  # of a file that the run wrote


@dataclass(frozen=True)
class Checkpoint:
    """A saved model. `whole`: has it the manifest that is written last?"""

    name: str
    step: int
    bytes: int
    time: float
    whole: bool


@dataclass
class Facts:
    """The facts of one folder.

    Attributes:
        run: the first line of the newest run's record.
        layout: what rank 0 has written at the start.
        metrics: lines of the record, one for each logged step.
        notes: what the monitor has said.
        log: Trainer's `log_history`.
        hangs: sentence of the newest one, then places by rank.
        profiles: pictures of single steps.
    """

    folder: str
    run: Line = field(default_factory=dict)
    layout: Line = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    notes: list[Line] = field(default_factory=list)
    log: list[Line] = field(default_factory=list)
    runs: int = 0
    hangs: list[tuple[str, str]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)

    @property
    def config(self) -> ParallelConfig | None:
        """Return the layout; None if this version does not know its spec."""
        spec, world = self.run.get("spec") or self.layout.get("spec"), self.run.get("world_size")
        try:
            config = ParallelConfig.parse(spec) if isinstance(spec, str) else None
            if config is not None and isinstance(world, int):
                config = config.resolve(world)
        except SpecError:
            return None
        return config if config is not None and 0 < config.world_size <= _MOST_RANKS else None

    @property
    def plan(self) -> Line:
        """Return the planner's prediction, if there is one."""
        return as_mapping(self.run.get("plan"))

    @property
    def is_predicted(self) -> bool:
        """Return whether the planner knows this hardware. Of CPUs it only counts what tensors take."""
        return bool(self.plan) and self.run.get("device") != "cpu"

    @property
    def ranks(self) -> list[dict[str, float]]:
        """Return the measurements of each rank, a mean over all logs but the first, which holds what happens once."""
        listed = [line.get("ranks") for line in self.metrics[1:] or self.metrics]
        logs = [[list_finite_numbers(row) for row in rows] for rows in listed if isinstance(rows, list) and rows]
        logs = [rows for rows in logs if len(rows) == len(logs[-1])]  # of the newest number of processes
        return [
            {name: sum(row.get(name, 0.0) for row in own) / len(own) for name in own[0]}
            for own in zip(*logs, strict=True)
        ]


def read_facts(folder: str) -> Facts:
    """Read all that a training has left in its folder.

    Raises:
        SpecError: nothing of this package is there.
    """
    if not os.path.isdir(folder):
        refuse(folder, "is no folder", do="give the output_dir of a training")
    try:
        lines = session.read_records(folder)
    except (SpecError, OSError, UnicodeDecodeError):
        lines = []
    facts = Facts(folder, layout=as_mapping(_read_json_file(os.path.join(folder, LAYOUT))))
    if not lines and not facts.layout:
        refuse(
            folder,
            f"holds neither {LAYOUT} nor {session.FILE}, which a training under a layout writes",
            do="give its output_dir",
        )
    runs = [line for line in lines if line.get("kind") == "run"]
    facts.runs, facts.run = len(runs), runs[-1] if runs else {}
    metrics = [line for line in lines if line.get("kind") == "metrics"]
    found = {number(line.get("step")): line for line in metrics}
    facts.metrics = [found[step] for step in sorted(step for step in found if math.isfinite(step))]
    facts.notes = [line for line in lines if line.get("kind") == "note"]
    places = [folder, *glob.glob(_find_within(folder, "checkpoint-*"))]
    states = [state for place in places if (state := as_mapping(_read_json_file(os.path.join(place, STATE))))]
    newest = max(states, key=lambda state: number(state.get("global_step"), 0), default={})
    log = newest.get("log_history")
    history = [line for line in log if isinstance(line, dict) and "step" in line] if isinstance(log, list) else []
    # Where nothing was saved: without the loss
    facts.log = history or [{"step": line.get("step"), **as_mapping(line.get("perf"))} for line in facts.metrics]
    # The newest run writes its layout at its first batch, and its first line when it logs
    layout = os.path.join(folder, LAYOUT)
    times = [number(facts.run.get("time"), 0.0)] if facts.run else []
    times += [os.stat(layout).st_mtime] if os.path.isfile(layout) else []
    facts.hangs = _read_hangs(os.path.join(folder, HANGS), min(times, default=0.0))
    facts.checkpoints = _list_checkpoints(folder)
    pictures = [
        *glob.glob(_find_within(folder, "profile_step_*.svg")),
        *glob.glob(_find_within(folder, "timeline_step_*.svg")),
    ]
    facts.profiles = sorted(pictures, key=lambda path: (_number_in(path), path))
    return facts


# ---- files ----------------------------------------------------------------------------------------------------------


def _read_json_file(path: str) -> object:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def _read_hangs(folder: str, since: float) -> list[tuple[str, str]]:
    """Return what was found since, then where each rank was: by its own words, or by those of the rank that told."""
    paths = [os.path.join(folder, "report.json"), *glob.glob(_find_within(folder, "rank_*.json"))]
    newer = [path for path in paths if os.path.isfile(path) and os.stat(path).st_mtime >= since]
    told = {path: as_mapping(_read_json_file(path)) for path in newer}
    report = told.pop(paths[0], {})
    found = [("", report["sentence"])] if isinstance(report.get("sentence"), str) else []
    ranks = {f"rank {rank}": as_mapping(own) for rank, own in as_mapping(report.get("ranks")).items()}
    ranks |= {f"rank {_number_in(path)}": own for path, own in told.items() if own}
    for name in sorted(ranks, key=lambda name: (_number_in(name), name)):
        own = ranks[name]
        words = [str(own[key]) for key in ("absent", "error", "place") if own.get(key)]
        pending = own.get("pending")  # in which collectives it waits
        first = as_mapping(pending[0]) if isinstance(pending, list) and pending else {}
        inside = ", ".join(str(first[key]) for key in ("axis", "module") if first.get(key))
        if first.get("operation"):
            words.append(f"{first['operation']} number {first.get('number')} ({inside})")
        found.append((name, "; ".join(words)))
    return found


def _list_checkpoints(folder: str) -> list[Checkpoint]:
    found = []
    for path in glob.glob(_find_within(folder, "checkpoint-*")):
        if os.path.isdir(path):
            files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
            sizes = [os.stat(file) for file in files if os.path.isfile(file)]
            when = max([os.stat(path).st_mtime, *(size.st_mtime for size in sizes)])
            whole = os.path.isfile(os.path.join(path, "manifest.json"))
            total = sum(size.st_size for size in sizes)
            found.append(Checkpoint(os.path.basename(path), _number_in(path), total, when, whole))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.name))


def _find_within(folder: str, pattern: str) -> str:
    return os.path.join(glob.escape(folder), pattern)


def _number_in(path: str) -> int:
    """Return the last number in the name of a file."""
    numbers = re.findall(r"\d+", os.path.basename(path))
    return int(numbers[-1]) if numbers else 0


# ---- values ---------------------------------------------------------------------------------------------------------


def as_mapping(value: object) -> Line:
    """Return a mapping itself, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def number(value: object, otherwise: float = math.nan) -> float:
    """Return a float, or `otherwise` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    return float(value)


def list_finite_numbers(value: object) -> dict[str, float]:
    """Return the entries of a mapping that are finite numbers."""
    return {str(k): found for k, v in as_mapping(value).items() if math.isfinite(found := number(v))}


# ---- What to change, with numbers: what the step waits for as measured, and what the planner predicts of other
# layouts
# Layouts are only predicted where the planner knows the hardware, with the speeds that this run has measured.


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


def compute_shares(facts: Facts) -> dict[str, float]:
    """Return the shares of the step, by part: means over ranks."""
    found = dict.fromkeys(PARTS, 0.0)
    for rank in facts.ranks:
        whole = sum(rank.get(part, 0.0) for part in PARTS)
        for part in PARTS:
            found[part] += rank.get(part, 0.0) / whole / len(facts.ranks) if whole else 0.0
    return found


def list_advice(facts: Facts) -> list[str]:
    """Return lines of advice, the most important first; none where nothing is known to be better."""
    config, part = facts.config, compute_shares(facts)
    batch = []
    # What `monitor=noise` has measured, at the newest log that can tell
    measured = [number(as_mapping(line.get("noise")).get("sequences"), 0.0) for line in facts.metrics]
    critical = next((one for one in reversed(measured) if one), 0.0)
    size = number(facts.layout.get("global_batch"), 0)
    if critical > 0 and size > 0:
        sentence = describe_critical_batch(critical, size)
        batch.append(f"{sentence[0].upper()}{sentence[1:]}.")
    if config is None or not any(part.values()):
        return batch
    cluster = None
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        cluster = expected.read_cluster(facts.plan["cluster"]) if facts.is_predicted else None
    lines = []
    for axis in sorted((axis for axis in AXES if part[axis] >= WAITS), key=lambda axis: -part[axis]):
        link = ""
        if cluster is not None:
            names = [name for name in AXES[axis] if config.sizes.get(name, 1) > 1]
            groups = [group for name in names for group in list_axis_ranks(config, name)]
            inside = all(len({rank // cluster.per_node for rank in group}) == 1 for group in groups)
            link = f" over {(cluster.inside if inside else cluster.between).name}"
        lines.append(f"{part[axis]:.0%} of the step waits in {axis}{link}.")
    lines += _advise_on_idle(facts, config, part)
    faster = list(_advise_on_layout(facts, config, cluster))
    first = [f"{lines.pop(0).rstrip('.')}; {faster.pop()}"] if lines and faster else []
    if part["data"] >= DATA:
        lines.append(f"{part['data']:.0%} of the step reads data: more --dataloader_num_workers read it meanwhile.")
    # Of a GPU's memory: on a CPU the measured number is that of the whole process
    there = number(facts.plan.get("cluster", {}).get("gpu", {}).get("memory_gib"), 0.0) if facts.is_predicted else 0.0
    peak = max((rank.get("memory_peak", 0.0) for rank in facts.ranks), default=0.0) / 2**30
    if there and peak > FULL * there:
        lines.append(f"Tensors take {peak:.1f} of {there:.0f} GiB: activation_checkpointing=selective makes room.")
    elif there and 0 < peak < EMPTY * there:
        lines.append(f"Tensors take {peak:.1f} of {there:.0f} GiB: there is room for a larger batch on each rank.")
    return [*first, *faster, *lines, *batch]


def _advise_on_idle(facts: Facts, config: ParallelConfig, part: dict[str, float]) -> Iterator[str]:
    """Yield what follows from the arithmetic of the schedule, on any hardware."""
    if part["pp"] < BUBBLE or config.pp_size == 1:
        return
    line = f"{part['pp']:.0%} of the step waits for other stages."
    rows = number(facts.plan.get("batch", {}).get("rows"), 0)
    try:
        count = count_micro_batches(int(rows), config)
        layers = tuple([1] * config.pipeline_stages)
        now, then = (predict_bubble(config, layers, micro) for micro in (count, 2 * count))
    except (SpecError, ValueError, KeyError):
        yield line
        return
    yield (
        f"{line} Of equal stages {config.pipeline_schedule} leaves {now:.0%} idle with {count} micro-batches and "
        f"{then:.0%} with {2 * count}: a larger batch, or fewer stages, waits less."
    )


# ---- other layouts --------------------------------------------------------------------------------------------------


def _advise_on_layout(facts: Facts, config: ParallelConfig, cluster: Cluster | None) -> Iterator[str]:
    """Yield the planner's best layout for the same batch, if it is faster than this one."""
    shape = _read_shape(facts.folder)
    if cluster is None or shape is None:
        return
    try:
        batch, measured = Batch(**facts.plan["batch"]), ""
        try:
            cluster, _ = expected.calibrated(facts.folder, shape)
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
        # Its spec, without sizes of 1 but for those that are larger now
        changed = [f"{axis}=1" for axis, size in best.config.sizes.items() if size == 1 < config.sizes[axis]]
        spec = ",".join([*changed, *(part for part in best.config.to_spec().split(",") if not part.endswith("=1"))])
        yield (
            f"{spec} is predicted {here / best.step_time_s:.1f} x faster: "
            f"{best.step_time_s:.3g} s per step instead of {here:.3g} s for the same {rows} rows "
            f"(per_device_train_batch_size={best.rows}, gradient_accumulation_steps={best.accumulation}){measured}."
        )


def _read_shape(folder: str) -> ModelShape | None:
    """Read the model's shape from the config that was saved with it."""
    import transformers

    places = [folder, *(os.path.join(folder, name) for name in sorted(os.listdir(folder)) if "checkpoint-" in name)]
    for place in places:
        if os.path.isfile(os.path.join(place, "config.json")):
            try:
                return shape_of(transformers.AutoConfig.from_pretrained(place, trust_remote_code=False))
            except (SpecError, OSError, ValueError, KeyError, AttributeError, TypeError):
                continue
    return None
