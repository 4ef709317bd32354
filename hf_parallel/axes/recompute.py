"""Activation checkpointing (Chen et al., 2016): keep each layer's input and run its forward again in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis, Keys, NotBuilt, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class RecomputeKeys(Keys):
    activation_checkpointing: str = key(
        "none",
        "`full` recomputes each layer in the backward pass",
        choices=("none", "selective", "full"),
        not_built=(NotBuilt("selective checkpointing", "activation_checkpointing=full", ("selective",)),),
    )


class Recompute(Axis[bool, str]):
    """Transformers' own checkpointing of whole layers."""

    name = "recompute"

    def is_on(self, config: ParallelConfig) -> bool:
        return config.activation_checkpointing != "none"

    def read(self, model: Any, config: ParallelConfig) -> bool:
        """Can the model's layers be recomputed?"""
        return bool(getattr(model, "supports_gradient_checkpointing", False))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: bool) -> str:
        """What is recomputed."""
        if not facts:
            refuse(
                f"activation_checkpointing={config.activation_checkpointing}",
                f"{anatomy.name} does not support it",
                "activation_checkpointing=none",
            )
        return config.activation_checkpointing

    def apply(self, model: Any, part: str, building: Building) -> None:
        """Switch it on; before transformers 5.23 by its former name."""
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()


RECOMPUTE = RecomputeKeys.axis = Recompute()
