"""Rows that travel between ranks: equal counts, or as many as each has for the other (all-to-all with counts)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from hf_parallel.ask.keys.data import PIECE
from hf_parallel.ranks.differentiable import (
    cut_sequence,
    join_parts_of_sequence,
    start_all_gather,
    start_reduce_scatter,
    with_gradient,
)
from hf_parallel.ranks.observed import COLLECTIVE, does_keep, keep_or_compute


def all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Send rows by counts; without counts as many to each rank. Not differentiable."""
    arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(
        arrived, rows.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group
    )
    return arrived


@with_gradient(all_to_all)
def exchange_equally(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, …] -> [ranks, …]: what is at place r goes to rank r, and what came from rank r is at place r."""
    return keep_or_compute(lambda: all_to_all(parts, group), COLLECTIVE)


@with_gradient(lambda gradient, sent, received, group: all_to_all(gradient, group, received, sent))
def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows in the order of the ranks they go to -> rows in the order of the ranks they come from.

    Args:
        sent: how many of `rows` go to each rank.
        received: how many come from each.
    """
    return keep_or_compute(lambda: all_to_all(rows, group, sent, received), COLLECTIVE)


def exchange_during(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, meanwhile: Callable[[], None]
) -> torch.Tensor:
    """`exchange`; what `meanwhile` computes runs while rows travel, its gradients while theirs do."""
    if does_keep(COLLECTIVE):  # a checkpoint keeps what arrives, in order
        arrived = exchange(rows, sent, received, group)
        meanwhile()
        return arrived
    journey = _Journey(sent, received, group)
    departed = _depart(rows, journey)
    meanwhile()
    return _arrive(departed, journey)


@dataclass(eq=False)
class _Journey:
    """Rows on their way, or their gradients on the way back."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    _travels: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def start(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Start to send the rows; return the memory that will hold the rows that arrive."""
        arriving, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        work = dist.all_to_all_single(
            arriving, rows, output_split_sizes=received, input_split_sizes=sent, group=self.group, async_op=True
        )
        self._travels = work, rows, arriving  # rows, as their memory is read until then
        return arriving

    def send_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start to send gradients back; return them in the shape that autograd expects: `_depart` has what arrives."""
        self.start(gradient, self.received, self.sent)
        return gradient

    def wait(self) -> torch.Tensor:
        """Return the rows, which have arrived."""
        assert self._travels is not None  # `start` came before
        (work, _, arrived), self._travels = self._travels, None
        work.wait()
        return arrived


@with_gradient(lambda gradient, journey: journey.wait())
def _depart(rows: torch.Tensor, journey: _Journey) -> torch.Tensor:
    """Start to send rows; in the backward pass their gradients have arrived."""
    return journey.start(rows, journey.sent, journey.received)


@with_gradient(lambda gradient, journey: journey.send_back(gradient))
def _arrive(departed: torch.Tensor, journey: _Journey) -> torch.Tensor:
    """Wait for rows; in the backward pass their gradients start."""
    journey.wait()
    return departed.view_as(departed)


@with_gradient(lambda gradient, factor: gradient * factor)
def _scale_tensor(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor.view_as(tensor)


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor itself, with a gradient that is multiplied by `factor`."""
    return tensor if factor == 1 else _scale_tensor(tensor, factor)


# ---- Numbers in fewer bits, block by block, and a reduce-scatter that sends them so (ZeRO++, arXiv:2306.10209)
# A block of 64 numbers becomes 64 codes and one scale of 16 bits, its largest number divided by the largest code:
#
#     row of n numbers    [ codes of n numbers, padded to whole blocks | scales ]    as bytes
#
# A block with an infinity or a NaN comes back without a finite number, so that whoever looks for them still finds one.

BLOCK = 64
_BITS = {"int8": 8, "fp8": 8, "int4": 4}
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_SCALE = torch.bfloat16  # the exponents of fp32 in half its bytes; codes are made for the scale as it was rounded


