"""Which layers each stage of the pipeline holds, and which stages each rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from hf_parallel.axes.pipeline.axis import V_SCHEDULES
from hf_parallel.axes.pipeline.balance import Cost, Costs, balance
from hf_parallel.axes.pipeline.timeline import even_split
from hf_parallel.planner.layout import Job, Layout
from hf_parallel.planner.model_shape import Block, ModelShape, distinct
from hf_parallel.spec import SpecError


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks, each kind with its number; the first holds the embedding, the last the norm and the head."""

    counts: tuple[tuple[Block, int], ...]
    embedding: int  # parameters
    head: int
    is_first: bool
    is_last: bool
    index: int = field(default=0, compare=False)  # equal stages take equal times, wherever they are

    @property
    def blocks(self) -> list[Block]:
        """Every block, repeated as often as it occurs."""
        return [block for block, count in self.counts for _ in range(count)]

    @property
    def layers(self) -> int:
        """How many blocks."""
        return sum(count for _, count in self.counts)

    def dense_parameters(self, tp: int) -> float:
        """Parameters of a rank without experts; tp cuts matrices, embedding and head, not norms and routers."""
        total = (self.embedding + self.head) / tp
        for block, count in self.counts:
            whole = block.others + sum(m.parameters for m in block.matrices if m.split == "whole")
            total += count * (whole + (block.parameters - block.expert_parameters - whole) / tp)
        return total

    def expert_parameters(self, ep: int) -> float:
        """Parameters of a rank's experts."""
        return sum(count * block.expert_parameters for block, count in self.counts) / ep


def make_stages(shape: ModelShape, layout: Layout, job: Job) -> tuple[Stage, ...]:
    """All stages of the pipeline in order.

    Layers are spread evenly where the stages divide them, as every engine does; otherwise by cost, which takes layers
    from the last stage for the head's sake. `engine="hf_parallel"` always goes by cost.
    """
    number = layout.pp * layout.virtual_stages
    split = layout.split or _split(shape, number, job.engine, job.recompute, job.seq)
    if len(split) != number or sum(split) != shape.layers:
        raise SpecError(f"split={list(split)}: not {shape.layers} layers in {number} stages")
    return _cut(shape, split)


@functools.lru_cache(maxsize=4096)
def _cut(shape: ModelShape, split: tuple[int, ...]) -> tuple[Stage, ...]:
    number = len(split)
    stages: list[Stage] = []
    first = 0
    for index, layers in enumerate(split):
        counts = tuple(distinct(shape.blocks[first : first + layers]).items())
        first += layers
        stages.append(_stage(shape, counts, index, number))
    return tuple(stages)


def _stage(shape: ModelShape, counts: tuple[tuple[Block, int], ...], index: int, number: int) -> Stage:
    is_first, is_last = index == 0, index == number - 1
    copied = shape.embedding_parameters if shape.tied and not is_first else 0
    head = shape.head_parameters + copied + shape.other_parameters if is_last else 0
    return Stage(counts, shape.embedding_parameters if is_first else 0, head, is_first, is_last, index)


@functools.lru_cache(maxsize=4096)
def _split(shape: ModelShape, number: int, engine: str, recompute: str, length: int) -> tuple[int, ...]:
    if engine == "standard" and number in (shape.layers + 1, shape.layers + 2):
        return (*[0] * (number - shape.layers - 1), *[1] * shape.layers, 0)  # Megatron-LM: the ends count as layers
    if shape.layers < number:
        raise SpecError(
            f"pp x virtual_stages = {number}: {shape.layers} layers do not fill them; {shape.layers} works"
        )
    if number == 1 or (engine == "standard" and shape.layers % number == 0):
        return tuple(even_split(shape.layers, number))
    passes = 4 / 3 if recompute == "full" else 1
    head = (shape.head_flops + 5 * shape.head_outputs) / passes
    if engine == "standard" and len(set(map(id, shape.blocks))) == 1:
        return _split_around_head(shape.layers, number, head / shape.blocks[0].flops(length))
    blocks = tuple(Cost(block.flops(length) * passes, 2 * block.parameters) for block in shape.blocks)
    weights = shape.embedding_parameters if shape.tied else shape.head_parameters
    return balance(Costs(Cost(0, 2 * shape.embedding_parameters), blocks, Cost(head * passes, 2 * weights)), number)


def _split_around_head(layers: int, number: int, head: float) -> tuple[int, ...]:
    """Equal layers: the last stage gets as many as keep it from being the slowest, the first ones the fewer."""

    def others(last: int) -> list[int]:
        return list(reversed(even_split(layers - last, number - 1)))

    fitting = [last for last in range(1, layers - number + 2) if layers - last >= number - 1]
    best = min(fitting, key=lambda last: (max(*others(last), last + head), -last))
    return (*others(best), best)


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """The stages of a rank: round and round, or down and up again in a V."""
    if layout.schedule in V_SCHEDULES:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + turn * layout.pp for turn in range(layout.virtual_stages)]


def neighbours_elsewhere(stages: list[Stage]) -> int:
    """How many times a stage beside one of these is on another rank; the two at the bottom of a V are on one."""
    here = {stage.index for stage in stages}
    beside = [(stage.index - 1, not stage.is_first) for stage in stages]
    beside += [(stage.index + 1, not stage.is_last) for stage in stages]
    return sum(exists and index not in here for index, exists in beside)
