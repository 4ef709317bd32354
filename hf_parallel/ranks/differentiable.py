"""The conjugate pairs of Megatron-LM: f and g (Shoeybi et al., 2019, section 3), and their forms along the sequence
(Korthikanti et al., 2022, section 4.2.2).

Each takes a local tensor and a process group. Sequence forms cut tokens: those of all rows of [batch, seq, hidden] one
after another, or of [tokens, hidden] where a model flattens. So a part is consecutive in memory, whatever the batch,
and nothing is copied before or after a collective; a part of [batch, seq, hidden] has the shape
[batch, seq / n, hidden], although its rows are not those of the whole:

    rows a, b of four tokens, two ranks    rank 0: [[a0 a1] [a2 a3]]    rank 1: [[b0 b1] [b2 b3]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import function as autograd_function
from torch.distributed.distributed_c10d import _resolve_process_group

from hf_parallel.ranks.observed import COLLECTIVE, keep_or_compute

Pass = TypeVar("Pass", bound=Callable[..., torch.Tensor])

# ---- Collectives that have only started: compute something else, then `wait()` for the result. Not differentiable
# On CUDA a wait holds back what is computed after it, not the process. These call c10d directly: torch's functional
# collectives do the same with three to five times the overhead.

# torch 2.13 renamed gathers and this one; the former names warn.
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def call_all_gather(output: torch.Tensor, own: torch.Tensor, **settings: Any) -> Any:
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
    return Started(gathered, call_all_gather(gathered.flatten(), tensor.flatten(), group=group, async_op=True))


def start_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None) -> Started:
    """Start to sum [n, …] over ranks to this rank's part […]; into `own`, if given and contiguous."""
    own = tensor.new_empty(tensor.shape[1:]) if own is None else own
    return Started(own, _reduce_scatter_op(own.flatten(), tensor.flatten(), group=group, async_op=True))


# ---- The same as operations of a compiled graph, which torch.compile sees as one with a known output shape
# The graph of a layer does not break there, and who listens to collectives (`observed.py`) hears of each.


@torch.library.custom_op("hf_parallel::all_reduce", mutates_args=())
def _run_all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    own = tensor.clone(memory_format=torch.contiguous_format)
    return start_all_reduce(own, _resolve_process_group(group)).wait()  # type: ignore[arg-type]


