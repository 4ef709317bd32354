"""Facts about a batch's padding while its parts run: transformers would ask the device for each part.

A pipeline calls the backbone per micro-batch and stage, and each call would wait for the device to say whether the
mask hides anything, or whether positions start again. The batch is asked once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_parallel.ask.session import of_session
from hf_parallel.model.calls import bind_arguments_of, compute_targets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True)
class KnownMask:
    """The facts about the batch in progress.

    Attributes:
        length: of its rows; a mask of another length, such as a padded one, is not known.
        hides: does its mask hide any token? None: it has no mask of one entry per token.
        packs: may positions start again within a row? Not where the model counts them itself.
        restarts: do they, in any row? None: nobody has looked.
    """

    length: int
    hides: bool | None
    packs: bool
    restarts: bool | None = None


class _Now:
    """The batch in progress; None: nothing is known of it."""

    known: KnownMask | None = None


def find_known_mask(batch: Mapping[str, object], tokens: torch.Tensor) -> KnownMask:
    """Return the facts about a batch. Waits once for its mask, or for its positions where it has no mask."""
    mask, positions, restarts = batch.get("attention_mask"), batch.get("position_ids"), None
    hides = not bool(mask.all()) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if mask is None and isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[1] > 1:
        restarts = bool((positions.diff(dim=-1) != 1).any())
    return KnownMask(tokens.shape[1], hides, positions is not None, restarts)


def share_known_mask(batch: Mapping[str, object], tokens: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Let only parts of this batch run inside the `with`."""
    return use_known_mask(find_known_mask(batch, tokens))


@contextlib.contextmanager
def use_known_mask(known: KnownMask | None) -> Iterator[None]:
    """Let parts of a batch run inside the `with` about which this is known."""
    now = of_session(_Now)
    former, now.known = now.known, known
    try:
        yield
    finally:
        now.known = former


def is_hiding_nothing(mask: torch.Tensor) -> bool:
    """Return whether this mask [sequences, length] hides no token. Waits for the device unless the batch is known."""
    known = get_known_mask()
    if known is None or known.hides is None or mask.shape[-1] != known.length:
        return bool(mask.all())
    return not known.hides


def get_known_mask() -> KnownMask | None:
    """Return the facts about the batch in progress; None: nothing is known."""
    return of_session(_Now).known


# ---- Labels that a model predicts at tokens its attention mask leaves out, where kernels do not compute the same
# at such a token                    eager               sdpa          flash, cp
# there is a token to be seen        that is attended    the same      nothing is attended: zeros
# there is none (left padding)       the mean of all     zeros         zeros
#
# Only these tokens differ, as no other sees them: without a label nothing depends on them. A loss of spans (question
# answering) predicts one of all tokens of a row, those too.

_IGNORED = -100
_BY_MATRIX = ("eager", "sdpa")


def refuse_masked_targets(model: nn.Module, own: str, used: str, setting: str, works: str, shifts: bool) -> None:
    """Let calls of the model raise an error for labels that kernel `used` would not predict as its `own` does.

    Args:
        own: the kernel of one process.
        used: that of the layout; by any name but "eager" and "sdpa" it computes nothing where the mask is zero.
        setting: that made the layout use it.
        works: another one, under which the labels are predicted as in one process.
        shifts: does the model shift labels by one?
    """
    seeing, blind = (own in _BY_MATRIX) != (used in _BY_MATRIX), (own == "eager") != (used == "eager")
    if (not seeing and not blind) or getattr(model.config, "is_encoder_decoder", False):
        return  # there the mask is of other tokens than the labels
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    find = functools.partial(_has_targets, seeing=seeing, blind=blind, causal=causal, shifts=shifts)
    names = list(inspect.signature(model.forward).parameters)
    at = f"at a token where attention_mask is 0, which attention={own} computes otherwise"
    label = (
        f"hf_parallel: {setting}: a label is predicted {at}; -100 as the label after each such token (for left "
        f"padding: of the first token after it), or {works}, works"
    )
    span = f"hf_parallel: {setting}: a span may be predicted {at}; rows without padding, or {works}, work"
    model.register_forward_pre_hook(functools.partial(_check_mask_of_call, names, find, label, span), with_kwargs=True)


def _check_mask_of_call(
    names: list[str],
    find: Callable[[Mapping], bool],
    label: str,
    span: str,
    model: nn.Module,
    args: tuple,
    kwargs: dict,
) -> None:
    batch = bind_arguments_of(names, args, kwargs, model)
    if find(batch):
        raise ValueError(span if torch.is_tensor(batch.get("start_positions")) else label)


def _has_targets(batch: Mapping, seeing: bool, blind: bool, causal: bool, shifts: bool) -> bool:
    """Return whether a label is predicted at a masked token that sees others (`seeing`), or none (`blind`)."""
    mask, labels, shifted = (batch.get(key) for key in ("attention_mask", "labels", "shift_labels"))
    given = labels if shifted is None else shifted
    if not torch.is_tensor(mask) or mask.dim() != 2:
        return False
    if torch.is_tensor(batch.get("start_positions")):
        targets = torch.zeros_like(mask)  # each token may be one
    elif not torch.is_tensor(given) or given.shape != mask.shape:
        return False
    else:
        targets = compute_targets_of(labels, shifted, _IGNORED) if shifts else given
    kept = mask.bool().to(targets.device)
    sees = kept.cumsum(-1) > 0 if causal else kept.any(-1, keepdim=True).expand_as(kept)
    counts = sees if not blind else ~sees if not seeing else torch.ones_like(sees)
    return bool((~kept & counts & (targets != _IGNORED)).any())
