"""A watchdog beside Trainer's loop: what it is at is marked where its calls are patched anyway."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from hf_parallel.axes.watching import AUTO, OFF
from hf_parallel.collectives import desync
from hf_parallel.collectives.observed import listen, unlisten
from hf_parallel.dryrun.observe import axis_names
from hf_parallel.groups import time_out
from hf_parallel.hooks import report, runtime
from hf_parallel.monitor.collective_record import CollectiveRecord
from hf_parallel.monitor.last_words import before_abort
from hf_parallel.monitor.watchdog import Settings, Watchdog

#: Of the process group's time-out: a rank must have said where it is before that ends it.
SHARE, TORCH_TIME_OUT_S = 0.8, 1800.0
_numbers = itertools.count()
_current: Watched | None = None


class Watched:
    """One training. Its watchdog starts with the first step, on all ranks."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stack = trainer, contextlib.ExitStack()
        self.watchdog: Watchdog | None = None
        self.begun = False

    def begin(self) -> None:
        """At the first step, when there is a model."""
        if self.begun:
            return
        self.begun = True
        state, store = runtime.parallel_state(self.trainer.model), desync.store()
        if state is None or store is None:
            return
        tied = state.pipeline.tied_group if state.pipeline else None
        record = CollectiveRecord(axis_names(state.mesh, tied), self.trainer.model)
        listen(record)
        self.stack.callback(unlisten, record)
        store = dist.PrefixStore(f"hangs/{next(_numbers)}", store)
        self.watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size(), _settings(self.trainer), record.facts)
        self.stack.callback(self.watchdog.close)
        self.stack.enter_context(before_abort(self.watchdog.tell_abort))
        desync.explained_by = self.watchdog.explain
        self.stack.callback(setattr, desync, "explained_by", None)


@contextlib.contextmanager
def watched(trainer: Any) -> Iterator[None]:
    """Inside, ranks say why nothing goes on."""
    global _current
    if runtime.mesh().config.hang_timeout_s == OFF:
        yield
        return
    former, _current = _current, Watched(trainer)
    try:
        with _current.stack:
            yield from _telling_errors(_current)
    finally:
        _current = former


def _telling_errors(watched: Watched) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if watched.watchdog is not None:
            watched.watchdog.tell_error(error)
        raise


def mark(phase: str, may_take_long: bool = False) -> None:
    """Something has ended, and this begins."""
    if _current is not None and _current.watchdog is not None:
        _current.watchdog.mark(phase, may_take_long)


def mark_step(number: int) -> None:
    """The first one starts the watchdog."""
    if _current is not None:
        _current.begin()
    mark(f"step {number}")


@contextlib.contextmanager
def taking_long(phase: str) -> Iterator[None]:
    """In here may be what a shared disk, or a hub, takes its time for."""
    dog = None if _current is None else _current.watchdog
    former = ("the end of a step", False) if dog is None else (dog.phase, dog.may_take_long)
    mark(phase, may_take_long=True)
    try:
        yield
    finally:
        mark(*former)


def _settings(trainer: Any) -> Settings:
    config = runtime.mesh().config
    limit = time_out()
    seconds = TORCH_TIME_OUT_S if limit is None else limit.total_seconds()
    asked = SHARE * seconds if config.hang_timeout_s == AUTO else float(config.hang_timeout_s)
    if asked >= seconds:
        report.say(
            f"hang_timeout_s={asked:.0f} is not below the process groups' time-out of {seconds:.0f} s, which ends"
        )
    return Settings(asked, config.hang_action == "stop", trainer.args.output_dir)
