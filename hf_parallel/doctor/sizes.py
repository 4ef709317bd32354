"""Which slice of each parameter a rank stores: the rules of rewrite and sharding as arithmetic, without processes.

style "rowwise", tp=2, dp_shard=2       [64, 128]  --tp cuts dim 1-->  [64, 64]  --FSDP2 cuts dim 0-->  [32, 64]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from transformers.pytorch_utils import Conv1D

from hf_parallel.config import ParallelConfig

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


def tp_cuts(model: Any, styles: dict[str, str]) -> dict[str, int]:
    """The dimension along which tp cuts a parameter, under all its full names; whole ones are not in it."""
    own: dict[str, int] = {}
    for name, style in styles.items():
        for key, dim in CUTS[style].items():
            flipped = key == "weight" and isinstance(model.get_submodule(name), Conv1D)
            own[f"{name}.{key}".rstrip(".")] = 1 - dim if flipped else dim
    cuts = {}
    for _, names in distinct_parameters(model):
        dims = [own[name] for name in names if name in own]
        cuts.update(dict.fromkeys(names, dims[0]) if dims else {})
    return cuts


def distinct_parameters(model: Any) -> list[tuple[Any, list[str]]]:
    """Every parameter once, with all its names: tied ones have several."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def slice_shape(shape: Iterable[int], dim: int | None, parts: int, index: int) -> Shape:
    """The shape of part `index` as DTensor and FSDP2 cut: ceil(size / parts) each, until nothing is left."""
    sizes = list(shape)
    if dim is not None and sizes:
        size, part = sizes[dim], -(-sizes[dim] // parts)
        sizes[dim] = min(size, part * (index + 1)) - min(size, part * index)
    return tuple(sizes)


def stored(model: Any, cuts: dict[str, int], config: ParallelConfig) -> dict[tuple[int, int], tuple[int, int]]:
    """Parameters and bytes of `model`, or of one stage of it, at each (dp_shard, tp) place."""
    parameters = [(p, cuts.get(names[0])) for p, names in distinct_parameters(model)]
    table = {}
    for tp in range(config.tp_size):
        local = [(slice_shape(p.shape, dim, config.tp_size, tp), p.element_size()) for p, dim in parameters]
        for shard in range(config.dp_shard_size):
            counts = [(math.prod(slice_shape(shape, 0, config.dp_shard_size, shard)), width) for shape, width in local]
            table[shard, tp] = sum(n for n, _ in counts), sum(n * width for n, width in counts)
    return table
