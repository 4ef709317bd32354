"""PEFT: adapters that were put in before the layout was active, as by a script that names it in its arguments.

They are taken out, the base becomes parallel, and the same adapters are put in again: what follows is `peft.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.hooks import runtime
from hf_parallel.hooks.peft import settings as peft_settings
from hf_parallel.hooks.peft.placing import place
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def make_parallel_below(model: PreTrainedModel, parallelize: Callable[[nn.Module], object]) -> None:
    """Make the base of a PeftModel parallel by `parallelize`. Collective; rank 0's adapters win.

    Raises:
        SpecError: adapters of another kind, merged ones, or copies of modules beside them.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tuner = getattr(model, "base_model", model)
    configs = dict(model.peft_config)
    for config in configs.values():
        peft_settings.check_kind(config)
    if not hasattr(tuner, "inject_adapter"):
        refuse("adapters of Transformers' add_adapter", "whole on every rank", "get_peft_model")
    for config in configs.values():
        peft_settings.check(tuner, tuner.model, config, False)
        if config.modules_to_save or any(getattr(module, "merged", False) for module in model.modules()):
            refuse(
                "merged adapters, or modules_to_save",
                "the model has them from before the layout was active",
                do="launch with --parallel first",
            )
    values = {
        name: get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in configs
    }
    kept = {name: {key: tensor.detach().clone() for key, tensor in found.items()} for name, found in values.items()}
    active, trains = list(tuner.active_adapters), any(p.requires_grad for p in model.parameters())
    tuner.unload()
    parallelize(tuner.model)
    for name in configs:
        tuner.inject_adapter(tuner.model, name)
        tuner._cast_adapter_dtype(adapter_name=name, autocast_adapter_dtype=True)
        state = runtime.parallel_state(tuner.model)
        assert state is not None
        place(tuner.model, state)
        set_peft_model_state_dict(model, _from_first_rank(kept[name], tuner.model), adapter_name=name)
    tuner.set_adapter(active, inference_mode=not trains)


def _from_first_rank(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    state = runtime.parallel_state(model)
    assert state is not None
    device, equal = state.mesh.device, {}
    for key in sorted(tensors):
        equal[key] = tensors[key].to(device).contiguous()
        dist.broadcast(equal[key], src=0)
    return equal
