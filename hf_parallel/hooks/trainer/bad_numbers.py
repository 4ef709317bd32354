"""When the gradient norm of a step is not finite: where it comes from, and what becomes of the step.

The norm is equal on all ranks, so they decide alike. It is read before the optimizer's step where Trainer waits for
the device as well: on the CPU, under `logging_nan_inf_filter` (its default: it reads every loss), and where
`nan_action` asks for it. Otherwise it is what Trainer logs. The step's batches are then computed once more, with hooks
on all modules; where that is not possible (a script's own `training_step`, offload) the next step has the hooks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import Told
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.monitor.first_bad import Finding, Search, format_findings
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import RandomState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments


# ---- What a trainer counts beside its loss, where a pipeline computes the loss of a batch in parts ------------------
# TRL's metrics are quotients of what it gathers: of sums over tokens, of rows. Each part is given what was gathered of
# all parts so far, so that the last one counts the whole batch; what the ones before have counted is forgotten.


@dataclass(eq=False)
class Joined:
    """The parts of one batch."""

    trainer: Trainer
    gathered: list[torch.Tensor] = field(default_factory=list)  # by the order of the calls in a part
    reduced: list[torch.Tensor] = field(default_factory=list)
    restore: Callable[[], None] | None = None

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """The loss of a part is computed in here."""
        if self.restore is None:
            self.restore = remember_counts(self.trainer)
        else:
            self.restore()
        gather, calls = self.trainer.accelerator.gather, itertools.count()
        reduce, reductions = self.trainer.accelerator.reduce, itertools.count()

        def with_former(value: torch.Tensor) -> torch.Tensor:
            found, place = gather(value), next(calls)
            if place == len(self.gathered):
                self.gathered.append(found)
            else:
                self.gathered[place] = torch.cat([self.gathered[place], found])
            return self.gathered[place]

        def added(value: torch.Tensor, **kwargs: object) -> torch.Tensor:
            found, place = reduce(value, **kwargs), next(reductions)
            if place == len(self.reduced):
                self.reduced.append(found)
            else:
                self.reduced[place] = self.reduced[place] + found
            return self.reduced[place]

        # `gather` is what `gather_for_metrics` calls as well; what is reduced are sums.
        with replacing(self.trainer.accelerator, gather=with_former, reduce=added):
            yield


def remember_counts(trainer: Trainer) -> Callable[[], None]:
    """Return a function after which the trainer has counted and collected no more than now.

    It also gives the trainer's tensors, and the buffers of its modules (queues, centers), their values back.
    """
    known = set(vars(trainer))
    named = {name: value for name, value in vars(trainer).items() if torch.is_tensor(value)}
    modules = [one for one in vars(trainer).values() if isinstance(one, nn.Module) and one is not trainer.model]
    held = (*named.values(), *(buffer for one in modules for buffer in one.buffers()))
    # A loss writes to no parameter, nor to a part of one.
    tensors = [one for one in held if not one.requires_grad and not isinstance(one, DTensor)]
    values = [tensor.detach().clone() for tensor in tensors]
    counters = {name: value for name, value in vars(trainer).items() if _is_collection(value)}
    before = copy.deepcopy(counters)

    @torch.no_grad()
    def restore() -> None:
        vars(trainer).update(named)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)  # unseen by autograd: a backward pass may need one that nobody has changed
        for name, value in list(vars(trainer).items()):
            if name not in known and (torch.is_tensor(value) or _is_collection(value)):
                delattr(trainer, name)
        for name, value in counters.items():
            former = copy.deepcopy(before[name])
            # A container gets its former content: others may hold it too.
            if isinstance(value, dict):
                value.clear()
                value.update(former)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(former)
            setattr(trainer, name, value if isinstance(value, dict | list | deque) else former)

    return restore


def _is_collection(value: object, depth: int = 3) -> bool:
    """Return whether it is a number, or a container of numbers and words."""
    if value is None or isinstance(value, int | float | str):
        return True
    if not depth or not isinstance(value, dict | list | deque) or len(value) > 10_000:
        return False
    return all(_is_collection(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


#: How many times a training is searched: each takes as long as a step.
SEARCHES = 3
#: Methods of Trainer that compute a batch once more; a script's own may do something else with it.
_METHODS = ("training_step", "_prepare_inputs")


@dataclass
class _Now:
    """The training whose numbers are looked at now, if any."""

    looking: Looking | None = None


class BadNumberError(RuntimeError, Told):
    """A loss or a gradient norm is not finite, and `nan_action=stop`."""


class Looking(TrainerCallback):
    """A training that is looked at: the batches of the step in progress, and what its norm is."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.action = trainer, runtime.mesh().config.nan_action
        self.batches: list[tuple[PreTrainedModel, dict, tuple, dict]] = []
        self.random_state: RandomState | None = None
        self.norm: torch.Tensor | None = None
        self.search: Search | None = None  # in the step in progress
        self.wanted = False  # in the next step
        self.searches, self.bad_steps = 0, 0
        self.is_scaled = trainer.accelerator.scaler is not None  # fp16's scaler tries what is too large, by plan
        if self.action != "report" and self.is_scaled:
            report.say(f"nan_action={self.action}: not looked at under fp16, whose loss scaler leaves such steps out")

    def note(self, model: PreTrainedModel, inputs: dict, args: tuple, kwargs: dict) -> None:
        """A micro-batch of the step in progress, before anything is taken out of it."""
        if not self.batches:
            self.random_state = runtime.mesh().read_random_state()
            self.search = self._made() if self.wanted else None
            self.wanted = False
            if self.search is not None:
                self.search.look_at_weights()
        self.batches.append((model, copy.copy(inputs), args, kwargs))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """All gradients are there, and their norm: look for where a bad one comes from, and decide over the step."""
        step = self.trainer.state.global_step + 1
        if self._is_read_now() and self.norm is not None and not math.isfinite(float(self.norm)):
            self.bad_steps += 1
            bad = f"step {step}: the gradient norm is {float(self.norm):g}"
            if self.search is not None:
                self._tell(bad, self.search.finding)
            elif self.searches < (SEARCHES if self.action == "skip" else 1):
                self.searches += 1
                kind = type(self.trainer)
                plain = all(getattr(kind, name) is getattr(Trainer, name) for name in _METHODS)
                if plain and runtime.mesh().config.offload == "none" and self.batches:
                    self._tell(bad, self._repeat_batches())
                else:
                    self.wanted = True
                    report.say(f"{bad}; the next step is searched")
            elif self.action == "skip":
                report.say(f"{bad}, the step is left out")
            if self.action != "report":
                # Optimizers pass over parameters without a gradient, on all ranks. A model may override the method.
                nn.Module.zero_grad(self.trainer.model)
                self._skip_optimizer()
        elif self.search is not None:
            line = f"step {step}, which was searched for what the one before it had, is finite again"
            if self.action == "stop":
                raise BadNumberError(f"hf_parallel: {line}; nan_action=stop ends the run, the bad step was not taken")
            report.say(line)
        self.batches, self.search, self.norm = [], None, None

    def _is_read_now(self) -> bool:
        free = runtime.mesh().device.type == "cpu" or self.trainer.args.logging_nan_inf_filter
        return not self.is_scaled and (free or self.action != "report" or self.search is not None)

    def logged(self, logs: dict[str, float]) -> None:
        """Look at what Trainer has read anyway."""
        known = (logs.get(name) for name in ("loss", "grad_norm"))
        bad = any(isinstance(value, int | float) and not math.isfinite(value) for value in known)
        if bad and not self.bad_steps and not self.is_scaled and not self._is_read_now():
            self.wanted = True

    def _skip_optimizer(self) -> None:
        """Let Trainer's call of the optimizer's step do nothing, once.

        Without gradients weights and their states stay, but some optimizers count their steps in their groups.
        """
        optimizer = self.trainer.optimizer
        own = vars(optimizer).get("step")  # a scheduler may have put one on the object

        def skipped(closure: object = None) -> None:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

        optimizer.step = skipped

    def _repeat_batches(self) -> Finding | None:
        """Return the step's batches once more, with the same random numbers; gradients are as before. Collective."""
        search, parameters = self._made(), list(self.trainer.model.parameters())
        gradients = [parameter.grad for parameter in parameters] if self.action == "report" else []
        nn.Module.zero_grad(self.trainer.model)
        restore, stream = remember_counts(self.trainer), runtime.mesh().read_random_state()
        assert self.random_state is not None  # taken with the first batch
        runtime.mesh().set_random_state(self.random_state)
        search.look_at_weights()
        with replacing(of_session(_Now), looking=None):  # these batches are known, and are not noted once more
            for number, (model, inputs, args, kwargs) in enumerate(self.batches, 1):
                with search.looking(number):
                    loss = self.trainer.training_step(model, inputs, *args, **kwargs)
                search.look_at_loss(loss)
        search.look_at_gradients()
        restore()
        runtime.mesh().set_random_state(stream)
        nn.Module.zero_grad(self.trainer.model)
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = gradient
        return search.finding

    def _made(self) -> Search:
        state = runtime.find_parallel_state(self.trainer.model)
        engine = None if state is None else state.pipeline
        stages = [] if engine is None else list(zip(engine.stages, engine.views, strict=True))
        return Search(
            self.trainer.model, [(s, engine is None or view.index == engine.last_index) for s, view in stages]
        )

    def _tell(self, bad: str, finding: Finding | None) -> None:
        """Say where a bad norm comes from. Collective over all ranks, of which each has come to the same norm."""
        findings = dict(enumerate(messages.gather_objects(finding, runtime.mesh().host_group_of_training)))
        line = f"{bad}: {format_findings(findings, len(self.batches), self.trainer.state.global_step + 1)}"
        if self.action == "stop":
            raise BadNumberError(f"hf_parallel: {line}; nan_action=stop ends the run, the step is not taken")
        then = (
            "is left out (nan_action=skip)" if self.action == "skip" else "is taken all the same (nan_action=report)"
        )
        report.say(f"{line}; the step {then}")


@contextlib.contextmanager
def look_for_bad_numbers(trainer: Trainer) -> Iterator[None]:
    """Inside, numbers that are not finite are told about."""
    now = of_session(_Now)
    former, now.looking = now.looking, Looking(trainer)
    trainer.add_callback(now.looking)
    try:
        yield
    finally:
        trainer.remove_callback(now.looking)
        now.looking = former


@contextlib.contextmanager
def watch_micro_batch(model: PreTrainedModel, inputs: dict, args: tuple, kwargs: dict) -> Iterator[None]:
    """Around the computation of one micro-batch."""
    looking = find_looking()
    if looking is None:
        yield
        return
    looking.note(model, inputs, args, kwargs)
    if looking.search is None:
        yield
        return
    with looking.search.looking(len(looking.batches)):
        yield


def find_looking() -> Looking | None:
    """Return the training that is looked at, if any."""
    return of_session(_Now).looking
