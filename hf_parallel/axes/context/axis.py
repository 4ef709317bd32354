"""Context parallelism: each rank holds a part of every sequence, and attention runs over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import AttentionInterface, AttentionMaskInterface

from hf_parallel.ask.spec import get_first_line
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.context.attention import NAME, Exchanged, make_context_mask, run_context_attention
from hf_parallel.axes.context.choose import (
    Choice,
    ContextFacts,
    can_use_registries,
    choose_variants,
    read_score_dropout,
    read_sliding_window,
)
from hf_parallel.axes.context.cut import SequenceCut
from hf_parallel.axes.context.layout import Shape, compute_local_length
from hf_parallel.model.anatomy import (
    find_stacks,
    find_text_part,
    find_token_readers,
    get_text_config,
    read_attention_heads,
    read_head_width_of,
)
from hf_parallel.model.known_masks import refuse_masked_targets
from hf_parallel.model.shrink import keeps_documents_apart
from hf_parallel.ranks.groups import connect_group
from hf_parallel.ranks.mesh import ParallelMesh, list_axis_ranks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


#: Backbones that look positions up in a table, and take those they are given.
_LEARNED_POSITIONS = {"GPT2Model", "GPTBigCodeModel", "BertModel"}
#: Layers that see whole sequences in ways of their own.
_OTHER_LAYERS = ("linear", "conv", "mamba", "recurrent", "chunked", "sparse", "ssm")
#: Rotations that change with the largest position a rank sees.
_GROWING = ("dynamic", "longrope")


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
        """Read heads, masks, and what stands against cutting its sequences."""
        if getattr(model, "config", None) is None:
            return ContextFacts(f"{type(model).__name__} has no config", (1, 1), True)
        text = get_text_config(model)
        window = read_sliding_window(text)
        heads = getattr(text, "num_attention_heads", None) or 1
        hidden = getattr(text, "hidden_size", 128 * heads) if isinstance(heads, int) else None
        # SegFormer has a list of hidden sizes, one per block.
        width = read_head_width_of(text) or (hidden // heads if isinstance(hidden, int) else 128)
        return ContextFacts(
            _find_obstacle(model, text),
            read_attention_heads(model) or (1, 1),
            any(getattr(module, "is_causal", False) is True for module in model.modules()),
            width,
            () if window is None else (window,),
            read_score_dropout(text),
            getattr(text, "_attn_implementation", None) or "eager",
        )

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: ContextFacts) -> ContextPart:
        """Choose the variant, or say why there is none."""
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
        AttentionInterface.register(NAME, run_context_attention)
        AttentionMaskInterface.register(NAME, make_context_mask)
        setting = f"cp_size={part.config.cp_size}"
        refuse_masked_targets(model, part.facts.kernel, NAME, setting, "cp_size=1", part.own_loss)
        model.set_attn_implementation(NAME)
        size, flag = building.mesh.size("cp"), building.sequence_flag
        # Under sequence parallelism tp ranks share what a cp rank holds.
        multiple = building.mesh.size("tp") if flag is not None and flag.on else 1
        building.local_length = lambda length: compute_local_length(length, size, multiple)

    def finish(self, model: PreTrainedModel, part: ContextPart, building: Building) -> None:
        """Cut batches, inside of a pipeline and around what pads for tp."""
        mesh = building.mesh
        assert building.local_length is not None
        cut = SequenceCut(
            group=mesh.attention_group,
            choice=part.choice,
            ways=build_ways(mesh, part.config, part.choice.ways),
            local_length=building.local_length,
            packed=functools.cache(functools.partial(_can_tell_packs_apart, model, part)),
            own_loss=part.own_loss,
            caches=building.pipeline is None,
        )
        cut.attach(model, find_token_readers(model)[0])
        building.whole_tokens.append(cut.whole_tokens)


def _find_obstacle(model: nn.Module, config: PretrainedConfig) -> str | None:
    name, readers = type(model).__name__, find_token_readers(model)
    if getattr(config, "is_encoder_decoder", False) or len(readers) != 1 or len(find_stacks(model)) != 1:
        return f"{name} is not one stack of layers that reads tokens"
    if find_text_part(model) is not getattr(model, "base_model", model):
        return f"{name} reads more than tokens"
    if not can_use_registries(model):
        return f"{name} has an attention of its own"
    reader = readers[0]
    rotary = any("rotary" in child for child, _ in reader.named_children())
    if not rotary and type(reader).__name__ not in _LEARNED_POSITIONS:
        return f"where {type(reader).__name__} has its positions from is not known"
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if any(x in kind for x in _OTHER_LAYERS)]
    if kinds:
        return f"{name} has layers of {kinds[0]}"
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    rotations = [str(one.get("rope_type") or one.get("type")) for one in sets]
    growing = [kind for kind in rotations if kind in _GROWING]
    return f"its rotary embedding is {growing[0]}, which changes with the length" if growing else None


def build_ways(
    mesh: ParallelMesh, config: ParallelConfig, variants: Iterable[str]
) -> dict[str, tuple[Shape, Exchanged]]:
    """By variant: who holds which tokens, and how ranks attend. Collective over all ranks.

    Neighbours share heads; ranks with the same place in their groups form a ring.
    """
    found = {}
    for variant in variants:
        one = replace(config, context_parallel=variant)
        size, inner, all_ranks = one.cp_size, one.ulysses_size, list_axis_ranks(one, "cp")
        ring = mesh.attention_group if inner == 1 else None
        heads = mesh.attention_group if inner == size else None
        if 1 < inner < size:
            ring = mesh.groups.along([ranks[place::inner] for ranks in all_ranks for place in range(inner)])
        if ring is not None:  # its ranks send what others see: under windows, and in packs, not each of them sends
            connect_group(ring, mesh.device)
        if 1 < inner < size:
            heads = mesh.groups.along([ranks[at : at + inner] for ranks in all_ranks for at in range(0, size, inner)])
        how = Exchanged(ring, heads, variant == "allgather", one.attention)
        found[variant] = Shape(size // inner, inner), how
    return found


def _can_tell_packs_apart(model: PreTrainedModel, part: ContextPart) -> bool:
    """Do positions that start again begin another document, as they do in one process?

    Raises:
        ValueError: no small copy of the model can be tried.
    """
    if not part.facts.causal:
        return False
    try:
        return keeps_documents_apart(model, part.facts.kernel)
    except Exception as error:
        raise ValueError(
            f"hf_parallel: whether {type(model).__name__} tells the documents of a row apart cannot be tried "
            f"({get_first_line(error)}); cp_size=1 works"
        ) from error


CONTEXT = Context()
