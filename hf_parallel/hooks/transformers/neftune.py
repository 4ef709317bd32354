"""NEFTune: noise on embeddings, of a size that follows from how many tokens an example has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.hooks.patching import patch
from hf_parallel.model.calls import held_tokens

if TYPE_CHECKING:
    import torch


@patch("transformers.integrations.neftune:neftune_post_forward_hook", "draws for, and counts, a rank's tokens alone")
def add_noise(
    original: Callable, module: torch.nn.Module, input: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    """Draw the noise of whole examples and add this rank's part.

    Ranks of cp, which draw from one state, then take the numbers of one process. For that moment a rank holds one
    hidden state of the whole examples.
    """
    held = held_tokens()
    if held is None or not module.training:
        return original(module, input, output)
    return output + held.part(original(module, input, output.new_zeros(*held.shape, output.shape[-1])))
