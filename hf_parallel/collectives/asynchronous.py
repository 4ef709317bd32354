"""Collectives that have only started: compute something else, then `wait()` for the result. Not differentiable.

On CUDA a wait holds back what is computed after it, not the process. These call c10d directly: torch's functional
collectives do the same with three to five times the overhead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# torch 2.13 renamed gathers and this one; the former names warn.
_reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_op(output: torch.Tensor, own: torch.Tensor, **settings: Any) -> Any:
    """Looked up at each call: who counts or watches collectives replaces them in torch.distributed."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, own, **settings)


class Started(NamedTuple):
    """What will be in `result` once the work is done."""

    result: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The result."""
        self.work.wait()
        return self.result


def start_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Started:
    """The sum over ranks, in place of a contiguous tensor."""
    return Started(tensor, dist.all_reduce(tensor, operation, group, async_op=True))


def start_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> Started:
    """[…] -> [n, …], every rank's."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    return Started(gathered, all_gather_op(gathered.flatten(), tensor.flatten(), group=group, async_op=True))


def start_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None) -> Started:
    """[n, …] -> […], the sum over ranks of what each has for this one; into `own`, if given and contiguous."""
    own = tensor.new_empty(tensor.shape[1:]) if own is None else own
    return Started(own, _reduce_scatter_op(own.flatten(), tensor.flatten(), group=group, async_op=True))
