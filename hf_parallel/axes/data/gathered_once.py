"""Weights that stay gathered while a model generates: `generate` calls it once for each token.

                                    gathers of a unit, n tokens    whole on each rank
    zero_stage=3, little memory     n                              one layer
    zero_stage=3                    1                              all weights, until `generate` returns
    zero_stage=1, 2; stages         1                              all weights, as between micro-batches

Nothing changes weights inside `generate`, so the numbers are the same. All ranks of a model decide together, by the
one with the least free memory: as much must be left for keys, values and activations as the weights take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.keys.data import offload_folder
from hf_parallel.axes.data.lowered import follow_dtype_now
from hf_parallel.axes.data.units import get_groups_of, get_state_of, iterate_parameter_groups, iterate_sharded_modules
from hf_parallel.ranks.devices import measure_free_memory
from hf_parallel.ranks.mesh import ParallelMesh

_KEPT = "_hf_parallel_keeps_gathered"


def is_kept_gathered(model: nn.Module) -> bool:
    """Return whether the units of a model stay gathered after this forward pass, for the next one."""
    return getattr(model, _KEPT, False)


@contextlib.contextmanager
def keep_gathered(model: nn.Module, mesh: ParallelMesh) -> Iterator[bool]:
    """Inside, forward passes gather each unit of `model` once, if there is room. Collective.

    Afterwards no unit is gathered. Weights that a forward pass before has left gathered are gathered anew, because
    they may have changed since.

    Args:
        model: or the list of a pipeline's stages on this rank.

    Yields:
        Whether they do.
    """
    units = list(iterate_sharded_modules(model))
    if not units or is_kept_gathered(model) or not _has_room(model, mesh):
        yield False
        return
    for unit in units:
        unit.reshard()
    for root in model if isinstance(model, nn.ModuleList) else [model]:
        follow_dtype_now(root, mesh.device)
    former = [(unit, group, group.post_forward_mesh_info) for unit in units for group in get_groups_of(unit)]
    for _, group, _ in former:
        group.post_forward_mesh_info = None
    setattr(model, _KEPT, True)
    try:
        yield True
    finally:
        setattr(model, _KEPT, False)
        for unit, group, info in former:
            state = get_state_of(unit)
            # What ran first, here or before, is the root, whose weights torch keeps for the backward pass.
            group.post_forward_mesh_info = None if state._is_root and state._auto_reshard_after_forward else info
        for unit in units:
            unit.reshard()


def _has_room(model: nn.Module, mesh: ParallelMesh) -> bool:
    """Return whether all ranks of the model can hold whole weights. Stages, and zero_stage=1 and 2, do in training."""
    if offload_folder(mesh.config.offload):
        return False
    if mesh.config.zero_stage < 3 or mesh.config.pp_size > 1:
        return True
    whole = 0
    for group in iterate_parameter_groups(model):
        held: list[Any] = group.fsdp_params
        stored = [(one._sharded_param_data, one.mesh_info.shard_mesh_size, one.mp_policy.param_dtype) for one in held]
        lowered = [(own, ranks, dtype if own.is_floating_point() else None) for own, ranks, dtype in stored]
        whole += sum(own.numel() * ranks * (dtype or own.dtype).itemsize for own, ranks, dtype in lowered)
    least = torch.tensor(measure_free_memory(mesh.device) - 2.0 * whole, device=mesh.device)
    for axis in ("dp_shard", "cp", "tp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.group(axis))
    return bool(least >= 0)
