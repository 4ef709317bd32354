"""The conjugate pairs of Megatron-LM: f and g (Shoeybi et al., 2019, section 3), and their forms along the sequence
(Korthikanti et al., 2022, section 4.2.2).

Each takes a local tensor and a process group. Sequence forms cut tokens: those of all rows of [batch, seq, hidden] one
after another, or of [tokens, hidden] where a model flattens. So a part is consecutive in memory, whatever the batch,
and nothing is copied before or after a collective; a part of [batch, seq, hidden] has the shape
[batch, seq / n, hidden], although its rows are not those of the whole:

    rows a, b of four tokens, two ranks    rank 0: [[a0 a1] [a2 a3]]    rank 1: [[b0 b1] [b2 b3]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hf_parallel.ranks.in_graphs import gather_in_graph, scatter_in_graph, sum_in_graph
from hf_parallel.ranks.observed import COLLECTIVE, kept_or

# ---- Collectives that have only started: compute something else, then `wait()` for the result. Not differentiable
# On CUDA a wait holds back what is computed after it, not the process. These call c10d directly: torch's functional
# collectives do the same with three to five times the overhead.


# torch 2.13 renamed gathers and this one; the former names warn.
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_op(output: torch.Tensor, own: torch.Tensor, **settings: Any) -> Any:
    """Gather, by the function torch.distributed has at this call: who counts collectives replaces it there."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, own, **settings)


class Started(NamedTuple):
    """A collective under way: its value is in `result` once the work is done."""

    result: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """Return the result, once it is there."""
        self.work.wait()
        return self.result


def start_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Started:
    """Start to sum over ranks, in place of a contiguous tensor."""
    return Started(tensor, dist.all_reduce(tensor, operation, group, async_op=True))


def start_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> Started:
    """Start to gather […] of each rank to [n, …]."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    return Started(gathered, all_gather_op(gathered.flatten(), tensor.flatten(), group=group, async_op=True))


def start_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None) -> Started:
    """Start to sum [n, …] over ranks to this rank's part […]; into `own`, if given and contiguous."""
    own = tensor.new_empty(tensor.shape[1:]) if own is None else own
    return Started(own, _reduce_scatter_op(own.flatten(), tensor.flatten(), group=group, async_op=True))


