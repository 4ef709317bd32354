"""Rows that travel between ranks: as many to each, or as many as each has for the other (all-to-all with counts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.collectives.kept import COLLECTIVE, keeps, kept_or

if TYPE_CHECKING:
    from hf_parallel.collectives.context import Context


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts, which is its own way back."""

    @staticmethod
    def forward(ctx: Context, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return kept_or(lambda: _all_to_all(parts, None, None, group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, None, None, ctx.group), None


class _Exchange(torch.autograd.Function):
    """All-to-all forward, the way back backward."""

    @staticmethod
    def forward(
        ctx: Context, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return kept_or(lambda: _all_to_all(rows, sent, received, group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    """Identity forward, a factor backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def exchange_equally(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, …] -> [ranks, …]: what is at place r goes to rank r, and what came from rank r is at place r."""
    return _AllToAll.apply(parts, group)


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows in the order of the ranks they go to -> rows in the order of the ranks they come from.

    Args:
        sent: how many of `rows` go to each rank.
        received: how many come from each.
    """
    return _Exchange.apply(rows, sent, received, group)


def exchange_during(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, meanwhile: Callable[[], None]
) -> torch.Tensor:
    """`exchange`; what `meanwhile` computes runs while rows travel, its gradients while theirs do."""
    if keeps(COLLECTIVE):  # a checkpoint keeps what arrives, in order
        arrived = exchange(rows, sent, received, group)
        meanwhile()
        return arrived
    journey = _Journey(sent, received, group)
    departed = _Depart.apply(rows, journey)
    meanwhile()
    return _Arrive.apply(departed, journey)


class _Journey:
    """Rows on their way, or their gradients on the way back."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._travels: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def start(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """What will hold those that arrive."""
        arriving, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        work = dist.all_to_all_single(
            arriving, rows, output_split_sizes=received, input_split_sizes=sent, group=self.group, async_op=True
        )
        self._travels = work, rows, arriving  # rows, as their memory is read until then
        return arriving

    def wait(self) -> torch.Tensor:
        """They have arrived."""
        assert self._travels is not None  # `start` came before
        (work, _, arrived), self._travels = self._travels, None
        work.wait()
        return arrived


class _Depart(torch.autograd.Function):
    """Rows start forward; their gradients have arrived backward."""

    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, journey: _Journey) -> torch.Tensor:
        ctx.journey = journey
        return journey.start(rows, journey.sent, journey.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.journey.wait(), None


class _Arrive(torch.autograd.Function):
    """Rows have arrived forward; their gradients start backward."""

    @staticmethod
    def forward(ctx: Context, departed: torch.Tensor, journey: _Journey) -> torch.Tensor:
        ctx.journey = journey
        journey.wait()
        return departed.view_as(departed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        journey = ctx.journey
        journey.start(gradient, journey.received, journey.sent)
        return gradient, None  # of the shape that autograd expects; `_Depart` has the rows that come back


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, …], what this rank tells each -> [ranks, …], what each tells this one. Not differentiable."""
    return kept_or(lambda: _all_to_all(counts, None, None, group), COLLECTIVE)


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor itself, whose gradient is multiplied by `factor`."""
    return tensor if factor == 1 else _ScaleGradient.apply(tensor, factor)


def _all_to_all(
    rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Without counts as many rows to each rank."""
    arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(
        arrived, rows.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group
    )
    return arrived