@torch.library.custom_op("hf_parallel::all_gather", mutates_args=())
def _run_all_gather(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return start_all_gather(tensor, _resolve_process_group(group)).wait()  # type: ignore[arg-type]


@torch.library.custom_op("hf_parallel::reduce_scatter", mutates_args=())
def _run_reduce_scatter(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return start_reduce_scatter(tensor, _resolve_process_group(group)).wait()  # type: ignore[arg-type]


# The shapes of their results.
_run_all_reduce.register_fake(lambda own, group: torch.empty_like(own, memory_format=torch.contiguous_format))
_run_all_gather.register_fake(lambda own, group, size: own.new_empty(size, *own.shape))
_run_reduce_scatter.register_fake(lambda own, group: own.new_empty(own.shape[1:]))

# ---- Collectives that have a result, in a graph or outside. Not differentiable --------------------------------------


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return a new reduced tensor: in place would change what autograd has saved. Not differentiable."""
    if torch.compiler.is_compiling():
        return torch.ops.hf_parallel.all_reduce(tensor, group.group_name)
    return start_all_reduce(tensor.clone(memory_format=torch.contiguous_format), group, operation).wait()


def cut_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, s, h] -> [n, …, s / n, h]: the tokens of each rank. A view of what is contiguous."""
    length, size = tensor.shape[-2], group.size()
    if length % size:
        raise ValueError(f"hf_parallel: {length} tokens cannot be cut into {size} equal parts")
    # Flat in between: a graph of any number of sequences would else hold for even or odd ones alone.
    return tensor.flatten(0, -2).unflatten(0, (size, *tensor.shape[:-2], length // size))


def join_parts_of_sequence(parts: torch.Tensor) -> torch.Tensor:
    """[n, …, s / n, h] -> […, s, h]: what `cut_sequence` took apart.

    Never a view: models may change in place what leaves a Function, which autograd does not allow for views.
    """
    size, *before, length, features = parts.shape
    return torch.ops.aten._unsafe_view(parts.flatten(0, -2), (*before, size * length, features))


def _gather_from_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.hf_parallel.all_gather(tensor, group.group_name, group.size())
    return start_all_gather(tensor, group).wait()


def _sum_own_part(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.hf_parallel.reduce_scatter(parts, group.group_name)
    return start_reduce_scatter(parts, group).wait()


def _gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return join_parts_of_sequence(_gather_from_all(tensor, group))


def _scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _sum_own_part(cut_sequence(tensor, group), group)


def _scatter_last_dims(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _sum_own_part(tensor.unflatten(-1, (group.size(), -1)).movedim(-2, 0), group)


def _with_last_dims_of_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    joined = _gather_from_all(tensor, group).movedim(0, -2).flatten(-2)
    return torch.ops.aten._unsafe_view(joined, joined.shape)


# ---- The pairs: each function is its own forward pass; its decorator names the backward pass ------------------------


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Do as torch's decorator of this name, whose `no_grad` costs as much as it does: autograd is in it already."""
    guarded = autograd_function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Context, *gradients: torch.Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call


def with_gradient(back: Callable[..., torch.Tensor]) -> Callable[[Pass], Pass]:
    """Return a decorator that makes a function of a tensor differentiable, once.

    Args:
        back: takes the gradient of the result, and the function's arguments after the tensor.
    """

    def make(there: Pass) -> Pass:
        def forward(ctx: Context, tensor: torch.Tensor, *given: object) -> torch.Tensor:
            ctx.given = given
            return there(tensor, *given)

        @once_differentiable
        def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return back(gradient, *ctx.given), *[None for _ in ctx.given]

        passes = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function: Any = type(there.__name__, (torch.autograd.Function,), passes)

        @functools.wraps(there)
        def call(tensor: torch.Tensor, *given: object) -> torch.Tensor:
            return function.apply(tensor, *given)

        return cast(Pass, call)

    return make


@with_gradient(all_reduce)
def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter a region whose ranks each use the same tensor for a part of the work (f): all-reduce backward."""
    return tensor.view_as(tensor)


@with_gradient(lambda g, group: all_reduce(g.to(torch.promote_types(g.dtype, torch.float32)), group).to(g.dtype))
def copy_weight_to_group(weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter such a region with a weight that all ranks hold and use for a part of the work.

    What ranks add to its gradient is added in fp32, as few bits of a sum of many would be left.
    """
    return weight.view_as(weight)


@with_gradient(lambda gradient, group: gradient)
def reduce_from_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave a region whose ranks each hold a partial sum (g): all-reduce forward, identity backward."""
    return keep_or_compute(lambda: all_reduce(tensor, group), COLLECTIVE)


@with_gradient(lambda gradient, group: gradient)
def reduce_product_from_group(product: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Leave it with a tensor that nobody else reads, autograd neither: its own memory takes the sum."""
    if torch.compiler.is_compiling():
        return all_reduce(product, group)
    whole = start_all_reduce(product.contiguous(), group).wait()
    return torch.ops.aten._unsafe_view(whole, whole.shape)  # not the input, of which autograd would make a view


@with_gradient(_scatter_sequence)
def gather_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h]: enter such a region with parts of the sequence; reduce-scatter backward."""
    return _gather_sequence(tensor, group)


@with_gradient(_gather_sequence)
def reduce_scatter_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h] partial sums -> [b, s / n, h]: leave it with parts of the sequence; all-gather backward."""
    return keep_or_compute(lambda: _scatter_sequence(tensor, group), COLLECTIVE)


@with_gradient(_gather_sequence)
def split_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h], the same on all ranks -> [b, s / n, h], this rank's; all-gather backward."""
    return cut_sequence(tensor, group)[group.rank()].clone()  # the whole may go


@with_gradient(lambda gradient, group: cut_sequence(gradient, group)[group.rank()])
def join_sequence(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s / n, h] -> [b, s, h] on all ranks, which must go on to compute the same thing."""
    return _gather_sequence(tensor, group)


@with_gradient(lambda gradient, group: gradient.chunk(group.size(), dim=-1)[group.rank()].contiguous())
def join_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all, which must go on to compute the same thing."""
    return _with_last_dims_of_all(tensor, group)


@with_gradient(_scatter_last_dims)
def gather_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n] on each rank -> […, n * group size] on all, each of which uses it for a part of the work."""
    return _with_last_dims_of_all(tensor, group)


@with_gradient(_with_last_dims_of_all)
def scatter_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n * group size] partial sums -> […, n]: this rank's features of the sum; all-gather backward."""
    return keep_or_compute(lambda: _scatter_last_dims(tensor, group), COLLECTIVE)


@with_gradient(_with_last_dims_of_all)
def split_last_dim(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[…, n * group size], the same on all ranks -> […, n], this rank's; all-gather backward."""
    return tensor.chunk(group.size(), dim=-1)[group.rank()].clone()  # the whole may go


@with_gradient(all_reduce)
def sum_of_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Partial sums -> the sum on all ranks, which each use it for a part of the work: all-reduce in both passes."""
    return all_reduce(tensor, group)


# ---- The context that autograd hands to both passes of a `torch.autograd.Function` ----------------------------------


class Context(Protocol):
    """The context of one call: what the forward pass leaves in it the backward pass finds."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]  # what `save_for_backward` was given
    save_for_backward: Callable[..., None]  # inputs and outputs, or None; it is seen whether they are changed
    mark_non_differentiable: Callable[..., None]  # outputs
    set_materialize_grads: Callable[[bool], None]  # whether gradients that nobody has are zeros, or None

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
