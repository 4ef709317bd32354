"""Which slice of each parameter a rank stores: the rules of the tensor and data axes as arithmetic, without processes.

style "rowwise", tp=2, dp_shard=2       [64, 128]  --tp cuts dim 1-->  [64, 64]  --FSDP2 cuts dim 0-->  [32, 64]
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    parameters: Iterable[ParameterFacts], cuts: dict[str, int], config: ParallelConfig
) -> dict[tuple[int, int], tuple[int, int]]:
    """How many elements and bytes of these parameters a rank keeps, at each (dp_shard x cp, tp) place."""
    placed = [(p.shape, cuts.get(p.names[0]), p.width) for p in parameters]
    table, shards = {}, config.dp_shard_size * config.cp_size
    for tp in range(config.tp_size):
        local = [(slice_shape(shape, dim, config.tp_size, tp), width) for shape, dim, width in placed]
        for shard in range(shards):
            counts = [(math.prod(slice_shape(shape, 0, shards, shard)), width) for shape, width in local]
            table[shard, tp] = sum(n for n, _ in counts), sum(n * width for n, width in counts)
    return table
