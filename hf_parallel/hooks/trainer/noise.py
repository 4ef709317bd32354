"""NEFTune in joined batches: the size of its noise follows from the length of an example with its padding.

The hook of Transformers takes the joined row for one example: n examples of a length L get 1 / sqrt(n) of the noise
alpha / sqrt(L * width) that they have in n rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from hf_parallel.hooks.trainer.rows import PADDED_LENGTHS
from hf_parallel.model.calls import get_held_tokens

if TYPE_CHECKING:
    from transformers import Trainer


def draw_noise_of_examples(trainer: Trainer, inputs: dict) -> contextlib.AbstractContextManager:
    """Give each token of a joined batch the noise of its example; the noise's length is taken out of the batch."""
    lengths = inputs.pop(PADDED_LENGTHS, None) if isinstance(inputs, dict) else None
    handle = getattr(trainer, "neftune_hook_handle", None)
    if lengths is None or handle is None:
        return contextlib.nullcontext()
    return _scale_noise(handle, (lengths.shape[1] / lengths).sqrt()[..., None])


@contextlib.contextmanager
def _scale_noise(handle: torch.utils.hooks.RemovableHandle, scale: torch.Tensor) -> Iterator[None]:
    hooks = handle.hooks_dict_ref()
    if hooks is None:  # the module is gone
        yield
        return
    hook = hooks[handle.id]
    hooks[handle.id] = functools.partial(_add_scaled, hook, scale)
    try:
        yield
    finally:
        hooks[handle.id] = hook


def _add_scaled(
    hook: Callable, scale: torch.Tensor, module: torch.nn.Module, input: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    noise, held = hook(module, input, torch.zeros_like(output)), get_held_tokens()
    return output + noise * (scale if held is None else held.part(scale)).to(output)
