"""The model's own causal loss without its logits: head and cross-entropy a chunk of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.chunked_loss import find_reason_against_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class LossPart:
    """`always`: also in loops written by hand, and for any number of tokens. `why_not`: it cannot be, and why."""

    always: bool
    why_not: str | None = None


class Loss(Axis[str, LossPart]):
    """Changes nothing that a script sees."""

    name, key, off = "loss", "lean_loss", "false"

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> str | None:
        """Return why head and loss of the model cannot be computed together; None if they can."""
        from torch import nn
        from transformers import PreTrainedModel

        from hf_parallel.model.anatomy import is_loss_summed_over_tokens

        if not isinstance(model, PreTrainedModel) or not is_loss_summed_over_tokens(model):
            return "has a loss of its own"
        head = model.get_output_embeddings()
        return None if type(head) is nn.Linear else f"has no linear head, but {type(head).__name__}"

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: str | None) -> LossPart:
        """On, or why it cannot be."""
        always = config.lean_loss == "true"
        if facts is not None and always:
            refuse("lean_loss=true", f"{anatomy.name} {facts}", "lean_loss=auto")
        return LossPart(always, None if facts is None else f"{anatomy.name} {facts}")

    def apply(self, model: PreTrainedModel, part: LossPart, building: Building) -> None:
        """Before the model is cut; a pipeline calls it for its loss by itself."""
        from hf_parallel.axes.tensor.lean_loss import attach

        if part.why_not is None:
            # Chunks and whole logits order FSDP2's collectives differently: no data rank may go by its own tokens.
            any_number = part.always or building.mesh.data_size > 1
            attach(model, any_number, in_loops=part.always and building.mesh.size("pp") == 1)

    def finish(self, model: PreTrainedModel, part: LossPart, building: Building) -> None:
        """After it."""
        from hf_parallel.axes.tensor.lean_loss import finish

        if part.why_not is not None:
            return
        finish(model)
        if building.pipeline is not None:
            building.services.loss_in_chunks = find_reason_against_chunks(building.pipeline.config) is None


LOSS = Loss()
