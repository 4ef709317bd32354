"""Adapters that Transformers' own methods put into a model: `model.add_adapter(config)`, `model.load_adapter(folder)`.

The model stays of its class, and its `save_pretrained` writes the adapters alone. sentence-transformers goes this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.apply.methods import bind
from hf_parallel.ask.spec import refuse
from hf_parallel.checkpoint import slices
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import gather_saved_tensors, save_pretrained
from hf_parallel.hooks.peft.before import is_kept_whole
from hf_parallel.hooks.peft.placing import place_in_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@patch(
    "transformers.integrations.peft:PeftAdapterMixin.{add_adapter,load_adapter}", "leaves adapters whole on every rank"
)
def put_adapters_in(original: Callable, self: PreTrainedModel, *args: object, **kwargs: object) -> object:
    """Split the adapters when Transformers is done with them.

    Raises:
        SpecError: they are of a kind that is kept whole.
    """
    result, state = original(self, *args, **kwargs), runtime.find_parallel_state(self)
    if state is None:
        return result
    for config in self.peft_config.values():
        if is_kept_whole(config, self, state.mesh):
            refuse(f"model.{original.__name__} of peft_type={config.peft_type.value}", "LoRA alone", "get_peft_model")
    place_in_base(self, state)
    slices.let_ask(self, gather_saved_tensors)
    bind(self, "save_pretrained", functools.partial(save_pretrained, type(self).save_pretrained))
    return result
