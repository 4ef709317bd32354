"""Gradients of the small weights of a layer that all ranks hold whole, summed over ranks in one all-reduce.

Norms on parts of the sequence, biases of row-parallel layers and the whole halves of adapters have a part of their
gradient on each rank. An all-reduce of each would wait for the network 2 to 14 times in a layer's backward pass:

    each by itself    norm ─ all-reduce    bias ─ all-reduce    norm ─ all-reduce
    here              norm, bias, norm ─────────────────────────────── one buffer ─ all-reduce

The sum comes at the end of the layer's backward pass, before FSDP2 reduces the layer over data ranks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_parallel.model.anatomy import find_stacks
from hf_parallel.ranks import copy_weight_to_group
from hf_parallel.ranks.differentiable import once_differentiable, start_all_reduce
from hf_parallel.ranks.local import is_lowered_from

if TYPE_CHECKING:
    import torch.distributed as dist

    from hf_parallel.ranks.differentiable import Context

Place = tuple[nn.Module, str]


class LayerSums:
    """The weights of one layer that its modules asked for when it ran, and their copies while it runs.

    A layer learns in its first forward pass which weights these are. All ranks learn the same in the same order.
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.runs = group, False
        #: The weights, and the modules on the way to them, which may have become units of FSDP2.
        self._known: dict[Place, list[nn.Module]] = {}
        self._copies: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._end, always_call=True)

    def copy(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return the weight for use on a part of the work: `copy_weight_to_group`."""
        weight: Any = module._parameters[name]
        source, copied = self._copies.get((module, name), (None, None))
        if source is not None and copied is not None:
            if source is weight:
                return copied
            if is_lowered_from(weight, source):
                return copied.to(weight.dtype)
        # Other code has put another tensor in its place, or the layer runs for the first time.
        if self.runs:
            self._known.setdefault((module, name), [])
        return copy_weight_to_group(weight, self.group)

    def _begin(self, layer: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            return
        self.runs = True
        held = {}
        for (module, name), way in self._known.items() if torch.is_grad_enabled() else ():
            if not way:  # the modules inside the layer that hold this one, and itself
                inside = (one for one in layer.modules() if one is not layer)
                way = [one for one in inside if any(part is module for part in one.modules())]
            self._known[module, name] = way
            weight: Any = module._parameters.get(name)
            # A unit inside the layer gathers its weights later, and reduces their gradients earlier.
            apart = isinstance(weight, DTensor) or any(isinstance(one, FSDPModule) for one in way)
            if weight is not None and not apart and weight.requires_grad:
                held[module, name] = weight
        if len(held) > 1:
            copies = _SumTogether.apply(self.group, *held.values())
            self._copies = {place: (weight, copy) for (place, weight), copy in zip(held.items(), copies, strict=True)}

    def _end(self, layer: nn.Module, args: tuple, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.runs, self._copies = False, {}


def sum_by_layer(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the split layers of each transformer layer add up the gradients of their whole weights together."""
    for layer in (layer for stack in find_stacks(model) for layer in stack.layers):
        sums = LayerSums(layer, group)
        for module in layer.modules():
            if "region" in vars(module):
                vars(module)["region"].sums = sums


class _SumTogether(torch.autograd.Function):
    """Weights -> the same; their gradients, of which each rank has a part, are summed in fp32 in one buffer."""

    @staticmethod
    def forward(ctx: Context, group: dist.ProcessGroup, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        wide = functools.reduce(torch.promote_types, (gradient.dtype for gradient in given), torch.float32)
        whole = start_all_reduce(torch.cat([gradient.flatten().to(wide) for gradient in given]), ctx.group).wait()
        sums = iter(whole.split([gradient.numel() for gradient in given]))
        return None, *(None if g is None else next(sums).view_as(g).to(g.dtype) for g in gradients)
