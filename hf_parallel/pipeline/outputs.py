"""What a pipelined forward returns: values that every rank of the pipeline has, as autograd nodes where they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput

Gradients = list[torch.Tensor | None]


@dataclass
class PipelineLoss(ModelOutput):
    """Output of a scheduled step: the loss alone, as logits of past micro-batches are freed on the way."""

    loss: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"hf_parallel: a pipelined training step keeps no {name}; call the model without labels to get logits"
        )


class _Node(torch.autograd.Function):
    """Values computed elsewhere; backward hands their gradients to a function and returns none."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, finish: Callable[[Gradients], None], *values: torch.Tensor) -> Any:
        ctx.finish = finish
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value in values if not value.is_floating_point()))
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        ctx.finish(list(gradients))
        return (None, None, *(None for _ in gradients))


def detached_node(values: list[torch.Tensor], finish: Callable[[Gradients], None]) -> list[torch.Tensor]:
    """`values` as outputs of one autograd node whose backward calls `finish(gradients)` once."""
    anchor = torch.zeros((), requires_grad=True)
    return list(_Node.apply(anchor, finish, *values))


def broadcast_outputs(
    outputs: Any, group: dist.ProcessGroup, source: int, device: torch.device, loss_only: bool
) -> tuple[Callable[[list[torch.Tensor]], Any], list[torch.Tensor]]:
    """Send the last stage's outputs to all stages.

    Args:
        outputs: what the model returned on the last stage; ignored elsewhere.
        source: which rank of the group holds the last stage.
        loss_only: send nothing but the loss, if there is one.

    Returns:
        A function that rebuilds the model's output from a list of tensors, and those tensors: on the last stage the
        ones that carry a graph, elsewhere their received values.
    """
    last = group.rank() == source
    entries: list[tuple[str, torch.Tensor]] = []
    note: list[Any] = [None]
    if last:
        entries = [(key, value) for key, value in outputs.items() if torch.is_tensor(value)]
        if loss_only and any(key == "loss" for key, _ in entries):
            entries = [(key, value) for key, value in entries if key == "loss"]
        # Logits that are cut over tp ranks: those of the last stage make them whole together.
        entries = [(key, value.full_tensor() if isinstance(value, DTensor) else value) for key, value in entries]
        note = [(type(outputs), [(key, value.shape, value.dtype) for key, value in entries])]
    dist.broadcast_object_list(note, group=group, group_src=source)
    kind, described = note[0]
    tensors = [v for _, v in entries] if last else [torch.empty(s, dtype=d, device=device) for _, s, d in described]
    for tensor in tensors:
        dist.broadcast(tensor.detach().contiguous() if last else tensor, group=group, group_src=source)
    keys = [key for key, _, _ in described]
    return lambda values: kind(**dict(zip(keys, values, strict=True))), tensors
