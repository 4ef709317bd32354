"""Layers per pipeline stage, chosen so that the slowest stage is as fast as it can be.

Every stage waits for the slowest one, and the last has the head on top of its layers. Costs are forward FLOPs per
token as in Narayanan et al., 2021 (Megatron-LM, appendix): 2 per weight of each matrix that a token meets, plus
attention's two products. A backward costs twice that everywhere, so the ratios hold for a training step. They are
counted from the modules, each layer for itself, on any device: do it before anything is cut, over pp or tp.

Under schedules with several stages per rank stages are balanced, and with them the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from hf_parallel.ask.keys.layers import read_recompute_interval
from hf_parallel.ask.spec import refuse
from hf_parallel.model.anatomy import Backbone, get_text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Configs give the longest sequence a model can read, up to millions: rows of training data are rarely longer than
#: this, and attention over more would make the head look cheap.
_LONGEST_ASSUMED = 4096
_LOSS_FLOPS = 5  # of cross-entropy, per logit: cast, maximum, difference, exponential, sum


@dataclass(frozen=True)
class Cost:
    """`flops`: of a forward, per token. `memory`: bytes of the parameters."""

    flops: float = 0
    memory: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.memory + other.memory)


@dataclass(frozen=True)
class Costs:
    """The costs of what runs `before` the layers (embedding), of the layers, and of what runs `after` them."""

    before: Cost
    layers: tuple[Cost, ...]
    after: Cost

    def of_stage(self, first: int, last: int) -> Cost:
        """Cost of a stage that holds the layers `first` to `last` - 1 and what belongs to the ends."""
        total = sum(self.layers[first:last], self.before if first == 0 else Cost())
        return total + self.after if last == len(self.layers) else total


def block_costs(
    model: PreTrainedModel, backbone: PreTrainedModel, plan: Backbone, sequence_length: int | None = None
) -> Costs:
    """Count the costs of a whole model, on any device.

    Args:
        backbone: the part of `model` whose modules `plan` names.
        sequence_length: tokens per row; default: the longest the model reads, at most 4096.
    """
    config = get_text_config(model)
    length = sequence_length or min(getattr(config, "max_position_embeddings", None) or math.inf, _LONGEST_ASSUMED)
    layers = []
    for layer in backbone.get_submodule(plan.layers):
        # The weights (of experts the share that one token meets) and attention's products.
        experts = {"top_k": getattr(config, "num_experts_per_tok", None), "num_experts": None}
        for part in layer.modules():  # the modules know best, layers may differ
            experts |= {key: vars(part)[key] for key in experts if isinstance(vars(part).get(key), int)}
        chosen, count = experts["top_k"], experts["num_experts"]
        weights = _compute_weights_cost(layer, min(1, chosen / count) if chosen and count else 1)
        attention: float = 0
        for part in (part for part in layer.modules() if hasattr(part, "is_causal")):
            # Scores and their product with the values, per token, over the keys that a causal mask shows on average.
            heads = getattr(part, "num_heads", None) or config.num_attention_heads
            width = getattr(part, "head_dim", None) or config.hidden_size // heads
            widths = getattr(part, "qk_head_dim", width) + getattr(part, "v_head_dim", width)
            window = min(getattr(part, "sliding_window", None) or length, length)
            attention += 2 * heads * widths * window * (1 - window / (2 * length))
        layers.append(Cost(weights.flops + attention, weights.memory))
    outside = [child for child in model.children() if backbone not in child.modules()]
    ends = [[getattr(backbone, name, None) for name in names] for names in (plan.before, plan.after)]
    before, after = (sum((_compute_weights_cost(x) for x in end if isinstance(x, nn.Module)), Cost()) for end in ends)
    loss = Cost(_LOSS_FLOPS * len(getattr(model.get_output_embeddings(), "weight", ())))
    return Costs(before, tuple(layers), sum(map(_compute_weights_cost, outside), after + loss))


def with_recomputation(costs: Costs, recompute: str = "full") -> Costs:
    """Count four passes for three where a layer is checkpointed: it runs its forward twice, the head once."""
    again = list_checkpointed_layers(recompute, len(costs.layers))
    passes = zip(costs.layers, again, strict=True)
    return replace(
        costs, layers=tuple(replace(one, flops=one.flops * (4 / 3 if twice else 1)) for one, twice in passes)
    )


def list_checkpointed_layers(recompute: str, layers: int) -> list[bool]:
    """Return which layers run a second time as a whole. `selective` recomputes next to nothing."""
    each = read_recompute_interval(recompute) or int(recompute == "full")
    return [each > 0 and place % each == 0 for place in range(layers)]


def _compute_weights_cost(module: nn.Module, active_share: float = 1) -> Cost:
    """Two FLOPs per weight of each matrix; an embedding is a lookup, and a token meets a share of the experts."""
    flops: float = 0
    for name, part in module.named_modules():
        share = active_share if "experts" in name.split(".") else 1
        if not isinstance(part, nn.Embedding):
            flops += sum(2 * share * p.numel() for p in part.parameters(recurse=False) if p.ndim > 1)
    return Cost(flops, sum(p.numel() * p.element_size() for p in module.parameters()))


def balance(
    costs: Costs, stages: int, speeds: Sequence[float] | None = None, rooms: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the layers per stage, by dynamic programming: the slowest stage is as fast as any split allows.

    Among equally fast splits the one whose memory is most even wins (in whole layers: only these can move), then the
    one with more layers on early stages. Fewer layers than stages are a SpecError.

    Args:
        speeds: of each stage's device, in any unit; default: all are alike.
        rooms: bytes of parameters that each stage may hold. Where no split keeps to them, the one whose fullest stage
            holds least in proportion is taken.
    """
    layers = len(costs.layers)
    if not 1 <= stages <= layers:
        refuse(f"{stages} stages", f"the model has {layers} layers, a stage needs one", f"{layers} stages")
    of_stage = functools.cache(costs.of_stage)

    if rooms is not None:
        held, leanest = find_best_split(layers, stages, lambda at, *span: of_stage(*span).memory / rooms[at], max)
        if held > 1:
            return leanest

    def fitting(stage: int, first: int, last: int) -> float:
        fits = rooms is None or of_stage(first, last).memory <= rooms[stage]
        return of_stage(first, last).flops / (speeds[stage] if speeds else 1.0) if fits else math.inf

    slowest, _ = find_best_split(layers, stages, fitting, max)
    unit = sum(cost.memory for cost in costs.layers) / layers or 1
    return find_best_split(
        layers,
        stages,
        # The sum is fixed, so squares measure the spread.
        lambda at, *span: (
            round(of_stage(*span).memory / unit) ** 2 if fitting(at, *span) <= slowest * (1 + 1e-9) else math.inf
        ),
        lambda one, others: one + others,
    )[1]


def find_best_split(
    layers: int, stages: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the smallest combined cost of contiguous stages and their layers; of equals, the largest early counts.

    Args:
        cost: of a stage that holds the layers from a first one to before a last one: `cost(stage, first, last)`.
    """

    @functools.cache
    def rest(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        stage = stages - left
        if left == 1:
            return cost(stage, first, layers), (layers - first,)
        ends = range(layers - left + 1, first, -1)  # many layers first: `min` keeps the first of equals
        tails = ((last, *rest(last, left - 1)) for last in ends)
        options = (
            (combine(cost(stage, first, last), value), (last - first, *counts)) for last, value, counts in tails
        )
        return min(options, key=lambda option: option[0])

    return rest(0, stages)


def explain(costs: Costs, counts: tuple[int, ...]) -> str:
    """Return a line for the layout report: `layers per stage 9, 9, 9, 5 (the head costs 3.8 layers)`."""
    head = costs.after.flops * len(costs.layers) / (sum(cost.flops for cost in costs.layers) or 1)
    return f"layers per stage {', '.join(map(str, counts))} (the head costs {head:.1f} layers)"
