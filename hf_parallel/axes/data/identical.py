"""A model built from code must hold the same values on all ranks before each rank keeps its slice."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def make_identical(model: nn.Module, device: torch.device) -> bool:
    """Compare checksums over all ranks; if they differ, send rank 0's tensors one by one. Collective.

    Args:
        device: where this process communicates from; the model may still be on the CPU.

    Returns:
        Whether anything had to be sent.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    if not tensors:
        return False
    checksums = torch.stack([_checksum(tensor) for tensor in tensors]).to(device)
    extremes = torch.stack([checksums, -checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    # Not a number differs from itself, so such a model is sent: the safe side.
    if torch.equal(extremes[0], -extremes[1]):
        return False
    for tensor in tensors:
        carrier = tensor.to(device).contiguous()
        dist.broadcast(carrier, src=0)
        tensor.copy_(carrier)
    return True


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """One float64 that a change of any element, or an exchange of two, is all but sure to change."""
    total = torch.zeros((), dtype=torch.float64)
    for i, part in enumerate(tensor.reshape(-1).split(1 << 22)):  # in parts: a double copy of all would be large
        weights = torch.arange(1, part.numel() + 1, dtype=torch.float64, device=part.device).sin_()
        total += (i + 1) * torch.dot(part.double(), weights).cpu()
    return total
