"""A watchdog beside Trainer's loop or a script's own: what it is at is marked where its calls are patched anyway."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.ask.keys.run import HANG_AUTO, HANG_OFF
from hf_parallel.ask.session import of_process, of_session
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.monitor.collective_record import CollectiveRecord, call_before_abort
from hf_parallel.monitor.watchdog import Settings, Watchdog
from hf_parallel.planner.dryrun.recorder import name_groups
from hf_parallel.prove.certificate import format_line_about
from hf_parallel.ranks import desync
from hf_parallel.ranks.groups import time_out
from hf_parallel.ranks.observed import listen, unlisten

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedModel, Trainer

#: Of the process group's time-out: a rank must have said where it is before that ends it.
SHARE, TORCH_TIME_OUT_S = 0.8, 1800.0
#: OUTPUT_DIR of a loop whose Accelerator has no `project_dir`.
OUTPUTS = "outputs"
_numbers = itertools.count()


@dataclass(eq=False)
class Watched:
    """A training that is watched. Its watchdog starts with the first step, on all ranks.

    Args:
        model: gives it, once it is there.
        folder: OUTPUT_DIR.
        is_loop: a script's own, with an Accelerator.
    """

    model: Callable[[], PreTrainedModel]
    folder: str
    is_loop: bool = False
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    watchdog: Watchdog | None = None
    begun: bool = False

    def begin(self) -> None:
        """At the first step, when there is a model."""
        if self.begun:
            return
        self.begun = True
        model, store = self.model(), desync.get_store()
        state = runtime.find_parallel_state(model)
        if state is None or store is None:
            return
        record = CollectiveRecord(name_groups(state), model)
        listen(record)
        self.stack.callback(unlisten, record)
        store = dist.PrefixStore(f"hangs/{next(_numbers)}", store)
        config, limit = runtime.mesh().config, time_out()
        seconds = TORCH_TIME_OUT_S if limit is None else limit.total_seconds()
        asked = SHARE * seconds if config.hang_timeout_s == HANG_AUTO else float(config.hang_timeout_s)
        if asked >= seconds:
            what = f"hang_timeout_s={asked:.0f} is not below the process groups' time-out of {seconds:.0f} s"
            report.say(f"{what}, which ends")
        settings = Settings(asked, config.hang_action == "stop", self.folder)
        self.watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), settings, record.facts)
        self.stack.callback(self.watchdog.close)
        self.stack.enter_context(call_before_abort(self.watchdog.tell_abort))
        answering = of_process(desync.Answering)
        answering.explained_by = self.watchdog.explain
        self.stack.callback(setattr, answering, "explained_by", None)


@dataclass
class _Now:
    """The training that is watched now, if any."""

    watched: Watched | None = None


@contextlib.contextmanager
def watch_training(trainer: Trainer) -> Iterator[None]:
    """Inside, ranks say why nothing goes on."""
    end_loop()
    if runtime.mesh().config.hang_timeout_s == HANG_OFF:
        yield
        return
    watched = Watched(lambda: trainer.model, trainer.args.output_dir)
    with replacing(of_session(_Now), watched=watched), watched.stack:
        try:
            yield
        except Exception as error:
            if watched.watchdog is not None:
                watched.watchdog.tell_error(error)
            raise


def get_watchdog() -> Watchdog | None:
    """Return the watchdog of the training that is watched, once that has begun."""
    current = of_session(_Now).watched
    return None if current is None else current.watchdog


def mark_phase(phase: str, may_take_long: bool = False) -> None:
    """Something has ended, and this begins."""
    dog = get_watchdog()
    if dog is not None:
        dog.mark(phase, may_take_long)


def mark_step(number: int) -> None:
    """The first one starts the watchdog."""
    current = of_session(_Now).watched
    if current is not None:
        current.begin()
    mark_phase(f"step {number}")


@contextlib.contextmanager
def allow_long_phase(phase: str) -> Iterator[None]:
    """Run what a shared disk, or a hub, takes its time for."""
    dog = get_watchdog()
    former = ("the end of a step", False) if dog is None else (dog.phase, dog.may_take_long)
    mark_phase(phase, may_take_long=True)
    try:
        yield
    finally:
        mark_phase(*former)


# ---- loops: between steps, and after the last batch, a script evaluates and saves as long as it likes ---------------


def mark_loop(phase: str, may_take_long: bool = False) -> None:
    """`mark_phase`, where a script's own loop is watched."""
    current = of_session(_Now).watched
    if current is not None and current.is_loop:
        mark_phase(phase, may_take_long)


def backward_begins(accelerator: Accelerator) -> None:
    """The first one of a loop starts its watchdog, on all ranks, and says what is known of the script's proof."""
    now = of_session(_Now)
    if now.watched is None and runtime.mesh().config.hang_timeout_s != HANG_OFF:
        model = next((model for model in accelerator._models if runtime.find_parallel_state(model) is not None), None)
        now.watched = Watched(lambda: model, str(accelerator.project_dir or OUTPUTS), is_loop=True)
        now.watched.begin()
        atexit.register(end_loop)
        proof = format_line_about(sys.argv[0], runtime.mesh().config.to_spec())
        if proof is not None:
            report.say(f"hf-parallel prove: {proof}")
    mark_loop("a backward pass")


def mark_forward_pass(module: nn.Module, args: tuple) -> None:
    """Mark a forward pass of a loop's model in training: a hook."""
    if module.training and torch.is_grad_enabled():
        mark_loop("a forward pass")


def mark_batches(batches: Iterator) -> Iterator:
    """The batches of a prepared loader."""
    try:
        mark_loop("the data loader")
        for batch in batches:
            mark_loop("what is done with a batch")
            yield batch
            mark_loop("the data loader")
    finally:
        mark_loop("what follows the last batch", may_take_long=True)


@patch("accelerate.accelerator:Accelerator.end_training", "does not say that a loop is over")
def end_training(original: Callable, self: Accelerator) -> None:
    """End the watch of a training."""
    end_loop()
    original(self)


def end_loop() -> None:
    """The loop is over on this rank, or another one begins."""
    now = of_session(_Now)
    if now.watched is not None and now.watched.is_loop:
        over, now.watched = now.watched, None
        atexit.unregister(end_loop)
        over.stack.close()
