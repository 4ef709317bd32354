"""A model built from code must hold the same values on all ranks before each rank keeps its slice."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data.copies import follow_copies
from hf_parallel.axes.data.units import (
    WHOLE,
    drop_empty_groups,
    get_groups_of,
    get_state_of,
    iterate_parameter_groups,
    iterate_sharded_modules,
    renew_group,
)
from hf_parallel.axes.data.zero import lend

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from hf_parallel.ranks.mesh import ParallelMesh

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
    checksums = torch.stack([compute_checksum(tensor, device) for tensor in tensors])
    extremes = torch.stack([checksums, ~checksums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if torch.equal(extremes[0], ~extremes[1]):
        return False
    send_from_first(tensors, [dist.distributed_c10d._get_default_group()], device)
    return True


@torch.no_grad()
def send_from_first(tensors: Iterable[torch.Tensor], groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Give plain tensors the values of the first rank, of one group after another. Collective over these groups."""
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            carrier = tensor.to(device).contiguous()
            for group in groups:
                dist.broadcast(carrier, group=group, group_src=0)
            tensor.copy_(carrier)


def compute_checksum(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a number of 64 bits that a change of any element changes, and an exchange of two is all but sure to."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    weights, products = _make_checksum_buffers(device)
    values = tensor.contiguous().view(-1).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    even = values.numel() // 8 * 8
    # The bits of a tensor as words, and what fills none byte by byte.
    for words in (*values[:even].view(torch.int64).split(weights.numel()), values[even:].to(torch.int64)):
        count = words.numel()
        # All modulo 2^64, where a product with an odd number forgets nothing.
        total = total * _FACTOR + torch.mul(words.to(device), weights[:count], out=products[:count]).sum()
    return total


@functools.cache
def _make_checksum_buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd numbers in no order, and memory for products: on a CPU as much as its cache holds."""
    generator, count = torch.Generator().manual_seed(0), 1 << (17 if device.type == "cpu" else 23)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return (drawn | 1).to(device), torch.empty(count, dtype=torch.int64, device=device)


# ---- Parameters that come into a model after `fully_shard`, such as adapters: into the group of the unit they are in
# So they are gathered and reduced with the layer around them, in the same collectives. A weight without gradient takes
# part in no reduction, so of a frozen layer only what was added is reduced. torch has no call for this: a unit's state
# and its parameter group are its internals, looked at in torch 2.13.


def add_late_parameters(root: nn.Module, mesh: ParallelMesh | None = None) -> None:
    """Shard what lies in the units below `root` and is in no group yet; whole on all data ranks.

    Args:
        mesh: shard only what trains, with the values of the first rank; without it all, whose values are equal.
    """
    for group, modules, new in list(iterate_late_parameters(root, trained=mesh is not None)):
        if mesh is not None:
            for parameter in new:
                parameter.data = parameter.data.to(mesh.device).contiguous()
            groups = [mesh.sharing_mesh.get_group(axis) for axis in range(mesh.sharing_mesh.ndim)]
            send_from_first(new, [*groups, *([mesh.group("tp")] if mesh.size("tp") > 1 else [])], mesh.device)
        for parameter, where in zip(new, _get_param_module_infos(new, modules), strict=True):
            policies = get_state_of(group.modules[0])._mp_policy, group.offload_policy
            meshes = group.mesh_info, group.post_forward_mesh_info
            held = FSDPParam(parameter, where, *meshes, group.device, None, *policies)
            lend(held)
            group.fsdp_params.append(held)
        renew_group(group)
    follow_copies(root)


def iterate_late_parameters(
    root: nn.Module, trained: bool
) -> Iterator[tuple[FSDPParamGroup, tuple[nn.Module, ...], list[nn.Parameter]]]:
    """Yield the units' groups with what is in them and in no group yet.

    Args:
        trained: only whole parameters that train; those of no dim are reduced by themselves.
    """
    whole = getattr(root, WHOLE, ())
    for unit in iterate_sharded_modules(root):
        groups = get_groups_of(unit)
        infos = (held._module_info for group in groups for held in group.fsdp_params)
        known = {place for info in infos for place in find_registrations(info)}
        modules = tuple(_iterate_own_modules(cast(nn.Module, unit)))
        new: dict[int, nn.Parameter] = {}
        registered = ((id(module), name, p) for module in modules for name, p in module._parameters.items())
        for owner, name, p in registered:
            if p is None or (owner, name) in known or p in whole:
                continue
            # Parameters of experts that no other rank holds are left out of all groups.
            is_shared_out = "ep" in (getattr(getattr(p, "device_mesh", None), "mesh_dim_names", None) or ())
            takes = not trained or (p.requires_grad and p.dim() and not isinstance(p, DTensor))
            if takes and not is_shared_out:
                new[id(p)] = p
        if new and not groups:
            raise NotImplementedError(
                "hf_parallel: new parameters in a unit of FSDP2 whose own ones were merged away are not part of this "
                "version; save the merged model and load it"
            )
        if new:
            yield groups[0], modules, list(new.values())


def remove_late_parameters(root: nn.Module, changed: Iterable[nn.Module] = ()) -> None:
    """Let the units below `root` forget parameters whose modules are no longer in them, or get others."""
    gone = {id(module) for module in changed}
    for unit in iterate_sharded_modules(root):
        here = {id(module) for module in _iterate_own_modules(cast(nn.Module, unit))} - gone
        for group in get_groups_of(unit):
            places = [(held, held._module_info) for held in group.fsdp_params]
            group.fsdp_params[:] = [
                held
                for held, place in places
                if id(place.module) in here and place.param_name in place.module._parameters
            ]
            renew_group(group)
        if not gone:  # modules that get other parameters need their groups
            drop_empty_groups(unit)


def find_registrations(info: ParamModuleInfo) -> Iterator[tuple[int, str]]:
    """Return the modules and names of a parameter.

    Loading puts other objects there, so the parameter itself tells nothing.
    """
    yield id(info.module), info.param_name
    yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def _iterate_own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """The unit and what is below it, without inner units."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _iterate_own_modules(child)


# ---- `p.data = x` of a parameter that ranks hold parts of: it shares x's memory afterwards, as an ordinary one would
# FSDP2 gathers from memory that it remembers beside the parameter, padded where ranks hold unequal parts. torch has no
# call for the exchange: a unit's parameter group is its internal, looked at in torch 2.13.

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: By a parameter's id: the group that gathers it, and what FSDP2 knows of it. A weak reference to a parameter would
#: keep torch from moving or casting its module.
_known: dict[int, tuple[weakref.ref[FSDPParamGroup], weakref.ref[FSDPParam], str]] = {}


class Held(NamedTuple):
    """The group that gathers a parameter, what FSDP2 knows of it there, and where it rests."""

    group: FSDPParamGroup
    held: FSDPParam
    offload: str

    def knows(self, parameter: torch.Tensor) -> bool:
        """Return whether this is the tensor that FSDP2 has for these numbers, stored or gathered."""
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return any(getattr(self.held, name, None) is parameter for name in names)


def assign_memory(parameter: DTensor, value: DTensor, found: Held | None) -> None:
    """Let `parameter` be what `value` is, in its memory where that can be gathered from.

    Args:
        value: of the same shape and placements.
        found: who gathers it, if anybody does.
    """
    if found is not None:
        found.group.reshard()  # what was gathered is no longer what it was
    _SET_DATA(parameter, value)  # what the tensor around the stored part says of itself
    parameter._spec, parameter._local_tensor = copy.copy(value._spec), value._local_tensor
    if found is not None:
        found.held.reset_sharded_param()
        value._local_tensor = parameter._local_tensor  # also where FSDP2 has padded it


def find_holder(parameter: torch.Tensor, models: Iterable[nn.Module]) -> Held | None:
    """Return what gathers a parameter of one of these models; None for a gradient."""
    found = _recall_holder(parameter)
    if found is not None or not isinstance(parameter, nn.Parameter):
        return found
    for gone in [number for number, (_, held, _) in _known.items() if held() is None]:
        del _known[gone]
    for model in models:
        state: Any = getattr(model, "_hf_parallel", None)
        groups = iterate_parameter_groups(state.root) if state is not None and state.config.sharing_size > 1 else ()
        for group in groups:
            for held in group.fsdp_params:
                _known[id(held.sharded_param)] = weakref.ref(group), weakref.ref(held), state.config.offload
    return _recall_holder(parameter)


def forget_holders() -> None:
    """Drop the references to parameters: torch exchanges none that is referred to, as where a model is moved."""
    _known.clear()


def find_holder_at(module: nn.Module, name: str, models: Iterable[nn.Module]) -> Held | None:
    """Return what gathers the parameter that a module has under a name, whatever is there now."""
    for model in models:
        state: Any = getattr(model, "_hf_parallel", None)
        for group in iterate_parameter_groups(state.root) if state is not None else ():
            for held in group.fsdp_params:
                if (id(module), name) in find_registrations(held._module_info):
                    return Held(group, held, state.config.offload)
    return None


def _recall_holder(parameter: torch.Tensor) -> Held | None:
    known = _known.get(id(parameter))
    group, held = (known[0](), known[1]()) if known else (None, None)
    if known is None or group is None or held is None or held.sharded_param is not parameter:
        return None
    return Held(group, held, known[2])
