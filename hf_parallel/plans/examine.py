"""A report of a plan: what a spec would do to a model, and everything that stops it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import get_first_line, refuse
from hf_parallel.axes.axis import Plan
from hf_parallel.axes.experts.axis import EXPERTS
from hf_parallel.axes.pipeline.axis import PIPELINE
from hf_parallel.axes.pipeline.part import PipelinePart, find_holding_stages, list_layer_ranges
from hf_parallel.axes.tensor.axis import TENSOR, TensorPart
from hf_parallel.model import anatomy as build
from hf_parallel.model.anatomy import Anatomy
from hf_parallel.plans.resolve import (
    Cut,
    compute_tp_shape,
    count_stored,
    draft_plan,
    find_tp_cuts,
    read_model,
    slice_shape,
)
from hf_parallel.ranks.mesh import compute_coordinates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from transformers import PreTrainedModel


# ---- The findings about a model and a spec, and how they read -------------------------------------------------------

_ORIGINS = {"plan": "model's plan", "inferred": "structure", "known": "known kind"}
_VOCABULARY = ("embedding_rowwise", "colwise_gather_output")
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")  # of layers, in the name of a module
_HEADINGS = ("module", "style", "from", "whole -> per rank", "stays whole")


@dataclass
class Split:
    """Modules of one pattern that tp treats alike. `per_rank`: of the first tp rank; no rank has more."""

    pattern: str
    modules: list[str]
    style: str
    origin: str
    whole: tuple[int, ...]
    per_rank: tuple[int, ...]
    stays_whole: tuple[str, ...]


@dataclass
class PipelineRank:
    """The contents of a place along pp; without pp the whole model. `parameters` and `bytes`: of its fullest rank."""

    stages: list[int]
    layers: list[str]
    others: list[str]
    parameters: int
    bytes: int


@dataclass
class Report:
    """The findings of `examine`. A fact that a problem leaves unknown is left out."""

    model: str
    dtype: str
    axes: dict[str, int] = field(default_factory=dict)
    splits: list[Split] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    pipeline: list[PipelineRank] = field(default_factory=list)
    parameters_per_rank: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return the report as values that JSON knows."""
        return {"works": not self.problems, **dataclasses.asdict(self)}


def render_examination(report: Report) -> str:
    """Return the report for people."""
    sizes = " x ".join(f"{axis}={size}" for axis, size in report.axes.items())
    count = math.prod(report.axes.values())
    lines = [f"{report.model} ({report.dtype}) on {count} process{'es' * (count != 1)}: {sizes}", ""]
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for split in report.splits:
        pattern = split.pattern + (f" ×{len(split.modules)}" if len(split.modules) > 1 else "")
        shape = str(list(split.whole)) + (f" -> {list(split.per_rank)}" if split.per_rank != split.whole else "")
        origin = _ORIGINS.get(split.origin, split.origin)
        rows.append((pattern, split.style, origin, shape, ", ".join(split.stays_whole)))
    facts: list[tuple[str, ...]] = [*report.facts.items()]
    for place in report.pipeline:
        stored = f"{place.parameters:,} parameters, {format_bytes(place.bytes)}"
        if place.stages:
            stages = f"stage {' and '.join(map(str, place.stages))}"
            facts += [(stages, ", ".join([*place.layers, *place.others])), ("", f"fullest rank: {stored}")]
        else:
            facts.append(("fullest rank", stored))
    facts += [("note", note) for note in report.notes]
    facts += [("stops it", problem) for problem in report.problems] or [("works", "nothing stops it")]
    for table in ([rows] if report.splits else []) + [facts]:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned = (zip(row, widths, strict=True) for row in table)
        lines += ["  ".join(f"{cell:<{width}}" for cell, width in cells).rstrip() for cells in aligned]
        lines += [""]
    return "\n".join(lines[:-1])


