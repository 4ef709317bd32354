"""Whole tensors of a parallel model, for scripts that need values: what each rank stores is a part of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from hf_parallel.checkpoint import full_state_dict as gather_state
from hf_parallel.checkpoint.slices import axes_and_dims
from hf_parallel.model.anatomy import StoredOrder
from hf_parallel.ranks import assert_all_ranks
from hf_parallel.ranks.mesh import stored

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember(model: nn.Module) -> None:
    """Let `full_tensor` know in which order this model stores its packed weights."""
    _models.add(model)


def parallel_models() -> list[nn.Module]:
    """Those of this process."""
    return list(_models)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the `model.state_dict()` of one process, on rank 0's CPU; empty on the other ranks.

    Collective: all ranks call it. Of a model that is not parallel, what it has itself.
    """
    state: Any = getattr(model, "_hf_parallel", None)
    if state is None:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    assert_all_ranks("full_state_dict")
    whole = gather_state(model, state.mesh)
    own = {stored(parameter).data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    whole = {name: tensor.clone() if tensor.data_ptr() in own else tensor for name, tensor in whole.items()}
    tied = getattr(model, "_hf_parallel_tied_keys", None) or {}
    return whole | {target: whole[source] for target, source in tied.items() if source in whole}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, or of its gradient, on every rank that has a part of it. Collective over these ranks.

    A tensor that is whole is returned as it is. Under a pipeline a stage has the parameters of its layers.

    Raises:
        ValueError: a tensor of the size of a packed weight, of which it is not known how it is stored.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    detached: Any = tensor.detach()
    order, whole = order_of(tensor), detached.full_tensor()
    return whole if order is None else order.to_own(whole)


@torch.no_grad()
def whole_number(tensor: Any) -> torch.Tensor:
    """The one number of a DTensor as a plain tensor, such as a sum over a parameter of which ranks hold parts.

    Collective over the ranks that have a part, in groups apart from training's; none where each has the number.
    """
    states: list[Any] = [vars(model)["_hf_parallel"] for model in _models if "_hf_parallel" in vars(model)]
    groups = states[0].mesh.groups if states else None
    if groups is None or all(placement.is_replicate() for placement in tensor.placements):
        return tensor.detach().full_tensor()
    own = stored(tensor.detach())
    exact = torch.int64 if own.dtype in _EXACT else torch.promote_types(own.dtype, torch.float64)
    number = own.sum().to("cpu", exact)  # zero where another rank stores it
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if not placement.is_replicate():
            group = groups.for_numbers(dist.get_process_group_ranks(tensor.device_mesh.get_group(axis)))
            numbers = [torch.empty_like(number) for _ in range(group.size())]
            dist.all_gather(numbers, number, group=group)
            number = _combined(torch.stack(numbers), placement)
    return number.to(own.device, own.dtype).reshape(tensor.shape)


_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMBINED: dict[str, Any] = {
    "sum": torch.sum,
    "avg": torch.mean,
    "product": torch.prod,
    "max": torch.amax,
    "min": torch.amin,
}


def _combined(numbers: torch.Tensor, placement: Placement) -> torch.Tensor:
    """What the numbers of the ranks along one axis of a mesh come to."""
    norm_type = getattr(placement, "norm_type", None)  # of sums of powers that are norms already
    if norm_type is not None:
        return torch.linalg.vector_norm(numbers, norm_type)
    return _COMBINED[getattr(placement, "reduce_op", "sum")](numbers)


def order_of(tensor: DTensor) -> StoredOrder | None:
    """In which order the rows of a parameter, its data or its gradient are stored; None is the model's own.

    Raises:
        ValueError: it may be, but is not known to be, that of a packed weight.
    """
    if not axes_and_dims(tensor):
        return None  # not cut, as a mean over rows
    alike = False
    for module in (module for model in _models for module in model.modules()):
        orders = vars(module).get("stored_orders", {})
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.shape != tensor.shape:
                continue
            if any(tensor is known or _shares_memory(tensor, known) for known in (parameter, parameter.grad)):
                return orders.get(name)
            alike = alike or name in orders
    if alike:
        raise ValueError(
            f"hf_parallel: a tensor of {tuple(tensor.shape)} may hold packed rows in another order; "
            "give full_tensor the parameter or its gradient"
        )
    return None


def _shares_memory(tensor: torch.Tensor, other: object) -> bool:
    if not isinstance(other, DTensor):
        return False
    address = stored(tensor).data_ptr()
    return address != 0 and address == stored(other).data_ptr()
