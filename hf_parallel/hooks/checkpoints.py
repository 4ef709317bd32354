"""Trainer's checkpoints: whole or not there at all, and resumed under any layout.

tmp-checkpoint-20/   weights, optimizer, schedule, random states, trainer_state.json, hf_parallel.json (layout)
checkpoint-20/       the same folder, renamed once every rank has written its part and all of it is on disk
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.config import AXES
from hf_parallel.hooks import runtime
from hf_parallel.mesh import data_rank

LAYOUT = "hf_parallel.json"
_UNFINISHED = "tmp-"  # not "checkpoint-…", by which Trainer finds and counts checkpoints


def save(original: Callable) -> Callable:
    """A transformers model saves itself, streamed; another module's weights are gathered first."""

    def replacement(self: Any, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = folders.full_state_dict(self.model, runtime.mesh())
        original(self, output_dir, state_dict)
        dist.barrier()

    return replacement


def save_checkpoint(original: Callable) -> Callable:
    """Trainer's steps in Trainer's order, in a folder that gets its name when it is whole."""

    def replacement(self: Any, model: Any, trial: Any) -> None:
        from transformers.trainer_utils import rotate_checkpoints

        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = self._get_output_dir(trial=trial)
        final = os.path.join(run, f"checkpoint-{self.state.global_step}")
        with _whole_or_nothing(final) as folder:
            _write(self, folder, run)
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    return replacement


def _write(trainer: Any, folder: str, run: str) -> None:
    trainer.save_model(folder, _internal_call=True)
    _note_best(trainer, run)
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(folder)
        trainer._save_rng_state(folder)
    if trainer.args.should_save:
        _write_layout(trainer, folder)
        _export_callbacks(trainer)
        trainer.state.save_to_json(os.path.join(folder, "trainer_state.json"))


@contextlib.contextmanager
def _whole_or_nothing(final: str) -> Iterator[str]:
    """A folder to write to, which becomes `final` when all ranks are done. Collective."""
    run, name = os.path.split(final)
    folder = os.path.join(run, _UNFINISHED + name)
    if dist.get_rank() == 0:
        _remove_unfinished(run)
        os.makedirs(folder)
    dist.barrier()
    yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        _flush(folder)
        former = os.path.join(run, f"{_UNFINISHED}former-{name}")
        if os.path.isdir(final):
            os.rename(final, former)
        os.rename(folder, final)
        _flush_entry(run)
        shutil.rmtree(former, ignore_errors=True)
    dist.barrier()


def _remove_unfinished(run: str) -> None:
    """What a crash has left."""
    os.makedirs(run, exist_ok=True)
    for name in os.listdir(run):
        if name.startswith(f"{_UNFINISHED}checkpoint-") or name.startswith(f"{_UNFINISHED}former-checkpoint-"):
            shutil.rmtree(os.path.join(run, name))


def _flush(folder: str) -> None:
    """Everything in the folder is on disk, not in the system's memory."""
    for place, _, files in os.walk(folder):
        for file in files:
            _flush_entry(os.path.join(place, file))
        _flush_entry(place)


def _flush_entry(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _note_best(trainer: Any, run: str) -> None:
    """The folder of the best step, which may be the one that is being written."""
    best = trainer.state.best_global_step
    if not best or str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "no":
        return
    path = os.path.join(run, f"checkpoint-{best}")
    if best == trainer.state.global_step or os.path.exists(path):
        trainer.state.best_model_checkpoint = path


def _export_callbacks(trainer: Any) -> None:
    """As Trainer does just before it writes its state."""
    from transformers.trainer_callback import ExportableState

    kept = trainer.state.stateful_callbacks
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(kept[name], list):
                kept[name].append(callback.state())
            else:
                kept[name] = callback.state()


def _write_layout(trainer: Any, folder: str) -> None:
    config = runtime.mesh().config
    facts = {
        "spec": config.to_spec(),
        "axes": axis_sizes(),
        "data_ranks": [data_rank(config, rank) for rank in range(config.world_size)],
        "global_batch": trainer.get_total_train_batch_size(trainer.args),
    }
    with open(os.path.join(folder, LAYOUT), "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=2)


def axis_sizes() -> dict[str, int]:
    """The layout that is in force, as it is compared."""
    return {axis: runtime.mesh().size(axis) for axis in AXES}


def save_optimizer(original: Callable) -> Callable:
    """The optimizer's state by name, streamed to rank 0, and the learning-rate schedule."""

    def replacement(self: Any, output_dir: str) -> None:
        folders.save_optimizer(self.model, inner_optimizer(self.optimizer), runtime.mesh(), output_dir)
        if self.args.should_save:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    return replacement


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def save_rng_state(original: Callable) -> Callable:
    """One file per process: stages of one model use their random numbers unequally. One process reads rank 0's."""

    def replacement(self: Any, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.random.get_rng_state()
        names = [f"rng_state_{dist.get_rank()}.pth"] + ["rng_state.pth"] * (dist.get_rank() == 0)
        for name in names:
            path = os.path.join(output_dir, name)
            torch.save(state, path)
            _flush_entry(path)  # rank 0 can do so only for files that this machine's system has written

    return replacement
