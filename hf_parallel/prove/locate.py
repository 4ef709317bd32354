"""The first module where a layout and one process part, and the kind of error that the numbers look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_parallel.prove.compare import TIMES, Compared, compute_rounding_floor
from hf_parallel.prove.record import Record, Step

#: What a run looks like that was right until another layout resumed it.
AFTER_RESUMPTION = (
    "the first layout trained as one process and the resumed one does not: the optimizer or the schedule in the "
    "checkpoint, the examples that are left of the epoch, or what a callback of the script remembers"
)
#: Share of the tokens of one process that a layout must lack before a module counts as another one; and of a rank's
#: tokens that one process must lack: sequences are filled up to divide, and data ranks pad and repeat examples.
FEW, MANY, MOST = 0.002, 0.2, 0.9
#: Relative difference below which factors are the same.
_ALIKE = 1e-3


@dataclass
class Place:
    """Where two runs part.

    Attributes:
        module: its name in the model.
        direction: "forward" or "backward".
        step: of the optimizer, from 1.
        ranks: whose tokens are not those of one process; all of them if nobody's stand out.
        words: one line that says it.
    """

    module: str
    direction: str
    step: int
    ranks: list[int]
    words: str


def find_first_place_of(ranks: Sequence[Record], alone: Record, disturbed: Record, compared: Compared) -> Place | None:
    """Return the first module, in order of computation, whose tokens or gradients differ from one process's."""
    if all(one.kind == "saved weight" for one in compared.differences):
        return None
    strange_from = MANY if len({rank.data_rank for rank in ranks}) == 1 else MOST
    steps = [one.step for one in compared.differences if one.step]
    last = min(steps, default=len(alone.steps)) + 1  # an evaluation after a step shows the weights of the next
    for index in range(min(last, len(alone.steps), len(disturbed.steps))):
        ours = [rank.steps[index] for rank in ranks if index < len(rank.steps)]
        theirs, noisy, floor = alone.steps[index], disturbed.steps[index], compute_rounding_floor(alone)
        found = _find_forward_place(ours, theirs, noisy, index + 1, strange_from, floor)
        if found is not None:
            return found
        wrong = [one for one in compared.differences if one.kind == "gradient" and one.step == index + 1]
        rank_of = {one.what.removeprefix("gradient of "): one.rank for one in wrong}
        if rank_of:
            # A backward pass computes the gradients of the last module first
            order = {name: number for number, name in enumerate(theirs.tokens)}
            _, name = max((order.get(name.rpartition(".")[0], -1), name) for name in rank_of)
            share = f"{len(rank_of)} of {len(theirs.gradients)} gradients differ"
            words = f"the backward pass in step {index + 1}: {share}, the first to be computed is that of {name}"
            words += describe_returned_gradients(ours, theirs, noisy, strange_from, floor)
            return Place(name.rpartition(".")[0], "backward", index + 1, sorted(set(rank_of.values())), words)
    return None


def _find_forward_place(
    ours: list[Step], theirs: Step, noisy: Step, step: int, strange_from: float, floor: float
) -> Place | None:
    for module, tokens in theirs.tokens.items():
        parts = {
            rank: own.tokens[module]
            for rank, own in enumerate(ours)
            if module in own.tokens and own.width[module] == theirs.width[module]
        }
        if not parts or module not in noisy.tokens or noisy.tokens[module].shape != tokens.shape:
            continue
        scale = tokens.square().mean(0).sqrt().clamp_min(1e-30)
        allowed = max(floor, TIMES * float(((noisy.tokens[module] - tokens) / scale).abs().max()))
        lost = _mark_unlike(tokens[theirs.kept[module]] / scale, torch.cat(list(parts.values())) / scale, allowed)
        strange = {
            rank: _compute_marked_share(_mark_unlike(part / scale, tokens / scale, allowed))
            for rank, part in parts.items()
        }
        most = max(strange.values())
        if _compute_marked_share(lost) > FEW or most > strange_from:
            who = [rank for rank, share in strange.items() if share > max(FEW, most / 2)]
            words = f"the outputs of {module} in step {step}"
            if lost.any():
                words += f": {int(lost.sum())} of {len(lost)} tokens of one process are missing"
                words += _format_batch_of(theirs, theirs.calls[module], theirs.kept[module], lost)
            if who:
                named = f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
                words += f": {most:.0%} of the tokens of {named} are not one process's"
            return Place(module, "forward", step, who or sorted(parts), words)
    return None


def _format_batch_of(step: Step, calls: list[int], kept: torch.Tensor, lost: torch.Tensor) -> str:
    """Say which of a step's batches has the first of the lost tokens; nothing if the step has one batch.

    Args:
        calls: tokens of each call of the module; of these, those that are `kept` may be `lost`.
    """
    batches, batch_of = _number_batches(step, calls)
    return f", the first in batch {int(batch_of[kept][lost][0])} of {batches}" if batches > 1 else ""