class _Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _CopyWeight(torch.autograd.Function):
    """f for a weight: what ranks add to its gradient is added in fp32, as few bits of a sum of many would be left."""

    @staticmethod
    def forward(ctx: Context, weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return all_reduce(wide, ctx.group).to(gradient.dtype), None


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return kept_or(lambda: all_reduce(tensor, group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    """All-gather of tokens forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(gradient, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter of tokens forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return kept_or(lambda: _scattered(tensor, group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    """This rank's tokens forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return parts_of_sequence(tensor, group)[group.rank()].clone()  # the whole may go

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _JoinSequence(torch.autograd.Function):
    """All-gather of tokens forward, this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return parts_of_sequence(gradient, ctx.group)[ctx.group.rank()], None


class _GatherLastDim(torch.autograd.Function):
    """All-gather of features forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _with_last_dims_of_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _last_dims_scattered(gradient, ctx.group), None


class _JoinLastDim(torch.autograd.Function):
    """All-gather of features forward, this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _with_last_dims_of_all(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


class _ScatterLastDim(torch.autograd.Function):
    """Reduce-scatter of features forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return kept_or(lambda: _last_dims_scattered(tensor, group), COLLECTIVE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _with_last_dims_of_all(gradient, ctx.group), None


class _SplitLastDim(torch.autograd.Function):
    """This rank's features forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.chunk(group.size(), dim=-1)[group.rank()].clone()  # the whole may go

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _with_last_dims_of_all(gradient, ctx.group), None


class _SumOfParts(torch.autograd.Function):
    """All-reduce in both passes: each rank gives a part of a sum, and uses the whole sum for a part of the work."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_reduce(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter a region whose ranks each use the same tensor for a part of the work (f)."""
    return _Copy.apply(tensor, group)


def copy_weight_to_group(weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter such a region with a weight that all ranks hold and use for a part of the work."""
    return _CopyWeight.apply(weight, group)


def reduce_from_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave a region whose ranks each hold a partial sum (g)."""
    return _Reduce.apply(tensor, group)


def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h]: enter such a region with parts of the sequence."""
    return _GatherSequence.apply(tensor, group)


def begin_gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to gather as `gather_sequence` does; what it returns waits for the result. Not differentiable."""
    parts = start_all_gather(tensor, group)
    return lambda: whole_sequence(parts.wait())


def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h] partial sums -> [b, s / n, h]: leave it with parts of the sequence."""
    return _ReduceScatterSequence.apply(tensor, group)


def split_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h], the same on all ranks -> [b, s / n, h]."""
    return _SplitSequence.apply(tensor, group)


def join_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h] on all ranks, which must go on to compute the same thing."""
    return _JoinSequence.apply(tensor, group)


def join_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all, which must go on to compute the same thing."""
    return _JoinLastDim.apply(tensor, group)


def gather_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all, each of which uses it for a part of the work."""
    return _GatherLastDim.apply(tensor, group)


def begin_gather_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to gather as `gather_last_dim` does; what it returns waits for the result. Not differentiable."""
    parts = start_all_gather(tensor, group)
    return lambda: parts.wait().movedim(0, -2).flatten(-2)


def scatter_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n * group size] partial sums -> […, n]: this rank's features of the sum."""
    return _ScatterLastDim.apply(tensor, group)


def split_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n * group size], the same on all ranks -> […, n]."""
    return _SplitLastDim.apply(tensor, group)


def sum_of_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Partial sums -> the sum on all ranks, each of which uses it for a part of the work."""
    return _SumOfParts.apply(tensor, group)


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return a new reduced tensor: in place would change what autograd has saved. Not differentiable."""
    if torch.compiler.is_compiling():
        return sum_in_graph(tensor, group)
    return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group, operation).wait()


def parts_of_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, h] -> [n, …, s / n, h]: the tokens of each rank. A view of what is contiguous."""
    length, size = tensor.shape[-2], group.size()
    if length % size:
        raise ValueError(f"hf_parallel: {length} tokens cannot be cut into {size} equal parts")
    return tensor.reshape(size, *tensor.shape[:-2], length // size, tensor.shape[-1])


def whole_sequence(parts: torch.Tensor) -> torch.Tensor:
    """[n, …, s / n, h] -> […, s, h]: what `parts_of_sequence` took apart.

    Never a view: models may change in place what leaves a Function, which autograd does not allow for views.
    """
    size, *before, length, features = parts.shape
    return torch.ops.aten._unsafe_view(parts, (*before, size * length, features))


def _of_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return gather_in_graph(tensor, group)
    return start_all_gather(tensor, group).wait()


def _own_sum(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return scatter_in_graph(parts, group)
    return start_reduce_scatter(parts, group).wait()


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole_sequence(_of_all(tensor, group))


def _scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _own_sum(parts_of_sequence(tensor, group), group)


def _last_dims_scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = tensor.unflatten(-1, (group.size(), -1)).movedim(-2, 0)
    return _own_sum(parts, group)


def _with_last_dims_of_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    joined = _of_all(tensor, group).movedim(0, -2).flatten(-2)
    return torch.ops.aten._unsafe_view(joined, joined.shape)


# ---- The context that autograd hands to both passes of a `torch.autograd.Function` ----------------------------------


class Context(Protocol):
    """The context of one call: what the forward pass leaves in it the backward pass finds."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors `save_for_backward` was given."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep inputs and outputs, in a way that sees whether they are changed."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Outputs without a gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Are gradients that nobody has zeros, or None?"""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
