"""The loss of a Trainer's step: weighted over data ranks as one process would, and scheduled in a pipeline."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from hf_parallel.config import SpecError
from hf_parallel.hooks import report, runtime
from hf_parallel.pipeline.batches import row_count
from hf_parallel.pipeline.engine import BackboneCalledError
from hf_parallel.pipeline.own_loss import adds_up, watched
from hf_parallel.pipeline.schedules import micro_batch_count


def prepare(trainer: Any) -> None:
    """Find out whose loss the trainer computes; in a pipeline the script's own is looked at in the first step."""
    trainer._loss_adds_up, trainer._calls_backbone = None, False
    state = runtime.parallel_state(trainer.model)
    if state is None or state.pipeline is None:
        return
    state.pipeline.keep_outputs = _overrides(trainer)
    if _is_own(trainer):
        state.notes.append("the loss is the script's: the first step, and each ragged batch, keeps all activations")


def _overrides(trainer: Any) -> bool:
    from transformers import Trainer

    return type(trainer).compute_loss is not Trainer.compute_loss


def _is_own(trainer: Any) -> bool:
    return _overrides(trainer) or trainer.compute_loss_func is not None or trainer.label_smoother is not None


def compute_loss(self: Any, own: Callable, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
    """The loss as the model or the script computes it, without Trainer's factor for the number of processes."""
    engine = _pipeline_of_own_loss(self, model)
    if engine is not None:
        return _own_loss(self, engine, own, model, inputs, args, kwargs)
    try:
        if not self._calls_backbone:
            return _weighted(self, own, model, inputs, args, kwargs)
    except BackboneCalledError:
        if torch.is_grad_enabled():
            raise
        self._calls_backbone = True
    return _loss_on_last_stage(self, own, model, inputs, args, kwargs)


def _weighted(self: Any, own: Callable, model: Any, inputs: dict, args: tuple, kwargs: dict) -> Any:
    real = self._rows_of_step if torch.is_grad_enabled() else None
    averages, labels = self.args.average_tokens_across_devices, inputs.get("labels")
    result = _call(self, own, model, inputs, args, kwargs)
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    self._per_token = labels is not None and averages and _is_per_token(self, model, loss)
    self._targets = None if self._per_token else _targets_of_own_mean(model, labels, loss)
    weight = real if self._targets is None else self._targets
    if weight is None or self._per_token or not torch.is_grad_enabled():
        return result
    # A mean over no target is not a number, and stays so times zero.
    loss = (loss if weight else torch.nan_to_num(loss)) * _share(weight)
    return (loss, *outputs) if outputs else loss


def _call(self: Any, own: Callable, model: Any, inputs: dict, args: tuple, kwargs: dict) -> Any:
    former = self.args.average_tokens_across_devices
    self.args.average_tokens_across_devices = False  # our share of tokens holds that factor already
    try:
        return own(model, inputs, *args, **kwargs)
    finally:
        self.args.average_tokens_across_devices = former


def _pipeline_of_own_loss(trainer: Any, model: Any) -> Any:
    """The pipeline, if this is a training step with a loss of the script's and a batch that can be cut."""
    state = runtime.parallel_state(model)
    ragged = trainer._rows_of_step is not None  # data ranks may have other numbers of rows: the same way for all
    if state is None or state.pipeline is None or ragged or not torch.is_grad_enabled() or not _is_own(trainer):
        return None
    return None if trainer._loss_adds_up is False else state.pipeline


def _own_loss(self: Any, engine: Any, own: Callable, model: Any, inputs: dict, args: tuple, kwargs: dict) -> Any:
    """Scheduled if the loss adds up over micro-batches, which the first step finds out on whole outputs."""

    def loss_of(part: dict) -> torch.Tensor:
        result = _call(self, own, model, dict(part), args, kwargs)
        return result[0] if isinstance(result, tuple) else result

    if self._loss_adds_up:
        self._per_token, self._targets = True, None
        return engine.run_loss(dict(inputs), loss_of)
    batch = dict(inputs)  # scripts may take out of it what they have read
    try:
        with watched(engine) as calls:
            result = _weighted(self, own, model, inputs, args, kwargs)
    except BackboneCalledError:
        if not _reads_item_count(type(self).compute_loss):
            raise
        self._loss_adds_up = self._calls_backbone = True
        report.say("the script's loss calls the backbone and reads num_items_in_batch: taken to add up over rows")
        return _own_loss(self, engine, own, model, batch, args, kwargs)
    loss = result[0] if isinstance(result, tuple) else result
    self._loss_adds_up = _agreed(adds_up(engine, batch, calls, loss, loss_of))
    if self._loss_adds_up:
        report.say(f"the script's loss adds up over micro-batches: {engine.config.pipeline_schedule} from now on")
    else:
        report.say("the script's loss needs whole batches: the pipeline keeps all activations of a batch")
    return result


def _loss_on_last_stage(self: Any, own: Callable, model: Any, inputs: dict, args: tuple, kwargs: dict) -> Any:
    """A loss that calls the backbone, whose output no other stage could use: evaluation, and ragged batches."""
    engine: Any = cast(Any, runtime.parallel_state(model)).pipeline
    self._per_token, self._targets = True, None

    def call(part: dict) -> Any:
        return _call(self, own, model, dict(part), args, kwargs)

    if torch.is_grad_enabled():
        return engine.run_loss(_filled(dict(inputs), engine.config), call)
    outputs = engine.run_once(dict(inputs), lambda: call(inputs))
    loss = outputs.pop("loss")
    return (loss, outputs) if kwargs.get("return_outputs", bool(args and args[0])) else loss


def _filled(batch: dict, config: Any) -> dict:
    """As many rows as the schedule can cut; the repeated ones have no targets."""
    rows = row_count(batch)
    wanted = next(n for n in itertools.count(rows) if _can_be_cut(n, config))
    if wanted == rows:
        return batch
    tensors = {key: value for key, value in batch.items() if torch.is_tensor(value) and value.shape[:1] == (rows,)}
    more = {key: value[-1:].expand(wanted - rows, *value.shape[1:]) for key, value in tensors.items()}
    more["labels"] = torch.full_like(more["labels"], -100)
    return {**batch, **{key: torch.cat([value, more[key]]) for key, value in tensors.items()}}


def _can_be_cut(rows: int, config: Any) -> bool:
    try:
        return micro_batch_count(rows, config) > 0
    except SpecError:
        return False


def _agreed(here: bool) -> bool:
    """All ranks go the same way."""
    answer = torch.tensor(float(here), device=runtime.mesh().device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN)
    return bool(answer)


def log(original: Callable) -> Callable:
    """What a script's loss collects it collects on the last stage: rank 0 shows it."""

    def replacement(self: Any, logs: dict, *args: Any, **kwargs: Any) -> None:
        state = runtime.parallel_state(self.model)
        if state is not None and state.pipeline is not None and self._loss_adds_up:
            state.pipeline.tell(logs)
        original(self, logs, *args, **kwargs)

    return replacement


def _is_per_token(trainer: Any, model: Any, loss: Any) -> bool:
    """Is the loss a sum over tokens divided by their share? Then rows need no weight: missing ones have no tokens."""
    state = runtime.parallel_state(model)
    if state is not None and loss is state.model_loss:
        return state.reads_item_count
    if trainer.label_smoother is not None and trainer.compute_loss_func is None:
        return True
    return _reads_item_count(trainer.compute_loss_func or type(trainer).compute_loss)


def _reads_item_count(function: Any) -> bool:
    """Does a script's loss use `num_items_in_batch`, by name or among its other keywords? If not, it is a mean."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        code = type(function).__call__.__code__
    names = {"num_items_in_batch"}
    if code.co_flags & inspect.CO_VARKEYWORDS and "num_items_in_batch" not in code.co_varnames[: code.co_argcount]:
        positional = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        names.add(code.co_varnames[positional])  # the name of **kwargs
    reads = (step for step in dis.get_instructions(code) if step.opname.startswith("LOAD"))
    return any(names & set(step.argval if isinstance(step.argval, tuple) else (step.argval,)) for step in reads)


def _targets_of_own_mean(model: Any, labels: Any, loss: Any) -> int | None:
    """Over how many targets the model's own mean runs (token classification, masked tokens), if rows do not tell."""
    state = runtime.parallel_state(model)
    if state is None or state.mesh.data_size == 1 or loss is not state.model_loss or state.reads_item_count:
        return None
    if not torch.is_tensor(labels) or labels.ndim < 2 or labels.is_floating_point():
        return None
    return int((labels != -100).sum())


def _share(weight: int) -> float:
    """Means of data ranks over unequal numbers of rows or targets: weighted so, their average is the mean over all."""
    mesh = runtime.mesh()
    total = torch.tensor(float(weight), device=mesh.device)
    dist.all_reduce(total, group=mesh.data_group)
    return weight * mesh.data_size / max(1.0, float(total))
