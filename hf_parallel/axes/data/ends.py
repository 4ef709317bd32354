"""Embedding and head in parameter groups of their own, so that they are gathered only while they are needed.

In the group of the root they would be whole from the first gather to the end of the backward, 2.1 GB of an 8B in
bf16, and the head's gradient would be reduced after everything else:

                 in the root's group          in a group of its own
    embedding    held all the time            freed after the forward; its backward needs no weight
    head         held all the time            gathered during the last layer, reduced before the layers' backward

One weight that both share is needed at both ends, and stays with the root.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

from hf_parallel.axes.data.units import groups_of, state_of
from hf_parallel.model.anatomy import backbone_of, input_embedding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from transformers import PreTrainedModel


class Settings(TypedDict, total=False):
    """Of `fully_shard`, the same for all units of a model."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter]


def shard_ends(model: PreTrainedModel, blocks: list[nn.Module], keeps: bool, settings: Settings) -> None:
    """Give embedding and head groups of their own where each has its weight for itself.

    Args:
        keeps: weights stay gathered from the forward to the backward.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    embedding, head, backbone = input_embedding(model), _head(model), backbone_of(model)
    if isinstance(embedding, nn.Embedding) and id(embedding) not in inside and _alone(model, embedding):
        unit = fully_shard(embedding, reshard_after_forward=not keeps, **settings)
        is_lookup = len(list(embedding.parameters())) == 1  # no norm in it, whose backward reads a weight
        if is_lookup:
            unit.set_unshard_in_backward(False)
    if head is not None and backbone is not None and _alone(model, head) and head not in set(backbone.modules()):
        unit = fully_shard(head, reshard_after_forward=False, **settings)
        _gather_early(model, unit, backbone, blocks)


def gather(unit: FSDPModule) -> None:
    """Make the weights of a unit whole before its own hook does, while the model around it runs.

    `unit.unshard` would forget that gradients are being summed in fp32: see reduction.py.
    """
    for group in groups_of(unit) if state_of(unit)._is_root is False else ():  # else it runs by itself
        group.unshard()
        group.wait_for_unshard()


def _head(model: PreTrainedModel) -> nn.Module | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) and not any(head.children()) else None


def _alone(model: nn.Module, end: nn.Module) -> bool:
    """Has the model this module, and its parameters nowhere else?"""
    own = {id(parameter) for parameter in end.parameters()}
    every = itertools.chain.from_iterable(module._parameters.values() for module in model.modules())
    return bool(own) and sum(id(parameter) in own for parameter in every) == len(own)


def _gather_early(model: nn.Module, head: FSDPModule, backbone: nn.Module, blocks: list[nn.Module]) -> None:
    """Whole when the backbone is done, and in the backward, though a forward pass in between has freed it.

    A loss in pieces reads the head's weight and does not call the head.
    """
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    if units:
        units[-1].set_modules_to_forward_prefetch([head])

    def gather_unless_done(*_: object) -> None:
        if all(group._training_state != TrainingState.POST_BACKWARD for group in groups_of(head)):
            gather(head)  # gradients of outputs that come after the head's, as of router logits, must leave it freed

    def gather_in_backward(module: nn.Module, args: tuple, output: object) -> None:
        held = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
        for tensor in tree_leaves(held) if torch.is_grad_enabled() else ():
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(gather_unless_done)

    backbone.register_forward_hook(lambda *_: gather(head))
    model.register_forward_hook(gather_in_backward)
