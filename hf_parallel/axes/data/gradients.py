"""Gradients over data ranks: when they are reduced, in which dtype, and their norm over all ranks.

The norm counts each shard once, and a tensor that several ranks hold alike once. So the sum of powers is taken per set
of axes over which a parameter is cut, summed over exactly those axes, and then over the stages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.axes.data.lowered import keep_copies
from hf_parallel.axes.data.units import (
    forget_end_of_backward,
    get_gradient_dtype,
    give_whole_gradient,
    holds_whole_gradient,
    iterate_parameter_groups,
    iterate_sharded_modules,
    reduce_whole_gradients,
    set_gradient_dtype,
    take_whole_gradient,
)
from hf_parallel.ranks.mesh import EXPERT_AXES, ParallelMesh, get_stored

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from hf_parallel.ask.config import ParallelConfig

# ---- When data ranks reduce gradients, and how long they keep gathered weights: ZeRO's stages over micro-batches
# of m micro-batches      reduces       gathers             whole on each rank between them
#     zero_stage=0        once          never               weights, gradients, optimizer states
#     zero_stage=1        once          once                weights, gradients
#     zero_stage=2        m times       once                weights
#     zero_stage=3        m times       2 m times           nothing
#
# `gradient_reduction=step` reduces once at stages 2 and 3 too, and holds whole gradients in between. A pipeline
# gathers once per run of its schedule; at stages 2 and 3 it reduces per run, too, else once per step: `HeldGradients`.
#
# Gradients of 16-bit weights are summed over micro-batches in fp32 and rounded once, after the last backward pass.

HELD = "_hf_parallel_held_gradients"
_MORE = "_hf_parallel_more_micro_batches"
_WIDENED = "_hf_parallel_widened"


@contextlib.contextmanager
def run_before_the_last(root: nn.Module, config: ParallelConfig) -> Iterator[None]:
    """Run all micro-batches of a step but the last one (in a pipeline: all runs of its schedule but the last).

    Inside, gradients are reduced, and weights freed, only as `zero_stage` asks for.
    """
    unit = None if config.pp_size > 1 else next(iterate_sharded_modules(root), None)
    if getattr(unit, _MORE, False):  # a part of such a micro-batch
        yield
        return
    held: HeldGradients | None = None
    if unit is not None:
        unit.set_requires_gradient_sync(config.reduces_each_micro_batch)
        unit.set_reshard_after_backward(config.zero_stage == 3)
        setattr(unit, _MORE, True)
    elif not config.reduces_each_run:
        held = getattr(root, HELD, None)
    if held is not None:
        held.more = True
    try:
        yield
    finally:
        if held is not None:
            held.more = False
        if unit is not None:
            setattr(unit, _MORE, False)
            unit.set_requires_gradient_sync(True)
            unit.set_reshard_after_backward(True)
        keep_copies()


def is_followed_by_micro_batch(root: nn.Module) -> bool:
    """Return whether the micro-batch that runs now is not the last one of its step."""
    unit = next(iterate_sharded_modules(root), None)
    return getattr(unit, _MORE, False)


def end_last_micro_batch(root: nn.Module) -> None:
    """End a step whose last forward pass had no backward pass. Collective.

    Reduce what gradients the passes before it have left, and free the weights that it has gathered.
    """
    unit = next(iterate_sharded_modules(root), None)
    if unit is None or getattr(unit, _MORE, False):
        return
    held = [one for group in iterate_parameter_groups(root) for one in group.fsdp_params]
    if any(holds_whole_gradient(one) for one in held):
        reduce_whole_gradients(unit)
        _narrow_gradients(cast(nn.Module, unit))
    for each in iterate_sharded_modules(root):
        each.reshard()


def round_after_backward(root: nn.Module) -> None:
    """Give 16-bit weights of `root` gradients of their own dtype once the last micro-batch has added to them."""
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def follow(module: nn.Module, args: tuple, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        if getattr(module, _MORE, False):
            _widen_gradients(module)
        elif getattr(module, _WIDENED, None):
            # FSDP2's hook on the same tensors came first: its last reductions are queued before the rounding.
            for tensor in tree_leaves(output):
                if torch.is_tensor(tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: queue(lambda: _narrow_gradients(module)))

    root.register_forward_hook(follow)


def _widen_gradients(root: nn.Module) -> None:
    """Keep gradients in fp32, in which they are reduced: torch would round the sum after each micro-batch."""
    if getattr(root, _WIDENED, None):
        return
    widened = []
    for group in (group for group in iterate_parameter_groups(root) if group.reduce_grads):
        held = [p for p in group.fsdp_params if p.sharded_param.dtype in (torch.bfloat16, torch.float16)]
        if held and get_gradient_dtype(group, held[0]) != torch.float32:
            widened.append((group, held))
            _convert_gradients(group, held, torch.float32)
    setattr(root, _WIDENED, widened)


def _narrow_gradients(root: nn.Module) -> None:
    """Round gradients to their parameters' dtype. The hooks of several outputs may call it; the first call does it."""
    for group, held in getattr(root, _WIDENED) or ():
        _convert_gradients(group, held, held[0].sharded_param.dtype)
    setattr(root, _WIDENED, None)


