"""Means over targets inside a loss, made means over the targets of all data ranks.

    in a model's forward    each mean is weighted where it is taken: the average over data ranks is the mean over all
    in a script's own loss  nothing is changed; what the script returns may be such a mean itself, which is remembered

Data ranks see unlike numbers of targets (masked tokens, labels that are ignored, answers cut away), so an average of
their means is no mean. We need not know which heads take a mean: they all call torch's functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hf_parallel.ask.session import of_session
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate import loop_losses
from hf_parallel.hooks.accelerate.paired_losses import refuse_pairs
from hf_parallel.hooks.accelerate.shares import weigh_loss
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.model.calls import bind_by_name

if TYPE_CHECKING:
    from transformers import Trainer

Given: TypeAlias = Mapping[str, torch.Tensor]  # arguments by name


@dataclass
class Scope:
    """The loss of one batch of a Trainer, while it is computed.

    Attributes:
        share: what the loss is multiplied by when it is known; means over targets are divided by it.
        weighs_itself: the script divides by the count of targets, so that models return it their plain means.
        counted: were means over targets weighted, or a count filled in?
        assumed: for a model that the script gave no count?
        reads_count: has the script computed with the count of targets?
        predicts: is it that of a `prediction_step`, which nobody weighs by the count of targets?
        corrects: are means over targets in the script's own code made means over those of all data ranks?
        taken: the last mean outside of what is weighted, and over how many targets it runs.
    """

    share: float = 1.0
    weighs_itself: bool = False
    counted: bool = False
    assumed: bool = False
    reads_count: bool = False
    predicts: bool = False
    corrects: bool = False
    taken: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass
class Forward:
    """A call of a parallel model. `share` is None where its means are left as they are.

    Attributes:
        passed_on: has the script given it the count of targets?
        counted: is its loss known to be that of all data ranks' targets? Not because it is given their count: some
            models only hand it on to where nobody reads it.
        filled: by what is done here, rather than by the script.
        given: what the model was called with.
        whole: is its loss that of the whole batch on each data rank, as of `paired_losses`?
        last: the loop's last batch, if it is called with it, and rows of it are repeated.
        leaves_repeats: has its loss no part of them?
        trains: may its outputs have gradients of its parameters?
    """

    share: float | None
    passed_on: bool = False
    given: Mapping[str, object] = field(default_factory=dict)
    counted: bool = False
    filled: bool = False
    whole: bool = False
    last: runtime.LastBatch | None = None
    leaves_repeats: bool = False
    trains: bool = False


@dataclass
class _Now:
    """The Trainer's loss that is being computed, if any, and the forward passes in progress, innermost last.

    Attributes:
        computes: is a loss of torch.nn.functional being computed?
    """

    scope: Scope | None = None
    forwards: list[Forward] = field(default_factory=list)
    computes: bool = False


def get_scope() -> Scope | None:
    """Return the Trainer's loss that is being computed, if any."""
    return of_session(_Now).scope


def compute_in_scope(new: Scope) -> contextlib.AbstractContextManager[None]:
    """Compute a loss for a Trainer inside the `with`."""
    return replacing(of_session(_Now), scope=new)


def enter(share: float | None, passed_on: bool, given: Mapping[str, object]) -> Forward:
    """Begin a model's forward pass."""
    now = of_session(_Now)
    now.forwards.append(Forward(share, passed_on, given))
    return now.forwards[-1]


def leave_forward() -> Forward:
    """End the innermost forward pass, and return it."""
    return of_session(_Now).forwards.pop()


def note(forward: Forward) -> None:
    """Note that something was counted over data ranks."""
    now = of_session(_Now)
    forward.counted = forward.filled = True
    if now.scope is not None:
        now.scope.counted = True
        now.scope.assumed |= not forward.passed_on


#: Functions that tell nothing of a tensor's value: FSDP2 calls them on all that a layer is given.
_QUESTIONS = {getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "device", "dtype", "shape", "is_leaf")}


class Count(torch.Tensor):
    """The count of targets that a script is given: its scope knows when something is computed with it."""

    scope: Scope

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = tree_map(_read_mean_argument, (args, kwargs or {}))
        return func(*args, **kwargs)


def _read_mean_argument(value: object) -> object:
    if not isinstance(value, Count):
        return value
    value.scope.reads_count = True
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _make_number(number: float, value: torch.Tensor) -> torch.Tensor:
    """Make a number on the device of `value`: a copy to a GPU would wait for it."""
    return torch.full((), number, dtype=torch.float32, device=value.device)


def _count_mean_targets(given: Given, value: torch.Tensor) -> torch.Tensor:
    """Return what torch divides by: targets that are not ignored, each with the weight of its class."""
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():  # probabilities of classes
        classes = given["input"].shape[1 if given["input"].ndim > 1 else 0]
        return _make_number(target.numel() / classes, value)
    kept = target != given.get("ignore_index", -100)
    return kept.sum().float() if weight is None else (weight[target.where(kept, 0)] * kept).sum().float()


