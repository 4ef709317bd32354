"""Which attention a plan assumes: what `attention=auto` would be on its GPUs, by the same rules as in a run.

    kind      kernels                                            holds of each layer       computes
    flash     torch_flash, flash_attention_2, …; those of cp     no scores                 keys that are seen
    sdpa      sdpa on rows of one document                       no scores; of windows     keys that are seen; of windows
                                                                 a mask of queries by keys all
    masked    sdpa on padded rows or packs                       that mask                 all keys
    eager     eager                                              scores, in 32 and 16 bits all keys, and passes over them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.axes.attention.axis import AUTO, TORCH_FLASH
from hf_parallel.axes.attention.choose import chosen, why_not_torch_flash
from hf_parallel.axes.attention.read import AttentionFacts, read_attention
from hf_parallel.config import ParallelConfig

if TYPE_CHECKING:
    from hf_parallel.planner.hardware import Gpu
    from hf_parallel.planner.shape import Attention

FLASH, SDPA, MASKED, EAGER = "flash", "sdpa", "masked", "eager"
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16}
_LOWERED = {"mixed": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Planned:
    """The attention of a plan.

    Attributes:
        auto: what `attention=auto` would be.
        why: the reason, for people.
        asked: what the plan's specs say.
        documents: are rows padded, or packs of documents, so that sdpa needs a mask?
    """

    auto: str = TORCH_FLASH
    why: str = "no model, only its numbers: flash attention is assumed"
    asked: str = AUTO
    documents: bool = False

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
    model: Any, gpu: Gpu, precision: str, seq: int, own: str | None = None, documents: bool = False
) -> Planned:
    """What is assumed of a model, on GPUs that need not be here.

    Args:
        model: a config; of mere numbers flash attention is assumed.
        own: the kernel that the script asks for; default: what transformers chooses.
        documents: are rows padded, or packs?
    """
    facts = None if isinstance(model, Mapping) else _facts(model, gpu, precision, own)
    if facts is None or not facts.head_size:
        return Planned(documents=documents)
    kernel = chosen(ParallelConfig(), facts)
    assert kernel is not None
    found = Planned(kernel.name, kernel.why or "", documents=documents)
    masked = documents or (facts.window is not None and facts.window < seq)
    lowered = dataclasses.replace(facts, dtype=_LOWERED.get(precision, facts.dtype))
    if kernel.own and masked and lowered != facts and why_not_torch_flash(lowered) is None:
        why = "products are in 16 bits under autocast, and sdpa would get a mask of queries by keys"
        return dataclasses.replace(found, asked=TORCH_FLASH, why=why)
    return found


def _facts(model: Any, gpu: Gpu, precision: str, own: str | None) -> AttentionFacts | None:
    from hf_parallel.model.build import build_on_meta

    built = model if isinstance(model, torch.nn.Module) else _built(build_on_meta, model)
    facts = None if built is None else read_attention(built, ParallelConfig())
    if facts is None:
        return None
    here = facts.device == "cuda" and facts.capability == gpu.capability
    device = "cpu" if gpu.capability == (0, 0) else "cuda"
    dtype = _DTYPES.get(precision, torch.float32)
    changes: dict[str, Any] = {"device": device, "capability": gpu.capability, "dtype": dtype, "here": here}
    return dataclasses.replace(facts, own=own or facts.own, **changes)


def _built(build: Any, config: Any) -> Any:
    """None of what is no config."""
    return build(config) if hasattr(config, "model_type") else None
