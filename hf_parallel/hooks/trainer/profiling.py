"""Trainer's steps of `profile_steps`: begun before their batches are read, ended after their last callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.hooks import monitoring, report, runtime
from hf_parallel.hooks.trainer.record import record_of
from hf_parallel.monitor.profile import Profile
from hf_parallel.monitor.session import known_groups

if TYPE_CHECKING:
    from transformers import Trainer


def at_step(trainer: Trainer) -> None:
    """A step begins; is it one to profile? Collective over all ranks, if it is."""
    state, step = runtime.parallel_state(trainer.model), trainer.state.global_step + 1
    if state is not None:
        _say_unreached(trainer, state.config.profile_steps or ())
    if state is None or step not in (state.config.profile_steps or ()):
        return
    monitoring.watched(trainer.model)  # its own notes begin before those of a profile, and end after them
    record_of(trainer).profile = Profile(state.mesh, known_groups(state), step)


def _say_unreached(trainer: Trainer, steps: tuple[int, ...]) -> None:
    """Once: steps that this training does not get to."""
    record, late = record_of(trainer), [step for step in steps if step > trainer.state.max_steps]
    if late and not record.told_unreached:
        record.told_unreached = True
        report.say(f"profile_steps: the training ends after step {trainer.state.max_steps}, before {late}")


def step_ended(trainer: Trainer) -> None:
    """The step has ended for all that look at it."""
    record = record_of(trainer)
    if record.profile is not None:
        for line in record.profile.finish(trainer.args.output_dir):
            report.say(line)
        record.profile = None
