"""Models without memory for weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_parallel.spec import first_line, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WORKS = "a folder with a config.json works, or that file"


def read_config(source: str, others: str | None = None) -> PretrainedConfig:
    """The config of a folder, a config.json or a Hub id.

    Args:
        others: what else the caller takes.

    Raises:
        SpecError: there is no such model, or it is made by code of its own.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not os.path.exists(source):
            why = "no file or folder here, nor to be had from the Hub (wrong name, no access, or offline)"
            refuse(source, why, do=_WORKS if others is None else f"{_WORKS}, or {others}", cause=error)
        refuse(source, first_line(error), cause=error)


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device: of the class it names, else of the one that fits its kind.

    Raises:
        SpecError: Transformers has no model for it.
    """
    import transformers

    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    kinds = [transformers.AutoModelForSeq2SeqLM] if getattr(config, "is_encoder_decoder", False) else []
    kinds += [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel]
    with torch.device("meta"):
        if named is not None:
            return all_on_meta(named._from_config(config))
        for kind in kinds:
            if type(config) in kind._model_mapping:
                return all_on_meta(kind.from_config(config))
    refuse(type(config).__name__, "Transformers has no model for it", "a config of a language model")


def all_on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Move the parameters to the meta device that `__init__` made elsewhere; return the model.

    `torch.Tensor(n)` takes memory in a context of the meta device too. Transformers puts the checkpoint's values, or
    new ones, in the place of every parameter, wherever it was made.
    """
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in moved:
                moved[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            module._parameters[name] = moved[parameter]
    return model
