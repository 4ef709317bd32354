"""From whole sequences to a rank's tokens and back, with gradients that are averaged over cp ranks afterwards.

Cp ranks hold the same parameters and other tokens, and FSDP2 averages gradients over them as over data ranks. What is
computed of some tokens is therefore counted `cp` times on the way back, what all ranks compute alike once:

    join             tokens of each rank -> all of them, which all ranks use alike     backward: own tokens, times cp
    sum_over_ranks   a sum over each rank's tokens -> over all                         backward: times cp
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.axes.context.layout import Layout
from hf_parallel.collectives import reduce_from_group, scale_gradient, start_all_gather

if TYPE_CHECKING:
    from hf_parallel.collectives.context import Context


class _Join(torch.autograd.Function):
    """[b, n, …] of each rank -> [b, s, …] in the original order."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, layout: Layout, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.layout, ctx.group = layout, group
        gathered = start_all_gather(tensor.contiguous(), group).wait()  # [cp, b, n, …]
        inverse = layout.on(tensor.device)[1]
        rows = torch.arange(len(inverse), device=tensor.device)[:, None]
        return gathered.transpose(0, 1).flatten(1, 2)[rows, inverse]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = take(gradient, ctx.layout, ctx.group.rank())
        return own * ctx.group.size(), None, None


def join(tensor: torch.Tensor, layout: Layout, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, n, …] of this rank's tokens -> [b, s, …] on all ranks, which must go on to compute the same."""
    return _Join.apply(tensor, layout, group)


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A sum over this rank's tokens -> that over all."""
    return reduce_from_group(scale_gradient(tensor, group.size()), group)


def take(tensor: torch.Tensor, layout: Layout, rank: int, fill: float = 0) -> torch.Tensor:
    """[b, s, …] -> [b, n, …]: the tokens of a rank, `fill` where it holds none. Of a tensor without memory another."""
    if tensor.dim() > 2 and tensor.stride(1) == 0:
        return tensor[:, :1].expand(-1, layout.local, *tensor.shape[2:])
    own = layout.on(tensor.device)[0][:, rank]
    rows = torch.arange(len(own), device=tensor.device)[:, None]
    held = tensor[rows, own.clamp(min=0)]
    none = (own < 0).view(*own.shape, *(1,) * (tensor.dim() - 2))
    return held.masked_fill(none, fill)
