"""Resuming a Trainer's run from a checkpoint of any layout, or of plain Trainer."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.checkpoints import LAYOUT, axis_sizes, inner_optimizer
from hf_parallel.hooks.peft import load_adapter_weights


def train(original: Callable) -> Callable:
    """`resume_from_checkpoint=True` is the newest whole checkpoint that rank 0 sees, on every rank."""

    def replacement(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            found = [_newest(self.args.output_dir) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(found, src=0)
            resume_from_checkpoint = found[0]
            if resume_from_checkpoint is None:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        if resume_from_checkpoint:
            _compare(self, resume_from_checkpoint)
        return original(self, resume_from_checkpoint or None, *args, **kwargs)

    return replacement


def _newest(run: str) -> str | None:
    steps = {}
    for name in os.listdir(run) if os.path.isdir(run) else ():
        stem, _, step = name.partition("-")
        if stem == "checkpoint" and step.isdigit() and os.path.isfile(os.path.join(run, name, "trainer_state.json")):
            steps[int(step)] = os.path.join(run, name)
    return steps[max(steps)] if steps else None


def _compare(trainer: Any, folder: str) -> None:
    """Say what cannot continue as it was."""
    if not folders.has_optimizer(folder):
        report.say(f"{folder} has no optimizer state: weights and step are resumed, moments and schedule start anew")
    former, now = _layout_of(folder).get("global_batch"), trainer.get_total_train_batch_size(trainer.args)
    if former not in (None, now) and not trainer.args.ignore_data_skip:
        report.say(f"{folder} was written with {former} rows per step, this run has {now}: other rows are skipped")


def _layout_of(folder: str) -> dict[str, Any]:
    """The layout that wrote a checkpoint; empty if it was plain Trainer."""
    path = os.path.join(folder, LAYOUT)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def load_from_checkpoint(original: Callable) -> Callable:
    """Each rank reads its slices of the weights."""

    def replacement(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        _load(self.model if model is None else model, resume_from_checkpoint)

    return replacement


def load_best_model(original: Callable) -> Callable:
    """Each rank reads its slices of the best checkpoint."""

    def replacement(self: Any) -> None:
        _load(self.model, self.state.best_model_checkpoint)

    return replacement


def _load(model: Any, folder: str) -> None:
    if hasattr(model, "peft_config"):
        load_adapter_weights(model, folder)
    else:
        folders.load_weights(model, folder)


def load_optimizer(original: Callable) -> Callable:
    """Each rank reads its slices of the optimizer's state, by name; all read the schedule."""

    def replacement(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not folders.has_optimizer(checkpoint):
            return
        folders.load_optimizer(self.model, inner_optimizer(self.optimizer), checkpoint, _plain_groups(self))
        _load_schedule(self, checkpoint)

    return replacement


def load_optimizer_without_layout(original: Callable) -> Callable:
    """In one process or under DDP: checkpoints of a layout, beside those of plain Trainer."""

    def replacement(self: Any, checkpoint: str | None) -> None:
        engine = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if checkpoint is None or engine or not _layout_of(checkpoint) or not folders.has_optimizer(checkpoint):
            return original(self, checkpoint)
        folders.load_optimizer(self.model, inner_optimizer(self.optimizer), checkpoint)
        _load_schedule(self, checkpoint)

    return replacement


def _load_schedule(trainer: Any, checkpoint: str) -> None:
    """Its numbers per group come from the optimizer's groups, which a layout may cut in another way."""
    state = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
    own, groups = trainer.lr_scheduler.state_dict(), inner_optimizer(trainer.optimizer).param_groups
    for key, value in own.items():
        if isinstance(value, list) and isinstance(state.get(key), list) and len(value) != len(state[key]):
            state[key] = value
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state and all(option in group for group in groups):
            state[key] = [group[option] for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer.lr_scheduler.load_state_dict(state)


def _plain_groups(trainer: Any) -> list[list[list[str]]]:
    """How a plain Trainer groups parameters: those that decay and the others, or a script's optimizer, all in one."""
    mesh, model = runtime.mesh(), trainer.model
    order = folders.names_in_order(model, mesh)
    decays = set(trainer.get_decay_parameter_names(model))
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if mesh.size("pp") > 1:
        found: list[Any] = [None] * mesh.size("pp")
        dist.all_gather_object(found, (decays, trains), group=mesh.group("pp"))
        decays, trains = (set().union(*part) for part in zip(*found, strict=True))
    kept = [name for name in order if name in trains]
    return [[[n for n in kept if n in decays], [n for n in kept if n not in decays]], [kept], [order]]


def load_rng_state(original: Callable) -> Callable:
    """Under the same layout each rank's own; under another one that of a rank that read the same share of the data."""

    def replacement(self: Any, checkpoint: str | None) -> None:
        path = None if checkpoint is None else _rng_file(checkpoint)
        if path is None:
            return
        from transformers.trainer_pt_utils import safe_globals

        with safe_globals():
            state = torch.load(path, weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            cuda = state["cuda"]  # plain Trainer under DDP: of all devices that a process sees
            torch.cuda.random.set_rng_state(cuda[torch.cuda.current_device()] if isinstance(cuda, list) else cuda)

    return replacement


def _rng_file(checkpoint: str) -> str | None:
    mesh, layout = runtime.mesh(), _layout_of(checkpoint)
    if not layout:
        number = mesh.data_rank
    elif layout["axes"] == axis_sizes():
        number = mesh.rank
    else:
        number = layout["data_ranks"].index(mesh.data_rank % (max(layout["data_ranks"]) + 1))
    names = (f"rng_state_{number}.pth", "rng_state.pth")
    return next((p for p in (os.path.join(checkpoint, name) for name in names) if os.path.isfile(p)), None)
