"""Forward passes that end by an error: a script's hook that stops at a layer, a batch that does not fit.

FSDP2 ends a pass in hooks of the modules' outputs, of which there are none. torch has no call for it: the states of
units are internals, looked at in torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hf_parallel.axes.data.gathered_once import is_kept_gathered
from hf_parallel.axes.data.units import (
    get_groups,
    get_groups_of,
    get_state_of,
    iterate_sharded_modules,
    reduce_whole_gradients,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_ENDS_PASS = "_hf_parallel_ends_pass"  # a weight whose gradient ends the backward pass


def end_stopped_pass(model: nn.Module, args: tuple, output: object) -> None:
    """End a forward pass that an error has left, such as one that a script's hook stops at a layer.

    Clipping and optimizers would take gathered weights for the model's parameters, and the next pass would not gather
    anew. A loss of what a hook has kept may still go back through the pass: its gradients end it, then.
    """
    if output is not None or is_kept_gathered(model):
        return
    for module in iterate_sharded_modules(model):
        state = get_state_of(module)
        state._state_ctx.iter_forward_root, state._training_state = None, TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in get_groups_of(module):
            if torch.is_grad_enabled() and group._training_state is TrainingState.FORWARD:
                group._record_post_forward()
                for held in group.fsdp_params:
                    _let_gradient_end_pass(held, state)
            group._training_state = TrainingState.IDLE
        if not torch.is_grad_enabled():
            module.reshard()


def _let_gradient_end_pass(held: FSDPParam, state: FSDPState) -> None:
    """Reduce the gradient of a gathered weight, although the pass had no output that would see to it."""
    copy = held.unsharded_param
    if copy.requires_grad and not hasattr(copy, _ENDS_PASS):
        setattr(copy, _ENDS_PASS, True)
        copy.register_post_accumulate_grad_hook(lambda parameter: state._register_root_post_backward_final_callback())


def end_unannounced_backward(model: nn.Module) -> None:
    """Reduce the gradients of a backward pass that came to no output of a unit, of which FSDP2 knows nothing.

    A loss may read only what a replaced forward has put aside in the middle of a unit.
    """
    if not isinstance(model, FSDPModule) or not get_state_of(model)._is_root:
        return
    root = get_state_of(model)
    gathered = [group for state in root._state_ctx.all_states for group in get_groups(state) if group.is_unsharded]
    if any(group.reduce_grads and any(map(_has_gradient, group.fsdp_params)) for group in gathered):
        reduce_whole_gradients(model)


def _has_gradient(held: FSDPParam) -> bool:
    copy = getattr(held, "_unsharded_param", None)
    return copy is not None and copy.grad is not None
