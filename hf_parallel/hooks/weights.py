"""Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out.

torch's own answer is lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.assigning import store
from hf_parallel.hooks.patching import patch, replace


@replace("torch.distributed.tensor:DTensor.data", "`p.data = x` is lost")
def data(original: Any) -> property:
    """Reading it stays torch's; what is assigned is stored."""

    return property(original.__get__, store)


@patch("torch.distributed.tensor:DTensor.norm", "gives a DTensor, which does not mix with norms of whole tensors")
def norm(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One number, as of a whole tensor; of rows or columns, and where autograd follows, torch's."""
    found = original(self, *args, **kwargs)
    return found.full_tensor() if isinstance(found, DTensor) and not found.ndim and not found.requires_grad else found
