"""Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out.

torch's own answer is lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from hf_parallel.assigning import store
from hf_parallel.hooks.patching import patch, replace
from hf_parallel.whole import whole_number


@replace("torch.distributed.tensor:DTensor.data", "`p.data = x` is lost")
def data(original: Any) -> property:
    """Reading it stays torch's; what is assigned is stored."""

    return property(original.__get__, store)


@patch(
    "torch.distributed.tensor:DTensor.{norm,sum,mean,max,min}",
    "gives a DTensor, which does not mix with numbers of whole tensors",
)
def reduce_to_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> Any:
    """One number, as of a whole tensor; of rows or columns, and where autograd follows, torch's."""
    found = original(self, *args, **kwargs)
    return whole_number(found) if isinstance(found, DTensor) and not found.ndim and not found.requires_grad else found


@patch(
    "torch.distributed.tensor:DTensor.{item,tolist,numpy,__float__,__int__,__bool__,__index__,__complex__,__format__}",
    "reads what this rank holds of a sum",
)
def read_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> object:
    """What a script computes of a weight, a gradient or a moment and reads as one number is of the whole tensor."""
    if self.numel() != 1:
        return original(self, *args, **kwargs)
    return getattr(whole_number(self), original.__name__)(*args, **kwargs)
