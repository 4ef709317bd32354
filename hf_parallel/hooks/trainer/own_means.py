"""Find what a script's own loss is a mean over, so that data ranks with unlike numbers of targets weigh unlike.

A loss that is a mean over tokens by the script's own arithmetic, `(losses * mask).sum() / mask.sum()`, knows the
tokens of one data rank. The average over data ranks is the mean over all tokens only if each rank weighs as many as it
has. The first batch shows it: a few of its examples are taken twice, tokens are hidden in them, noise is put on what
the model gave for them, and the loss is computed from all and from both halves. No model runs for that. Halves may
have as many targets by chance, so several such trials must agree.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from hf_parallel.axes.pipeline.batches import split_examples
from hf_parallel.axes.pipeline.script_loss import change_columns, disturb_batch
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.hooks.trainer.bad_numbers import remember_counts
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.hooks.trainer.rows import JOINED, Batch, count_examples
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from transformers import Trainer

#: Tensors of the batch that tell targets together, and whether the first of each sequence is none; None: examples.
Targets: TypeAlias = tuple[tuple[str, ...], bool] | None
#: The loss by what stands for the model, a batch, and whether its count of targets is without end.
Loss: TypeAlias = Callable[[Any, dict, bool], torch.Tensor]

#: Examples and tokens of the first batch that are looked at: logits of more would need memory that a step may lack.
_EXAMPLES, _TOKENS = 4, 64
#: So many batches are looked at until one tells.
_LOOKS = 8
#: So many unlike trials on a batch must agree.
_TRIALS = 3


@dataclass
class FirstLoss:
    """The batch of a loss that nobody has looked at yet, and what the model gave for it, call by call."""

    batch: dict
    outputs: list[Any] = field(default_factory=list)


class Vote(NamedTuple):
    """A rank's examples say this: what the loss may be a mean over, and whether the script's code ran on them."""

    over: list[Targets]
    runs: bool = True


@contextlib.contextmanager
def keep_first_loss(model: nn.Module, batch: Batch) -> Iterator[FirstLoss]:
    """Keep what `find_mean` needs of the loss that is computed inside the `with`."""
    first = FirstLoss(dict(batch))
    handle = model.register_forward_hook(lambda module, args, output: first.outputs.append(output))
    try:
        yield first
    finally:
        handle.remove()


def find_mean(trainer: Trainer, first: FirstLoss, settled: bool, loss_of: Loss, computes: bool) -> bool:
    """Note in the trainer's record what its loss is a mean over. Collective over all ranks.

    Args:
        settled: the loss is known to be that of all data ranks' targets.
        computes: does this rank compute the loss, rather than another stage?

    Returns:
        Has the loss a part that is no mean over one thing, and knows no count?
    """
    record, found = record_of(trainer), None
    shown = not settled and JOINED not in first.batch and bool(first.outputs) == computes
    held = messages.gather_objects(_list_targets(first.batch) if shown else [])
    if not held[0] or any(names != held[0] for names in held):
        record.knows_mean = True
        return False
    if computes:

        def compute(stand_in: StandInModel, part: dict, endless: bool) -> torch.Tensor:
            restore, stream = remember_counts(trainer), runtime.mesh().read_random_state()
            stop = trainer.model.register_forward_pre_hook(_refuse_to_run, prepend=True)
            try:
                with replacing(record, tries=True), torch.no_grad():
                    return loss_of(stand_in, part, endless).detach().clone()
            finally:
                stop.remove()
                restore()
                runtime.mesh().set_random_state(stream)

        found = _test_means(trainer.model, *_take_examples(first), compute)
    record.looks_at_mean += 1
    votes = [vote for vote in messages.gather_objects(found) if vote is not None]
    if not votes:  # no rank's loss tells anything, as one of no targets: the next batch may
        record.knows_mean = record.looks_at_mean == _LOOKS
        return False
    common = [targets for targets in votes[0].over if all(targets in vote.over for vote in votes)]
    record.knows_mean, record.told_unknown = True, record.told_unknown or bool(common)
    record.mean_over = common[0] if common else None
    if record.mean_over is not None:
        keys, shifted = record.mean_over
        tokens = " and ".join(f"{key}[:, 1:]" if shifted else key for key in keys)
        report.say(f"the script's loss is a mean over the targets of {tokens}: data ranks weigh by how many they have")
    return not common and all(vote.runs for vote in votes)


def count_targets_of_own_mean(trainer: Trainer, batch: Batch) -> torch.Tensor | None:
    """Return how many targets of this data rank the script's loss is a mean over, if that is known."""
    targets = record_of(trainer).mean_over
    return _count_targets(batch, targets) if targets is not None and batch.keys() >= set(targets[0]) else None


