"""Column-parallel layers that keep this rank's part of a gathered input and gather it again in the backward.

Autograd would keep the whole input for the weights' gradients: 2 s b h bytes per region that tp does not divide.
Korthikanti et al. (2022, section 4.2.2) keep the part instead, at the price of one more all-gather per region, which
runs while the input's gradient is computed:

    forward     part [b, s / n, h] -> all-gather -> whole [b, s, h] -> q, k, v            kept: part
    backward    part -> all-gather -> whole -> gradients of the weights of v, k, q        dropped after the last
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_parallel.ranks import Started, gather_sequence, join_parts_of_sequence, start_all_gather
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import switch_autocast_off

#: Makes the whole of the parts [n, …] of all ranks.
Join: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def gather_for_linear(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h], or [tokens / n, h] -> [tokens, h]: what `multiply_gathered` can gather again."""
    if torch.compiler.is_compiling():  # the partitioner of the graph gathers again what a checkpoint would
        return checkpoint(gather_sequence, part, group, use_reentrant=False)
    return remember_origin(gather_sequence(part, group), part, group)


def remember_origin(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, join: Join = join_parts_of_sequence
) -> torch.Tensor:
    """Note on `whole` that it was gathered from `part`, and joined as `join` does."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # On the tensor itself: it lives as long, and a checkpoint inside the region passes the same object again.
        vars(whole)["_gathered_from"] = Origin(part.detach(), group, whole._version, join)
    return whole


def multiply_gathered(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of local tensors that keeps only the part of an input from `gather_for_linear`."""
    origin = find_origin_of(input, weight)
    return F.linear(input, weight, bias) if origin is None else _Linear.apply(input, weight, bias, origin)


def find_origin_of(input: torch.Tensor, weight: torch.Tensor) -> Origin | None:
    """Return what a linear may keep in place of its input, if there is such a thing."""
    origin = getattr(input, "_gathered_from", None)
    # An input changed in place is not what would be gathered; for a frozen weight nothing would be kept anyway.
    if origin is None or origin.version != input._version or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    return origin


class _Linear(torch.autograd.Function):
    """whole […, in], weight [out / n, in], bias [out / n] -> […, out / n]."""

    @staticmethod
    def forward(
        ctx: Context, whole: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, origin: Origin
    ) -> torch.Tensor:
        output = F.linear(whole, weight, bias)
        part, ctx.gathered_again = origin.read_by(ctx, output.dtype)
        # Saved as autograd's own linear saves it: FSDP2 frees and refills the memory behind an unsharded weight.
        ctx.save_for_backward(part, weight if ctx.needs_input_grad[0] else None)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        ctx.gathered_again.begin(ctx, part)
        # In the forward's dtype, whatever the caller's context; autograd casts to the dtype of each input.
        with switch_autocast_off(gradient.device.type):
            of_whole = None if weight is None else gradient @ weight.to(gradient.dtype)
            rows = gradient.flatten(0, -2)
            of_weight = rows.t() @ ctx.gathered_again.take(ctx)
            of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_whole, of_weight, of_bias, None


class Reader(Protocol):
    """Who reads a gathered input in the backward."""

    passes: int  # over the graph, counted by `GatheredAgain`


@dataclass(eq=False)
class Origin:
    """The tensor from which a gathered one was gathered; it dies with that one."""

    part: torch.Tensor
    group: dist.ProcessGroup
    version: int
    join: Join
    _kept: dict[torch.dtype, tuple[torch.Tensor, GatheredAgain]] = field(default_factory=dict)

    def read_by(self, reader: Context | Reader, dtype: torch.dtype) -> tuple[torch.Tensor, GatheredAgain]:
        """Return the part in the dtype the reader computes in, one copy for all readers; autocast may lower it."""
        if dtype not in self._kept:
            self._kept[dtype] = self.part.to(dtype), GatheredAgain(self.group, self.join)
        part, gathered_again = self._kept[dtype]
        reader.passes = 0
        gathered_again.readers.add(reader)
        return part, gathered_again


@dataclass(eq=False)
class GatheredAgain:
    """An input in the backward: gathered when the first linear asks, dropped when the last one has read it.

    It holds no part between forward and backward: under checkpointing there is none until it is recomputed. Whether to
    gather depends on the order of the backward only, which is the same on all ranks; when to drop, on who still lives.
    """

    group: dist.ProcessGroup
    join: Join
    passes: int = 0
    readers: weakref.WeakSet[Context | Reader] = field(default_factory=weakref.WeakSet)
    _started: Started | None = None
    _whole: torch.Tensor | None = None

    def begin(self, reader: Reader, part: torch.Tensor) -> None:
        """Start to gather, unless another reader has in this pass over the graph."""
        if reader.passes == self.passes:
            self.passes += 1
            self._started = start_all_gather(part, self.group)

    def take(self, reader: Reader) -> torch.Tensor:
        """Return the whole input as [rows, h], after `begin`."""
        if self._started is not None:
            self._whole, self._started = self.join(self._started.wait()).flatten(0, -2), None
        whole, reader.passes = self._whole, self.passes
        assert whole is not None
        if all(other.passes == self.passes for other in self.readers):
            self._whole = None
        return whole
