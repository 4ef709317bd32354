"""BatchNorm over data ranks: mean and variance of the whole batch, as one process takes them.

A data rank's own rows have another mean and another variance, by which the same row would be normalised to other
numbers. Both are summed over the data ranks, in the forward and in the backward pass; the variance around the common
mean, since a difference of squares would lose digits. Evaluation uses what training has collected, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_parallel.ranks import copy_to_group, reduce_from_group
from hf_parallel.ranks.local import put_in_front
from hf_parallel.ranks.mesh import ParallelMesh

#: Does this rank take part with rows that do not count? Hooks know.
is_absent: Callable[[], bool] = lambda: False  # noqa: E731


def share_batch_norms(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on BatchNorm modules of `model` in training see the rows of all data ranks; others stay theirs."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            put_in_front(SharedBatchNorm, module).group = mesh.data_group


class SharedBatchNorm(_BatchNorm):
    """[rows, channels, …], this rank's rows of a batch -> the same shape."""

    group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        wide = torch.promote_types(input.dtype, torch.float32)
        x, dims = input.to(wide), [0, *range(2, input.ndim)]
        shape, counts = (1, -1, *(1,) * (input.ndim - 2)), float(not is_absent())
        rows = x.new_full((1,), input.numel() / input.shape[1])
        own = torch.cat([x.sum(dims), rows]) * counts
        total, count = reduce_from_group(copy_to_group(own, self.group), self.group).split([input.shape[1], 1])
        mean = total / count
        centred = x - mean.view(shape)
        squares = centred.square().sum(dims) * counts
        variance = reduce_from_group(copy_to_group(squares, self.group), self.group) / count
        if self.training and self.track_running_stats:  # as torch collects them, the variance unbiased
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.to(wide).view(shape) + self.bias.to(wide).view(shape)
        return y.to(input.dtype)
