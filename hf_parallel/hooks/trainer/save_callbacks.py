"""What follows a save in the background: callbacks and uploads, when the folder has its name.

They come at the end of the first step for which all ranks know (`stopping.py`), and are told the step that was saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hf_parallel.hooks.trainer.record import record_of
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_parallel.hooks.trainer.checkpoints import UnfinishedSave


def is_writing(trainer: Trainer) -> bool:
    """Is a thread of this rank still at a checkpoint?"""
    unfinished = record_of(trainer).unfinished_save
    return unfinished is not None and unfinished.thread is not None and unfinished.thread.is_alive()


def has_failed(trainer: Trainer) -> bool:
    """Has a thread of this rank ended with an error?"""
    unfinished = record_of(trainer).unfinished_save
    return unfinished is not None and unfinished.error is not None


def on_save(
    trainer: Trainer,
    original: Callable,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **kwargs: object,
) -> object:
    """Callbacks are told of a checkpoint when it has its name; at once if it was not written in the background."""
    unfinished = record_of(trainer).unfinished_save
    if unfinished is None:
        return original(args, state, control, **kwargs)
    unfinished.announce, control.should_save = True, False
    return control


@contextlib.contextmanager
def as_of(trainer: Trainer, unfinished: UnfinishedSave) -> Iterator[None]:
    """Whoever asks is told the step that was saved; the model has gone on, and must not be taken for that step's."""
    state, model = trainer.state, trainer.model
    now = {"global_step": state.global_step, "epoch": state.epoch}
    state.global_step, state.epoch = unfinished.step, unfinished.epoch
    late, own = now["global_step"] != unfinished.step, vars(model).get("save_pretrained")
    if late:
        model.save_pretrained = functools.partial(_refuse_late_weights, unfinished.saving.name, now["global_step"])
    try:
        yield
    finally:
        vars(state).update(now)
        if late:
            del model.save_pretrained
        if late and own is not None:
            model.save_pretrained = own


def _refuse_late_weights(name: str, step: int, *args: object, **kwargs: object) -> None:
    refuse(
        "async_save=true",
        f"on_save callbacks are called when {name} is whole, and the model is at step {step} by now: "
        "save_pretrained would give it the wrong name",
        do="copy that folder instead, or async_save=false works",
    )
