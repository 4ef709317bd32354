"""What a model tells of its attentions, and what this machine has for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.ask.keys.layers import AUTO, TORCH_FLASH
from hf_parallel.axes.context.read import score_dropout, sliding_window, uses_registries
from hf_parallel.model.anatomy import head_width, text_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from hf_parallel.config import ParallelConfig


@dataclass(frozen=True)
class AttentionFacts:
    """What decides which kernel a model can run.

    Attributes:
        own: its present kernel: what its script asked for, or what transformers chose.
        interface: does it call its attention, and make its masks, through transformers' registries?
        text: is it a decoder that reads nothing but tokens?
        head_size: of a query.
        softcap: of its scores, or None.
        dropout: `key=value` of the dropout of its scores, or None.
        window: of its sliding layers, or None.
        sinks: has it further scores per head, as gpt-oss?
        lacks: why transformers does not set the kernel that the spec names, or None.
        device: where it will run.
        capability: of a CUDA device, as (9, 0).
        dtype: of the weights.
        here: is that device this machine's, so that a kernel can be tried?
    """

    own: str
    interface: bool
    text: bool
    head_size: int
    softcap: float | None
    dropout: str | None
    window: int | None
    sinks: bool
    lacks: str | None
    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    here: bool = True


def read_attention(model: PreTrainedModel, config: ParallelConfig) -> AttentionFacts | None:
    """The facts; the model is not changed. None of a module that is not one of transformers."""
    if not hasattr(model, "set_attn_implementation"):
        return None
    own = text_config(model)
    device, capability = _device()
    return AttentionFacts(
        own=model.config._attn_implementation or "eager",
        interface=uses_registries(model),
        text=own is model.config and not getattr(own, "is_encoder_decoder", False),
        head_size=_head_size(own),
        softcap=getattr(own, "attn_logit_softcapping", None) or None,
        dropout=score_dropout(own),
        window=sliding_window(own),
        sinks=any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()),
        lacks=None if config.attention in (AUTO, TORCH_FLASH) else _why_not(model, config.attention),
        device=device,
        capability=capability,
        dtype=getattr(model, "dtype", torch.float32),
    )


def _head_size(config: PretrainedConfig) -> int:
    wide, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", None)
    if getattr(config, "qk_head_dim", None):  # latent attention
        return int(config.qk_head_dim)
    return int(head_width(config) or (wide // heads if isinstance(heads, int) and heads else 0))


def _device() -> tuple[str, tuple[int, int]]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return "cpu", (0, 0)
    return found.type, torch.cuda.get_device_capability() if found.type == "cuda" else (0, 0)


def _why_not(model: nn.Module, name: str) -> str | None:
    """Tried on a model without layers; the first line of what transformers says."""
    kind: Any = type(model)
    shell = kind.__new__(kind)
    torch.nn.Module.__init__(shell)
    shell.config = copy.deepcopy(model.config)
    try:
        shell.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return None
