"""Operations on weights that ranks hold in parts and on tensors that are whole, which torch refuses to mix.

Whole are the copies and averages that a script makes of a model before `prepare` or Trainer divides it, what it draws
by a weight's shape, and what it reads from a file. As in one process, and as under DDP, every rank has all of them.
What stays whole (an average, a number of a copy) is computed from the gathered weights. What becomes part of the model
(`p.copy_(x)`) or of its gradients (a distance from a copy) is cut as the weight is, after its ranks have shown that
they have the same numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.apply.weights import (
    full_tensor,
    is_constant,
    is_same_on_ranks,
    keep_order,
    knows_order,
    list_parallel_models,
    order_of,
    reduce_to_whole_number,
)
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.ask.keys.sizes import SHARDS
from hf_parallel.ask.session import of_session
from hf_parallel.axes.data.reach import Reach, find_reaches
from hf_parallel.axes.data.units import wait_for_reductions
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.ranks.desync import is_rank_0_alone
from hf_parallel.ranks.mesh import EXPERT_AXES, get_stored, place_as
from hf_parallel.ranks.steps import call_after_steps, call_before_steps

#: Operations of which one tensor may be whole: element by element, lists of such, and products, as by a head.
_ELEMENTWISE = (
    "add add_ sub sub_ rsub mul mul_ div div_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ copy_ maximum minimum "
    "clone abs neg where pow eq ne lt le gt ge mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward "
    "huber_loss huber_loss_backward"
)
_PRODUCTS = ("mm", "addmm", "mv", "dot", "embedding", "cat", "stack")
_LISTS = "add add_ sub sub_ mul mul_ div div_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ copy_ maximum minimum"


@dataclass
class _Proved:
    """Whole tensors of which the ranks have shown the same numbers: the version at that time, and the ranks' mesh."""

    versions: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


@dataclass
class _Paused:
    """The operations that torch has to itself while an optimizer steps; none where no layout has taken them over."""

    operations: set[Any] = field(default_factory=set)


@functools.cache
def list_operations() -> tuple[Any, ...]:
    """Return the operations that `combine` computes, each with one name and one set of argument types."""
    names = [*_ELEMENTWISE.split(), *_PRODUCTS] + [f"_foreach_{name}" for name in _LISTS.split()]
    packets = [getattr(torch.ops.aten, name) for name in names]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def pause_in_steps() -> None:
    """Leave torch's own optimizers to torch, which step by lists of parts alone. A second call changes nothing."""
    call_before_steps(_pause)
    call_after_steps(_go_on)


def _pause(optimizer: Optimizer, *rest: object) -> None:
    # What steps on parts alone (`step_on_local_parts`) has no DTensors then.
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if type(optimizer).__module__.startswith("torch.optim") and any(isinstance(p, DTensor) for p in parameters):
        if all(reach is Reach.NUMBERS for reach in find_reaches(optimizer)):
            return
        handlers = DTensor._op_dispatcher._custom_op_handlers
        taken = {operation for operation in list_operations() if handlers.pop(operation, None) is not None}
        of_session(_Paused).operations |= taken


def _go_on(*rest: object) -> None:
    paused = of_session(_Paused)
    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(paused.operations, combine))
    paused.operations.clear()


def combine(operation: Any, args: tuple, kwargs: dict) -> Any:
    """Compute an operation on parts of weights and whole tensors, as torch's dispatcher asks for it.

    Collective over the ranks of a weight if one of the tensors is whole. Parts alone are torch's own.

    Raises:
        NotImplementedError: the weight would take numbers which its ranks do not share, or a whole tensor is to have
            gradients of parts.
    """
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    parts = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    target = next(iter(tree_leaves(kwargs.get("out", args[0]))), None) if operation._schema.is_mutable else None
    is_average = isinstance(target, torch.Tensor) and not isinstance(target, DTensor)
    wholes = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and (tensor.numel() > 1 or is_average)]
    is_partial = isinstance(target, DTensor) and any(placement.is_partial() for placement in target.placements)
    if not wholes or is_partial or not all(map(is_of_layout, parts)):
        return _compute_as_torch(operation, args, kwargs, parts)
    if isinstance(args[0], Sequence) and len(args[0]) > 1 and operation._schema.name.startswith("aten::_foreach_"):
        return _combine_each(operation, args, kwargs)
    if not all(map(knows_order, parts)):
        raise NotImplementedError(
            f"hf_parallel: {operation._schema.name.removeprefix('aten::')} of a whole tensor and of what was computed "
            "of packed weights, whose rows ranks store in another order: hf_parallel.full_tensor(p) of a parameter is "
            "whole"
        )
    is_followed = torch._C._current_graph_task_id() != -1  # a backward pass, whose results are gradients of parts
    is_followed |= torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if is_followed and is_average:
        raise NotImplementedError(
            f"hf_parallel: {operation._schema.name.removeprefix('aten::')} with gradients of weights, of which ranks "
            "store parts, into a tensor that is whole: loss = loss + penalty works where loss += penalty does not"
        )
    if is_followed or isinstance(target, DTensor):
        args, kwargs = tree_map(_add_up, (args, kwargs))
        parts = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
        args, kwargs = tree_map(lambda value: _take_part(operation, value, parts), (args, kwargs))
        return _compute_as_torch(operation, args, kwargs, parts)
    args, kwargs = tree_map(lambda value: full_tensor(value) if isinstance(value, DTensor) else value, (args, kwargs))
    return operation(*args, **kwargs)