def format_bytes(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def build_source_on_meta(source: str) -> PreTrainedModel:
    """Build the model that a folder, a Hub id or a config.json describes, without memory for weights.

    Its class is the one that config.architectures names, else the causal language model of its type.

    Raises:
        SpecError: there is no such model, or it is made by code of its own.
    """
    try:
        return build.build_on_meta(build.read_config(source))
    except SpecError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        refuse(source, get_first_line(error), cause=error)


def examine(model: nn.Module, config: ParallelConfig, processes: int | None = None) -> Report:
    """Report what `config` would do to `model`, which is not changed.

    Args:
        processes: how many there are; default: what the sizes multiply to, with dp_shard=-1 as 1.
    """
    notes: list[str] = []
    problems: list[str] = []
    free = [axis for axis, size in config.sizes.items() if size == -1]
    alone: dict[str, Any] = {f"{axis}_size": 1 for axis in free}
    try:
        if processes is not None and processes < 1:
            refuse(f"--nproc {processes}", "there is at least one process", "--nproc 1")
        if processes is not None:
            config = config.resolve(processes)
        elif free not in ([], ["dp_shard"]):
            refuse(f"{free[0]}_size=-1", "takes the processes that are left", do="--nproc 8 says how many there are")
        else:
            notes += ["dp_shard_size=-1 counts as 1 here; --nproc says how many processes there are" for _ in free]
            config = dataclasses.replace(config, **alone)
    except SpecError as error:
        problems.append(str(error))
        config = dataclasses.replace(config, **alone)
    report = report_of(draft_plan(config, read_model(model, config)))
    report.notes[:0], report.problems[:0] = notes, problems
    return report


def report_of(plan: Plan) -> Report:
    """Describe a plan for people and programs."""
    anatomy, config = plan.anatomy, plan.config
    report = Report(anatomy.name, str(anatomy.dtype).removeprefix("torch."), config.sizes)
    report.notes, report.problems = list(plan.notes), list(plan.problems)
    tensor, pipeline = plan.part(TENSOR), plan.part(PIPELINE)
    cuts = find_tp_cuts(anatomy, tensor) if tensor is not None else {}
    if tensor is not None:
        report.splits = _list_splits(anatomy, tensor, cuts, config)
        if tensor.grid is not None:
            rows, columns = tensor.grid
            report.facts["grid"] = (
                f"{rows} rows x {columns} columns of ranks: weights of layers are cut along both dims"
            )
        reason, tp_size = tensor.whole_sequences, config.tp_size
        report.facts["sequence parallelism"] = "on" if reason is None else f"off: {reason}"
        shapes = {name: p.shape for p in anatomy.parameters for name in p.names}
        words = [name for name, style in tensor.words.items() if style in _VOCABULARY]
        said = []
        for count in sorted({shapes[f"{name}.weight"][0] for name in words}):
            parts = [slice_shape([count], 0, tp_size, index)[0] for index in range(tp_size)]
            shown = parts if len(set(parts)) > 1 else parts[:1]
            said.append(f"{count} rows, per rank {', '.join(map(str, shown))}")
        report.facts["vocabulary"] = "; ".join(said) or "whole"
        heads, kv_heads = tensor.facts.heads or (0, 0)
        keys = f"{kv_heads // tp_size} key/value"
        if tp_size > kv_heads:
            keys = f"1 key/value shared by {tp_size // kv_heads} ranks"
        per_rank = f"per rank {heads // tp_size} query, {keys}"
        report.facts["attention heads"] = f"{heads} query, {kv_heads} key/value; {per_rank}"
    if (config.tp_size == 1 or tensor is not None) and (config.pp_size == 1 or pipeline is not None):
        experts = plan.part(EXPERTS)
        over_ep = experts.experts.items() if experts is not None and experts.ranks > 1 else ()
        apart = {f"{name}.{key}" for name, facts in over_ep for key in facts.widths}
        _count_held(report, anatomy, pipeline, cuts, config, apart)
    report.facts.update(_describe_experts(plan))
    tied = [f"{name} = {p.names[0]}" for p in anatomy.parameters for name in p.names[1:]]
    report.facts.update({"tied weights": ", ".join(tied)} if tied else {})
    return report


def _list_splits(anatomy: Anatomy, part: TensorPart, cuts: dict[str, Cut], config: ParallelConfig) -> list[Split]:
    """Describe each pattern of names once, or more often where layers differ; in the model's order."""
    groups: dict[tuple, list[str]] = {}
    shapes = {name: p.shape for p in anatomy.parameters for name in p.names}
    for module, parameters in _group_by_module(anatomy.names).items():
        owner = module.rpartition(".")[0]  # of a parameter that stands for itself; it may hold experts
        of_owner = part.styles.get(owner if owner in part.facts.experts else "")
        style, origin = part.styles.get(module) or of_owner or ("whole", "")
        key = parameters[0]
        per_rank = compute_tp_shape(shapes[key], cuts.get(key, ()), config, 0)
        whole = tuple(name.rpartition(".")[2] for name in parameters if name not in cuts) if origin else ()
        alike = (_NUMBERS.sub(".*", module), style, origin, shapes[key], per_rank, whole)
        groups.setdefault(alike, []).append(module)
    patterns = [pattern for pattern, *_ in groups]
    return [
        Split(pattern if patterns.count(pattern) == 1 < len(names) else _join_numbered(names), names, *rest)
        for (pattern, *rest), names in groups.items()
    ]


def _group_by_module(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Group parameters by their module; a parameter that is neither weight nor bias stands for itself."""
    modules: dict[str, list[str]] = {}
    for name in names:
        owner, _, key = name.rpartition(".")
        modules.setdefault(owner if key in ("weight", "bias") else name, []).append(name)
    return modules


def _join_numbered(names: list[str]) -> str:
    """Join layers.0.x, layers.1.x, layers.3.x to layers.0-1,3.x; numbers behind the first become *."""
    parts = [re.split(r"\.(\d+)(?=\.|$)", name, maxsplit=1) for name in names]
    if len(names) == 1 or len(parts[0]) == 1:
        return names[0]
    numbers = sorted({int(part[1]) for part in parts})
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    shown = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    rest = _NUMBERS.sub(".*", parts[0][2])
    return f"{parts[0][0]}.{shown}{rest}"


def _describe_experts(plan: Plan) -> dict[str, str]:
    part = plan.part(EXPERTS)
    if part is None or not part.experts:
        return {}
    counts = ", ".join(str(count) for count in sorted({facts.count for facts in part.experts.values()}))
    if part.ranks == 1:
        return {"experts": f"{counts} in each of {len(part.experts)} layers, on every rank"}
    holders: dict[int, list[int]] = {}
    for rank in range(plan.config.world_size):
        index = compute_coordinates(plan.config, rank, plan.config.expert_sizes)["ep"]
        holders.setdefault(index, []).append(rank)
    shown = _format_few(
        f"{place * part.per_rank}-{(place + 1) * part.per_rank - 1} "
        f"on rank{'s' * (len(ranks) > 1)} {' '.join(_format_few(ranks))}"
        for place, ranks in holders.items()
    )
    shards = plan.config.ep_shard_size
    shared = f"; a rank stores 1/{shards} of each" if shards > 1 else ""
    return {"experts": f"{counts} in each of {len(part.experts)} layers: {', '.join(shown)}{shared}"}


def _format_few(items: Iterable[object]) -> list[str]:
    """Return all of at most four items, else the first two and the last."""
    shown = [str(item) for item in items]
    return shown if len(shown) <= 4 else [*shown[:2], "…", shown[-1]]


def _count_held(
    report: Report,
    anatomy: Anatomy,
    part: PipelinePart | None,
    cuts: dict[str, Cut],
    config: ParallelConfig,
    apart: set[str],
) -> None:
    """Fill in what each pipeline rank holds and each rank stores."""
    tables = []
    for place in range(config.pp_size):
        stages = [] if part is None else config.stages_of_rank(place)
        held = [
            p
            for p in anatomy.parameters
            if part is None or not all(find_holding_stages(part, name).isdisjoint(stages) for name in p.names)
        ]
        tables.append(count_stored(held, cuts, config, apart))
        parameters, size = (max(column) for column in zip(*tables[-1].values(), strict=True))
        layers, others = [], []
        if part is not None:
            prefix, ranges = part.facts.layers, list_layer_ranges(part)
            layers = [_join_numbered([f"{prefix}.{i}" for i in range(*ranges[stage])]) for stage in stages]
            modules = [name for name in _group_by_module(anatomy.names) if not name.startswith(f"{prefix}.")]
            others = [name for name in modules if not find_holding_stages(part, name).isdisjoint(stages)]
        report.pipeline.append(PipelineRank(stages, layers, others, parameters, size))
    for rank in range(config.world_size):
        where = compute_coordinates(config, rank)
        shard = where["dp_shard"] * config.cp_size + where["cp"]
        report.parameters_per_rank.append(tables[where["pp"]][shard, where["tp"]][0])
