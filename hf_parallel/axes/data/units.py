"""The records that torch keeps of an FSDP2 unit: internals, as there is no call for them, of torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast
from unittest import mock

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from hf_parallel.ask.replaced import Replaced

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

REPLACES = (
    Replaced(
        "torch.distributed.fsdp._fully_shard._fsdp_param:nn",
        "torch 2.11 gives each parameter a gradient at first, which weights of whole numbers cannot have",
        "while a module is sharded, on torch 2.11 alone",
    ),
)


def get_state_of(unit: nn.Module | FSDPModule) -> FSDPState:
    """The record that the hooks of a unit share."""
    return cast("FSDPState", fully_shard.state(unit))  # type: ignore[attr-defined]


def get_groups_of(unit: nn.Module | FSDPModule) -> list[FSDPParamGroup]:
    """The parameters of one unit that are gathered and reduced together; torch 2.11 has one such group at most."""
    state = get_state_of(unit)
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def iterate_sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """The units from `root` on, outermost first."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def iterate_parameter_groups(root: nn.Module) -> Iterator[FSDPParamGroup]:
    """The groups of all units from `root` on."""
    for unit in iterate_sharded_modules(root):
        yield from get_groups_of(unit)


def holds_whole_gradient(held: FSDPParam) -> bool:
    """Has a parameter a gradient of this rank's own micro-batches, which is not reduced yet?"""
    gathered = getattr(held, "_unsharded_param", None)
    return held.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def forget_gathered_memory(root: nn.Module) -> None:
    """Let the units below `root` make room for gathered weights anew, because the dtype of these changes.

    Call it while no unit holds gathered weights. torch has no call for this; looked at in torch 2.13.
    """
    for group in iterate_parameter_groups(root):
        for held in group.fsdp_params:
            held.all_gather_outputs = []
            if hasattr(held, "_unsharded_param"):
                del held._unsharded_param
        if group._reset_sharded_params:  # it has run already; else it finds out about dtypes when it first does
            group._init_mp_dtypes()


@contextlib.contextmanager
def allow_packed_weights() -> Iterator[None]:
    """Let `fully_shard` take weights of whole numbers; torch 2.11 wants a gradient of each parameter at first."""
    if Version(torch.__version__).release[:2] > (2, 11):
        yield
        return
    patched = mock.Mock(wraps=nn)
    patched.Parameter = lambda data, requires_grad=True: nn.Parameter(data, requires_grad and data.is_floating_point())
    with mock.patch.object(_fsdp_param, "nn", patched):
        yield


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dim along which `ranks` share experts of this shape: FSDP2 pads no dim but the first."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)
