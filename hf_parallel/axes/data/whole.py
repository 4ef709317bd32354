"""Parameters that every data rank keeps whole, as it keeps adapters whose parts would mean nothing to their method.

After the last backward pass of a step each has the mean of all data ranks' gradients, as FSDP2 gives it to the others:
one all-reduce for all of them, which also tells of which parameters a rank has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.axes.data.gradients import is_followed_by_micro_batch
from hf_parallel.axes.data.parameters import send_from_first
from hf_parallel.axes.data.units import WHOLE
from hf_parallel.ranks.mesh import ParallelMesh


def keep_whole(root: nn.Module, mesh: ParallelMesh, tensors: Iterable[torch.Tensor]) -> None:
    """Keep parameters and buffers, below `root` or beside it, whole on all data ranks: the first one's. Collective."""
    if WHOLE not in vars(root):
        vars(root)[WHOLE] = WholeParameters(root, mesh)
    vars(root)[WHOLE].add(tensors)


def forget_whole(root: nn.Module, former: Iterable[nn.Parameter], now: Iterable[nn.Parameter]) -> None:
    """Average no longer what a model had and has not now: ranks would collect it as garbage at times of their own."""
    kept = set(now)
    for parameter in former:
        if parameter not in kept:
            vars(root)[WHOLE].forget(parameter)


class WholeParameters:
    """The parameters of a model that every data rank keeps whole."""

    def __init__(self, root: nn.Module, mesh: ParallelMesh) -> None:
        axes = mesh.sharing_mesh
        self._root, self._device = root, mesh.device
        self._groups = [axes.get_group(axis) for axis in range(axes.ndim) if axes.size(axis) > 1]
        self._parameters: Any = WeakIdKeyDictionary()
        self._pass = -1  # the backward pass at whose end gradients are averaged
        self._given: tuple[list[bool], torch.Tensor] = [], torch.empty(0)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._parameters

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep these, too. Buffers take the first rank's values, and no more."""
        new = [tensor for tensor in tensors if tensor not in self._parameters]
        for tensor in new:
            tensor.data = tensor.data.to(self._device)
        for parameter in (tensor for tensor in new if isinstance(tensor, nn.Parameter)):
            self._parameters[parameter] = None
            if parameter.is_floating_point() and self._groups:
                trains = parameter.requires_grad  # torch takes hooks of what trains alone
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._note)
                parameter.requires_grad_(trains)
        send_from_first(new, self._groups, self._device)

    def forget(self, parameter: nn.Parameter) -> None:
        """Average the gradients of a parameter no longer, if it was kept here."""
        self._parameters.pop(parameter, None)

    def _note(self, parameter: torch.Tensor) -> None:
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._pass:
            self._pass = this_pass
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        if is_followed_by_micro_batch(self._root):
            return
        trained = [parameter for parameter in self if parameter.requires_grad]
        given = [parameter.grad is not None for parameter in trained]
        if given != self._given[0]:
            self._given = given, torch.tensor(given, dtype=torch.float32, device=self._device)
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in trained]
        mean = torch.cat([self._given[1], *(part.float() for part in parts)])
        for group in self._groups:
            dist.all_reduce(mean, group=group)
            mean /= group.size()
        anywhere, *means = mean.split([len(trained), *map(len, parts)])
        if not all(given):  # only a rank without a gradient looks whether another has one
            given = anywhere.gt(0).tolist()
        for parameter, value, is_given in zip(trained, means, given, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(value.view_as(parameter))
            elif is_given:
                parameter.grad = value.view_as(parameter).to(parameter.dtype)
