"""Losses of detection and segmentation, which divide sums by how many boxes or masks there are.

One process divides by those of its whole batch. Transformers divides by the average over processes, divided once more
by their number (DETR, MaskFormer), by that of all ranks of one model too (LW-DETR), or by the rank's own (RT-DETR).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer import means


@patch(
    "transformers.models.{maskformer.modeling_maskformer:MaskFormer,mask2former.modeling_mask2former:Mask2Former,"
    "oneformer.modeling_oneformer:OneFormer,eomt.modeling_eomt:Eomt,eomt_dinov3.modeling_eomt_dinov3:EomtDinov3,"
    "videomt.modeling_videomt:Videomt}Loss.get_num_masks",
    "divides a mean over processes by their number",
)
def get_num_masks(original: Callable, self: object, class_labels: list[torch.Tensor], device: torch.device) -> object:
    """This data rank's share of all masks."""
    return means.normaliser(torch.tensor(float(sum(map(len, class_labels))), device=device))


@patch(
    "transformers.loss.loss_{for_object_detection:Image,rt_detr:RTDetr}Loss.get_loss",
    "divides by the boxes of this rank, or by all",
)
@patch("transformers.loss.loss_lw_detr:LwDetrImageLoss.get_loss", "divides by the boxes of this rank", since="5.23")
def get_loss(
    original: Callable,
    self: nn.Module,
    loss: object,
    outputs: object,
    targets: list[dict[str, torch.Tensor]],
    indices: object,
    num_boxes: float,
    *args: object,
    **kwargs: object,
) -> object:
    """Divide by this data rank's share of all boxes; `num_boxes` is a multiple of its own ones.

    A criterion is made for each batch, and counts them once.
    """
    counted: tuple[object, float] | None = vars(self).get("_counted")
    if counted is None or counted[0] is not targets:
        own = torch.tensor(float(sum(len(target["class_labels"]) for target in targets)), device=runtime.mesh().device)
        counted = vars(self)["_counted"] = targets, float(means.normaliser(own) / own.clamp(min=1))
    return original(self, loss, outputs, targets, indices, num_boxes * counted[1], *args, **kwargs)


@patch("transformers.loss.loss_for_object_detection:reduce", "adds up what is shared out in `get_loss`")
def multiply(original: Callable, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Own boxes, times the number of data ranks by which they are divided next."""
    return tensor * runtime.mesh().data_size


@patch(
    "transformers.loss.{loss_lw_detr,loss_rf_detr}:_is_torch_distributed_initialized",
    "adds up what is shared out in `get_loss`",
    since="5.23",
)
def stays_alone(original: Callable) -> bool:
    """Own boxes only."""
    return False
