"""Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out.

torch's own answer is lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data.assigned import Held, assign, held_by
from hf_parallel.axes.offload import folder, parameters_rest
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
            found = held_by(self, parallel_models())
            own = _contiguous(_as_stored(self, value))
            _check(found, self, own)
            assign(self, own, found)

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


def _check(found: Held | None, parameter: DTensor, value: DTensor) -> None:
    """Before anything is changed."""
    if found is None:
        return
    advice = "p.data.copy_(x)"
    if folder(found.offload) and parameters_rest(found.offload):
        refuse("p.data = x", f"with offload={found.offload} parameters lie in a file", advice)
    if type(parameter._local_tensor) is not torch.Tensor:
        refuse("p.data = x", f"of a {type(parameter._local_tensor).__name__}, whose memory is its own", advice)
    if found.group._reset_sharded_params and parameter._local_tensor.dtype != value.dtype:
        why = f"from {parameter._local_tensor.dtype} to {value.dtype} after a forward pass of a sharded model"
        refuse("p.data = x", why, do="give the model another dtype before it runs")


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
