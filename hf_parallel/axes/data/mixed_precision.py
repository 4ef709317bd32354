"""Mixed precision of weights that data ranks share: kept and summed in fp32, gathered and multiplied in 16 bits.

torch.autocast alone would gather fp32, and keep a 16-bit copy of every weight beside it until the backward pass:

                          travels at a gather      held from forward to backward
    autocast              4 bytes per parameter    4 + 2
    MixedPrecisionPolicy  2                        2

Weights of 16 bits are gathered as they are; their gradients are summed in fp32 too. A policy belongs to `fully_shard`,
but which one holds is known later, when a script has prepared the model or runs it under autocast. torch has no call
to change it: a unit's state and its parameter groups are its internals, looked at in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from hf_parallel.autocast import autocast_dtype
from hf_parallel.axes.data.units import groups_of, parameter_groups, sharded_modules, state_of

_HALF = (torch.bfloat16, torch.float16)
_SETTLED = "_hf_parallel_computes_in"


def policy_for(root: nn.Module, dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """What `fully_shard` is to do with the weights of `root` while they are computed with in `dtype`."""
    widened = dtype is not None or any(parameter.dtype in _HALF for parameter in root.parameters())
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if widened else None)


def follow_autocast(root: nn.Module, device: torch.device) -> None:
    """From here on each forward pass of `root` gathers weights in autocast's dtype, if it runs under autocast.

    What has been settled by `compute_in` holds instead: accelerate enters autocast inside the model's forward.
    """

    def follow(module: nn.Module, args: tuple) -> None:
        change(module, getattr(module, _SETTLED, None) or autocast_dtype(device))

    root.register_forward_pre_hook(follow, prepend=True)  # before FSDP2's own, which gathers


def compute_in(root: nn.Module, dtype: torch.dtype) -> None:
    """From here on `root` gathers its weights in this dtype, in training and evaluation."""
    if isinstance(root, FSDPModule):
        setattr(root, _SETTLED, dtype)
        change(cast(nn.Module, root), dtype)


def lowered_dtype(root: nn.Module, device: torch.device) -> torch.dtype | None:
    """The dtype that a forward pass of `root` would gather its fp32 weights in, here and now."""
    dtype = autocast_dtype(device)
    if not isinstance(root, FSDPModule) or dtype in (None, computed_in(root)):
        return dtype if isinstance(root, FSDPModule) else None
    return None if any(weight.dtype != torch.float32 for weight in _weights(root)) else dtype


def computed_in(root: nn.Module) -> torch.dtype | None:
    """The dtype that `root` gathers its weights in; None: in their own."""
    return state_of(root)._mp_policy.param_dtype if isinstance(root, FSDPModule) else None


def change(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Let the units below `root` gather in `dtype`, if their weights are fp32; not while they hold gathered ones."""
    if not isinstance(root, FSDPModule) or dtype == computed_in(root):
        return
    first = next(_weights(root), None)  # this is asked before each forward pass
    if first is None or (dtype is not None and first.dtype != torch.float32):
        return
    held = [parameter for group in parameter_groups(root) for parameter in group.fsdp_params]
    if any(p.sharded_state.name != "SHARDED" or p.unsharded_accumulated_grad is not None for p in held):
        return
    if dtype is not None and any(weight.dtype != torch.float32 for weight in _weights(root)):
        return
    policy = policy_for(root, dtype)
    for unit in sharded_modules(root):
        _set(unit, policy)


def _weights(root: nn.Module) -> Iterator[torch.Tensor]:
    """What units of `root` store, but for packed weights, which are integers."""
    for group in parameter_groups(root):
        yield from (p.sharded_param for p in group.fsdp_params if p.sharded_param.is_floating_point())


def _set(unit: FSDPModule, policy: MixedPrecisionPolicy) -> None:
    state_of(unit)._mp_policy = policy
    for group in groups_of(unit):
        group.mp_policy = policy
        for held in group.fsdp_params:
            held.mp_policy = policy
            held.all_gather_outputs = []  # of the former dtype
            if hasattr(held, "_unsharded_param"):
                del held._unsharded_param
        if group._reset_sharded_params:  # it has run already; else it finds out about dtypes when it first does
            group._init_mp_dtypes()
