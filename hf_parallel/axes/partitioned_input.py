"""Inputs of checkpointed layers, of which each tp rank keeps a part (ZeRO-R, Rajbhandari et al., 2020, section 6.1).

Without sequence parallelism the residual stream is the same on all tp ranks, and each would keep all of it:

    forward     input [b, s, h] of a layer -> 1/tp of its numbers                        kept: the part
    backward    part -> all-gather -> input -> the layer again, and its gradients        dropped after the layer
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hf_parallel.collectives import start_all_gather


def partition_inputs(layers: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """From here on those of the layers that are checkpointed keep a part of their input."""
    for layer in layers:
        keeping = Keeping(group)
        layer.register_forward_pre_hook(keeping.begin)
        layer.register_forward_hook(lambda *_, keeping=keeping: keeping.end(), always_call=True)


class Keeping:
    """What one layer keeps. Checkpointing hides from these hooks all that is not an input."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._open: list[saved_tensors_hooks] = []

    def begin(self, layer: nn.Module, args: tuple) -> None:
        """The layer starts."""
        if not (torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)):
            return
        # The first alone: others may differ between ranks, as biases. Not itself, which the hooks would keep alive.
        given = (args[0].data_ptr(), args[0].shape) if args and torch.is_tensor(args[0]) else None
        hooks = saved_tensors_hooks(lambda tensor: self._pack(tensor, given), _unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def end(self) -> None:
        """It is done."""
        if self._open:
            self._open.pop().__exit__()

    def _pack(self, tensor: torch.Tensor, given: tuple[int, torch.Size] | None) -> Part | torch.Tensor:
        return Part(tensor, self.group) if (tensor.data_ptr(), tensor.shape) == given else tensor


class Part:
    """This rank's part of a tensor that all ranks of `group` have."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.shape = group, tensor.shape
        row, size = tensor.detach().reshape(-1), math.ceil(tensor.numel() / group.size())
        start = min(group.rank() * size, row.numel())
        self.numbers = row.new_zeros(size)
        own = row[start : start + size]
        self.numbers[: own.numel()] = own

    def whole(self) -> torch.Tensor:
        """The tensor. Collective."""
        return start_all_gather(self.numbers, self.group).wait().view(-1)[: self.shape.numel()].view(self.shape)


def _unpack(kept: Part | torch.Tensor) -> torch.Tensor:
    return kept.whole() if isinstance(kept, Part) else kept
