"""Whole gradients of a pipeline's stages, kept from one run of its schedule to the next: reduced once per step.

    micro-step 1 of 3    run, nothing reduced     its gradients, weighed     held
    micro-step 2         the same                                            added
    micro-step 3         the same                                            added, then reduced

What a run gives is known before the gradient of its loss, by which it is to be weighed; so the last run does not
reduce either where something is held. A step of a single run holds nothing, and reduces in its schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_parallel.axes.data.units import parameter_groups, state_of
from hf_parallel.mesh import stored

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


Whole = list[tuple["FSDPParam", torch.Tensor]]


class Run:
    """One of several runs of a step, which reduces nothing; `more` of them follow."""

    def __init__(self, held: HeldGradients, more: bool) -> None:
        self.held, self.more = held, more
        self.whole: Whole = []

    def take(self) -> None:
        """What it has left unreduced; its weights are freed."""
        groups = [group for stage in self.held.stages for group in parameter_groups(stage)]
        self.whole = [found for group in groups for found in _taken(group)]

    def hand_over(self, scale: torch.Tensor | None) -> None:
        """Hold that too, times the gradient of its loss; after the last run reduce it all."""
        self.held.add(self.whole, scale)
        self.whole = []
        if not self.more:
            self.held.reduce()


class HeldGradients:
    """Those of one rank's stages; `more`: another run of the step follows."""

    def __init__(self, stages: list[nn.Module]) -> None:
        self.stages = [stage for stage in stages if isinstance(stage, FSDPModule)]
        self.more = False
        self._held: dict[FSDPParam, torch.Tensor] = {}

    def run(self) -> Run | None:
        """The run that begins, if it is one of several."""
        return Run(self, self.more) if self.more or self._held else None

    def add(self, whole: Whole, scale: torch.Tensor | None) -> None:
        """Hold these too, times the gradient of their loss."""
        for parameter, gradient in whole:
            if scale is not None:
                stored(gradient).mul_(scale)
            if parameter in self._held:
                stored(self._held[parameter]).add_(stored(gradient))
            else:
                self._held[parameter] = gradient

    def reduce(self) -> None:
        """Reduce what is held, into the gradients of the stored parameters."""
        for parameter, gradient in self._held.items():
            parameter.unsharded_accumulated_grad = gradient
        self._held = {}
        for stage in self.stages:
            _reduce(stage)


def _taken(group: FSDPParamGroup) -> Whole:
    found: Whole = []
    for parameter in group.fsdp_params:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()  # sums of 16 bits are kept in fp32
        whole, given = parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad
        parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
        if (gradient := given if whole is None else whole) is not None:
            found.append((parameter, gradient))
    group._to_sharded()
    return found


def _reduce(stage: Any) -> None:
    """What torch's schedules do at their end."""
    for setting in (stage.set_is_last_backward, stage.set_reshard_after_backward, stage.set_requires_gradient_sync):
        setting(True)
    for group in parameter_groups(stage):
        group.post_backward()
    state_of(stage)._root_post_backward_final_callback()
