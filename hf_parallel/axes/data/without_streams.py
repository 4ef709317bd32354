"""FSDP2 on CPUs, which have no streams: there every gather and every reduction would be waited for where it is called.

    reductions   go on while the backward pass does; waited for at its end, or when two more have begun
    gathers      of a layer begin while the layer before it computes; in the backward pass the layer after it

Where torch reads what was reduced at once, to add, round or move it, it waits as before. It has no call to reduce
later: collectives of a unit's parameter groups are its internals, looked at in torch 2.13.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from hf_parallel.axes.data.reduction import parameter_groups

#: Reductions that may be under way at a time; each holds the gradients of a layer.
UNDER_WAY = 2


def overlap(root: nn.Module, blocks: list[nn.Module]) -> None:
    """Let the units below `root` communicate while they compute; `blocks` run one after the other."""
    later = _Later()
    for group in parameter_groups(root):
        group.unshard_async_op = True
        group._reduce_scatter_comm = _ReduceScatter(group._reduce_scatter_comm, group, later)
        if isinstance(group.mesh_info, DDPMeshInfo):
            info: Any = copy.copy(group.mesh_info)
            group.mesh_info = info
            info.replicate_process_group = _Replicas(info.replicate_process_group, group, later)
    units: Any = [block for block in blocks if isinstance(block, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    root.register_forward_hook(_forget_gathers, always_call=True)


def _forget_gathers(root: nn.Module, args: Any, output: Any) -> None:
    """Of layers that were left out of a forward pass: the next one would compute with weights of this step."""
    for group in parameter_groups(root):
        if (begun := group._all_gather_result) is not None:
            if begun.all_gather_work is not None:
                begun.all_gather_work.wait()
            group._all_gather_result = None


_now = False


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """In here reductions are waited for where they are called: what follows reads them."""
    global _now
    former, _now = _now, True
    try:
        yield
    finally:
        _now = former


class _Later:
    """Reductions under way in a backward pass."""

    def __init__(self) -> None:
        self.works: deque[Any] = deque()
        self.backward = -1  # the pass at whose end they are waited for

    def can_wait(self, group: Any, reduced: torch.Tensor) -> bool:
        """Will nothing of this unit's gradients be read before the end of the backward pass that runs?"""
        if _now or torch._C._current_graph_task_id() == -1 or reduced.dtype != torch.float32:
            return False  # 16 bits are scaled or rounded
        return not any(_read_at_once(held) for held in group.fsdp_params)

    def add(self, work: Any) -> None:
        """From here on it is waited for."""
        if self.backward != (running := torch._C._current_graph_task_id()):
            self.backward = running
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        self.works.append(work)
        while len(self.works) > UNDER_WAY:
            self.works.popleft().wait()

    def finish(self) -> None:
        """Wait for all."""
        while self.works:
            self.works.popleft().wait()


def _read_at_once(held: Any) -> bool:
    stored = held.sharded_param
    if not stored.requires_grad:
        return False
    added_to = stored.grad is not None or getattr(stored, "_post_accumulate_grad_hooks", None)
    return bool(added_to) or held.offload_to_cpu or stored.dtype != torch.float32


class _ReduceScatter:
    """A unit's reduce-scatter, which ends later where it can: where no replicas reduce what it gives."""

    def __init__(self, comm: Any, group: Any, later: _Later) -> None:
        self.comm, self.group, self.later = comm, group, later
        self.allocate = comm.allocate

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **settings: Any) -> Any:
        replicas = isinstance(self.group.mesh_info, DDPMeshInfo)
        if replicas or not self.later.can_wait(self.group, output_tensor):
            return self.comm(output_tensor, input_tensor, **settings)
        self.later.add(self.comm(output_tensor, input_tensor, **{**settings, "async_op": True}))
        return None


class _Replicas:
    """What torch asks of a process group to reduce over replicas."""

    def __init__(self, replicas: dist.ProcessGroup, group: Any, later: _Later) -> None:
        self.replicas, self.group, self.later = replicas, group, later

    def size(self) -> int:
        return self.replicas.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """The work to wait for; None if that is done later."""
        if not self.later.can_wait(self.group, tensors[0]):
            return self.replicas.allreduce(tensors, options)
        options.asyncOp = True
        self.later.add(self.replicas.allreduce(tensors, options))
        return None
