"""Collectives as single operations of a compiled graph: what `differentiable.py` calls while torch.compile traces.

Each is the same call of c10d as outside of graphs, started and waited for at once, so that who listens to collectives
(`observed.py`: the hang record, the monitor) hears of it. The compiler sees one operation with a known output shape:
the graph of a layer does not break there. Autograd is that of `differentiable.py`, which is traced around them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def sum_in_graph(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks of a tensor of any shape."""
    return torch.ops.hf_parallel.all_reduce(tensor, group.group_name)


def gather_in_graph(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather […] of each rank to [n, …]."""
    return torch.ops.hf_parallel.all_gather(tensor, group.group_name, group.size())


def scatter_in_graph(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [n, …] over ranks, and return […], this rank's part."""
    return torch.ops.hf_parallel.reduce_scatter(tensor, group.group_name)


def _named(group: str) -> dist.ProcessGroup:
    return _resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("hf_parallel::all_reduce", mutates_args=())
def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    from hf_parallel.ranks.differentiable import all_reduce

    return all_reduce(tensor, _named(group))


@_all_reduce.register_fake
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_parallel::all_gather", mutates_args=())
def _all_gather(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    from hf_parallel.ranks.differentiable import start_all_gather

    return start_all_gather(tensor, _named(group)).wait()


@_all_gather.register_fake
def _(tensor: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return tensor.new_empty(size, *tensor.shape)


@torch.library.custom_op("hf_parallel::reduce_scatter", mutates_args=())
def _reduce_scatter(tensor: torch.Tensor, group: str) -> torch.Tensor:
    from hf_parallel.ranks.differentiable import start_reduce_scatter

    return start_reduce_scatter(tensor, _named(group)).wait()


@_reduce_scatter.register_fake
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape[1:])
