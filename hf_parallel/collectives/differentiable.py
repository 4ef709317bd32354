"""The conjugate pairs of Megatron-LM: f and g (Shoeybi et al., 2019, section 3), and their forms along the sequence
(Korthikanti et al., 2022, section 4.2.2).

Each takes a local tensor and a process group. Sequence forms cut the last dim but one into equal parts: tokens of
[batch, seq, hidden], or of [tokens, hidden] where a model flattens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.collectives.asynchronous import start_all_gather, start_all_reduce, start_reduce_scatter


class _Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _CopyWeight(torch.autograd.Function):
    """f for a weight: what ranks add to its gradient is added in fp32, as few bits of a sum of many would be left."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return all_reduce(wide, ctx.group).to(gradient.dtype), None


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduce(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(tensor, tensor.dim() - 2, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(gradient, gradient.dim() - 2, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(tensor, tensor.dim() - 2, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, gradient.dim() - 2, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    """This rank's part of the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_part(tensor, tensor.dim() - 2, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, gradient.dim() - 2, ctx.group), None


class _Join(torch.autograd.Function):
    """All-gather along a dim forward, this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(tensor, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_part(gradient, ctx.dim, ctx.group), None, None


def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter a region whose ranks each use the same tensor for a part of the work (f)."""
    return _Copy.apply(tensor, group)


def copy_weight_to_group(weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same with a weight that all ranks hold and use for a part of the work."""
    return _CopyWeight.apply(weight, group)


def reduce_from_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave a region whose ranks each hold a partial sum (g)."""
    return _Reduce.apply(tensor, group)


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h]: enter such a region with parts of the sequence."""
    return _GatherSequence.apply(tensor, group)


def begin_gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to gather as `gather_sequence` does; what it returns waits for the result. Not differentiable."""
    parts, dim = start_all_gather(tensor, group), tensor.dim() - 2
    return lambda: _joined(parts.wait(), dim)


def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h] partial sums -> [b, s / n, h]: leave it with parts of the sequence."""
    return _ReduceScatterSequence.apply(tensor, group)


def split_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h], the same on all ranks -> [b, s / n, h]."""
    return _SplitSequence.apply(tensor, group)


def join_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h] on all ranks, which must go on to compute the same thing."""
    return _Join.apply(tensor, tensor.dim() - 2, group)


def join_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all, which must go on to compute the same thing."""
    return _Join.apply(tensor, tensor.dim() - 1, group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new reduced tensor; one in place would change what autograd has saved. Not differentiable."""
    return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group, operation).wait()


def _all_gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return _joined(start_all_gather(tensor, group).wait(), dim)


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, …, k, …] -> […, n k, …], without a copy where all dims before `dim` are 1, as in a batch of one row.

    Never a view: models may change in place what leaves a Function, which autograd does not allow for views.
    """
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.ops.aten._unsafe_view(joined, joined.shape)


def _reduce_scatter(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return start_reduce_scatter(tensor.unflatten(dim, (group.size(), -1)).movedim(dim, 0), group).wait()


def _own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    if tensor.shape[dim] % group.size():
        raise RuntimeError(f"hf_parallel: {tensor.shape[dim]} tokens do not divide among {group.size()} ranks")
    return tensor.chunk(group.size(), dim=dim)[group.rank()].contiguous()
