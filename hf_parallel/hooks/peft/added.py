"""Adapters that Transformers' own methods put into a model: `model.add_adapter(config)`, `model.load_adapter(folder)`.

The model stays of its class, and its `save_pretrained` writes the adapters alone. sentence-transformers goes this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.apply.methods import bind
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import place_adapters, save_pretrained
from hf_parallel.hooks.peft.whole import list_own_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@patch(
    "transformers.integrations.peft:PeftAdapterMixin.{add_adapter,load_adapter}", "leaves adapters whole on every rank"
)
def put_adapters_in(original: Callable, self: PreTrainedModel, *args: object, **kwargs: object) -> object:
    """Split the adapters when Transformers is done with them, or keep them whole."""
    former = list_own_tensors(self)
    result = original(self, *args, **kwargs)
    if runtime.find_parallel_state(self) is None:
        return result
    for config in self.peft_config.values():
        place_adapters(self, config, former)
    bind(self, "save_pretrained", functools.partial(save_pretrained, type(self).save_pretrained))
    return result