def _number_batches(step: Step, calls: list[int]) -> tuple[int, torch.Tensor]:
    """Return how many batches a step has, and from which one, from 1, each token of these calls of a module is.

    A module is called several times per batch if it is recomputed or has several places in the model.
    """
    batches = min(map(len, step.calls.values()), default=1)
    if len(calls) % batches:
        batches = 1
    numbers = torch.arange(len(calls)) * batches // max(1, len(calls)) + 1
    return batches, numbers.repeat_interleave(torch.tensor(calls, dtype=torch.long))


def _compute_marked_share(marked: torch.Tensor) -> float:
    return float(marked.float().mean()) if len(marked) else 0.0


def _mark_unlike(tokens: torch.Tensor, others: torch.Tensor, allowed: float) -> torch.Tensor:
    """Mark the tokens that have no like among the others."""
    order = torch.argsort(others[:, 0])
    first = others[order, 0].contiguous()
    found = torch.zeros(len(tokens), dtype=torch.bool)
    low = torch.searchsorted(first, (tokens[:, 0] - allowed).contiguous())
    high = torch.searchsorted(first, (tokens[:, 0] + allowed).contiguous(), right=True)
    for index, (begin, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        near = others[order[begin:end], 1]
        found[index] = bool(((near - tokens[index, 1]).abs() <= allowed).any())
    return ~found


def describe_returned_gradients(
    ours: list[Step], theirs: Step, noisy: Step, strange_from: float = MANY, floor: float = 0.0
) -> str:
    """Say at which module, in the order of the backward pass, and in which batch gradients of outputs first part.

    Layouts scale a backward pass by a constant, such as the number of data ranks. A factor of its own in one batch is
    an error.
    """
    factors: list[float] = []
    for module, alone in theirs.returned.items():
        parts = {
            rank: own.returned[module].tokens
            for rank, own in enumerate(ours)
            if module in own.returned and own.width[module] == theirs.width[module]
        }
        other = noisy.returned.get(module)
        if floor > _ALIKE or not parts or other is None or other.tokens.shape != alone.tokens.shape:
            continue
        of = f"the gradient of the outputs of {module}"
        if not factors:
            batches, batch_of = _number_batches(theirs, alone.calls)
            factors = _find_factors_of_batches(torch.cat(list(parts.values())), alone.tokens, batch_of, batches)
            if factors and max(factors) > (1 + _ALIKE) * min(factors):
                listed = ", ".join(f"{one:.4g} (batch {number})" for number, one in enumerate(factors, 1))
                return f"; {of} is one process's times {listed}"
            factors = factors or [1.0]
        scale = alone.tokens.square().mean(0).sqrt().clamp_min(1e-30)
        allowed = max(floor, TIMES * float(((other.tokens - alone.tokens) / scale).abs().max()))
        own_scale = scale * torch.tensor([factors[0] ** 2, factors[0]])
        whole = alone.tokens / scale
        lost = _mark_unlike(whole[alone.kept], torch.cat(list(parts.values())) / own_scale, allowed)
        strange = {
            rank: _compute_marked_share(_mark_unlike(part / own_scale, whole, allowed)) for rank, part in parts.items()
        }
        if _compute_marked_share(lost) > FEW:
            batch = _format_batch_of(theirs, alone.calls, alone.kept, lost)
            return f"; {of} lacks {int(lost.sum())} of {len(lost)} tokens of one process{batch}"
        if max(strange.values()) > strange_from:
            rank = max(strange, key=lambda one: strange[one])
            return f"; {of} on rank {rank} has {strange[rank]:.0%} of tokens that are not one process's"
    return "; the gradients of all modules' outputs agree" if factors else ""


def _find_factors_of_batches(
    ours: torch.Tensor, theirs: torch.Tensor, batch_of: torch.Tensor, batches: int
) -> list[float]:
    """Return the median factor between tokens of like direction, of each batch; nothing if a batch has no such token.

    Args:
        ours, theirs: squared norms of tokens, and their products with a fixed vector: [tokens, 2].
        batch_of: from 1, of each token of `theirs`.
    """
    has_norm = theirs[:, 0] > _ALIKE * theirs[:, 0].mean()
    theirs, batch_of, ours = theirs[has_norm], batch_of[has_norm], ours[ours[:, 0] > 0]
    if not len(ours) or not len(theirs):
        return []
    own, others = (tokens[:, 1] / tokens[:, 0].sqrt() for tokens in (ours, theirs))
    others, order = others.sort()
    right = torch.searchsorted(others, own.contiguous()).clamp(1, len(others) - 1)
    nearest = torch.where((others[right] - own).abs() < (others[right - 1] - own).abs(), right, right - 1)
    alike = (others[nearest] - own).abs() < _ALIKE / 10
    found, batch = (ours[:, 0] / theirs[order[nearest], 0]).sqrt()[alike], batch_of[order[nearest]][alike]
    of_batches = [found[batch == number] for number in range(1, batches + 1)]
    return [float(one.median()) for one in of_batches] if all(map(len, of_batches)) else []


def describe_suspect(
    compared: Compared, place: Place | None, alone: Record, data_ranks: int, ranks: Sequence[Record] = ()
) -> str:
    """Return the kind of error that the differences look like, and what to do; empty where they look like none known.

    Args:
        data_ranks: of the layout, whose records are `ranks`.
    """
    differences = compared.differences
    kinds = {one.kind for one in differences}
    gradients = [one for one in differences if one.kind == "gradient"]
    missing = [one for one in gradients if one.off == math.inf and one.ours == 0]
    if "example" in kinds:
        return "data ranks read other examples than one process: a sampler or a data set that each rank cuts itself"
    if missing:
        return f"{len(missing)} parameters have no gradient under the layout: a part of the model that no rank reaches"
    if kinds <= {"saved weight"}:
        return "training is right and the saved files are not: look at what the script saves, and on which rank"
    if kinds == {"prediction"} and _does_only_padding_differ(ranks, alone, 1):
        return "training and metrics are right: predictions at padding differ, which this layout computes otherwise"
    if kinds == {"metric"} and data_ranks == 1:
        return "training is right and a number is not: a callback computes it from the weights or tokens of one rank"
    if kinds <= {"metric", "prediction"}:
        return "training is right and the evaluation is not: a metric that a rank computes from its own examples"
    if kinds <= {"weight", "saved weight"}:
        return "gradients are right and weights are not: the optimizer, its clipping or its parameter groups"
    norms = [(one.ours, one.theirs) for one in gradients if one.step == 1 and math.isfinite(one.off)]
    factor = describe_common_factor(norms, len(alone.steps[0].gradients) if alone.steps else 0, data_ranks)
    if factor:
        return factor
    if place is None:
        return ""
    if place.step > 1 and not any(one.step < place.step for one in gradients):
        return f"gradients were right before step {place.step}, and weights in it are not: look at the optimizer"
    if place.direction == "forward" and data_ranks > 1 and place.module == next(iter(alone.steps[0].tokens)):
        return "other examples or tokens reach the model: a data set, sampler or collator that looks at the rank"
    if place.direction == "backward" and _does_only_padding_differ(ranks, alone, place.step):
        return (
            "a loss that reads outputs at padding, which this layout computes otherwise: leave out what the mask hides"
        )
    if place.direction == "backward" and data_ranks > 1 and "loss" in kinds:
        return "a mean of means: the loss weighs examples or tokens by the numbers that one data rank has"
    return ""


def _does_only_padding_differ(ranks: Sequence[Record], alone: Record, step: int) -> bool:
    """Return whether the model's outputs differ only at tokens that the mask hides."""
    theirs, ours = alone.steps[step - 1], [rank.steps[step - 1] for rank in ranks if len(rank.steps) >= step]
    for module in reversed(theirs.tokens):
        hidden = theirs.tokens[module][~theirs.kept[module]]
        parts = [own.tokens[module] for own in ours if own.width.get(module) == theirs.width[module]]
        if len(hidden) and parts:
            scale = theirs.tokens[module].square().mean(0).sqrt().clamp_min(1e-30)
            return (
                _compute_marked_share(
                    _mark_unlike(hidden / scale, torch.cat(parts) / scale, TIMES * compute_rounding_floor(alone))
                )
                > FEW
            )
    return False


def describe_common_factor(norms: Sequence[tuple[float, float]], count: int, data_ranks: int) -> str:
    """Say what the factor between all gradients comes from; empty where they do not differ by one factor.

    Args:
        norms: of the gradients that differ, in both runs.
        count: of all gradients.
    """
    factors = [ours / theirs for ours, theirs in norms if theirs > 0]
    if not factors or len(factors) < 0.8 * count:
        return ""
    factor = sorted(factors)[len(factors) // 2]
    close = sum(abs(one / factor - 1) < 1e-3 for one in factors)
    if close <= 0.9 * len(factors) or abs(factor - 1) <= 1e-3:
        return ""
    if data_ranks > 1 and abs(factor * data_ranks - 1) < 1e-2:
        return f"all gradients are 1/{data_ranks} of one process's: the loss is a sum, which data ranks average"
    if data_ranks > 1 and abs(factor / data_ranks - 1) < 1e-2:
        return f"all gradients are {data_ranks} times one process's: a loss counted once per data rank"
    return f"all gradients are {factor:.4g} times one process's: a factor in the loss that depends on the ranks"
