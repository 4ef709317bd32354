"""fp16: one loss scale for all ranks, although each sees only its own gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hf_parallel.hooks import runtime
from hf_parallel.local import local

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class MeshGradScaler(ShardedGradScaler):
    """torch's scaler for sharded gradients: a step is skipped by all ranks if one of them finds an overflow.

    Gradients may be split over several meshes, which torch's kernel does not take: it gets this rank's parts.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parts = [SimpleNamespace(grad=local(parameter.grad)) for parameter in parameters]
        return super()._unscale_grads_(SimpleNamespace(param_groups=[{"params": parts}]), *args, **kwargs)  # type: ignore[arg-type]

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict:
        """For fused optimizers, which scale back by themselves: torch's looks at this rank's gradients only."""
        found = super()._check_inf_per_device(optimizer)
        for here in found.values():
            carrier = here.to(self._device)
            dist.all_reduce(carrier, group=self.process_group)
            here.copy_(carrier)
        return found


def scale_together(accelerator: Accelerator) -> None:
    """Before a model or an optimizer is prepared: a scaler of the whole mesh, with the settings the script gave."""
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
