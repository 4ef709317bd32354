"""Losses in a loop without a Trainer, on data ranks: a line says what becomes of a loss of the loop's own.

A loss is weighed when its backward pass begins:

the model's loss, also scaled     nothing to do: its means run over the targets of all data ranks
a mean of torch's own, scaled     times `t D / T`, for t of T targets on D ranks, unless ranks scale unlike
another loss of the loop's own    taken for a mean over examples: times `n D / N`, for n of N under `batch_shares`
a model's and another in one sum  left as it is; under `batch_shares` refused: no factor is right for both

Rows that only fill a last batch, as accelerate repeats them, have no part in a model's own loss:

a sum over tokens                 the model is given no targets in them
a mean over the targets given     taken without them (`means`)
any other                         counts them, as under DDP, and a line says so
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.shares import (
    compute_full_share,
    count_real_rows,
    cut_of,
    is_ragged,
    share_of_rows,
    weigh_loss,
)

if TYPE_CHECKING:
    from accelerate.state import GradientState


def _get_watched_loop() -> runtime.LoopLosses | None:
    """Return what is known of the loop; None where losses need no weight, or a Trainer gives them."""
    current = runtime.current()
    if current is None or current.in_trainer or not current.config.shares_batches:
        return None
    return current.loop


#: Losses of models that one backward pass may start from.
_MOST_LOSSES = 16


def note_forward(loss: torch.Tensor | None, counted: bool, given: Mapping[str, object]) -> None:
    """Note a call of a model that trains.

    Args:
        loss: what it returned.
        counted: is that a mean over the targets of all data ranks?
        given: what it was called with.
    """
    current, loop = runtime.current(), _get_watched_loop()
    if current is not None:
        current.loop.rows = next((len(part) for part in given.values() if torch.is_tensor(part) and part.ndim), None)
        watched = not current.in_trainer and not current.loop.told and current.mesh.data_size > 1
        if watched and loss is not None and loss.requires_grad:
            # A loop that calls `loss.backward()` never takes them out: keep few, as each holds a graph.
            current.loop.of_models = [*current.loop.of_models[1 - _MOST_LOSSES :], loss]
    if loop is not None:
        loop.forwards += 1
        loop.weighed += [loss] if counted and loss is not None else []


def note_mean(value: torch.Tensor, count: torch.Tensor) -> None:
    """Note a mean of torch's own over `count` targets that the loop has computed."""
    current = runtime.current()
    if current is None or current.in_trainer or current.mesh.data_size == 1 or value.grad_fn is None:
        return
    if current.loop.weighs_means is not False:
        current.loop.means = [*current.loop.means[1 - _MOST_LOSSES :], (value, count)]


def watch_first_batch(model: nn.Module) -> None:
    """Say so if a loop gives all data ranks the same batch to train on. Collective at the model's first such call."""
    mesh = runtime.mesh()

    def compare(module: nn.Module, args: tuple, kwargs: dict) -> None:
        current, state = runtime.current(), runtime.find_parallel_state(module)
        if not (module.training and torch.is_grad_enabled()):
            return
        hook.remove()
        if current is None or current.in_trainer or current.pretended or state is None:
            return
        batch = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        if state.batches.is_equal_on_data_ranks(batch):
            report.say(
                f"all {mesh.data_size} data ranks train on the same batch, so that a step is one process's with the "
                f"batch of one rank, computed {mesh.data_size} times: accelerator.prepare(loader) shares batches out"
            )

    if mesh.data_size > 1:
        hook = model.register_forward_pre_hook(compare, with_kwargs=True)


