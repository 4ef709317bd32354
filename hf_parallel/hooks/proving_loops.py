"""Loops of a script that is proved: patches of Accelerate, and of torch's optimizers where nobody else tells."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import RandomSampler, SequentialSampler

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks.patching import Patch, with_first
from hf_parallel.prove.small_run import ACCUMULATION, EXAMPLES, Enough, Proving
from hf_parallel.ranks.steps import skip_inner_steps

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_COUNTS = (
    "accelerate.accelerator:Accelerator.num_processes",
    "transformers.training_args:TrainingArguments.world_size",
)
_LIBRARIES = ("accelerate", "transformers", "trl", "peft", "hf_parallel", "sentence_transformers")
_MULTIPLY = (torch.mul, *(getattr(torch.Tensor, name) for name in ("mul", "mul_", "__mul__", "__rmul__", "__imul__")))


def list_loop_patches(proving: Proving) -> list[Patch]:
    """Return the changes for loops."""
    of = functools.partial(with_first, proving)
    return [
        of("torch.optim.optimizer:Optimizer.__init__", _watch_bare_loop, "steps of loops without Accelerate"),
        of("torch:Tensor.backward", _keep_loss_of_bare_loop, "losses are compared"),
        of("accelerate.accelerator:Accelerator.prepare", _prepare, "watched"),
        *(
            Patch(target, functools.partial(_count_as_data_ranks, proving), "scripts count steps")
            for target in _COUNTS
        ),
        of("accelerate.accelerator:Accelerator.prepare_data_loader", _cut_data_of_loop, "a few steps"),
        of("accelerate.accelerator:Accelerator.backward", _keep_loss_of_loop, "losses are compared"),
        of("accelerate.accelerator:Accelerator.clip_grad_norm_", _clip, "gradients are compared before"),
        of("accelerate.accelerator:Accelerator.log", _keep_logged_numbers, "logs are compared"),
        of("accelerate.optimizer:AcceleratedOptimizer.step", _note_gradients_of_loop, "gradients are compared"),
        of("accelerate.scheduler:AcceleratedScheduler.step", _step_schedule_of_loop, "as often as under the layout"),
    ]


def make_accelerator(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Make an Accelerator for the device of the proof, in fp32 unless the dtype is kept, that tracks nothing."""
    proving.driven = True
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.arguments["cpu"] = not proving.on_gpu
    bound.arguments.pop("log_with", None)
    if not proving.sizes.keep_dtype:
        bound.arguments["mixed_precision"] = "no"
    if bound.arguments.get("gradient_accumulation_steps", 1) > ACCUMULATION:
        bound.arguments["gradient_accumulation_steps"] = ACCUMULATION
        proving.record.note(f"gradient_accumulation_steps is {ACCUMULATION}")
    original(*bound.args, **bound.kwargs)