def _convert_gradients(group: FSDPParamGroup, held: list[FSDPParam], dtype: torch.dtype) -> None:
    """Let stored parameters have gradients of this dtype. Some have one: of a sum, or zeros that a script has kept."""
    parameters = [one.sharded_param for one in held]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    set_gradient_dtype(group, held, dtype)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(dtype)


# ---- Whole gradients of a pipeline's stages, kept from one run of its schedule to the next: reduced once per step
#     micro-step 1 of 3    run, nothing reduced     its gradients, weighed     held
#     micro-step 2         the same                                            added
#     micro-step 3         the same                                            added, then reduced
#
# A run computes its gradients before the backward pass of the script, which tells the factor of its loss. Hence
# the last run does not reduce in its schedule either if gradients are held. A step of one run does, and holds nothing.

Whole = list[tuple["FSDPParam", torch.Tensor]]


@dataclass(eq=False)
class Run:
    """A run whose schedule reduces nothing. `more`: another run of the step follows."""

    held: HeldGradients
    more: bool
    whole: Whole = field(default_factory=list)

    def take(self) -> None:
        """Take the unreduced gradients of the run from FSDP2, and free its weights."""
        self.whole = []
        for group in (group for stage in self.held.stages for group in iterate_parameter_groups(stage)):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    gradient = take_whole_gradient(parameter)
                    if gradient is not None:
                        self.whole.append((parameter, gradient))
            group._to_sharded()
        for stage in self.held.stages:
            forget_end_of_backward(stage)

    def hand_over(self, scale: torch.Tensor | None) -> None:
        """Add the gradients of the run, times `scale`, to the held ones. After the last run, reduce all of them."""
        self.held.add(self.whole, scale)
        self.whole = []
        if not self.more:
            self.held.reduce()


class HeldGradients:
    """The unreduced gradients of one rank's stages. `more`: another run of the step follows."""

    def __init__(self, stages: list[nn.Module]) -> None:
        self.stages = [stage for stage in stages if isinstance(stage, FSDPModule)]
        self.more = False
        self._held: dict[FSDPParam, torch.Tensor] = {}

    def begin_run(self) -> Run | None:
        """Start a run. Return None if the step has no other."""
        return Run(self, self.more) if self.more or self._held else None

    def add(self, whole: Whole, scale: torch.Tensor | None) -> None:
        """Add whole gradients, times the gradient of their loss, to the held ones."""
        for parameter, gradient in whole:
            if scale is not None:
                get_stored(gradient).mul_(scale)
            if parameter in self._held:
                get_stored(self._held[parameter]).add_(get_stored(gradient))
            else:
                self._held[parameter] = gradient

    def reduce(self) -> None:
        """Reduce the held gradients into those of the stored parameters, as torch's schedules do at their end."""
        for parameter, gradient in self._held.items():
            give_whole_gradient(parameter, gradient)
        self._held = {}
        for stage in self.stages:
            stage.set_is_last_backward(True)
            stage.set_reshard_after_backward(True)
            stage.set_requires_gradient_sync(True)
            reduce_whole_gradients(stage)


