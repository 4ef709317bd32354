"""Tensor parallelism (Shoeybi et al., 2019), sequence parallelism between its regions (Korthikanti et al., 2022)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import Building
    from hf_parallel.axes.tensor.read import SplitFacts
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy
    from hf_parallel.model.batches import Batch


@dataclass(frozen=True)
class TensorPart:
    """What tp will do: style and origin by full module name, and why there is no sequence parallelism, or None."""

    styles: dict[str, tuple[str, str]]
    whole_sequences: str | None
    overlap: bool
    sums_over_tokens: bool
    facts: SplitFacts

    @property
    def words(self) -> dict[str, str]:
        """The style of each module that is split."""
        return {name: style for name, (style, _) in self.styles.items()}


class Tensor(Axis["SplitFacts", TensorPart]):
    """Splits matrices by columns and rows, the embedding and the head by rows of the vocabulary."""

    name = "tp"
    inside = True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> SplitFacts:
        """Which module could be split how."""
        from hf_parallel.axes.tensor.read import read_split

        return read_split(model)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: SplitFacts) -> TensorPart:
        """Styles that fit the number of ranks, and whether sequences are split between regions."""
        from hf_parallel.axes.tensor.read import resolve_styles, why_whole_sequences

        styles = resolve_styles(facts, config.tp_size, config.ep_size > 1)
        reason = why_whole_sequences(facts, config.sequence_parallel)
        return TensorPart(styles, reason, config.tp_overlap, anatomy.sums_over_tokens, facts)

    def notes(self, part: TensorPart) -> list[str]:
        asked = part.whole_sequences in (None, "sequence_parallel=false")
        return [] if asked else [f"no sequence parallelism: {part.whole_sequences}"]

    def apply(self, model: PreTrainedModel, part: TensorPart, building: Building) -> None:
        """Split layers, embedding and head; then what lies between them lives on parts of the sequence."""
        from hf_parallel.axes.axis import SequenceParallelFlag
        from hf_parallel.axes.tensor.experts import split_experts
        from hf_parallel.axes.tensor.sequence_parallel import sequence_parallel
        from hf_parallel.axes.tensor.tensor_parallel import retie, tensor_parallel
        from hf_parallel.axes.tensor.vocab_parallel import vocab_parallel

        mesh, device = building.mesh["tp"], building.mesh.device
        building.sequence_flag = flag = SequenceParallelFlag(part.whole_sequences is None)
        tensor_parallel(model, mesh, part.words, device, flag, part.overlap)
        split_experts(model, part.words, mesh, device, flag)
        vocab_parallel(model, mesh, part.words, device, part.sums_over_tokens, part.overlap)
        retie(model)
        if flag.on:
            sequence_parallel(model, mesh, device, flag)
            building.whole_tokens.append(functools.partial(_whole_tokens, building))

    def finish(self, model: PreTrainedModel, part: TensorPart, building: Building) -> None:
        """Whole logits for whoever reads them; padding for lengths that tp does not divide."""
        from hf_parallel.axes.tensor.sequence_parallel import pad_sequences
        from hf_parallel.axes.tensor.vocab_parallel import gather_when_read

        gather_when_read(model)
        if part.whole_sequences is None:
            assert building.sequence_flag is not None
            pad_sequences(model, building.mesh.size("tp"), building.sequence_flag, caches=building.pipeline is None)


def _whole_tokens(building: Building, tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[rows, own tokens, …] -> [rows, tokens, …], those of this rank's part of the sequence."""
    from hf_parallel.collectives import join_sequence
    from hf_parallel.model.batches import tokens_of

    length = tokens_of(batch).shape[1]
    length = length if building.local_length is None else building.local_length(length)
    return join_sequence(tensor, building.mesh.group("tp"))[:, :length]


TENSOR = Tensor()