def _prepare(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Watch the models that a loop prepares."""
    prepared = original(self, *args, **kwargs)
    if not _is_called_by_trainer():
        for model in (one for one in args if isinstance(one, nn.Module)):
            proving.watch(self.unwrap_model(model), self.mixed_precision)
            if not hasattr(model, "no_sync"):  # as models of several processes have
                vars(model)["no_sync"] = contextlib.nullcontext
    return prepared


def _is_called_by_trainer() -> bool:
    """Return whether this is called by a Trainer, which tells of its model itself."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return True
        frame = frame.f_back
    return False


def _cut_data_of_loop(
    proving: Proving, original: Callable, self: Accelerator, data_loader: DataLoader, *args: Any, **kwargs: Any
) -> Any:
    """Cut the data of a loop; one process takes the batches of all data ranks."""
    sampler: Any = getattr(data_loader, "batch_sampler", None)
    if not _is_called_by_trainer() and self.split_batches:
        proving.share_batches()
    if not _is_called_by_trainer() and isinstance(getattr(sampler, "batch_size", None), int):
        own = min(sampler.batch_size, max(EXAMPLES, proving.sizes.micro_batches))
        examples = proving.count_examples(own, self.gradient_accumulation_steps)
        order: Any = sampler.sampler
        if proving.sizes.data_ranks > 1 and isinstance(order, (RandomSampler, SequentialSampler)):
            batch = own * proving.sizes.data_ranks * self.gradient_accumulation_steps
            examples = max(batch, examples // batch * batch)
            proving.record.note("the loop trains on whole batches: Accelerate fills the last one of an epoch")
        if isinstance(order, RandomSampler):
            order._num_samples = min(examples, len(order.data_source))
        elif isinstance(order, SequentialSampler):
            order.data_source = range(min(examples, len(order.data_source)))  # type: ignore[assignment]
        sampler.batch_size = own * proving.multiply
        object.__setattr__(data_loader, "batch_size", sampler.batch_size)
        object.__setattr__(data_loader, "num_workers", 0)
    return original(self, data_loader, *args, **kwargs)


def _keep_loss_of_loop(
    proving: Proving, original: Callable, self: Accelerator, loss: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep the loss of a loop."""
    if not proving.in_trainer:
        proving.record.losses.append(float(loss.detach()))
    original(self, loss, *args, **kwargs)


def _clip(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Note the gradients before they are clipped."""
    if self.gradient_state.sync_gradients:
        proving.end_step(proving.watched)
    return original(self, *args, **kwargs)


def _keep_logged_numbers(
    proving: Proving, original: Callable, self: Accelerator, values: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep the numbers that a loop logs."""
    if not proving.in_trainer:
        proving.record.log(values)
    original(self, values, *args, **kwargs)


def _note_gradients_of_loop(
    proving: Proving, original: Callable, self: AcceleratedOptimizer, *args: Any, **kwargs: Any
) -> Any:
    """Note the gradients of a loop, and end it after the last step of the proof."""
    counts = self.gradient_state.sync_gradients and not proving.in_trainer
    if counts:
        proving.end_step(proving.watched)
    result = original(self, *args, **kwargs)
    if counts:
        _count_loop_step(proving)
    return result


def _count_loop_step(proving: Proving) -> None:
    if proving.leaves:
        why = "resumes Trainer's checkpoints; a loop of its own resumes by its own arguments"
        refuse("--saved_by", why, do="give a script with Trainer, or prove the loop without --saved_by")
    proving.done += 1
    if proving.done >= proving.sizes.steps:
        proving.note_weights(proving.watched)
        proving.record.note(f"the script was stopped after {proving.done} steps; what follows is not proved")
        raise Enough(0)


def _watch_bare_loop(
    proving: Proving, original: Callable, self: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> None:
    """Watch the models of a loop that has neither Trainer nor Accelerator, and count its steps."""
    original(self, *args, **kwargs)
    own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
    models = [model for model in proving.made if any(id(parameter) in own for parameter in model.parameters())]
    if proving.driven or not models:
        return
    if proving.sizes.data_ranks > 1:
        why = "without Trainer or Accelerator deals the data to its ranks itself"
        refuse("prove: a loop", why, do="prove a layout with one data rank, such as tp=2")
    for model in models[-1:]:  # made of the others
        proving.watch(model)

    def note_gradients(*_: object) -> None:
        if not proving.driven:
            proving.end_step(proving.watched)

    def count_step(*_: object) -> None:
        if not proving.driven:
            _count_loop_step(proving)

    self.register_step_pre_hook(skip_inner_steps(note_gradients))
    self.register_step_post_hook(skip_inner_steps(count_step))


def _keep_loss_of_bare_loop(
    proving: Proving, original: Callable, self: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Keep the loss of such a loop."""
    if not proving.driven and self.numel() == 1:
        proving.record.losses.append(float(self.detach()))
    original(self, *args, **kwargs)


class _ProcessCount(int):
    """The number of data ranks for which one process stands; times a loss it is 1.

    Loops that multiply a loss by the number of processes undo the mean that data ranks take of gradients.
    One process takes no such mean.
    """

    in_losses: int

    def __new__(cls, value: int, in_losses: int = 1) -> _ProcessCount:
        count = super().__new__(cls, value)
        count.in_losses = in_losses
        return count

    def __mul__(self, other: Any) -> Any:
        product = super().__mul__(other)
        return _ProcessCount(product, self.in_losses * other) if isinstance(other, int) else product

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        multiplied = function in _MULTIPLY
        is_loss = multiplied and any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
        args, kwargs = tree_map_only(cls, lambda one: one.in_losses if is_loss else int(one), (args, kwargs or {}))
        return function(*args, **kwargs)


def _count_as_data_ranks(proving: Proving, original: property) -> property:
    """Tell a script how many data ranks one process stands for; libraries go on with one process."""

    def count(self: Any) -> int:
        module = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        own = original.__get__(self)
        return own if module in _LIBRARIES or proving.multiply == 1 else _ProcessCount(own * proving.multiply, own)

    return property(count)


def _step_schedule_of_loop(
    proving: Proving, original: Callable, self: AcceleratedScheduler, *args: Any, **kwargs: Any
) -> None:
    """Step as often as the data ranks together do."""
    repeated = 1 if proving.in_trainer or self.split_batches else proving.multiply
    for _ in range(repeated):
        original(self, *args, **kwargs)