def note_last_batch(loader: object, batches: Iterator) -> Iterator:
    """Yield a prepared loader's batches; remember the last one if it is filled with repeated rows."""
    from accelerate.state import GradientState

    for batch in batches:
        current, state = runtime.current(), GradientState()
        if current is not None and state.active_dataloader is loader and is_ragged(state):
            parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
            tensors = [part for part in parts if torch.is_tensor(part) and part.ndim]
            rows, cut = len(tensors[0]) if tensors else 0, cut_of(state)
            ranks, size = runtime.mesh().data_size, getattr(loader, "total_batch_size", None)
            dealt = cut or (min(rows, size // ranks) if isinstance(size, int) else rows,) * ranks
            # Rows in one process's order are known of batches with one row per example: TRL's pairs are two blocks.
            known, repeated = rows <= dealt[runtime.mesh().data_rank], sum(dealt) - state.remainder
            if repeated > 0 and rows:
                real = count_real_rows(state, rows) if known else None
                whole = [one for one in tensors if not (one.is_floating_point() or one.is_complex())]
                tokens = [one for one in whole if len(one.unique()) > 2]  # no masks, which many batches share
                references = [weakref.ref(one) for one in tensors]
                share = share_of_rows(state, rows) if known else 1.0
                current.loop.last = runtime.LastBatch(references, rows, real, share, repeated, tokens)
        yield batch


def find_last_batch(given: Mapping[str, object]) -> runtime.LastBatch | None:
    """Return the last batch if a model is given a tensor of it, or a copy, and it has repeated rows.

    A copy has the same tokens, repeated ones included: `{k: v.to(device)}` makes copies of what lay elsewhere.
    """
    from accelerate.state import GradientState

    current = runtime.current()
    last = None if current is None else current.loop.last
    if last is None:
        return None
    held = [tensor for reference in last.tensors if (tensor := reference()) is not None]
    values = [value for value in given.values() if torch.is_tensor(value)]
    if any(value is tensor for value in values for tensor in held):
        return last
    if current is None or current.in_trainer:  # Trainer leaves repeated rows out itself
        return None
    pairs = ((value, one) for value in values for one in last.tokens if value.shape == one.shape)
    is_copy = GradientState().end_of_dataloader and any(torch.equal(a, b.to(a.device, a.dtype)) for a, b in pairs)
    return last if is_copy else None


#: What changes no value on the way from a sum to a loss, and what multiplies it.
_KEEPS_VALUE = ("Clone", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "ReshapeAlias")
_SCALES = ("Mul", "Div")


def is_undivided_sum(node: Any, ends: set) -> bool:
    """Return whether a loss ends in a sum that nothing divides, none of a model's own losses."""
    if node is None or node in ends:
        return False
    name = _name_operation(node)
    if name in ("Add", "Sub", *_KEEPS_VALUE):
        return any(is_undivided_sum(before, ends) for before, _ in node.next_functions)
    return name == "Sum" or getattr(node, "_saved_reduction", None) == torch.nn._reduction.get_enum("sum")


def _name_operation(node: Any) -> str:
    return node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")


def _find_scaled_mean(
    loss: torch.Tensor, means: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the mean that a loss is, or a multiple of, with its count of targets; None if it is anything else."""
    noted: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {mean.grad_fn: (mean, count) for mean, count in means}
    node: Any = loss.grad_fn
    while node is not None and node not in noted and _name_operation(node) in (*_SCALES, *_KEEPS_VALUE):
        before = [other for other, _ in node.next_functions if other is not None]
        node = before[0] if len(before) == 1 else None
    return noted.get(node)


def _compute_weight_by_targets(
    loss: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor] | None, loop: runtime.LoopLosses, otherwise: float
) -> torch.Tensor:
    """Return what a multiple of a mean of torch's own weighs by its targets. Collective over data ranks.

    Ranks agree in the first backward pass whether the loop has such means at all.

    Args:
        found: the mean, and its number of targets; None if this rank's loss is anything else.
        otherwise: the weight where a rank has another loss, or ranks scale by unlike numbers: such a loop weighs by
            itself.
    """
    mesh = runtime.mesh()
    numbers = torch.zeros(4, dtype=torch.float64, device=mesh.device)
    if found is not None:
        mean, count = (value.detach().double() for value in found)
        scale = torch.where((count == 0) | (mean == 0), 1.0, loss.detach().double().reshape(()) / mean)
        numbers.copy_(torch.stack([count, torch.ones_like(count), count * scale, count * scale**2]))
    total = numbers.clone()
    dist.all_reduce(total, group=mesh.data_group)
    if loop.weighs_means is None:
        loop.weighs_means = bool(total[1])
    targets, known, scales, squares = total.unbind()
    alike = (squares * targets - scales**2).abs() <= (2 * torch.finfo(loss.dtype).eps) ** 2 * squares * targets
    agreed = (known == mesh.data_size) & alike & (targets > 0)
    return torch.where(agreed, numbers[0] * mesh.data_size / targets, otherwise).to(loss.device)


def weigh(loss: torch.Tensor, state: GradientState) -> torch.Tensor:
    """Return the loss as its backward pass is to begin from, and say once what data ranks make of the loop's own."""
    current, ranks = runtime.current(), runtime.mesh().data_size
    if current is None or current.in_trainer or ranks == 1:
        return loss
    found, weight = _find_scaled_mean(loss, current.loop.means), None
    current.loop.means = []
    if current.loop.weighs_means is not False:
        otherwise = compute_full_share(state) if current.config.shares_batches else 1.0
        weight = _compute_weight_by_targets(loss, found, current.loop, otherwise)
    if not current.loop.told and found is None:
        of_models, current.loop.of_models = current.loop.of_models, []
        current.loop.told = _find_sources(loss, of_models)[1]
        if current.loop.told and is_undivided_sum(loss.grad_fn, {one.grad_fn for one in of_models}):
            report.say(
                f"the loop's loss is a sum over the examples of its data rank, and {ranks} data ranks average their "
                f"gradients: they are 1/{ranks} of one process's; accelerator.backward(loss * "
                "accelerator.num_processes) gives the whole gradients"
            )
        elif current.loop.told:
            report.say(
                "the loop's own loss is taken for a mean over examples: if data ranks have different numbers of "
                "targets, it is the mean of their means, not one process's loss; the model's own loss (labels=…) and "
                "a mean of torch's own (cross_entropy) are exact"
            )
    loop = _get_watched_loop()
    if loop is None:
        return loss if weight is None else weigh_loss(loss, weight)
    weighed, loop.weighed, loop.forwards = loop.weighed, [], 0
    what = f"batch_shares={runtime.mesh().config.batch_shares}"
    of_model, of_loop = _find_sources(loss, weighed)
    if of_model and of_loop:
        why = "the loop adds a term of its own to the model's loss, and they have unlike weights"
        refuse(what, why, do="a loss that is computed from logits works, and so does batch_shares=even")
    if of_model:
        return loss
    if cut_of(state) is None:
        why = "the loop reads batches that accelerate has not shared out"
        refuse(what, why, do="accelerator.prepare(loader) works")
    return loss * compute_full_share(state) if weight is None else weigh_loss(loss, weight)


def check_step() -> None:
    """Tell of an optimizer's step after a backward pass that was not seen; refuse it under `batch_shares`."""
    current, loop = runtime.current(), _get_watched_loop()
    if current is not None and current.loop.means and current.loop.weighs_means is None and not current.loop.told:
        current.loop.told = True
        report.say(
            "loss.backward() averages the means of data ranks, which is not one process's mean if they have different "
            "numbers of targets: accelerator.backward(loss) weighs them by targets"
        )
    if loop is not None and loop.forwards:
        what = f"batch_shares={runtime.mesh().config.batch_shares}"
        refuse(what, "loss.backward() does not weigh a data rank's part", do="accelerator.backward(loss) works")


def _find_sources(loss: torch.Tensor, weighed: list[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether gradients reach weights through one of the losses `weighed`, and whether by another way."""
    ends = {one.grad_fn for one in weighed}
    waiting, seen = [loss.grad_fn], set()
    of_model, of_loop = False, not ends
    while waiting and not (of_loop and (of_model or not ends)):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in ends:
            of_model = True
        elif node.next_functions:
            waiting += [before for before, _ in node.next_functions]
        else:
            of_loop = True
    return of_model, of_loop
