"""The conjugate pairs of Megatron-LM (Shoeybi et al., 2019, section 3, operators f and g).

Each takes a local tensor and a process group. A group of size one costs nothing but the autograd node.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


class _Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherLastDim(torch.autograd.Function):
    """All-gather along the last dim forward, this rank's slice of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter a region whose ranks each use the same tensor for a part of the work (f)."""
    return _Copy.apply(tensor, group)


def reduce_from_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave a region whose ranks each hold a partial sum (g)."""
    return _Reduce.apply(tensor, group)


def gather_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all; the ranks must go on to compute the same thing."""
    return _GatherLastDim.apply(tensor, group)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # The functional collective returns a new tensor: an in-place one would change what autograd has saved.
    return functional.wait_tensor(functional.all_reduce(tensor.contiguous(), "sum", group))