def _combine_each(operation: Any, args: tuple, kwargs: dict) -> list | None:
    """Compute an operation on lists tensor by tensor, so that one weight at a time is gathered."""

    def pick(number: int) -> Callable[[Any], Any]:
        return lambda value: [value[number]] if isinstance(value, Sequence) else value

    results = [
        operation(*map(pick(number), args), **{key: pick(number)(value) for key, value in kwargs.items()})
        for number in range(len(args[0]))
    ]
    return None if operation._schema.is_mutable else [tensor for result in results for tensor in result]


def _compute_as_torch(operation: Any, args: tuple, kwargs: dict, parts: list[DTensor]) -> Any:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(operation, None)
    try:
        result = operation(*args, **kwargs)
    finally:
        handlers[operation] = combine  # type: ignore[assignment]
    if operation._schema.name.removeprefix("aten::") not in _PRODUCTS:
        keep_order(result, parts)
    return result


def _add_up(value: Any) -> Any:
    if not isinstance(value, DTensor) or not any(placement.is_partial() for placement in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if one.is_partial() else one for one in value.placements])


def _take_part(operation: Any, value: Any, parts: list[DTensor]) -> Any:
    """Return this rank's part of a whole tensor, cut as the weight of its shape is; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.numel() == 1:
        return value
    alike = [part for part in parts if part.shape == value.shape]
    weight = next((part for part in alike if not is_constant(part)), next(iter(alike), None))
    if weight is None or value.requires_grad:
        return value  # torch refuses it
    _prove(operation._schema.name.removeprefix("aten::"), value, weight)
    part, stored = read_part(value, find_local_part(weight, order_of(weight))), get_stored(weight)
    return place_as(weight, part.to(stored.device)) if part.shape == stored.shape else value


def take_part_of_gradient(whole: torch.Tensor, weight: DTensor) -> DTensor:
    """Return this rank's part of a whole gradient of a weight. Collective over the ranks of the weight."""
    _prove("p.grad = x", whole, weight)
    part = read_part(whole.as_subclass(torch.Tensor), find_local_part(weight, order_of(weight)))
    return place_as(weight, part.to(get_stored(weight).device, copy=True))


def _prove(name: str, whole: torch.Tensor, weight: DTensor) -> None:
    versions = of_session(_Proved).versions
    proof = None if whole.is_inference() else (whole._version, weight.device_mesh)
    if proof is not None and versions.get(whole) == proof:
        return
    if is_rank_0_alone(f"{name} of a weight and a whole tensor"):
        raise NotImplementedError(
            f"hf_parallel: rank 0 alone calls {name} of a weight and a whole tensor, and other ranks have the weight, "
            "too: call ema.copy_to(…) and ema.restore(…), or what else changes weights, on all ranks"
        )
    if not is_same_on_ranks(whole, weight):
        raise NotImplementedError(
            f"hf_parallel: {name} of a weight of {tuple(weight.shape)} and a tensor of which its "
            f"{weight.device_mesh.size()} ranks have other numbers: a copy that all ranks change alike works, and "
            "noise drawn after torch.manual_seed with one number on all ranks, times numbers that all ranks have"
        )
    if proof is not None:
        versions[whole] = proof


class _Number(torch.autograd.Function):
    """Make a plain number of one that ranks hold in parts; its gradient is the mean of what the ranks give it.

    A loss may be weighed by what a data rank has of a batch, and a part of a weight has a gradient on one rank alone.
    """

    @staticmethod
    def forward(ctx: Any, number: DTensor) -> torch.Tensor:
        ctx.spec = copy.copy(number._spec)
        ctx.spec.placements = (Replicate(),) * number.device_mesh.ndim
        return reduce_to_whole_number(number)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:  # type: ignore[override]
        for model in list_parallel_models():
            wait_for_reductions(model)
        mesh: Any = ctx.spec.mesh
        mean = gradient.to(mesh.device_type, copy=True)
        for axis, name in enumerate(mesh.mesh_dim_names):
            if name not in TP_AXES:
                dist.all_reduce(mean, group=mesh.get_group(axis))
                mean /= mesh.size(axis)
        return DTensor(mean.to(gradient.device), ctx.spec, requires_grad=False)


def make_number(tensor: Any) -> Any:
    """Return a number that is computed of parts of weights as a plain tensor; anything else as it is.

    Collective over the ranks of the weights, here and in the backward pass.
    """
    if not isinstance(tensor, DTensor) or tensor.ndim or not is_of_layout(tensor):
        return tensor
    is_followed = tensor.requires_grad and torch.is_grad_enabled()
    return _Number.apply(tensor) if is_followed else reduce_to_whole_number(tensor)


def is_of_layout(tensor: DTensor) -> bool:
    """Return whether a layout has cut this tensor, rather than a script by a mesh of its own."""
    known = {axis.name for axis in ParallelConfig.mesh_axes}.union(EXPERT_AXES, TP_AXES, (SHARDS,))
    return set(tensor.device_mesh.mesh_dim_names or ("",)) <= known
