"""The kernel of a model: the one that the spec names, if it can run, or the one that suits.

attention=       runs on             windows   caps   sinks   packs, padding
eager            anything            yes       yes    yes     by a matrix of scores
sdpa             anything            yes       no     no      by a matrix of who sees whom
torch_flash      anything            yes       no     yes     document by document
flash_attention_2, _3, _4            as the package can; transformers says what it lacks
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from hf_parallel.ask.keys.layers import AUTO, TORCH_FLASH
from hf_parallel.axes.attention.varlen import gap
from hf_parallel.axes.context.flash import widest
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.axes.attention.read import AttentionFacts
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class Kernel:
    """What the layers will call.

    Attributes:
        why: the reason of a choice, for people.
        own: is it the model's already?
        shifts: does the model's loss shift labels by one?
    """

    name: str
    why: str | None = None
    own: bool = False
    shifts: bool = False


@dataclass(frozen=True)
class _Package:
    """Where a kernel comes from, the GPU that it needs, and what it cannot do and transformers would leave out."""

    name: str
    module: str
    capability: tuple[int, int]
    drops: bool = False


_PACKAGES = {
    "flash_attention_2": _Package("flash-attn", "flash_attn", (8, 0), drops=True),
    "flash_attention_3": _Package("flash-attn-3", "flash_attn_interface", (9, 0)),
    "flash_attention_4": _Package("flash-attn-4", "flash_attn", (9, 0)),
}


def named(config: ParallelConfig, anatomy: Anatomy, facts: AttentionFacts | None) -> Kernel:
    """The kernel that the spec names.

    Raises:
        SpecError: what it lacks: a package, a GPU, or a kind of attention.
    """
    name = config.attention
    asked = f"attention={name}"
    if facts is None:
        refuse(asked, f"{anatomy.name} is not a transformers model", f"attention={AUTO}")
    reason = torch_flash_lacks(facts) if name == TORCH_FLASH else _lacks(name, facts)
    if reason is not None:
        refuse(asked, reason, f"attention={AUTO}" if config.cp_size > 1 else _instead(name, facts))
    return Kernel(name)


def _instead(name: str, facts: AttentionFacts) -> str:
    plain = facts.softcap is None and not facts.sinks
    return "attention=sdpa" if plain and name != "sdpa" else "attention=eager"


def _lacks(name: str, facts: AttentionFacts) -> str | None:
    package = _PACKAGES.get(name)
    if package is not None:
        if facts.lacks is not None and find_spec(package.module) is None:
            return f"the package {package.name} is not installed"
        if facts.device == "cpu" or (facts.device == "cuda" and facts.capability < package.capability):
            here = facts.device if facts.device == "cpu" else "one of {}.{}".format(*facts.capability)
            return "needs a GPU of compute capability {}.{}, here is {}".format(*package.capability, here)
        if facts.dropout is not None and not package.drops:
            return f"{facts.dropout} would be left out"
    return facts.lacks


def torch_flash_lacks(facts: AttentionFacts) -> str | None:
    """Why torch's flash kernels do not compute this model's attention."""
    if not facts.interface:
        return "this model has an attention of its own"
    if facts.softcap is not None:
        return f"attn_logit_softcapping={facts.softcap:g}, and torch's flash kernels have no soft cap"
    if facts.dropout is not None:
        return f"{facts.dropout}, and torch's flash kernels of several documents drop no scores"
    return None


def chosen(config: ParallelConfig, facts: AttentionFacts | None) -> Kernel | None:
    """What `auto` takes; None where there is nothing to choose."""
    if facts is None or not facts.head_size or config.cp_size > 1:  # cp has kernels of its own
        return None
    why = why_not_torch_flash(facts)
    if why is not None:
        return Kernel(facts.own, why, own=True)
    window = "" if facts.window is None else f", and windows of {facts.window} tokens without a mask"
    return Kernel(TORCH_FLASH, f"packs and padded rows document by document{window}")


def why_not_torch_flash(facts: AttentionFacts) -> str | None:
    """Why `auto` leaves the model's own kernel; in the order in which people would look."""
    if facts.own not in ("sdpa", "eager"):
        return "the script's own choice"
    lacks = torch_flash_lacks(facts)
    if lacks is not None:
        return lacks
    if facts.own == "eager" and not facts.sinks:
        return "the script's own choice"
    if facts.device != "cuda":
        why = "the model's own, where there is no CUDA device; "
        return f"{why}attention=torch_flash reads packs and windows without a mask"
    if not facts.text:
        return "it reads more than tokens, and may show some of them later ones"
    return _not_on_cuda(facts)


def _not_on_cuda(facts: AttentionFacts) -> str | None:
    if facts.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(facts.dtype).removeprefix("torch.")
        return f"weights are in {dtype}; under autocast to 16 bits attention=torch_flash works"
    if facts.capability < (8, 0):
        return "compute capability {}.{} has no flash kernel".format(*facts.capability)
    if not facts.head_size or facts.head_size % 8 or facts.head_size > widest(facts.capability):
        return f"heads of {facts.head_size} numbers do not fit into torch's flash kernel"
    if not facts.here:
        return None
    found = gap("cuda", facts.dtype, facts.head_size)  # it runs here once before a training does
    return None if isinstance(found, float) and found < 0.05 else f"torch's flash kernel fails a trial here ({found})"
