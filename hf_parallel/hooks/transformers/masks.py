"""Questions that transformers asks of a mask on the device, where a pipeline knows the answer for the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_parallel.hooks.patching import patch
from hf_parallel.model.known_masks import what_is_known


@patch("transformers.masking_utils:_ignore_causal_mask_sdpa", "would wait for the device per micro-batch and stage")
def ignore_causal_mask(original: Callable, padding_mask: torch.Tensor | None, *args: object, **kwargs: object) -> bool:
    """A mask that hides nothing is none; one that hides something is made, also for rows without padding.

    Sequence parallelism pads rows at their end, where no token of a causal model sees: such a mask hides no more.
    """
    known = what_is_known()
    if known is None or known.hides is None or padding_mask is None:
        return original(padding_mask, *args, **kwargs)
    return False if known.hides else original(None, *args, **kwargs)


@patch(
    "transformers.masking_utils:find_packed_sequence_indices", "would wait for the device per micro-batch and stage"
)
def find_packs(original: Callable, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Positions that the model has counted itself do not start again."""
    known = what_is_known()
    return original(position_ids) if known is None or known.packs else None
