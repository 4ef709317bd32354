"""Which attention a plan assumes: what `attention=auto` would be on its GPUs, by the same rules as in a run.

kind     kernels                                         holds of each layer             computes
flash    torch_flash, flash_attention_2, …; those of cp  no scores                       keys that are seen
sdpa     sdpa on rows of one document                    no scores; of a window a mask   the same; of a window all
masked   sdpa on padded rows or packs                    a mask of queries by keys       all keys
eager    eager                                           scores in 32 and 16 bits        all keys; reads scores
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.keys.layers import AUTO, TORCH_FLASH
from hf_parallel.config import ParallelConfig
from hf_parallel.planner.shape import Attention, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.attention.read import AttentionFacts
    from hf_parallel.planner.hardware import Gpu

FLASH, SDPA, MASKED, EAGER = "flash", "sdpa", "masked", "eager"
_DTYPES = {"bf16": "bfloat16", "fp8": "bfloat16"}  # of the weights; else fp32
_LOWERED = {"mixed": "bfloat16", "fp16": "float16"}  # what autocast lowers products to


@dataclass(frozen=True)
class Planned:
    """The attention of a plan.

    Attributes:
        auto: what `attention=auto` would be.
        why: the reason, for people.
        asked: what the plan's specs say.
        documents: are rows padded, or packs of documents, so that sdpa needs a mask?
        counted: the kernel that a dry run of the model has, when what its layers keep is counted.
    """

    auto: str = TORCH_FLASH
    why: str = "no model, only its numbers: flash attention is assumed"
    asked: str = AUTO
    documents: bool = False
    counted: str = SDPA

    @property
    def name(self) -> str:
        """The kernel that the plan's layouts run."""
        return self.auto if self.asked == AUTO else self.asked

    def kind(self, config: ParallelConfig) -> str:
        """What this layout's attention is to the formulas; cp has kernels of its own."""
        if config.cp_size > 1:
            return FLASH
        name = self.auto if config.attention == AUTO else config.attention
        if name == SDPA:
            return MASKED if self.documents else SDPA
        return EAGER if name == EAGER else FLASH


def all_keys(attention: Attention, seq: int, kind: str) -> bool:
    """Does it compute scores of keys, too, that a mask then hides?"""
    return kind in (MASKED, EAGER) or has_mask(attention, seq, kind)


def has_mask(attention: Attention, seq: int, kind: str) -> bool:
    """Does sdpa get a mask of queries by keys? Without one it takes a flash kernel."""
    return kind == MASKED or (kind == SDPA and attention.window is not None and attention.window < seq)


def planned(
    model: PreTrainedModel, gpu: Gpu, precision: str, seq: int, own: str | None = None, documents: bool = False
) -> Planned:
    """What is assumed of a model, on GPUs that need not be here.

    Args:
        model: a config; of mere numbers flash attention is assumed, or `own`.
        own: the kernel that the script asks for; default: what transformers chooses.
        documents: are rows padded, or packs?
    """
    import torch

    from hf_parallel.axes.attention.choose import chosen, why_not_torch_flash

    known = None if isinstance(model, (Mapping, ModelShape)) else _read(model)
    if known is None or not known.head_size:
        asked = {} if own is None else {"auto": own, "why": "the script's own choice"}
        return Planned(documents=documents, **asked)
    facts = _elsewhere(known, gpu, precision, own)
    kernel = chosen(ParallelConfig(), facts)
    assert kernel is not None
    counted = EAGER if known.own == EAGER else SDPA
    found = Planned(kernel.name, kernel.why or "", documents=documents, counted=counted)
    masked = documents or (facts.window is not None and facts.window < seq)
    lowered = dataclasses.replace(facts, dtype=getattr(torch, _LOWERED.get(precision, "float32")))
    if kernel.own and masked and precision in _LOWERED and why_not_torch_flash(lowered) is None:
        why = "products are in 16 bits under autocast, and sdpa would get a mask of queries by keys"
        return dataclasses.replace(found, asked=TORCH_FLASH, why=why)
    return found


def _read(model: PreTrainedModel) -> AttentionFacts | None:
    """Of a config, or of a model that is there."""
    from hf_parallel.axes.attention.read import read_attention
    from hf_parallel.model.build import build_on_meta

    return read_attention(build_on_meta(model) if hasattr(model, "model_type") else model, ParallelConfig())


def _elsewhere(facts: AttentionFacts, gpu: Gpu, precision: str, own: str | None) -> AttentionFacts:
    """The same on the GPUs of the plan, in its precision."""
    import torch

    here = facts.device == "cuda" and facts.capability == gpu.capability
    device = "cpu" if gpu.capability == (0, 0) else "cuda"
    dtype = getattr(torch, _DTYPES.get(precision, "float32"))
    own = own or facts.own
    return dataclasses.replace(facts, own=own, device=device, capability=gpu.capability, dtype=dtype, here=here)
