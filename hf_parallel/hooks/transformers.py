"""Functions of transformers that count, ask, draw or multiply for one process: boxes, files, noise, experts."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from huggingface_hub import constants
from torch import nn

from hf_parallel.ask import hub
from hf_parallel.ask.spec import SpecError
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer import means
from hf_parallel.model.calls import get_held_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

# ---- Files of the Hub while no Hub answers: transformers asks for half a minute before it says so -------------------


@patch("transformers.utils.hub:cached_files", "asks a Hub that does not answer for half a minute")
def cached_files(
    original: Callable, path_or_repo_id: str | os.PathLike, filenames: list[str], *args: object, **kwargs: object
) -> list[str] | None:
    """Look only on this machine while no Hub answers.

    Raises:
        OSError: the original's own. If the script does not catch it, the run ends with one line that says what was
            asked for and what may have been meant.
    """
    reason = None
    own_ways = args or kwargs.get("local_files_only") or kwargs.get("repo_type")
    if not own_ways and hub.is_name(path_or_repo_id):
        files = tuple(os.path.join(str(kwargs.get("subfolder") or ""), name) for name in filenames)
        where = {key: kwargs.get(key) for key in ("cache_dir", "revision")}
        reason = hub.why_missing(str(path_or_repo_id), files, **where)  # type: ignore[arg-type]
    if reason is None:
        return original(path_or_repo_id, filenames, *args, **kwargs)
    try:
        return original(path_or_repo_id, filenames, **{**kwargs, "local_files_only": True})
    except OSError as error:
        advice = hub.suggest_model(str(path_or_repo_id)) or "load it once, or give a folder with the model"
        raise OSError(str(error)) from SpecError(f"{path_or_repo_id}: {reason}; {advice}")


@patch("huggingface_hub.utils._http:http_backoff", "tries again for 23 seconds while no Hub answers", copies=True)
def ask_hub(original: Callable, method: str, url: str, **kwargs: object) -> object:
    """Ask the Hub once while nothing accepts a connection: adapters and data sets are looked for without transformers.

    The error is huggingface_hub's own, and so is what its caller makes of it.
    """
    if method in ("HEAD", "GET") and url.startswith(constants.ENDPOINT) and hub.why_no_hub_answers():
        kwargs["max_retries"] = 0
    return original(method, url, **kwargs)


@patch(
    "transformers.{utils.hub:PushToHubMixin,modeling_utils:PreTrainedModel,tokenization_utils_base:"
    "PreTrainedTokenizerBase,processing_utils:ProcessorMixin}.push_to_hub",
    "uploads from each process",
)
def push_to_hub(original: Callable, self: PreTrainedModel, *args: object, **kwargs: object) -> object:
    """Upload from rank 0, to which the others send their part of a model."""
    if runtime.mesh().rank == 0:
        return original(self, *args, **kwargs)
    if runtime.find_parallel_state(self) is not None:
        size = {name: kwargs[name] for name in ("max_shard_size",) if name in kwargs}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **size)
    return None


@patch("transformers.trainer:Trainer.get_num_trainable_parameters", "counts those of one stage")
def count_trainable_parameters(original: Callable, self: Trainer) -> int:
    """Count those of the whole model."""
    state = runtime.find_parallel_state(self.model)
    if state is None or state.pipeline is None:
        return original(self)
    with state.pipeline.remote_modules.counted(getattr(self.model, "get_base_model", lambda: self.model)()):
        return original(self)


# ---- Experts whose part on a rank is narrower than the kernel reads -------------------------------------------------


@patch("transformers.integrations.moe:_can_use_grouped_mm", "takes a kernel that stops where no 16 bytes divide a row")
def can_group_products(original: Callable, input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    """Take Transformers' loop over experts where a part's rows are no multiples of 16 bytes, in the layer's dtype."""
    wide = [size for size in weight.shape[-2:] if size * weight.element_size() % 16]
    if wide and not torch.compiler.is_compiling() and runtime.mesh().rank == 0:
        each = 16 // weight.element_size()
        warnings.warn(
            f"hf_parallel: experts are computed one after another, which is slow: {wide[0]} columns of one are on a "
            f"rank, and grouped products take multiples of {each}; a smaller tp_size, or ep_size, makes them wider",
            stacklevel=2,
        )
    return not wide and original(input, weight, offs)


# ---- NEFTune: noise on embeddings, of a size that follows from how many tokens an example has -----------------------


@patch("transformers.integrations.neftune:neftune_post_forward_hook", "draws for, and counts, a rank's tokens alone")
def add_noise(
    original: Callable, module: torch.nn.Module, input: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Draw the noise of whole examples and add this rank's part.

    Ranks of cp, which draw from one state, then take the numbers of one process. For that moment a rank holds one
    hidden state of the whole examples.
    """
    held = get_held_tokens()
    if held is None or not module.training:
        return original(module, input, output)
    return output + held.part(original(module, input, output.new_zeros(*held.shape, output.shape[-1])))


# ---- Losses of detection and segmentation, which divide sums by how many boxes or masks there are
# One process divides by the boxes of its whole batch. Transformers divides by the average over processes, divided once
# more by their number (DETR, MaskFormer), by the boxes of all ranks of one model (LW-DETR), or by the rank's own
# (RT-DETR).


@patch(
    "transformers.models.{maskformer.modeling_maskformer:MaskFormer,mask2former.modeling_mask2former:Mask2Former,"
    "oneformer.modeling_oneformer:OneFormer,eomt.modeling_eomt:Eomt,eomt_dinov3.modeling_eomt_dinov3:EomtDinov3,"
    "videomt.modeling_videomt:Videomt}Loss.get_num_masks",
    "divides a mean over processes by their number",
)
def get_num_masks(original: Callable, self: object, class_labels: list[torch.Tensor], device: torch.device) -> object:
    """Return this data rank's share of all masks."""
    return means.compute_normaliser(torch.tensor(float(sum(map(len, class_labels))), device=device))


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
        counted = vars(self)["_counted"] = targets, float(means.compute_normaliser(own) / own.clamp(min=1))
    return original(self, loss, outputs, targets, indices, num_boxes * counted[1], *args, **kwargs)


@patch("transformers.loss.loss_for_object_detection:reduce", "adds up what is shared out in `get_loss`")
def multiply(original: Callable, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Return own boxes, times the number of data ranks by which they are divided next."""
    return tensor * runtime.mesh().data_size


@patch(
    "transformers.loss.{loss_lw_detr,loss_rf_detr}:_is_torch_distributed_initialized",
    "adds up what is shared out in `get_loss`",
    since="5.23",
)
def stays_alone(original: Callable) -> bool:
    """Return False, so that each rank counts its own boxes only."""
    return False


# ---- Losses that take means themselves, which `means` sees only in functions of torch ------------------------------


@patch(
    "transformers.models.speecht5.modeling_speecht5:SpeechT5GuidedMultiheadAttentionLoss.forward",
    "takes the mean over the scores of this rank's tokens",
)
def guide_attention(
    original: Callable, self: nn.Module, attentions: torch.Tensor, *masks: torch.Tensor
) -> torch.Tensor:
    """Weigh the mean over attentions by how many there are: each frame has one for each token, in as many heads.

    Args:
        masks: of tokens [rows, tokens] and of frames [rows, frames].
    """
    tokens, frames = (mask.sum(-1) for mask in masks)
    return means.correct_mean(original(self, attentions, *masks), (tokens * frames).sum().float())