def compute_share(trainer: Trainer, targets: torch.Tensor | None) -> torch.Tensor | float:
    """Return how much this data rank's mean weighs: by its targets, or by its rows where some rank has not counted.

    Collective over data ranks, also where nothing is counted: a script that goes another way on one rank must not make
    the others wait.
    """
    mesh, step = runtime.mesh(), record_of(trainer).step
    count = torch.zeros(2, device=mesh.device)
    count = count if targets is None else torch.stack([targets, torch.ones_like(targets)]).to(mesh.device)
    count[0] *= step.real_rows != 0
    total = count.clone()
    dist.all_reduce(total, group=mesh.data_group)
    return torch.where(total[1] == mesh.data_size, count[0] * mesh.data_size / total[0], step.share)


def fill_missing_target(batch: Batch, targets: tuple[tuple[str, ...], bool], count: torch.Tensor) -> None:
    """Give a batch without targets one whose loss weighs nothing: a mean over nothing, and its gradient, is 0/0."""
    for key in targets[0]:
        batch[key] = batch[key].clone()
        last = batch[key][(0, -1)[: batch[key].dim()]]
        last.copy_(torch.where(count == 0, not _is_labels(key), last))


def _is_labels(key: str) -> bool:
    return key.endswith("labels")


def _list_targets(batch: Batch) -> list[Targets]:
    """List what a mean may run over, the simplest first.

    That is the examples, or the tokens that one or two tensors of the batch tell: labels, masks, and weights, whose
    sum counts.
    """
    single: list[tuple[str, ...]] = []
    for key, value in sorted(batch.items()):
        if torch.is_tensor(value) and value.dim() in (1, 2):
            weighs = "mask" in key or ("weight" in key and value.is_floating_point())
            if weighs or (_is_labels(key) and value.dim() == 2 and not value.is_floating_point()):
                single.append((key,))
    pairs = [one + other for one, other in itertools.combinations(single, 2)]
    pairs = [pair for pair in pairs if len({batch[key].shape[:1] for key in pair}) == 1]
    pairs = [pair for pair in pairs if len({batch[key].shape for key in pair if batch[key].dim() == 2}) == 1]
    found: list[Targets] = [None]
    for keys in (*single, *pairs):
        has_tokens = any(batch[key].dim() == 2 for key in keys)
        found += [(keys, True), (keys, False)] if has_tokens else [(keys, False)]
    return found


def _count_targets(batch: Batch, targets: Targets) -> torch.Tensor:
    if targets is None:
        return torch.tensor(float(count_examples(batch) or 0))
    keys, shifted = targets
    held: Any = 1.0
    for key in keys:
        value = batch[key][:, 1:] if shifted and batch[key].dim() == 2 else batch[key]
        told = value.float() if value.is_floating_point() else (value != (-100 if _is_labels(key) else 0)).float()
        held = held * (told[:, None] if told.dim() == 1 and len(keys) > 1 else told)
    return held.sum()


def _take_examples(first: FirstLoss) -> tuple[dict, list]:
    """Take a few examples of the batch and of the outputs twice, and of these the tokens with most targets."""
    rows, batch = count_examples(first.batch) or 0, first.batch
    tokens: dict[int, torch.Tensor] = {}  # by the length of sequences: which are taken
    for key, value in batch.items():
        if torch.is_tensor(value) and value.dim() == 2 and len(value) == rows and not value.is_floating_point():
            length = value.shape[1]
            if length not in tokens or key.endswith("labels"):
                counts = (value != -100).sum(0).float() - torch.arange(length, device=value.device) / (length + 1)
                tokens[length] = counts.topk(min(_TOKENS, length)).indices.sort().values

    def take(value: Any) -> Any:
        if isinstance(value, list) and len(value) == rows:  # such as texts
            return value[:_EXAMPLES] * 2
        if not torch.is_tensor(value) or value.dim() == 0 or len(value) != rows:
            return value
        value = value.detach()[:_EXAMPLES]
        if value.dim() > 1 and value.shape[1] in tokens:
            value = value.index_select(1, tokens[value.shape[1]].to(value.device))
        return torch.cat([value, value])

    return {key: take(value) for key, value in batch.items()}, tree_map(take, first.outputs)


