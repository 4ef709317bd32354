"""Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out.

torch's own answers are lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored, and
a parameter that is put in the place of a sharded one is taken away by the next gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data.assigned import assign
from hf_parallel.checkpoint.slices import local_part, read
from hf_parallel.hooks.patching import patch, replace
from hf_parallel.mesh import placed_as, stored
from hf_parallel.spec import refuse
from hf_parallel.whole import order_of, parallel_models


@replace("torch.distributed.tensor:DTensor.data", "`p.data = x` is lost")
def data(original: Any) -> property:
    """Reading it stays torch's; what is assigned is stored."""

    def assigned(self: DTensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            assign(self, _contiguous(_as_stored(self, value)), parallel_models())

    return property(original.__get__, assigned)


def _as_stored(parameter: DTensor, value: torch.Tensor) -> DTensor:
    """What this rank stores of a value: one that lies as the parameter does, lies elsewhere, or is whole."""
    if value.shape != parameter.shape:
        why = f"a tensor of {tuple(value.shape)} for one of {tuple(parameter.shape)}, of which ranks hold parts"
        refuse("p.data = x", why, do="give it one of the same shape, or let one process change the model")
    if not isinstance(value, DTensor):
        own = stored(parameter)
        part = read(value, local_part(parameter, order_of(parameter)))
        return placed_as(parameter, part.to(own.device, copy=True))  # a view would keep the whole
    if value.device_mesh != parameter.device_mesh:
        why = "it lies on another mesh"
        refuse("p.data = x", why, do="give it what was made of the same parameter, or a whole tensor")
    if value.placements == parameter.placements:
        return value
    return value.redistribute(placements=parameter.placements)


def _contiguous(value: DTensor) -> DTensor:
    local: Any = value._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    if local is value._local_tensor and local.is_contiguous():
        return value
    return placed_as(value, local.contiguous())


@patch("torch.distributed.tensor:DTensor.norm", "gives a DTensor, which does not mix with norms of whole tensors")
def norm(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One number, as of a whole tensor; of rows or columns, and where autograd follows, torch's."""
    found = original(self, *args, **kwargs)
    return found.full_tensor() if isinstance(found, DTensor) and not found.ndim and not found.requires_grad else found