@torch.no_grad()
def clip_over_mesh(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    mesh: ParallelMesh,
    norm_type: float = 2.0,
    copies: Collection[int] = (),
    of_stage: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their joint norm is at most `max_norm`. Collective over one model's ranks.

    Args:
        copies: ids of parameters that another stage counts (the second copy of a tied embedding).
        of_stage: the norm is of parameters of this stage alone.

    Returns:
        The norm before clipping, a scalar equal on all ranks.
    """
    infinite = math.isinf(norm_type)
    combine = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    gathered: dict[frozenset[str], list[torch.Tensor]] = defaultdict(list)
    held: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            held.append(get_stored(parameter.grad))
            if id(parameter) not in copies:
                gathered[cut_axes(parameter.grad, mesh)].append(held[-1])
    # One slot per combination of axes, so that ranks with different parameters run the same collectives.
    known = [axis.name for axis in mesh.config.mesh_axes if axis.cuts] + [*EXPERT_AXES] * (mesh.config.ep_size > 1)
    known += [*TP_AXES] * (mesh.config.tp_col_size > 1)
    cutting = [axis for axis in known if mesh.size(axis) > 1]
    combinations = [
        frozenset(itertools.compress(cutting, chosen))
        for chosen in itertools.product((False, True), repeat=len(cutting))
    ]
    powers = torch.stack([_sum_of_powers(gathered[axes], norm_type, mesh.device) for axes in combinations])
    powers = powers.view((2,) * len(cutting))  # one dim per axis: not cut, cut
    for dim, axis in enumerate(cutting):
        over_axis = powers.select(dim, 1)  # a view, as a mask would have to be copied to the GPU
        cut = over_axis.contiguous()
        dist.all_reduce(cut, op=combine, group=mesh.group(axis))
        over_axis.copy_(cut)
    total = powers.max() if infinite else powers.sum()
    for mesh_axis in mesh.config.mesh_axes:
        if mesh_axis.layers and not of_stage and mesh.size(mesh_axis.name) > 1:
            dist.all_reduce(total, op=combine, group=mesh.group(mesh_axis.name))
    total = total if infinite else total ** (1.0 / norm_type)
    if not any(gradient.dtype == torch.float64 for gradient in held):
        total = total.float()
    if max_norm != math.inf:
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
        for gradients in _group_by_device_and_dtype(held):
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return total


def _sum_of_powers(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the sum of |g|^p over all elements, for the infinity norm the largest |g|; zero without gradients.

    In fp64, whatever the gradients are: ranks add them up, and those of another stage may have another dtype.
    """
    gradients = [gradient for gradient in gradients if gradient.numel()]  # an uneven shard can be empty
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    parts = []
    for alike in _group_by_device_and_dtype(gradients):
        wide = torch.promote_types(alike[0].dtype, torch.float32)  # torch would round norms to the gradients' dtype
        parts.append(torch.stack(torch._foreach_norm(alike, norm_type, dtype=wide)).double())
    stacked = torch.cat([part.to(device) for part in parts])  # one copy for all gradients on the host
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def cut_axes(gradient: torch.Tensor, mesh: ParallelMesh) -> frozenset[str]:
    """Return the axes of more than one rank over which this gradient is cut."""
    if not isinstance(gradient, DTensor):
        return frozenset()
    names = gradient.device_mesh.mesh_dim_names or ()
    # A strided shard (dp_shard and tp on one dim) has a dim too, but is not a plain Shard.
    cut = (n for n, placement in zip(names, gradient.placements, strict=True) if hasattr(placement, "dim"))
    return frozenset(axis for name in cut for axis in mesh.config.axes_along(name) if mesh.size(axis) > 1)


def _group_by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())