def _test_means(model: nn.Module, batch: dict, outputs: list, loss_of: Loss) -> Vote | None:
    """Return what the loss of the batch may be a mean over; None if this batch does not show it."""
    # All data ranks make all trials: a script may gather in its loss.
    vote, *others = [_test_means_once(model, batch, outputs, loss_of, trial) for trial in range(_TRIALS)]
    if vote is None or not vote.runs:
        return vote
    known = [other.over for other in others if other is not None and other.runs]
    return Vote([targets for targets in vote.over if all(targets in over for over in known)])


def _make_halves_unlike(padding: int | None, batch: dict, trial: int, generator: torch.Generator) -> dict:
    """Hide other tokens in each half of a batch, so that a mean over tokens is none over examples.

    Trials after the first one change weights, classes and tokens too, of which a script may count some. That may make
    a batch of which it can compute no loss.
    """
    rows = count_examples(batch) or 0
    batch = disturb_batch(padding, batch, generator)
    first = torch.arange(rows) < rows // 2
    for key in dict.fromkeys(key for targets in _list_targets(batch) if targets is not None for key in targets[0]):
        if batch[key].is_floating_point() or batch[key].dim() == 1:
            continue
        hidden = torch.rand(batch[key].shape, generator=generator) < 0.2 * _is_labels(key)  # labels apart from masks
        hidden[:, 0] = first  # the first tokens apart from the others
        batch[key] = batch[key].masked_fill(hidden.to(batch[key].device), -100 if _is_labels(key) else 0)
    return change_columns(batch, first.float(), generator) if trial else batch


def _test_means_once(model: nn.Module, batch: dict, outputs: list, loss_of: Loss, trial: int) -> Vote | None:
    generator, rows = torch.Generator().manual_seed(trial), count_examples(batch) or 0
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    batch = _make_halves_unlike(padding, batch, trial, generator)

    def is_by_row(value: Any) -> bool:
        return torch.is_tensor(value) and value.dim() > 0 and len(value) == rows

    def disturb(value: Any) -> Any:
        if not is_by_row(value) or not value.is_floating_point():
            return value
        noise = 1 + torch.randn(value.shape[:2], generator=generator) / 4
        noise[rows // 2 :] *= 4  # so that the halves have unlike losses, whatever size outputs have before training
        spread = value.float().std().clamp(min=1e-6).to(value.dtype)
        return value / spread * noise.to(value).reshape(*noise.shape, *[1] * (value.dim() - noise.dim()))

    def compute(part: Batch, places: slice, endless: bool = True) -> torch.Tensor:
        def give(value: Any) -> Any:
            # The model's own loss, and all that the script divides by the count, are right: what is left is looked at.
            if torch.is_tensor(value) and value.dim() == 0:
                return torch.full_like(value, 0 if endless else 7)
            return value[places] if is_by_row(value) else value

        stand_in = StandInModel(model, tree_map(give, disturbed))
        loss = loss_of(stand_in, dict(part), endless)
        if stand_in.answers:
            _refuse_to_run()
        return loss

    disturbed, halves, half = tree_map(disturb, outputs), split_examples(batch, 2, 1, rows), rows // 2
    calls = [(batch, slice(None), False), (batch, slice(None), True)]
    calls += [(part, slice(i * half, (i + 1) * half), True) for i, part in enumerate(halves)]
    found_losses = []
    for call in calls:  # all of them on each data rank
        with contextlib.suppress(Exception):  # whatever a script does with other examples than a loader's
            found_losses.append(compute(*call))
    if len(found_losses) < len(calls):
        return Vote([], runs=False)
    usual, whole, first, second = found_losses
    losses = torch.stack(found_losses)
    if not bool(losses.isfinite().all()) or not bool(usual):
        return None  # as where a half has no targets
    counts, is_rest = bool((usual - whole).abs() > 1e-6 * usual.abs()), bool((losses[1:].abs() > 1e-9).any())
    if counts and not is_rest:
        return Vote([None])
    if bool(first == second):
        return None
    found, tolerance = [], 1e-4 if whole.dtype in (torch.float32, torch.float64) else 2e-2
    for targets in _list_targets(batch):
        one, other = (_count_targets(part, targets).to(whole) for part in halves)
        if torch.allclose((one * first + other * second) / (one + other), whole, rtol=tolerance):
            found.append(targets)
    return Vote([targets for targets in found if targets is None] if counts else found)


def _refuse_to_run(*_: object) -> NoReturn:
    """Stop a loss that calls its model by another name: ranks would gather weights unlike numbers of times."""
    raise RuntimeError("the loss calls its model otherwise than before")


class StandInModel:
    """Answers calls with what a model gave before, in turn; has the model's attributes."""

    def __init__(self, model: nn.Module, answers: list):
        self.model, self.answers = model, answers

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.answers.pop(0) if self.answers else _refuse_to_run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)
