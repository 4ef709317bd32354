"""ZeRO (Rajbhandari et al., 2020) and its hybrid with replicas, as settings of torch's `fully_shard`.

    spec                          mesh of fully_shard            weights between forward and backward
    dp_shard=n                    (dp_shard,)                    freed (zero_stage=3) or kept (zero_stage=2)
    dp_replicate=m,dp_shard=n     (dp_replicate, dp_shard)       the same; gradients also all-reduced over replicas
    dp_replicate=m                (dp_replicate, 1)              kept: every rank owns the whole weight anyway

With a single data rank nothing is wrapped: on a mesh of size one `fully_shard` would copy every weight at each gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from hf_parallel.mesh import ParallelMesh


def shard_data_parallel(
    model: nn.Module, root: nn.Module, blocks: list[nn.Module], mesh: ParallelMesh, splits_backward: bool = False
) -> None:
    """Shard `root` over the data axes, one parameter group for each of `blocks` and one for the rest.

    Args:
        model: what the script calls.
        root: what runs its layers: under a pipeline the stage, otherwise the model.
        blocks: the transformer layers of this rank, gathered one at a time.
        splits_backward: gradients of inputs and of weights are computed at different times.
    """
    if mesh.data_size == 1:
        return
    axes = mesh["dp_replicate", "dp_shard"] if mesh.size("dp_replicate") > 1 else mesh["dp_shard"]
    reshard = mesh.config.zero_stage == 3 and mesh.size("dp_shard") > 1
    if mesh.size("pp") > 1:
        reshard = False  # gathering again for every micro-batch would cost more than the memory it frees
    # Between the halves of a split backward pass it would hold two sums.
    policy = MixedPrecisionPolicy() if splits_backward else _summing_in_fp32(root)
    for block in blocks:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=axes, reshard_after_forward=reshard, mp_policy=policy, **resting(mesh))
    # The root's own weights (embedding, head) are needed first in backward: None lets torch keep them.
    kept = None if reshard else False
    fully_shard(root, mesh=axes, reshard_after_forward=kept, mp_policy=policy, **resting(mesh))
    if root is model and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")  # it calls an encoder by itself, past the model's forward
    for module in sharded_modules(root):
        # Trainer looks class names up (label smoothing shifts labels for causal models only): keep the Hub's name.
        type(module).__name__ = type(module).__name__.removeprefix("FSDP")
    if root is model:  # a pipeline frees its stages itself
        model.register_forward_hook(_reshard_after_evaluation)
        _leave_inference_mode(model)


def resting(mesh: ParallelMesh) -> dict[str, Any]:
    """Under offload=cpu parameters and gradients rest on the host, in memory that a GPU copies from by itself."""
    if mesh.config.offload != "cpu":
        return {}
    return {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")}


def _summing_in_fp32(root: nn.Module) -> MixedPrecisionPolicy:
    """Gradients of 16 bits are summed over ranks and micro-batches in fp32; weights and activations stay 16 bits."""
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in root.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def _reshard_after_evaluation(model: nn.Module, args: Any, output: Any) -> None:
    """Without a backward pass nothing frees the gathered weights, and `parameters()` would show plain tensors."""
    if not torch.is_grad_enabled():
        for module in sharded_modules(model):
            module.reshard()


def _leave_inference_mode(model: nn.Module) -> None:
    """FSDP2 keeps the memory of its first gather: what inference mode has made, a backward pass could not use."""
    left: list[contextlib.ExitStack] = []

    def leave(module: nn.Module, args: Any) -> None:
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
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        state._is_root = None
        for group in state._fsdp_param_groups if state._auto_reshard_after_forward else ():
            group.post_forward_mesh_info = group.mesh_info  # a root keeps its weights for the backward pass


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules under FSDP2, outermost first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