#: Those whose mean runs over the elements of their input.
_BY_ELEMENT = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
#: Function of torch.nn.functional -> over how many numbers its mean runs: targets, elements, sequences.
COUNTS: dict[str, Callable[[Given, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": _count_mean_targets,
    "nll_loss": _count_mean_targets,
    **dict.fromkeys(_BY_ELEMENT, lambda given, value: _make_number(given["input"].numel(), value)),
    "ctc_loss": lambda given, value: _make_number(len(torch.as_tensor(given["target_lengths"])), value),
}
_PAIRS = (
    "the script's {loss} compares each example with the others of its data rank, as under DDP; to compare whole "
    "batches as one process does, gather the embeddings by torch.distributed.nn.all_gather before the loss, with "
    "dataloader_drop_last=True"
)
#: Those whose sum over sequences is a model's loss: no model divides it by anything.
SUMMED = {"ctc_loss"}


@patch(f"torch.nn.functional:{{{','.join(COUNTS)}}}", "takes the mean over this rank's targets")
def mean(original: Callable, *args: object, **kwargs: object) -> torch.Tensor:
    """Compute one of these functions over the targets of all data ranks; outside of losses it is torch's own."""
    now = of_session(_Now)
    if original.__name__ in _BY_ELEMENT and any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
        return _compute_penalty(original, bind_by_name(original, args, kwargs))
    if now.computes:  # torch calls it by its name once more under a mode, such as that of torch.set_default_device
        return original(*args, **kwargs)
    with replacing(now, computes=True):
        value = original(*args, **kwargs)
    if now.forwards and now.forwards[-1].whole:
        return value
    given = bind_by_name(original, args, kwargs)
    own = not now.forwards and (value.requires_grad or now.scope is not None)  # of the script, or of its evaluation
    if own and original.__name__ == "cross_entropy":
        # Say once that a script's loss compares the examples of a data rank, unless it has gathered those of others.
        current = runtime.current()
        if current is not None and not current.loop.told_of_pairs and current.mesh.data_size > 1:
            rows = len(given["input"])
            if rows <= (current.loop.rows or rows) and _is_comparing_rows(given, {}):
                current.loop.told_of_pairs = True
                report.say(_PAIRS.format(loss="loss" if value.requires_grad else "evaluation"))
    loops = not now.forwards and now.scope is None
    if loops and not value.requires_grad:
        return value
    former = given.get("size_average") is not None or given.get("reduce") is not None
    reduction = "none" if former else given.get("reduction", "mean")
    if loops:
        if reduction == "mean" and value.dim() == 0:
            loop_losses.note_mean(value, COUNTS[original.__name__](given, value))
        return value
    if reduction == "mean":
        if now.forwards and original.__name__ == "cross_entropy" and _is_comparing_rows(given, now.forwards[-1].given):
            refuse_pairs()
        last = now.forwards[-1].last if now.forwards else None
        if last is not None and last.real is not None and _is_by_row(given, now.forwards[-1].given, last.rows):
            now.forwards[-1].leaves_repeats = True
            kept = len(given["target"]) // last.rows * last.real
            given = {**given, "input": given["input"][:kept], "target": given["target"][:kept]}
            value = original(**given)
        return correct_mean(value, COUNTS[original.__name__](given, value))
    if reduction != "sum" or not now.forwards:
        return value
    # A sum in a model's forward: the model divides it by the count it was given, or it is the loss itself.
    forward = now.forwards[-1]
    if original.__name__ not in SUMMED:
        forward.counted |= forward.passed_on
        return value
    if forward.share is None:
        return value
    note(forward)
    return weigh_loss(value, (not runtime.is_absent()) * runtime.mesh().data_size / (forward.share or 1.0))


def _compute_penalty(original: Callable, given: Given) -> torch.Tensor:
    """Compute a function of weights, not of targets: torch would take a mean of means, also of unlike parts."""
    reduction = str(given.get("reduction", "mean"))
    values = original(**{**given, "reduction": "none"})
    return values if reduction == "none" else getattr(values, reduction)()


def _is_by_row(given: Given, of_model: Mapping[str, object], rows: int) -> bool:
    """Return whether the targets of a mean are what the model was called with, row after row."""
    target = given["target"]
    if not torch.is_tensor(target) or not target.ndim or len(target) % rows or len(given["input"]) != len(target):
        return False
    named = [value for value in of_model.values() if torch.is_tensor(value) and value.numel() == target.numel()]
    return any(len(value) == rows and torch.equal(value.flatten().to(target), target.flatten()) for value in named)


def _is_comparing_rows(given: Given, of_model: Mapping[str, object]) -> bool:
    """Return whether the right answer for each row is the row itself, as in CLIP's loss (Radford et al., 2021, fig.
    3).

    Its targets are counted up, of as many classes as rows, and nothing that the model was called with.
    """
    logits, target = given["input"], given["target"]
    if logits.ndim != 2 or len(set(logits.shape)) != 1 or target.ndim != 1 or len(logits) < 2:
        return False
    if not torch.equal(target, torch.arange(len(target), device=target.device)):
        return False
    given_tensors = [value for value in of_model.values() if torch.is_tensor(value)]
    return not any(value.numel() == len(target) and torch.equal(value.flatten(), target) for value in given_tensors)


def correct_mean(value: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Weigh a mean over `count` numbers where it is taken in a model's forward; remember one of the script's own."""
    now = of_session(_Now)
    if not now.forwards or now.forwards[-1].share is None:
        if now.scope is not None and now.scope.corrects and not now.forwards:
            return correct_over_data_ranks(value, count, now.scope.share)
        if now.scope is not None:
            now.scope.taken = value, count
        return value
    note(now.forwards[-1])
    return correct_over_data_ranks(value, count, now.forwards[-1].share)


@patch("transformers.trainer_pt_utils:LabelSmoother.__call__", "takes the mean over this rank's targets")
def smooth_labels(original: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Smooth labels in a `prediction_step`, where Seq2SeqTrainer hands on no count of targets."""
    value, given, scope = original(*args, **kwargs), bind_by_name(original, args, kwargs), get_scope()
    if scope is None or not scope.predicts or given.get("num_items_in_batch") is not None:
        return value
    labels = given["labels"][..., 1:] if given.get("shift_labels") else given["labels"]
    return correct_over_data_ranks(value, (labels != given["self"].ignore_index).sum().float(), scope.share)


def correct_over_data_ranks(mean: torch.Tensor, count: torch.Tensor, share: float) -> torch.Tensor:
    """Return this rank's mean such that the average of all, times their shares, is the mean over all targets."""
    mesh = runtime.mesh()
    count = count * (not runtime.is_absent())
    total = count.clone()
    dist.all_reduce(total, group=mesh.data_group)
    return weigh_loss(mean, count * mesh.data_size / (total * (share or 1.0)))


def compute_normaliser(count: torch.Tensor) -> torch.Tensor:
    """Return what a sum over `count` targets is divided by, so that data ranks average to the mean over all."""
    now = of_session(_Now)
    if not now.forwards or now.forwards[-1].share is None:
        return count.clamp(min=1)
    note(now.forwards[-1])
    mesh, total = runtime.mesh(), count * (not runtime.is_absent())
    dist.all_reduce(total, group=mesh.data_group)
    return total.clamp(min=1) * (now.forwards[-1].share or 1.0) / mesh.data_size


#: Names by which scripts ask for the number of processes.
_PROCESSES = {"num_processes", "world_size", "get_world_size"}


def does_know_processes(trainer: Trainer) -> bool:
    """Return whether the script's `compute_loss` asks for the number of processes, a factor of Trainer's loss.

    By the names in its code: the count that it is given depends on the answer, so no run of it can tell before.
    """
    return not _PROCESSES.isdisjoint(_find_names_in_loss(trainer))


def tell_of_sums_over_processes(trainer: Trainer) -> None:
    """Print a line if the script's `compute_loss` sums over all processes, some of which have the same examples."""
    mesh = runtime.mesh()
    processes, stages = mesh.config.world_size, mesh.size("pp")
    if processes == mesh.data_size or "all_reduce" not in _find_names_in_loss(trainer):
        return
    line = f"{type(trainer).__name__}.compute_loss calls all_reduce: over all {processes} processes it counts "
    line += f"each of {mesh.data_size} different batches {processes // mesh.data_size} times"
    if stages > 1:
        line += f", and waits for ever under pp_size={stages}, where the last stage alone computes the loss"
    report.say(f"{line}; trainer.accelerator.gather(x).sum() after the step counts each once")


def _find_names_in_loss(trainer: Trainer) -> set[str]:
    """Return the names that the code of the script's own `compute_loss` reads."""
    from transformers import Trainer

    classes, found = type(trainer).__mro__, set[str]()
    last = classes.index(Trainer) + (vars(Trainer)["compute_loss"].__module__ != Trainer.__module__)
    overrides = (vars(cls).get("compute_loss") for cls in classes[:last])
    for function in filter(None, overrides):  # a function, method, partial or callable object
        if getattr(function, "__module__", None) == "trl.trainer.sft_trainer":  # it multiplies as Trainer does
            continue
        while (partial := isinstance(function, functools.partial)) or hasattr(function, "__wrapped__"):
            function = function.func if partial else function.__wrapped__
        function = getattr(function, "__func__", function)
        code = getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)
        found.update(() if code is None else code.co_names)
    return found
