"""Why a layout was chosen as it is: for each of its settings, what the one beside it would need or take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_parallel.axes.attention.axis import AUTO, TORCH_FLASH
from hf_parallel.planner.candidates import Goal, configured
from hf_parallel.planner.choices import Choice, TooLarge, predicted


def reasons(goal: Goal, choice: Choice) -> Iterator[str]:
    """A line for what is trained, what is sharded, what is computed again, and what computes attention."""
    if goal.lora:
        yield f"adapters of rank {goal.lora}: the frozen weights have neither gradients nor optimizer states"
    yield from _sharding(goal, choice)
    yield _recomputing(goal, choice)
    yield from _chunks(goal, choice)
    yield from attending(goal, choice)


def attending(goal: Goal, choice: Choice) -> Iterator[str]:
    """The kernel, and what others would need and take: the same layers, so by the goal alone."""
    config = choice.config
    if config.cp_size > 1 or not any(block.attentions for block in goal.shape.blocks):
        return
    others = [name for name in (TORCH_FLASH, "sdpa", "eager") if name != goal.attention.name]
    lines = [f"{name} {_other(goal, choice, attention=name)}" for name in others]
    auto = f"auto is {goal.attention.auto}" if goal.attention.asked == AUTO else goal.attention.asked
    yield f"attention={auto}: {goal.attention.why}; {', '.join(lines)}"


def _sharding(goal: Goal, choice: Choice) -> Iterator[str]:
    """Against whole copies on each data rank, which only reduce gradients."""
    config = choice.config
    if config.dp_shard_size == 1:
        if config.data_parallel_size > 1:
            yield f"dp_replicate={config.dp_replicate_size}: whole weights fit, and nothing is gathered"
        return
    ranks = config.dp_replicate_size * config.dp_shard_size
    whole = _other(goal, choice, dp_replicate_size=ranks, dp_shard_size=1, zero_stage=3, hierarchical_shard=None)
    less = "" if config.zero_stage == 3 else f", zero_stage=3 {_other(goal, choice, zero_stage=3)}"
    yield f"dp_shard={config.dp_shard_size},zero_stage={config.zero_stage}: whole weights on each rank {whole}{less}"


def _recomputing(goal: Goal, choice: Choice) -> str:
    """Against the ways that compute less again; of the cheapest one, against what it saves."""
    way = choice.config.activation_checkpointing
    asked = f"activation_checkpointing={way}"
    if way == "none":
        needed = f"{choice.needed_gib:.1f} of {goal.cluster.gpu.memory_gib:.0f} GiB"
        return f"{asked}: all activations fit ({needed}); full {_other(goal, choice, activation_checkpointing='full')}"
    ways = ("none", "selective")[: 1 if way == "selective" else 2]
    lines = [f"{other} {_other(goal, choice, activation_checkpointing=other)}" for other in ways]
    return f"{asked}: {', '.join(lines)}"


def _chunks(goal: Goal, choice: Choice) -> Iterator[str]:
    """Where it rests on a loss in chunks, which loops and scripts that compute the loss themselves do not have."""
    whole = _beside(goal, choice, lean_loss="false")
    if isinstance(whole, Choice) and not whole.prediction.fits:
        said = _other(goal, choice, lean_loss="false")
        yield f"lean_loss={choice.config.lean_loss}: a Trainer's step with the model's own loss; whole logits {said}"


def _beside(goal: Goal, choice: Choice, **settings: Any) -> Choice | TooLarge | None:
    """The same layout with other settings."""
    config = configured(choice.config, **settings)
    return predicted(goal, config, choice.prediction.job.micro_batch, measure=True)


def _other(goal: Goal, choice: Choice, **settings: Any) -> str:
    """What the same layout with other settings would need and take, in words."""
    other = _beside(goal, choice, **settings)
    if not isinstance(other, Choice):
        return "cannot be predicted"
    there, ratio = goal.cluster.gpu.memory_gib, other.seconds_per_row / choice.seconds_per_row
    if not other.prediction.fits:
        return f"would need {other.needed_gib:.1f} of {there:.0f} GiB"
    return f"would need {other.needed_gib:.1f} GiB and take {ratio:.2f} x the time"
