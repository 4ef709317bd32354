"""The model's own causal loss without its logits: head and cross-entropy a chunk of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class LossKeys(Keys):
    lean_loss: str = key(
        "false",
        "`true`: head and loss in chunks of tokens, for models that train with their own loss, not with `pp`; logits "
        "are made when read, before the optimizer's step",
        choices=("true", "false"),
    )


class Loss(Axis[str, bool]):
    """Changes nothing that a script sees."""

    name = "loss"

    def is_on(self, config: ParallelConfig) -> bool:
        return config.lean_loss == "true"

    def check(self, config: ParallelConfig) -> None:
        """A script's loss runs inside a pipeline's last stage, where logits that it reads are not made right."""
        if config.lean_loss == "true" and config.pp_size != 1:
            refuse("lean_loss=true", f"pp_size={config.pp_size} is not supported", "lean_loss=false")

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> str | None:
        """Why its head and its loss cannot be one; None if they can."""
        from torch import nn
        from transformers import PreTrainedModel

        from hf_parallel.model.anatomy import loss_sums_over_tokens

        if not isinstance(model, PreTrainedModel) or not loss_sums_over_tokens(model):
            return "has a loss of its own"
        head = model.get_output_embeddings()
        return None if type(head) is nn.Linear else f"has no linear head, but {type(head).__name__}"

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: str | None) -> bool:
        """On, or why it cannot be."""
        if facts is not None:
            refuse("lean_loss=true", f"{anatomy.name} {facts}", "lean_loss=false")
        return True

    def apply(self, model: PreTrainedModel, part: bool, building: Building) -> None:
        """Before the model is cut."""
        from hf_parallel.axes.tensor.lean_loss import attach

        if part:
            attach(model)

    def finish(self, model: PreTrainedModel, part: bool, building: Building) -> None:
        """After it."""
        from hf_parallel.axes.tensor.lean_loss import finish

        if part:
            finish(model)


LOSS = LossKeys.axis = Loss()
