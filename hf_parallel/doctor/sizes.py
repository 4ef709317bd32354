"""Which slice of each parameter a rank stores: the rules of the tensor and data axes as arithmetic, without processes.

style "rowwise", tp=2, dp_shard=2       [64, 128]  --tp cuts dim 1-->  [64, 64]  --FSDP2 cuts dim 0-->  [32, 64]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from hf_parallel.axes.data.units import shard_dim
from hf_parallel.axes.tensor.axis import TensorPart
from hf_parallel.config import ParallelConfig
from hf_parallel.model.anatomy import Anatomy, ParameterFacts

Shape = tuple[int, ...]

_COLUMNS = {"weight": 0, "bias": 0}
_SHARED = ("colwise_shared_heads", "shared_qkv", "shared_groups", "embedding_heads", "replicated_with_grad_allreduce")
#: The dimension along which each style cuts a parameter over tp; what is not named stays whole.
CUTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("colwise", "packed_qkv", "packed_halves", "falcon_qkv", "colwise_gather_output"), _COLUMNS),
    "rowwise": {"weight": 1},
    "embedding_rowwise": {"weight": 0},
    "heads": {"": 0},  # the style is the parameter's own
    **dict.fromkeys(_SHARED, {}),
}


def tp_cuts(anatomy: Anatomy, part: TensorPart) -> dict[str, int]:
    """The dimension along which tp cuts a parameter, under all its full names; whole ones are not in it."""
    own: dict[str, int] = {}
    for name, style in part.words.items():
        if style == "experts":
            widths = part.facts.experts[name].widths
            own.update({f"{name}.{key}": dim for key, dim in widths.items() if dim is not None})
            continue
        for key, dim in CUTS[style].items():
            flipped = key == "weight" and name in part.facts.transposed
            own[f"{name}.{key}".rstrip(".")] = 1 - dim if flipped else dim
    cuts = {}
    for parameter in anatomy.parameters:
        dims = [own[name] for name in parameter.names if name in own]
        cuts.update(dict.fromkeys(parameter.names, dims[0]) if dims else {})
    return cuts


def slice_shape(shape: Iterable[int], dim: int | None, parts: int, index: int) -> Shape:
    """The shape of part `index` as DTensor and FSDP2 cut: ceil(size / parts) each, until nothing is left."""
    sizes = list(shape)
    if dim is not None and sizes:
        size, part = sizes[dim], -(-sizes[dim] // parts)
        sizes[dim] = min(size, part * (index + 1)) - min(size, part * index)
    return tuple(sizes)


def stored(
    parameters: Iterable[ParameterFacts], cuts: dict[str, int], config: ParallelConfig, apart: Collection[str] = ()
) -> dict[tuple[int, int], tuple[int, int]]:
    """How many elements and bytes of these parameters a rank keeps, at each (dp_shard x cp, tp) place.

    Args:
        apart: the names of those that are shared out over ep.
    """
    parameters = list(parameters)
    placed = [(p.shape, cuts.get(p.names[0]), p.width) for p in parameters if p.names[0] not in apart]
    shared = [p for p in parameters if p.names[0] in apart]
    table, shards = {}, config.dp_shard_size * config.cp_size
    for tp in range(config.tp_size):
        local = [(slice_shape(shape, dim, config.tp_size, tp), width) for shape, dim, width in placed]
        for shard in range(shards):
            counts = [(math.prod(slice_shape(shape, 0, shards, shard)), width) for shape, width in local]
            counts += [(_of_experts(p.shape, shard * config.tp_size + tp, config), p.width) for p in shared]
            table[shard, tp] = sum(n for n, _ in counts), sum(n * width for n, width in counts)
    return table


def _of_experts(shape: Shape, place: int, config: ParallelConfig) -> int:
    """Elements of experts at a place among the ranks of dp_shard and tp."""
    ranks = config.ep_shard_size
    own = slice_shape(shape, 0, config.ep_size, place % config.ep_size)
    return math.prod(slice_shape(own, shard_dim(own, ranks), ranks, place // config.ep_size))
