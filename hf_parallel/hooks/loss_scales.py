"""fp16: one loss scale for all ranks, although each sees only its own gradients; inside of schedules, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hf_parallel.apply.parallelize import state_of
from hf_parallel.apply.weights import list_parallel_models
from hf_parallel.ask.session import of_session
from hf_parallel.axes.pipeline.stage_runner import LoopScale
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.ranks.local import get_local

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.amp import GradScaler


class MeshGradScaler(ShardedGradScaler):
    """torch's scaler for sharded gradients: all ranks skip a step if one of them finds an overflow.

    torch's kernel does not take gradients of several meshes, so it is given this rank's parts.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(_take_parts(optimizer), *args, **kwargs)  # type: ignore[arg-type]

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict:
        """Find overflows on all ranks, for fused optimizers, which unscale by themselves; torch asks one rank."""
        return _find_on_all_ranks(super()._check_inf_per_device(optimizer), self._device)


@patch("torch.amp.grad_scaler:GradScaler.__init__", "scales a loss whose backward passes a schedule has run already")
def make_scaler(original: Callable, self: GradScaler, *args: object, **kwargs: object) -> None:
    """Note the scaler of a loop: schedules multiply losses by its factor before their backward passes."""
    original(self, *args, **kwargs)
    of_session(LoopScale).scaler = weakref.ref(self) if self.is_enabled() else None


@patch("torch.amp.grad_scaler:GradScaler._unscale_grads_", "takes no gradients of two meshes, and asks one rank")
def unscale_grads(
    original: Callable, self: GradScaler, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
) -> dict[torch.device, torch.Tensor]:
    """Unscale this rank's parts, and skip a step if any rank has an overflow: of scalers that a loop makes itself."""
    states = [state for state in map(state_of, list_parallel_models()) if state is not None]
    meshes = [state.mesh for state in states] if runtime.current() is None else [runtime.mesh()]
    meshes = [mesh for mesh in meshes if mesh.config.world_size > 1]  # a script may have models of one rank beside it
    if not meshes or isinstance(self, ShardedGradScaler):
        return original(self, optimizer, *args, **kwargs)
    return _find_on_all_ranks(original(self, _take_parts(optimizer), *args, **kwargs), meshes[0].device)


def _take_parts(optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """Return tensors whose gradients are this rank's parts of those of an optimizer's parameters."""
    gradients = [get_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    parts = [gradient.detach() for gradient in gradients]
    for part, gradient in zip(parts, gradients, strict=True):
        part.grad = gradient
    return SimpleNamespace(param_groups=[{"params": parts}])


def _find_on_all_ranks(found: dict[Any, torch.Tensor], device: Any) -> dict[Any, torch.Tensor]:
    """Add up over all ranks, in place, the numbers of overflows by device; they are sent from `device`."""
    for here in found.values():
        carrier = here.to(device)
        dist.all_reduce(carrier)
        here.copy_(carrier)
    return found


def scale_together(accelerator: Accelerator) -> None:
    """Replace the script's gradient scaler by one for all ranks with the same settings. Call it before `prepare`."""
    given = accelerator.scaler
    if given is None or isinstance(given, MeshGradScaler) or not given.is_enabled():
        return
    accelerator.scaler = MeshGradScaler(
        runtime.mesh().device.type,
        init_scale=given.get_scale(),
        growth_factor=given.get_growth_factor(),
        backoff_factor=given.get_backoff_factor(),
        growth_interval=given.get_growth_interval(),
    )
