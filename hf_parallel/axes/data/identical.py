"""A model built from code must hold the same values on all ranks before each rank keeps its slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

_FACTOR = 6364136223846793005  # odd


def make_identical(model: nn.Module, device: torch.device) -> bool:
    """Compare checksums over all ranks; if they differ, send rank 0's tensors one by one. Collective.

    Args:
        device: where this process computes and communicates; the model may still be on the CPU, and goes by in parts.

    Returns:
        Whether anything had to be sent.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    if not tensors:
        return False
    checksums = torch.stack([checksum(tensor, device) for tensor in tensors])
    extremes = torch.stack([checksums, ~checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if torch.equal(extremes[0], ~extremes[1]):
        return False
    for tensor in tensors:
        carrier = tensor.to(device).contiguous()
        dist.broadcast(carrier, src=0)
        tensor.copy_(carrier)
    return True


def checksum(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number of 64 bits that a change of any element changes, and an exchange of two is all but sure to."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    weights, products = _buffers(device)
    for words in _words(tensor.contiguous(), weights.numel()):
        count = words.numel()
        # All modulo 2^64, where a product with an odd number forgets nothing.
        total = total * _FACTOR + torch.mul(words.to(device), weights[:count], out=products[:count]).sum()
    return total


def _words(tensor: torch.Tensor, part: int) -> Iterator[torch.Tensor]:
    """The bits of a tensor as words, `part` at a time, and what fills none byte by byte."""
    values = tensor.view(-1).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    even = values.numel() // 8 * 8
    yield from values[:even].view(torch.int64).split(part)
    yield values[even:].to(torch.int64)


@functools.cache
def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd numbers in no order, and memory for products: on a CPU as much as its cache holds."""
    generator, count = torch.Generator().manual_seed(0), 1 << (17 if device.type == "cpu" else 23)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return (drawn | 1).to(device), torch.empty(count, dtype=torch.int64, device=device)
