"""Models without memory for weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


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
            return named._from_config(config)
        for kind in kinds:
            if type(config) in kind._model_mapping:
                return kind.from_config(config)
    refuse(type(config).__name__, "Transformers has no model for it", "a config of a language model")