def count_packed_bytes(count: int, kind: str) -> int:
    """Return the bytes that a row of `count` numbers takes."""
    blocks = math.ceil(count / BLOCK)
    return blocks * (BLOCK * _BITS[kind] // 8 + _SCALE.itemsize)


def pack_rows(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Pack each row in fewer bits: (rows, n) floats -> (rows, packed_bytes(n)) bytes.

    Numbers are packed a piece at a time, so what lies beside the codes meanwhile does not grow with the rows.
    """
    packed = rows.new_empty(len(rows), count_packed_bytes(rows.shape[1], kind), dtype=torch.uint8)
    for start, end, codes, scales in _list_pieces(packed, rows.shape[1], kind):
        piece = rows[:, start:end].float()
        if (end - start) % BLOCK:
            piece = pad(piece, (0, -(end - start) % BLOCK))
        blocks, largest = piece.reshape(len(rows), -1, BLOCK), _LARGEST[kind]
        rounded = (torch.maximum(blocks.amax(2), -blocks.amin(2)).abs() / largest).to(_SCALE)  # no -0.0
        blocks = blocks / rounded.float().masked_fill(rounded == 0, 1.0).unsqueeze(2)
        if kind == "fp8":  # the cast itself makes NaN of what is larger
            found = blocks.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
        elif kind == "int8":
            found = blocks.round_().clamp_(-largest, largest).to(torch.int8).view(torch.uint8)
        else:
            high, low = blocks.round_().clamp_(-largest, largest).add_(8).to(torch.uint8).chunk(2, dim=2)
            found = (high << 4).bitwise_or_(low)
        codes.copy_(found.view(len(rows), -1))
        scales.copy_(rounded.view(torch.uint8))
    return packed


def _list_pieces(packed: torch.Tensor, count: int, kind: str) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Return (first number of a row, end, codes, scales) of each piece of packed rows of `count` numbers."""
    blocks, bytes_of_codes = math.ceil(count / BLOCK), BLOCK * _BITS[kind] // 8
    codes, scales = packed.split([blocks * bytes_of_codes, blocks * _SCALE.itemsize], 1)
    step = max(1, PIECE // max(1, len(packed)) // BLOCK)  # blocks
    return [
        (first * BLOCK, min(count, end * BLOCK), codes[:, first * bytes_of_codes : end * bytes_of_codes], mine)
        for first, mine in zip(range(0, blocks, step), scales.split(step * _SCALE.itemsize, 1), strict=True)
        for end in [min(blocks, first + step)]
    ]


def unpack(packed: torch.Tensor, count: int, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of each row: (rows, packed_bytes(count)) bytes -> (rows, count) in `dtype`."""
    blocks = math.ceil(count / BLOCK)
    codes, scales = packed.split([packed.shape[1] - blocks * _SCALE.itemsize, blocks * _SCALE.itemsize], 1)
    return _unpack_codes(codes, scales, kind, dtype)[:, :count]


def _unpack_codes(codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of whole blocks: (rows, bytes of codes), (rows, bytes of scales) -> (rows, numbers).

    A code and a scale have 8 bits each, so 16-bit floats hold them exactly and their product is rounded once.
    """
    if dtype == torch.float16:  # whose exponents are too few for a scale
        return _unpack_codes(codes, scales, kind, torch.float32).to(dtype)
    codes = codes.reshape(len(codes), scales.shape[1] // _SCALE.itemsize, -1)
    if kind == "int4":
        values = torch.cat([codes >> 4, codes & 15], 2).to(dtype).sub_(8)
    else:
        values = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8).to(dtype)
    values *= scales.contiguous().view(_SCALE).to(dtype).unsqueeze(2)
    return values.view(len(codes), -1)


def reduce_scatter(
    parts: torch.Tensor, group: dist.ProcessGroup, kind: str, error: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over the group what each rank has for this one: (ranks, n) -> (n,), sent once and in fewer bits.

    Args:
        error: what earlier calls have lost in packing; sent with these parts, and updated (error feedback,
            arXiv:1901.09847).
    """
    if group.size() == 1:
        return parts[0]
    if error is not None:
        parts = parts + error
    packed, count = pack_rows(parts, kind), parts.shape[1]
    if error is not None:
        lost = torch.sub(parts, unpack(packed, count, kind), out=error)
        torch.nan_to_num_(lost, 0.0, 0.0, 0.0)  # a step that has overflowed is not made up for
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    total = parts.new_empty(count, dtype=torch.float32)
    for start, end, codes, scales in _list_pieces(received, count, kind):
        torch.sum(_unpack_codes(codes, scales, kind, torch.float32)[:, : end - start], 0, out=total[start:end])
    return total


# ---- Tokens and features on a grid of ranks: the pairs of `axes/tensor/grid.py` that go along both
# A tensor [t/p, h] holds a rank's tokens with all their features, [t/R, h/C] the tokens of all ranks of its row of the
# grid with 1/C of their features. Ranks count by rows, so the tokens of a row are consecutive.


def _send_to_columns(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    width = tensor.shape[-1] // group.size()
    parts = tensor.reshape(-1, group.size(), width).transpose(0, 1)
    return all_to_all(parts, group).view(*tensor.shape[:-2], -1, width)


def _send_to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    size, width = group.size(), tensor.shape[-1]
    parts = all_to_all(tensor.reshape(size, -1, width), group).transpose(0, 1)
    whole = parts.reshape(*tensor.shape[:-2], tensor.shape[-2] // size, size * width)
    return torch.ops.aten._unsafe_view(whole, whole.shape)  # no view: models add to it in place


@with_gradient(_send_to_tokens)
def exchange_tokens_for_columns(tensor: torch.Tensor, over_columns: dist.ProcessGroup) -> torch.Tensor:
    """[…, s / p, h] -> […, s / R, h / C]: the tokens of the ranks of a row, this rank's part of their features.

    An all-to-all whose backward pass is its transpose. Nothing is kept: as much arrives as has left.
    """
    return _send_to_columns(tensor, over_columns)


@with_gradient(
    lambda gradient, over_rows, over_columns: join_parts_of_sequence(
        start_all_gather(_send_to_columns(gradient, over_columns), over_rows).wait()
    )
)
def leave_grid(tensor: torch.Tensor, over_rows: dist.ProcessGroup, over_columns: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, h / C], a part of a sum over rows -> […, s / p, h] of the sum: this rank's tokens, all features.

    Reduce-scatter of tokens and all-to-all forward, all-to-all and all-gather backward.
    """
    parts = cut_sequence(tensor, over_rows)
    return keep_or_compute(
        lambda: _send_to_tokens(start_reduce_scatter(parts, over_rows).wait(), over_columns), COLLECTIVE
    )
