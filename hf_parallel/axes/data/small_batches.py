"""Squared norms of gradients before they are added up: of each small batch, as one data rank computes it.

    layout              where a small batch's gradient is seen
    without FSDP2       at the stored parameters, as each backward pass reaches them
    FSDP2               at the gathered parameters, before data ranks reduce
    cp                  between two hops of the reduction: summed over cp, not yet over data ranks

A reduction over cp and data ranks at once would never hold the gradient of one data rank's batch. In two hops, first
over cp, then over dp_shard, it sends as many bytes. Scalars beside FSDP2's units are left out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from hf_parallel.axes.data.gradients import cut_axes
from hf_parallel.axes.data.units import get_groups_of, iterate_parameter_groups, iterate_sharded_modules
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

#: Axes whose ranks hold a gradient alike unless it is cut over them; each stage of a pipeline holds its own.
_ALIKE = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(eq=False)
class GradientSquares:
    """Squared norms on this rank, each number of the model counted once among the ranks that hold it alike.

    Args:
        model: whose parameters get gradients.
        root: what FSDP2 shards: the model, or the stages of a pipeline.
    """

    model: nn.Module
    root: nn.Module
    mesh: ParallelMesh
    _followed: dict[int, FSDPParam] = field(default_factory=dict)  # by id, which stays theirs
    _leaves: dict[int, nn.Parameter] = field(default_factory=dict)  # what autograd reaches, by the trained one's id
    _passes: Counter[int] = field(default_factory=Counter)
    #: Of each pass, by the number of ranks that hold a gradient alike.
    _norms: list[defaultdict[int, list[torch.Tensor]]] = field(default_factory=list)
    _in_hops: list[torch.Tensor] = field(default_factory=list)

    def follow(self) -> None:
        """See the gradients of all parameters that train, those that came since the last call too."""
        units = list(iterate_sharded_modules(self.root))
        if self.mesh.size("cp") > 1:
            for unit in units:
                if any(not isinstance(group._reduce_scatter_comm, _InTwoHops) for group in get_groups_of(unit)):
                    unit.set_custom_reduce_scatter(_InTwoHops(self.mesh, self._in_hops))
            return
        for held in (held for group in iterate_parameter_groups(self.root) for held in group.fsdp_params):
            if id(held) not in self._followed:
                self._followed[id(held)] = held
                self._follow_gathered(held)
        for parameter in () if units else self.model.parameters():
            self._follow_leaf(id(parameter), parameter)

    def _follow_gathered(self, held: FSDPParam) -> None:
        """See the gradients of what FSDP2 gathers: it makes another tensor where the dtype of products changes."""
        make = held.init_unsharded_param

        def init_unsharded_param(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs)
            self._follow_leaf(id(held), held._unsharded_param)

        held.init_unsharded_param = init_unsharded_param  # type: ignore[method-assign]

    def _follow_leaf(self, key: int, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and self._leaves.get(key) is not parameter:
            self._leaves[key] = parameter
            parameter.register_hook(functools.partial(self._note, key))

    def _note(self, key: int, gradient: torch.Tensor) -> None:
        number = self._passes[key]
        self._passes[key] += 1
        if number == len(self._norms):
            self._norms.append(defaultdict(list))
        alike = self.mesh.size("tp") // math.prod(map(self.mesh.size, cut_axes(gradient, self.mesh)))
        self._norms[number][alike].append(torch.linalg.vector_norm(get_stored(gradient), dtype=torch.float32))

    def take(self) -> list[torch.Tensor]:
        """Return this rank's part of the square of each backward pass since the last call, in their order.

        What a data rank adds to the step's gradient is squared: the mean over data ranks divides it.
        """
        found = [_sum_of_squares(norms, self.mesh.device) for norms in self._norms]
        if self._in_hops:
            found = [torch.stack(self._in_hops).sum()]
            self._in_hops.clear()
        self._norms.clear()
        self._passes.clear()
        share = self.mesh.config.sharing_size
        return [square / share**2 for square in found]

    def of_step(self) -> torch.Tensor:
        """Return this rank's part of the squared norm of the step's gradient, as data ranks have reduced it."""
        if next(iterate_sharded_modules(self.root), None) is None:
            parameters = list(self.model.parameters())
        else:
            parameters = [
                held.sharded_param for group in iterate_parameter_groups(self.root) for held in group.fsdp_params
            ]
        norms: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        whole = math.prod(map(self.mesh.size, _ALIKE))
        for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
            alike = whole // math.prod(map(self.mesh.size, cut_axes(gradient, self.mesh)))
            norms[alike].append(
                torch.linalg.vector_norm(get_stored(gradient), dtype=torch.float32).to(self.mesh.device)
            )
        return _sum_of_squares(norms, self.mesh.device)


def _sum_of_squares(norms: dict[int, list[torch.Tensor]], device: torch.device) -> torch.Tensor:
    parts = [torch.stack(each).square().sum() / alike for alike, each in norms.items()]
    return torch.stack(parts).sum() if parts else torch.zeros((), device=device)


@dataclass(eq=False)
class _InTwoHops(DefaultReduceScatter):
    """The reduce-scatter of one FSDP2 unit, first over cp, then over dp_shard.

    Args:
        squares: gets the square of what each reduction holds between the hops.
    """

    mesh: ParallelMesh
    squares: list[torch.Tensor]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with this rank's shard of the sum, or mean, of all ranks' `input_tensor`."""
        shards, cp = self.mesh.size("dp_shard"), self.mesh.size("cp")
        size: Sequence[int] = (shards * output_tensor.numel(),)
        summed = self.allocate(size, dtype=input_tensor.dtype, device=input_tensor.device)
        by_part = input_tensor.view(shards, cp, -1).transpose(0, 1).contiguous().view(-1)
        super().__call__(summed, by_part, self.mesh.group("cp"), op)
        # A mean over cp has divided by cp already, by which `take` divides among all that share weights.
        factor = cp if op == dist.ReduceOp.AVG else 1
        self.squares.append((torch.linalg.vector_norm(summed, dtype=torch.float32) * factor).square())
        if shards > 1:
            return super().__call__(output_tensor, summed, self.mesh.group("dp_shard"), op, async_op)
        output_tensor.copy_(summed.view(output_tensor.shape))
        return None
