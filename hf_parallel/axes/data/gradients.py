"""One gradient norm for parameters that live on different meshes, as plain tensors or as DTensors.

A shard counts once; a tensor that several ranks hold alike counts once too. So the sum of powers is taken per set of
axes over which a parameter is cut, summed over exactly those axes, and then over the stages.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_parallel.mesh import EXPERT_AXES, ParallelMesh, stored


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    mesh: ParallelMesh,
    norm_type: float = 2.0,
    copies: Collection[int] = (),
) -> torch.Tensor:
    """Scale gradients so that their joint norm is at most `max_norm`. Collective over one model's ranks.

    Args:
        copies: ids of parameters that another stage counts (the second copy of a tied embedding).

    Returns:
        The norm before clipping, a scalar equal on all ranks.
    """
    parameters = list(parameters)
    total = gradient_norm(parameters, mesh, norm_type, copies)
    if max_norm != math.inf:
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
        for gradients in _by_device_and_dtype(stored(p.grad) for p in parameters if p.grad is not None):
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return total


def gradient_norm(
    parameters: Iterable[torch.Tensor], mesh: ParallelMesh, norm_type: float = 2.0, copies: Collection[int] = ()
) -> torch.Tensor:
    """The norm of all gradients of the model, over its stages and shards."""
    infinite = math.isinf(norm_type)
    combine = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    gathered: dict[frozenset[str], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in copies:
            gathered[_cut_axes(parameter.grad, mesh)].append(stored(parameter.grad))

    # One slot per combination of axes, so that ranks with different parameters run the same collectives.
    known = [axis.name for axis in mesh.config.mesh_axes if axis.cuts] + [*EXPERT_AXES] * (mesh.config.ep_size > 1)
    cutting = [axis for axis in known if mesh.size(axis) > 1]
    combinations = [
        frozenset(itertools.compress(cutting, chosen))
        for chosen in itertools.product((False, True), repeat=len(cutting))
    ]
    powers = torch.stack([_sum_of_powers(gathered[axes], norm_type, mesh.device) for axes in combinations])
    powers = powers.view((2,) * len(cutting))  # one dim per axis: not cut, cut
    for dim, axis in enumerate(cutting):
        over_axis = powers.select(dim, 1)  # a view, as a mask would have to be copied to the GPU
        cut = over_axis.contiguous()
        dist.all_reduce(cut, op=combine, group=mesh.group(axis))
        over_axis.copy_(cut)
    total = powers.max() if infinite else powers.sum()
    for mesh_axis in mesh.config.mesh_axes:
        if mesh_axis.layers and mesh.size(mesh_axis.name) > 1:
            dist.all_reduce(total, op=combine, group=mesh.group(mesh_axis.name))
    return total if infinite else total ** (1.0 / norm_type)


def _sum_of_powers(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |g|^p over all elements, or the largest |g|; zero without gradients."""
    gradients = [gradient for gradient in gradients if gradient.numel()]  # an uneven shard can be empty
    if not gradients:
        return torch.zeros((), device=device)
    parts = [torch.stack(_norms(part, norm_type)).float() for part in _by_device_and_dtype(gradients)]
    stacked = torch.cat([part.to(device) for part in parts])  # of gradients on the host one copy, not one for each
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _norms(gradients: list[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, ...]:
    """Of 16 bits in fp32: torch would round each norm to the gradients' own dtype."""
    return torch._foreach_norm(gradients, norm_type, dtype=torch.promote_types(gradients[0].dtype, torch.float32))


def _cut_axes(gradient: torch.Tensor, mesh: ParallelMesh) -> frozenset[str]:
    """The axes of more than one rank over which this gradient is cut."""
    if not isinstance(gradient, DTensor):
        return frozenset()
    names = gradient.device_mesh.mesh_dim_names or ()
    # A strided shard (dp_shard and tp on one dim) has a dim too, but is not a plain Shard.
    cut = (n for n, placement in zip(names, gradient.placements, strict=True) if hasattr(placement, "dim"))
    return frozenset(axis for name in cut for axis in mesh.config.axes_along(name) if mesh.size(axis) > 1)


def _by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())
