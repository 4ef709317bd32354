"""Which attention kernel the layers call."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class AttentionKeys(Keys):
    attention: str = key("auto", "`auto` leaves the model's own choice; else `sdpa`, `eager`, `flash_attention_2`, …")


class Attention(Axis[str, str]):
    """The kernel that the spec names; `auto` leaves the model's own."""

    name = "attention"

    def is_on(self, config: ParallelConfig) -> bool:
        return config.attention != "auto"

    def read(self, model: Any, config: ParallelConfig) -> str | None:
        """Why this model or this machine does not have the kernel; None if it has."""
        if not hasattr(model, "set_attn_implementation"):
            return f"{type(model).__name__} is not a transformers model"
        from torch import nn

        kind: Any = type(model)
        shell = kind.__new__(kind)  # a model without layers, to try it on
        nn.Module.__init__(shell)
        shell.config = copy.deepcopy(model.config)
        try:
            shell.set_attn_implementation(config.attention)
        except (ImportError, ValueError) as error:
            return str(error).strip().splitlines()[0]
        return None

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: str | None) -> str:
        """The kernel's name."""
        if facts is not None:
            refuse(f"attention={config.attention}", facts, "attention=sdpa")
        return config.attention

    def apply(self, model: Any, part: str, building: Building) -> None:
        """Set the kernel."""
        model.set_attn_implementation(part)


ATTENTION = AttentionKeys.axis = Attention()
