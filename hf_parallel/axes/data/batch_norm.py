"""BatchNorm over data ranks: mean and variance of the whole batch, as one process takes them.

A data rank's own rows have another mean and another variance, by which the same row would be normalised to other
numbers. Both are summed over the data ranks, in the forward and in the backward pass; the variance around the common
mean, since a difference of squares would lose digits. Evaluation uses what training has collected, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hf_parallel.ranks import copy_to_group, reduce_from_group
from hf_parallel.ranks.local import put_in_front
from hf_parallel.ranks.mesh import ParallelMesh

#: Does this rank take part with rows that do not count? Hooks know.
is_absent: Callable[[], bool] = lambda: False  # noqa: E731


def share_batch_norms(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on BatchNorm modules of `model` in training see the rows of all data ranks."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):  # which does so itself
            put_in_front(SharedBatchNorm, module).group = mesh.data_group


class SharedBatchNorm(_BatchNorm):
    """[rows, channels, …], this rank's rows of a batch -> the same shape, whatever else the module's forward does."""

    group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        with _Sharing(self.group):
            return super().forward(input)


class _Sharing(TorchFunctionMode):
    """Calls `normalise` in the place of torch's function, which timm's norms call in forwards of their own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: Any = None) -> Any:
        if func is nn.functional.batch_norm:
            return normalise(self.group, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def normalise(
    group: dist.ProcessGroup,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Do what `torch.nn.functional.batch_norm` does in training, with mean and variance over the ranks of `group`."""
    wide = torch.promote_types(input.dtype, torch.float32)
    x, dims = input.to(wide), [0, *range(2, input.ndim)]
    shape, counts = (1, -1, *(1,) * (input.ndim - 2)), float(not is_absent())
    rows = x.new_full((1,), input.numel() / input.shape[1])
    own = torch.cat([x.sum(dims), rows]) * counts
    total, count = reduce_from_group(copy_to_group(own, group), group).split([input.shape[1], 1])
    mean = total / count
    centred = x - mean.view(shape)
    squares = centred.square().sum(dims) * counts
    variance = reduce_from_group(copy_to_group(squares, group), group) / count
    if running_mean is not None and running_var is not None:  # as torch collects them, the variance unbiased
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp(min=1)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    y = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        y = y * weight.to(wide).view(shape)
    if bias is not None:
        y = y + bias.to(wide).view(shape)
    return y.to(input.dtype)
