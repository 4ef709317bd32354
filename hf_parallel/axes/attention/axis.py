"""Which attention kernel the layers call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hf_parallel.ask.keys.layers import AUTO, REGISTERED_FLASH, TORCH_FLASH
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.axes.attention.choose import AttentionFacts, Kernel
    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


class Attention(Axis["AttentionFacts", "Kernel | None"]):
    """The kernel that the spec names, or the one that device, dtype and model suggest."""

    name = "attention"

    def is_on(self, config: ParallelConfig) -> bool:
        return True  # `auto` looks at every model

    def read(self, model: nn.Module, config: ParallelConfig) -> AttentionFacts | None:
        """What its attentions are like; None if it is not one of transformers."""
        from hf_parallel.axes.attention.read import read_attention

        return read_attention(model, config)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: AttentionFacts | None) -> Kernel | None:
        """The kernel and why, or the SpecError that says what it lacks."""
        from hf_parallel.axes.attention.choose import chosen, named

        kernel = chosen(config, facts) if config.attention == AUTO else named(config, anatomy, facts)
        return None if kernel is None else replace(kernel, shifts=anatomy.sums_over_tokens)

    def notes(self, part: Kernel | None) -> list[str]:
        return [] if part is None or part.why is None else [f"attention={part.name}: {part.why}"]

    def apply(self, model: PreTrainedModel, part: Kernel | None, building: Building) -> None:
        """Set the kernel, if it is not the model's own."""
        if part is None or part.own or building.mesh.size("cp") > 1:  # cp has a function of its own, and the name
            return
        from hf_parallel.model.masked_targets import refuse_masked_targets

        own = model.config._attn_implementation or "eager"
        refuse_masked_targets(model, own, part.name, f"attention={part.name}", f"attention={own}", part.shifts)
        if part.name == TORCH_FLASH:
            from hf_parallel.axes.attention.flash import register

            register()
        model.set_attn_implementation(REGISTERED_FLASH if part.name == TORCH_FLASH else part.name)


ATTENTION = Attention()
