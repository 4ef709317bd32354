"""PEFT: adapters that started from factors of the base (PiSSA, OLoRA), saved as LoRA of the base as it was.

With A₀ and B₀ the adapter as it started, its file holds [A; A₀] and [B, -B₀], of twice the rank: B A - B₀ A₀.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftModel


@patch(
    "peft.tuners.lora.model:LoraModel._convert_state_dict_for_initial_model", "loads an adapter on the rank that saves"
)
def as_lora(
    original: Callable,
    cls: type[LoraModel],
    peft_model: PeftModel,
    peft_config: LoraConfig,
    path_initial_model_for_weight_conversion: str,
    *args: object,
) -> dict[str, torch.Tensor]:
    """Read the start from its file: peft would put it into the model, which takes all ranks."""
    path = path_initial_model_for_weight_conversion
    shown: object = peft_model
    if runtime.parallel_state(peft_model) is not None:
        folder, name = os.path.split(path)
        shown = SimpleNamespace(
            load_adapter=lambda *_, **__: None,
            delete_adapter=lambda *_: None,
            peft_config={name: peft_config},
            base_model=SimpleNamespace(subtract_mutated_init=lambda trained, *_: _less(trained, folder, name)),
        )
    return original(cls, shown, peft_config, path, *args)


def _less(trained: dict[str, torch.Tensor], folder: str, name: str) -> dict[str, torch.Tensor]:
    from peft import load_peft_weights

    first = load_peft_weights(folder, device="cpu", subfolder=name)
    signs = {"lora_A": (0, 1.0), "lora_B": (1, -1.0)}
    found = {key: next((how for part, how in signs.items() if part in key), None) for key in trained}
    return {
        key: torch.cat([trained[key], how[1] * first[key].to(trained[key])], how[0])
        for key, how in found.items()
        if how is not None
    }
