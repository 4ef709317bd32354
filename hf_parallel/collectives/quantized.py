"""Numbers in fewer bits, block by block, and a reduce-scatter that sends them so (ZeRO++, arXiv:2306.10209).

A block of 64 numbers becomes 64 codes and one scale of 16 bits, its largest number divided by the largest code:

    row of n numbers    [ codes of n numbers, padded to whole blocks | scales ]    as bytes

A block with an infinity or a NaN comes back without a finite number, so that whoever looks for them still finds one.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.nn.functional import pad

BLOCK = 64
_BITS = {"int8": 8, "fp8": 8, "int4": 4}
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_SCALE = torch.bfloat16  # the exponents of fp32 in half its bytes; codes are made for the scale as it was rounded


def packed_bytes(count: int, kind: str) -> int:
    """What a row of `count` numbers takes."""
    blocks = math.ceil(count / BLOCK)
    return blocks * (BLOCK * _BITS[kind] // 8 + _SCALE.itemsize)


def pack(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Each row in fewer bits: (rows, n) floats -> (rows, packed_bytes(n)) bytes."""
    count = rows.shape[1]
    blocks = pad(rows.float(), (0, -count % BLOCK)).view(len(rows), -1, BLOCK)
    scales = (blocks.abs().amax(2) / _LARGEST[kind]).to(_SCALE)
    divisors = scales.float().masked_fill(scales == 0, 1.0).unsqueeze(2)
    codes = _to_codes(blocks / divisors, kind)
    return torch.cat([codes.reshape(len(rows), -1), scales.view(torch.uint8)], 1)


def unpack(packed: torch.Tensor, count: int, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of each row: (rows, packed_bytes(count)) bytes -> (rows, count) in `dtype`.

    A code and a scale have 8 bits each, so 16-bit floats hold them exactly and their product is rounded once.
    """
    blocks = math.ceil(count / BLOCK)
    codes, scales = packed.split([packed.shape[1] - blocks * _SCALE.itemsize, blocks * _SCALE.itemsize], 1)
    if dtype == torch.float16:  # whose exponents are too few for a scale
        return unpack(packed, count, kind).to(dtype)
    values = _from_codes(codes.reshape(len(packed), blocks, -1), kind, dtype)
    values *= scales.contiguous().view(_SCALE).to(dtype).unsqueeze(2)
    return values.view(len(packed), -1)[:, :count]


def _to_codes(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "fp8":
        largest = _LARGEST[kind]  # the cast itself makes NaN of what is larger
        return blocks.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = blocks.round_().clamp_(-_LARGEST[kind], _LARGEST[kind])
    if kind == "int8":
        return codes.to(torch.int8).view(torch.uint8)
    high, low = (codes + 8).to(torch.uint8).chunk(2, dim=2)
    return (high << 4) | low


def _from_codes(codes: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).to(dtype)
    if kind == "int8":
        return codes.view(torch.int8).to(dtype)
    return torch.cat([codes >> 4, codes & 15], 2).to(dtype).sub_(8)


def reduce_scatter(
    parts: torch.Tensor, group: dist.ProcessGroup, kind: str, error: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over the group of what each rank has for this one: (ranks, n) -> (n,), sent once and in fewer bits.

    Args:
        error: what earlier calls have lost in packing; sent with these parts, and updated (error feedback,
            arXiv:1901.09847).
    """
    if group.size() == 1:
        return parts[0]
    if error is not None:
        parts = parts + error
    packed, count = pack(parts, kind), parts.shape[1]
    if error is not None:
        lost = torch.sub(parts, unpack(packed, count, kind), out=error)
        torch.nan_to_num_(lost, 0.0, 0.0, 0.0)  # a step that has overflowed is not made up for
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    return unpack(received, count, kind).sum(0)
