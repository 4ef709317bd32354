"""Turn a config and a model into a plan, or refuse them. Nothing else refuses a model.

    anatomy = read_model(model, config)      what the model is
    plan = resolve(config, anatomy)          what will be done to it: data that prints
    apply(model, plan, mesh)                 does it (`apply/parallelize.py`)

The second half of the file computes which slice of each parameter a rank stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import nn

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import refuse_with
from hf_parallel.axes.axis import Axis, Plan
from hf_parallel.axes.data.units import shard_dim
from hf_parallel.axes.order import AXES
from hf_parallel.axes.tensor.axis import TensorPart
from hf_parallel.axes.tensor.whole_layers import WHOLE_STYLES
from hf_parallel.model.anatomy import Anatomy, ParameterFacts, read_anatomy


def read_model(model: nn.Module, config: ParallelConfig, axes: tuple[Axis, ...] = AXES) -> Anatomy:
    """Read what the axes of this config need to know of a model, without changing the model."""
    anatomy = read_anatomy(model)
    asking = [axis for axis in axes if axis.is_on(config) and (anatomy.is_transformers or not axis.inside)]
    return replace(anatomy, facts={axis.name: axis.read(model, config) for axis in asking})


def resolve(config: ParallelConfig, anatomy: Anatomy, axes: tuple[Axis, ...] = AXES) -> Plan:
    """Return the plan for a model.

    Raises:
        SpecError: the first problem of the plan.
    """
    plan = draft_plan(config, anatomy, axes)
    if plan.problems:
        refuse_with(plan.problems[0])
    return plan


def draft_plan(config: ParallelConfig, anatomy: Anatomy, axes: tuple[Axis, ...] = AXES) -> Plan:
    """Return the plan with all its problems. An axis that refuses adds a problem and no part."""
    unsolved = [  # by any config
        (anatomy.is_parallel, f"{anatomy.name} is parallel already; parallelize it once"),
        (
            anatomy.is_quantised,
            f"{anatomy.name} is quantised already, in layers that cannot be cut; under "
            "`python -m hf_parallel --parallel SPEC` from_pretrained packs each rank's part in 4 bits, which works",
        ),
        (
            anatomy.of_quantised and not anatomy.is_quantised,
            "quantised checkpoints: not part of this version; load in bf16, or pack that in 4 bits",
        ),
        (anatomy.partly_on_meta, f"{anatomy.name} is partly on the meta device; load it fully or not at all"),
    ]
    plan = Plan(config, anatomy, axes, problems=tuple(line for stops, line in unsolved if stops))
    for axis in axes:
        if not axis.is_on(config):
            continue
        try:
            if axis.inside:
                _check_inside(plan, axis)
            part = axis.resolve(plan.config, anatomy, anatomy.facts[axis.name])
        except SpecError as error:
            plan = replace(plan, problems=(*plan.problems, str(error)))
            continue
        plan = replace(
            plan,
            config=axis.settle(plan.config, part),
            parts={**plan.parts, axis.name: part},
            notes=(*plan.notes, *(() if part is None else axis.notes(part))),
        )
    return plan


def _check_inside(plan: Plan, axis: Axis) -> None:
    """Refuse a model whose layers this axis cannot cut."""
    key, anatomy = f"{axis.name}_size", plan.anatomy
    asked, works = f"{key}={getattr(plan.config, key)}", f"{key}=1 with dp_shard works"
    if not anatomy.is_transformers:
        refuse_with(f"{asked}: {anatomy.name} is not a transformers model; {works}")
    if anatomy.replaced_forward is not None:
        refuse_with(
            f"{asked}: {anatomy.replaced_forward} has a forward of its own, as Liger puts on modules, which a split "
            f"would not change; TrainingArguments(use_liger_kernel=True) puts it on after the split, or {works}"
        )


# ---- Which slice of each parameter a rank stores: the rules of tp and FSDP2 as arithmetic, without processes -------
# style "rowwise", tp=2, dp_shard=2       [64, 128]  --tp cuts dim 1-->  [64, 64]  --FSDP2 cuts dim 0-->  [32, 64]

Shape = tuple[int, ...]
Cut = tuple[int, ...]  # the dims along which tp cuts a parameter: none, one, or two on a grid of ranks

_COLUMNS = {"weight": 0, "bias": 0}
_SHARED = ("colwise_shared_heads", "shared_qkv", "shared_groups", "embedding_heads", "replicated_with_grad_allreduce")
#: The dimension along which each style cuts a parameter over tp. Parameters that are not listed stay whole.
CUTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("colwise", "packed_qkv", "packed_halves", "falcon_qkv", "colwise_gather_output"), _COLUMNS),
    "rowwise": {"weight": 1},
    "embedding_rowwise": {"weight": 0},
    "heads": {"": 0},  # the style is the parameter's own
    **dict.fromkeys((*_SHARED, *WHOLE_STYLES), {}),
}
#: Styles whose weights a grid of tp's ranks cuts along both dims.
ON_GRID = ("colwise", "packed_qkv", "packed_halves", "falcon_qkv", "rowwise", "colwise_shared_heads")


def find_tp_cuts(anatomy: Anatomy, part: TensorPart) -> dict[str, Cut]:
    """Return the dims along which tp cuts each parameter, by each of its full names. Whole parameters are left out."""
    own: dict[str, Cut] = {}
    for name, style in part.words.items():
        if style == "experts":
            widths = part.facts.experts[name].widths
            own.update({f"{name}.{key}": (dim,) for key, dim in widths.items() if dim is not None})
            continue
        summed = part.grid is not None and style == "colwise_shared_heads"
        for key, dim in ({"weight": 0} if summed else CUTS[style]).items():
            dim = 1 - dim if key == "weight" and name in part.facts.transposed else dim
            on_grid = part.grid is not None and key == "weight" and style in ON_GRID
            own[f"{name}.{key}".rstrip(".")] = (dim, 1 - dim) if on_grid else (dim,)
    cuts: dict[str, Cut] = {}
    for parameter in anatomy.parameters:
        dims = [own[name] for name in parameter.names if name in own]
        cuts.update(dict.fromkeys(parameter.names, dims[0]) if dims else {})
    return cuts


def slice_shape(shape: Iterable[int], dim: int | None, parts: int, index: int) -> Shape:
    """Return the shape of part `index` of `parts`.

    Like DTensor and FSDP2, each part takes ceil(size / parts) until nothing is left, so the last ones may be empty.
    """
    sizes = list(shape)
    if dim is not None and sizes:
        size, part = sizes[dim], -(-sizes[dim] // parts)
        sizes[dim] = min(size, part * (index + 1)) - min(size, part * index)
    return tuple(sizes)


def compute_tp_shape(shape: Iterable[int], cut: Cut, config: ParallelConfig, index: int) -> Shape:
    """Return the shape of the part of a parameter that tp rank `index` holds."""
    if len(cut) < 2:
        return slice_shape(shape, cut[0] if cut else None, config.tp_size, index)
    row, column = divmod(index, config.tp_col_size)
    by_rows = slice_shape(shape, cut[0], config.tp_row_size, row)
    return slice_shape(by_rows, cut[1], config.tp_col_size, column)


def count_stored(
    parameters: Iterable[ParameterFacts], cuts: dict[str, Cut], config: ParallelConfig, apart: Collection[str] = ()
) -> dict[tuple[int, int], tuple[int, int]]:
    """Count the elements and bytes of these parameters that a rank stores, by its place (dp_shard x cp, tp).

    Args:
        apart: the names of the parameters that ep distributes: whole experts on each rank.
    """
    parameters = list(parameters)
    ranks, ep_size = config.ep_shard_size, config.ep_size
    placed = [(p.shape, cuts.get(p.names[0], ()), p.width) for p in parameters if p.names[0] not in apart]
    shared = [p for p in parameters if p.names[0] in apart]
    table, shards = {}, config.dp_shard_size * config.cp_size
    for tp in range(config.tp_size):
        local = [(compute_tp_shape(shape, cut, config, tp), width) for shape, cut, width in placed]
        for shard in range(shards):
            counts = [(math.prod(slice_shape(shape, 0, shards, shard)), width) for shape, width in local]
            # Experts are shared out over the ranks of dp_shard and tp.
            group, place = divmod(shard * config.tp_size + tp, ep_size)
            experts = [(slice_shape(p.shape, 0, ep_size, place), p.width) for p in shared]
            stored = [(slice_shape(own, shard_dim(own, ranks), ranks, group), width) for own, width in experts]
            counts += [(math.prod(shape), width) for shape, width in stored]
            table[shard, tp] = sum(n for n, _ in counts), sum(n * width for n, width in counts)
    return table
