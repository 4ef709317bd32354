"""The loss of a Trainer's step: weighted over data ranks as one process would, and scheduled in a pipeline."""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.hooks import report, runtime
from hf_parallel.pipeline.script_loss import Plan, find_plan, run_plan, takes
from hf_parallel.pipeline.serving import served


def prepare(trainer: Any) -> None:
    """Find out whose loss the trainer computes; in a pipeline the script's own is looked at in the first step."""
    trainer._plans = {}  # the entries of a batch -> how its loss is scheduled, None if it needs whole batches
    state = runtime.parallel_state(trainer.model)
    if state is not None and state.pipeline is not None and is_own(trainer):
        state.notes.append("the loss is the script's: the first step, and each ragged batch, keeps all activations")


def is_own(trainer: Any) -> bool:
    """Does the script compute the loss, rather than the model?"""
    from transformers import Trainer

    overrides = type(trainer).compute_loss is not Trainer.compute_loss
    return overrides or trainer.compute_loss_func is not None or trainer.label_smoother is not None


def compute_loss(self: Any, own: Callable, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
    """The loss as the model or the script computes it, without Trainer's factor for the number of processes."""
    state = runtime.parallel_state(model)
    engine = state.pipeline if state is not None and is_own(self) else None
    call = functools.partial(_call, self, state, own, model, args=args, kwargs=kwargs)
    labels = inputs.get("labels")  # taken now: scripts take out of a batch what they have read
    if engine is None:
        return _weighted(self, model, labels, call(inputs))
    # Data ranks may differ in rows of the last batch: there, all go the same way.
    trains = torch.is_grad_enabled() and self._rows_of_step is None
    plan = self._plans.get(tuple(inputs)) if trains else None
    logged: list[dict] = []
    quietly = functools.partial(_undone, self)

    def loss_of(part: dict) -> torch.Tensor:
        result = call(part)
        logged.extend(result["logged"])
        return result["loss"]

    if plan is not None and takes(plan, inputs, engine.config):
        self._per_token, self._targets = True, None
        loss = run_plan(engine, plan, dict(inputs), loss_of, quietly)
        if plan.logs:
            self.log(_told_mean(engine, logged))
        return loss
    result, made = served(engine, dict(inputs), lambda: call(dict(inputs)))
    for logs in result["logged"]:
        self.log(logs)
    if trains and tuple(inputs) not in self._plans:
        plan = self._plans[tuple(inputs)] = find_plan(engine, dict(inputs), made, loss_of, quietly)
        if plan is not None:
            plan.logs = bool(result["logged"])
        report.say(_verdict(plan, engine.config.pipeline_schedule))
    return _weighted(self, model, labels, result)


def _verdict(plan: Plan | None, schedule: str) -> str:
    if plan is None:
        return "the script's loss needs whole batches: the pipeline keeps all activations of a batch"
    how = "is a mean" if plan.cut.mean else "adds up"
    return f"the script's loss {how} over micro-batches: {schedule} from now on"


def _call(self: Any, state: Any, own: Callable, model: Any, inputs: dict, *, args: tuple, kwargs: dict) -> dict:
    """What the script makes of a batch: its loss, the outputs beside it, and whether the loss is the model's own."""
    self._logged, former = [], self.args.average_tokens_across_devices
    self.args.average_tokens_across_devices = False  # our share of tokens holds that factor already
    try:
        result = own(model, inputs, *args, **kwargs)
    finally:
        self.args.average_tokens_across_devices = former
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    if outputs and state is not None and state.pipeline is not None and state.pipeline.loss_only:
        outputs = [{}]
    models = state is not None and loss is state.model_loss
    return {"loss": loss, "outputs": outputs, "models": models, "logged": self._logged}


def _told_mean(engine: Any, logged: list[dict]) -> dict:
    """What the last stage logged for each micro-batch as one entry for the batch, on every stage."""
    merged: dict[str, Any] = {}
    for key in {key: None for logs in logged for key in logs}:
        values = [logs[key] for logs in logged if key in logs]
        merged[key] = sum(values) / len(values) if isinstance(values[0], int | float) else values[-1]
    engine.tell(merged)
    return merged


def _weighted(self: Any, model: Any, labels: Any, result: dict) -> Any:
    """The loss of this data rank's rows such that the average over data ranks is that of all rows."""
    loss, outputs = result["loss"], result["outputs"]
    real = self._rows_of_step if torch.is_grad_enabled() else None
    averages = self.args.average_tokens_across_devices
    self._per_token = labels is not None and averages and _is_per_token(self, model, result["models"])
    self._targets = None if self._per_token else _targets_of_own_mean(model, labels, result["models"])
    weight = real if self._targets is None else self._targets
    if weight is not None and not self._per_token and torch.is_grad_enabled():
        # A mean over no target is not a number, and stays so times zero.
        loss = (loss if weight else torch.nan_to_num(loss)) * share(weight)
    return (loss, *outputs) if outputs else loss


@contextlib.contextmanager
def _undone(trainer: Any) -> Iterator[None]:
    """What a loss counts and collects in its trainer in here is forgotten: the batch is computed once more."""
    counters = {name: value for name, value in vars(trainer).items() if _collects(value)}
    before = copy.deepcopy(counters)
    try:
        yield
    finally:
        for name, value in counters.items():
            setattr(trainer, name, _restored(value, before[name]))


def _collects(value: Any, depth: int = 3) -> bool:
    """A number, or containers of numbers and words."""
    if value is None or isinstance(value, int | float | str):
        return True
    if not depth or not isinstance(value, dict | list | collections.deque) or len(value) > 10_000:
        return False
    return all(_collects(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


def _restored(value: Any, before: Any) -> Any:
    """The same container with its former content: others may hold it too."""
    if isinstance(value, dict):
        value.clear()
        value.update(before)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(before)
    return value if isinstance(value, dict | list | collections.deque) else before


def log(original: Callable) -> Callable:
    """What a script's loss collects it collects on the last stage: rank 0 shows it."""

    def replacement(self: Any, logs: dict, *args: Any, **kwargs: Any) -> None:
        state = runtime.parallel_state(self.model)
        if state is not None and state.mesh.session is not None:
            self._logged.append(dict(logs))  # compute_loss runs on the last stage alone: the others log with it later
            return
        if state is not None and state.pipeline is not None and is_own(self):
            state.pipeline.tell(logs)
        original(self, logs, *args, **kwargs)

    return replacement


def _is_per_token(trainer: Any, model: Any, models: bool) -> bool:
    """Is the loss a sum over tokens divided by their share? Then rows need no weight: missing ones have no tokens."""
    state = runtime.parallel_state(model)
    if state is not None and models:
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


def _targets_of_own_mean(model: Any, labels: Any, models: bool) -> int | None:
    """Over how many targets the model's own mean runs (token classification, masked tokens), if rows do not tell."""
    state = runtime.parallel_state(model)
    if state is None or state.mesh.data_size == 1 or not models or state.reads_item_count:
        return None
    if not torch.is_tensor(labels) or labels.ndim < 2 or labels.is_floating_point():
        return None
    return int((labels != -100).sum())


def share(weight: int) -> float:
    """Means of data ranks over unequal numbers of rows or targets: weighted so, their average is the mean over all."""
    mesh = runtime.mesh()
    total = torch.tensor(float(weight), device=mesh.device)
    dist.all_reduce(total, group=mesh.data_group)
    return weight * mesh.data_size / max(1.0, float(total))
