"""FSDP2 gathers the codes of weights that multiply in fp8: one byte per number, and no more held while they are used.

A shard is rounded with the scale of its whole weight, so what is gathered is what one process would round. The scales
of all weights of a root are agreed on at once, by the first gather after they may have changed:

    root's forward, optimizer's step    scales are forgotten
    first gather                        one all-reduce of a number per weight
    each gather                         shard -> codes -> all-gather -> weight in codes

torch asks the tensor inside a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`; these are put on
that plain tensor itself, so that parameters stay what optimizers, checkpoints and adapters know. Which tensor that is
torch settles when a root first runs (`lazy_init`, looked at in torch 2.13).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_parallel.axes.data.units import parameter_groups, state_of
from hf_parallel.axes.eight_bit import WHOLE, W, largest_number, tensorwise
from hf_parallel.collectives import all_reduce
from hf_parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.utils.hooks import RemovableHandle

    from hf_parallel.axes.eight_bit import Float8


_scales: weakref.WeakSet[Scales] = weakref.WeakSet()
_installed: list[RemovableHandle] = []


def gather_codes(root: nn.Module, mesh: ParallelMesh) -> None:
    """From here on the units below `root` gather codes of what multiplies in fp8."""
    if not _installed:
        _installed.append(register_optimizer_step_post_hook(_forget))
    groups = [mesh.sharing_mesh.get_group(mesh.sharing_mesh.ndim - 1)]
    groups += [mesh["tp"].get_group()] if mesh.size("tp") > 1 else []
    root.register_forward_pre_hook(Scales(groups).before, prepend=True)  # before FSDP2's own, which gathers


def _forget(*_: object) -> None:
    for scales in _scales:
        scales.forget()


class Scales:
    """The scales of the sharded weights of one root that multiply in fp8."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.weights: list[CodedWeight] = []
        _scales.add(self)

    def before(self, root: nn.Module, args: tuple) -> None:
        """Weights may have been loaded, or replaced, since the root's last forward pass."""
        self.forget()
        state_of(root)._lazy_init()
        held_by_root = (held for group in parameter_groups(root) for held in group.fsdp_params)
        found = [(held, _recipe(held)) for held in held_by_root]
        self.weights = [_coded(held, recipe, self) for held, recipe in found if recipe is not None]

    def forget(self) -> None:
        """The weights may change."""
        for weight in self.weights:
            weight.scale = None

    def agree(self) -> None:
        """The scale of each whole weight. Collective, in one all-reduce per group."""
        from torchao.float8.float8_utils import amax_to_scale

        parts = [weight.held._sharded_local_tensor for weight in self.weights]
        largest = torch.stack([largest_number(part) for part in parts]).float()
        for group in self.groups:
            largest = all_reduce(largest, group, dist.ReduceOp.MAX)
        config = self.weights[0].recipe.config
        scales = amax_to_scale(
            largest, config.cast_config_weight.target_dtype, config.round_scales_to_power_of_2
        ).unbind()
        for weight, scale in zip(self.weights, scales, strict=True):
            weight.scale = scale


class CodedWeight:
    """How one parameter of FSDP2 is gathered. `held`: torch's record of it."""

    def __init__(self, held: FSDPParam, recipe: Float8, scales: Scales) -> None:
        self.held, self.recipe, self.scales = held, recipe, scales
        self.scale: torch.Tensor | None = None

    def pre(self, mesh: object, size: object, stride: object, module: object, policy: object) -> tuple[tuple, tuple]:
        """The codes of this rank's shard, filled up to the length of all shards."""
        if self.scale is None:
            self.scales.agree()
        part = self.held._sharded_local_tensor
        operand = self.recipe.cast(part, W, "in", self.recipe.config.cast_config_weight, WHOLE, self.scale)
        codes, whole = operand._data, self.held.padded_sharded_param_size
        if codes.shape != whole:
            filled = codes.new_zeros(whole)
            filled.view(torch.uint8)[: len(codes)] = codes.view(torch.uint8)
            codes = filled
        return (codes,), (self.scale,)

    def post(self, outputs: tuple, metadata: tuple, dtype: torch.dtype, *, out: Any = None) -> tuple | None:
        """The whole weight, which multiplies as it is."""
        (codes,), (scale,) = outputs, metadata
        if out is not None:
            getattr(out, "_local_tensor", out)._scale = scale
            return None
        return self.recipe.of_codes(codes, scale, W, dtype), (codes,)


def _recipe(held: FSDPParam) -> Float8 | None:
    info = held._module_info
    return tensorwise(info.module) if info.param_name == "weight" else None


def _coded(held: Any, recipe: Float8, scales: Scales) -> CodedWeight:
    """What the parameter has, or else a new one, for which torch makes room."""
    part = held._sharded_local_tensor
    known = getattr(part, "fsdp_pre_all_gather", None)
    if known is not None and known.__self__.held is held:
        return known.__self__
    coded = CodedWeight(held, recipe, scales)
    part.fsdp_pre_all_gather, part.fsdp_post_all_gather = coded.pre, coded.post
    held._init_extensions()
    held.all_gather_outputs = []
    if hasattr(held, "_unsharded_param"):
        del held._unsharded_param
    return coded
