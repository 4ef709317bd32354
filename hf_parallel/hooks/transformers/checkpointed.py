"""Layers that are recomputed, in transformers before 5.23: around the layer's hooks, which ran again with it.

5.23 recomputes `forward` alone. What gathers the weights of a layer, moves its activations or says how it is
recomputed is a hook of that layer, and has to run once, outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from hf_parallel.hooks.patching import patch

if TYPE_CHECKING:
    from transformers.modeling_layers import GradientCheckpointingLayer

#: What a layer would write a second time: left out, by any of its names.
_CACHES = ("past_key_value", "past_key_values", "layer_past")


@patch(
    "transformers.modeling_layers:GradientCheckpointingLayer.__call__",
    "runs a layer's hooks again when it is recomputed, and reads before them how it is",
    before="5.23",
)
def call(original: Callable, self: GradientCheckpointingLayer, *args: object, **kwargs: object) -> object:
    """With the hooks outside, unless the layer is compiled, whose graph is recomputed as a whole."""
    if getattr(self, "_compiled_call_impl", None) is not None or not self.training:
        return original(self, *args, **kwargs)
    own = vars(self).get("forward")
    vars(self)["forward"] = functools.partial(_forward, self, self.forward)
    try:
        return nn.Module.__call__(self, *args, **kwargs)
    finally:
        if own is None:
            del vars(self)["forward"]
        else:
            vars(self)["forward"] = own


def _forward(layer: GradientCheckpointingLayer, forward: Callable, *args: object, **kwargs: object) -> object:
    if not layer.gradient_checkpointing:
        return forward(*args, **kwargs)
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    if not layer._can_checkpoint_with_cache:
        kwargs.update(dict.fromkeys(kwargs.keys() & set(_CACHES)))
    return layer._gradient_checkpointing_func(functools.partial(forward, **kwargs), *args)
