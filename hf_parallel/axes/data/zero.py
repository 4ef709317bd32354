"""ZeRO (Rajbhandari et al., 2020) and its hybrid with replicas, as settings of torch's `fully_shard`.

    spec                          mesh of fully_shard            weights between forward and backward
    dp_shard=n                    (dp_shard,)                    freed (zero_stage=3) or kept (zero_stage=1, 2)
    dp_replicate=m,dp_shard=n     (dp_replicate, dp_shard)       the same; gradients also all-reduced over replicas
    dp_replicate=m, zero_stage=0  (dp_replicate, 1)              kept: every rank owns the whole weight anyway;
                                                                 a small model is one unit, reduced at once
    cp=c                          dp_shard x cp in the place of dp_shard: cp ranks hold other tokens of one batch

What happens between the micro-batches of a step is in `reduction.py`. With a single data rank nothing is wrapped: on a
mesh of size one `fully_shard` would copy every weight at each gather.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from hf_parallel.ask.keys.data import offload_folder, parameters_rest
from hf_parallel.axes.data.ends import Settings, shard_ends
from hf_parallel.axes.data.mixed_precision import follow_autocast, policy_for
from hf_parallel.axes.data.reduction import round_after_backward
from hf_parallel.axes.data.replicas import work_in_place
from hf_parallel.axes.data.units import (
    groups_of,
    packed_weights,
    parameter_groups,
    shard_dim,
    sharded_modules,
    state_of,
)
from hf_parallel.mesh import ParallelMesh, stored
from hf_parallel.model.experts import named_experts

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

#: Bytes of gradients that are not worth several reductions, as DistributedDataParallel has it (Li et al., 2020, 3.2).
BUCKET = 25 * 1024**2


@packed_weights()
def shard_data_parallel(model: nn.Module, root: nn.Module, blocks: list[nn.Module], mesh: ParallelMesh) -> None:
    """Shard `root` over the data axes: a parameter group for each of `blocks`, for both ends, and for the rest.

    Args:
        model: what the script calls.
        root: what runs its layers: under a pipeline the stage, otherwise the model.
        blocks: the transformer layers of this rank, gathered one at a time.
    """
    if mesh.config.sharing_size == 1:
        return
    axes = mesh.sharing_mesh
    keeps = mesh.config.zero_stage < 3 or mesh.config.sharing_size == mesh.size("dp_replicate")
    if mesh.size("pp") > 1:
        keeps = True  # gathering again for every micro-batch would cost more than the memory it frees
    settings: Settings = {"mesh": axes, "mp_policy": policy_for(root), **resting(mesh)}
    settings["ignored_params"] = _shard_experts(root, mesh, keeps, settings)
    apart = [] if _reduced_at_once(root, mesh) else blocks
    for block in apart:
        if any(True for _ in block.parameters()):
            _shard_other_dtypes(block, not keeps, settings)
            fully_shard(block, reshard_after_forward=not keeps, **settings)
    if apart and root is model:  # a pipeline keeps all of its weights
        shard_ends(model, blocks, keeps, settings)
    _shard_other_dtypes(root, not keeps, settings)
    # What is left is needed first in backward: None lets torch keep it.
    fully_shard(root, reshard_after_forward=False if keeps else None, **settings)
    if root is model and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")  # it calls an encoder by itself, past the model's forward
    for module in sharded_modules(root):
        _name_as_before(type(module))
    work_in_place(root)
    follow_autocast(root, mesh.device)
    round_after_backward(root)
    if root is model:  # a pipeline frees its stages itself
        model.register_forward_pre_hook(_gather_anew, prepend=True)
        model.register_forward_hook(_reshard_after_evaluation)
        _leave_inference_mode(model)


def _name_as_before(kind: type) -> None:
    """Name a class that FSDP2 has made as the model's own, by which libraries look it up.

    Trainer shifts labels for causal models by their names, Transformers records hidden states by them, and takes a
    class of another module for a script's own, whose new weights it draws in another way.
    """
    own = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
    kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__


def _reduced_at_once(root: nn.Module, mesh: ParallelMesh) -> bool:
    """Is one reduction after the backward the fastest? Of replicas with few gradients; they have nothing to gather."""
    if mesh.config.sharing_size > mesh.size("dp_replicate") or resting(mesh):
        return False
    trained = (stored(parameter) for parameter in root.parameters() if parameter.requires_grad)
    return sum(parameter.numel() * parameter.element_size() for parameter in trained) <= BUCKET


def _shard_other_dtypes(unit: nn.Module, again: bool, settings: Settings) -> None:
    """Give modules of another dtype than the rest of `unit` groups of their own, such as those kept in fp32.

    torch reduces the gradients of a group in one dtype.
    """
    sharded = {module for inner in sharded_modules(unit) for module in cast(nn.Module, inner).modules()}
    own = {module: _trained_dtypes(module) for module in unit.modules() if module not in sharded}
    sizes = Counter(dtype for dtypes in own.values() for dtype in dtypes)
    prevailing = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    for module, dtypes in own.items():
        if module is not unit and dtypes and prevailing not in dtypes:
            fully_shard(module, reshard_after_forward=again, **settings)


def _trained_dtypes(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters(recurse=False) if parameter.requires_grad}


def move_rest(model: nn.Module, mesh: ParallelMesh) -> None:
    """`fully_shard` moves what is in its units; a stage has buffers beside them. What rests on the host stays."""
    device, rests = mesh.device, bool(resting(mesh))
    for module in model.modules():
        for tensors in (module._buffers,) if rests else (module._parameters, module._buffers):
            for tensor in (tensor for tensor in tensors.values() if tensor is not None):
                if tensor.device != device and not tensor.is_meta:
                    tensor.data = tensor.data.to(device)


def resting(mesh: ParallelMesh) -> Settings:
    """Parameters and gradients that rest on the host; if not in files, in memory that a GPU copies from by itself."""
    offload = mesh.config.offload
    if not parameters_rest(offload):
        return {}
    return {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu" and not offload_folder(offload))}


def _shard_experts(root: nn.Module, mesh: ParallelMesh, keeps: bool, settings: Settings) -> set[nn.Parameter]:
    """Shard experts that are shared out over ranks among those that hold the same ones; where none does, leave them.

    Returns:
        What `fully_shard` of the modules around them must leave alone.
    """
    if mesh.config.ep_size == 1:
        return set()
    found = [module for _, module in named_experts(root)]
    if mesh.size("ep_shard") * mesh.size("dp_replicate") == 1:
        return {parameter for module in found for parameter in module.parameters()}
    axes = mesh["dp_replicate", "ep_shard"] if mesh.size("dp_replicate") > 1 else mesh["ep_shard"]
    again = not keeps and mesh.size("ep_shard") > 1

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(stored(parameter).shape, mesh.size("ep_shard")))

    own: Settings = {**settings, "mesh": axes}
    for module in found:
        fully_shard(module, reshard_after_forward=again, shard_placement_fn=place, **own)
    return set()


def _gather_anew(model: nn.Module, args: tuple) -> None:
    """Weights that a forward pass without its backward has left gathered may have changed since.

    Always, and not where they have: writing through `p.data` leaves no trace, and all ranks gather together.
    """
    if any(group._post_forward_indices for group in parameter_groups(model)):
        for module in sharded_modules(model):
            module.reshard()


def _reshard_after_evaluation(model: nn.Module, args: tuple, output: object) -> None:
    """Without a backward pass nothing frees the gathered weights, and `parameters()` would show plain tensors."""
    if not torch.is_grad_enabled():
        for module in sharded_modules(model):
            module.reshard()


def _leave_inference_mode(model: nn.Module) -> None:
    """FSDP2 keeps the memory of its first gather: what inference mode has made, a backward pass could not use."""
    left: list[contextlib.ExitStack] = []

    def leave(module: nn.Module, args: tuple) -> None:
        left.append(contextlib.ExitStack())
        if torch.is_inference_mode_enabled():
            left[-1].enter_context(torch.inference_mode(False))
            left[-1].enter_context(torch.no_grad())

    model.register_forward_pre_hook(leave, prepend=True)
    model.register_forward_hook(lambda module, args, output: left.pop().close(), always_call=True)


def forget_root(model: nn.Module) -> None:
    """Let a model that has run as the outermost one be sharded inside another: the next forward pass finds the root.

    torch has no call for this: a unit's state is its internal, looked at in torch 2.13.
    """
    for module in sharded_modules(model):
        state = state_of(module)
        state._is_root = None
        for group in groups_of(module) if state._auto_reshard_after_forward else ():
            # A root keeps its weights for the backward pass.
            group.post_forward_mesh_info = cast("FSDPMeshInfo", group.mesh_info)


def without_sharding(module: nn.Module) -> nn.Module:
    """The same module with the same parameters, for FSDP2 a stranger; the module itself if it is no unit.

    torch has no call for this: a unit's state and its handles are internals, looked at in torch 2.13.
    """
    if not isinstance(module, FSDPModule):
        return module
    state = state_of(module)
    kind: Any = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))  # from before
    plain = kind.__new__(kind)
    vars(plain).update(vars(module))
    for name in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        setattr(plain, name, type(vars(plain)[name])(vars(plain)[name]))
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(plain).pop(key, None)
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for hooks in (plain._forward_pre_hooks, plain._forward_pre_hooks_with_kwargs, plain._forward_hooks):
            hooks.pop(handle.id, None)
    return plain
