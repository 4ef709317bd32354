"""Parameters that come into a model after `fully_shard`, such as adapters: into the group of the unit they are in.

So they are gathered and reduced with the layer around them, in the same collectives. A weight without gradient takes
part in no reduction, so of a frozen layer only what was added is reduced. torch has no call for this: a unit's state
and its parameter group are its internals, looked at in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos

from hf_parallel.axes.data.replicas import lend
from hf_parallel.axes.data.units import groups_of, sharded_modules

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def add_late_parameters(root: nn.Module) -> None:
    """Shard what lies in the units below `root` and is in no group yet; whole and equal on all data ranks."""
    for unit in sharded_modules(root):
        groups = groups_of(unit)
        known = {place for group in groups for held in group.fsdp_params for place in places(held._module_info)}
        modules = tuple(_own_modules(cast(nn.Module, unit)))
        named = [(module, name, p) for module in modules for name, p in module._parameters.items() if p is not None]
        new = {id(p): p for module, name, p in named if (id(module), name) not in known and not _shared_out(p)}
        if new:
            _add(groups[0], list(new.values()), modules)


def _shared_out(parameter: nn.Parameter) -> bool:
    """Of experts that no other rank holds: left out of all groups."""
    return "ep" in (getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ())


def remove_late_parameters(root: nn.Module, changed: Iterable[nn.Module] = ()) -> None:
    """Let the units below `root` forget parameters whose modules are no longer in them, or get others."""
    gone = {id(module) for module in changed}
    for unit in sharded_modules(root):
        here = {id(module) for module in _own_modules(cast(nn.Module, unit))} - gone
        for group in groups_of(unit):
            group.fsdp_params[:] = [held for held in group.fsdp_params if id(held._module_info.module) in here]


def have_gathered(unit: FSDPModule) -> bool:
    """Has this unit run, so that it has memory for whole weights?"""
    return any(held.all_gather_outputs for group in groups_of(unit) for held in group.fsdp_params)


def places(info: ParamModuleInfo) -> Iterator[tuple[int, str]]:
    """Where a parameter is registered; loading puts other objects there, so the parameter itself tells nothing."""
    yield id(info.module), info.param_name
    yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """The unit and what is below it, without inner units."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def _add(group: FSDPParamGroup, parameters: list[nn.Parameter], modules: tuple[nn.Module, ...]) -> None:
    for parameter, where in zip(parameters, _get_param_module_infos(parameters, modules), strict=True):
        held = FSDPParam(
            parameter,
            where,
            group.mesh_info,
            group.post_forward_mesh_info,
            group.device,
            None,
            group.mp_policy,
            group.offload_policy,
        )
        lend(held)
        group.fsdp_params.append(held)
    if group._reset_sharded_params:  # it has run already; else it finds out about dtypes when it first does
        group._init_mp_dtypes()
