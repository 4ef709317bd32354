"""Context parallelism: each rank holds a part of every sequence, and attention runs over the ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import get_first_line
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.axes.context.choose import Choice, ContextFacts
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class ContextPart:
    """The part of cp in a plan. `config`: with the variant, where there is one; `why`: the reason of a choice."""

    config: ParallelConfig
    choice: Choice
    why: str | None
    own_loss: bool
    facts: ContextFacts


class Context(Axis["ContextFacts", ContextPart]):
    """Cuts sequences; ranks hold the same layers and other tokens, and share weights as data ranks do."""

    name = "cp"
    inside = True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> ContextFacts:
        """Heads, masks, and what stands against cutting its sequences."""
        from hf_parallel.axes.context.choose import read_context

        return read_context(model)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: ContextFacts) -> ContextPart:
        """The variant, or why there is none."""
        from hf_parallel.axes.context.choose import choose_variants

        choice, why = choose_variants(config, facts)
        if len(choice.ways) == 1:
            config = replace(config, context_parallel=choice.ways[0])
        return ContextPart(config, choice, why, anatomy.sums_over_tokens, facts)

    def settle(self, config: ParallelConfig, part: ContextPart | None) -> ParallelConfig:
        return config if part is None else replace(config, context_parallel=part.config.context_parallel)

    def notes(self, part: ContextPart) -> list[str]:
        return [] if part.why is None else [f"context_parallel={part.config.context_parallel}: {part.why}"]

    def apply(self, model: PreTrainedModel, part: ContextPart, building: Building) -> None:
        """Let layers call the attention that runs over the ranks; batches will be cut where tokens come in."""
        from hf_parallel.axes.context.attention import NAME, register_context_attention
        from hf_parallel.axes.context.layout import compute_local_length
        from hf_parallel.model.known_masks import refuse_masked_targets

        register_context_attention()
        setting = f"cp_size={part.config.cp_size}"
        refuse_masked_targets(model, part.facts.kernel, NAME, setting, "cp_size=1", part.own_loss)
        model.set_attn_implementation(NAME)
        size, multiple = building.mesh.size("cp"), _compute_length_multiple(building)
        building.local_length = lambda length: compute_local_length(length, size, multiple)

    def finish(self, model: PreTrainedModel, part: ContextPart, building: Building) -> None:
        """Cut batches, inside of a pipeline and around what pads for tp."""
        from hf_parallel.axes.context.cut import SequenceCut, find_token_reader
        from hf_parallel.axes.context.groups import build_ways

        mesh = building.mesh
        cut = SequenceCut(
            group=mesh.attention_group,
            choice=part.choice,
            ways=build_ways(mesh, part.config, part.choice.ways),
            multiple=_compute_length_multiple(building),
            packed=functools.cache(functools.partial(_can_tell_packs_apart, model, part)),
            own_loss=part.own_loss,
            caches=building.pipeline is None,
        )
        cut.attach(model, find_token_reader(model))
        building.whole_tokens.append(cut.whole_tokens)


def _can_tell_packs_apart(model: PreTrainedModel, part: ContextPart) -> bool:
    """Do positions that start again begin another document, as they do in one process?

    Raises:
        ValueError: no small copy of the model can be tried.
    """
    from hf_parallel.model.shrink import does_read_former_document, make_small_copy

    if not part.facts.causal:
        return False
    if "flash" in part.facts.kernel:  # it reads positions itself; all others read a mask
        return True
    try:
        return not does_read_former_document(make_small_copy(model))
    except Exception as error:
        raise ValueError(
            f"hf_parallel: whether {type(model).__name__} tells the documents of a row apart cannot be tried "
            f"({get_first_line(error)}); cp_size=1 works"
        ) from error


def _compute_length_multiple(building: Building) -> int:
    """Under sequence parallelism tp ranks share what a cp rank holds."""
    flag = building.sequence_flag
    return building.mesh.size("tp") if flag is not None and flag.on else 1


CONTEXT = Context()
