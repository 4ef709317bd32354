"""Transformers: which outputs of its layers a model can give, also one whose class FSDP2 has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from hf_parallel.hooks.patching import patch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@patch(
    "transformers.utils.output_capturing:_CanRecordRegistry.get",
    "looks a class up by its name, which FSDP2 changes: hidden states were left out",
    since="5.23",
)
def can_record(original: Callable, self: dict[str, dict], model: PreTrainedModel) -> dict:
    """What is known of the model's own class."""
    if not isinstance(model, FSDPModule):
        return original(self, model)
    own = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    return dict.get(self, str(own)) or {}
