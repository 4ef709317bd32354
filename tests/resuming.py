"""Training that stops and goes on: the script, and what a checkpoint of it holds, read without the product."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments

from tests import models
from tests.distributed import run, run_alone
from tests.rows import data
from tests.training import EVAL_SEED, GLOBAL_BATCH, TRAIN_SEED, Recorder, activate, axes, trainer_of, weights

ONE = ""  # the spec of one process
ROWS = 44  # two epochs of three steps of 8, 8, 8, 8, 8 and 4 rows: two batches a step, the last of an epoch ragged
STEPS = 6
STOP = 4  # in the middle of the second epoch, whose order is another one


@dataclass(frozen=True)
class Ended:
    """How a run ended: loss and gradient norm by step, and where it was saved."""

    logs: dict[int, dict[str, float]]
    folder: str


def train(
    folder: str,
    out: str,
    data_ranks: int = 1,
    resume: Any = None,
    change: Callable | None = None,
    adapt=None,
    stream: bool = False,
    **arguments,
):
    """Two shuffled epochs of AdamW under a falling learning rate, saved in the middle of the second and at the end."""
    chosen = {
        "per_device_train_batch_size": GLOBAL_BATCH // data_ranks,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": STOP,
        **arguments,
    }
    settings = TrainingArguments(out, report_to=[], disable_tqdm=True, use_cpu=True, seed=0, **chosen)
    model = models.auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    model = adapt(model) if adapt else model
    rows, held_out = data("llama", ROWS, TRAIN_SEED, stream=stream), data("llama", 13, EVAL_SEED)
    sets = {"train_dataset": rows, "eval_dataset": held_out}
    trainer, recorder = trainer_of(model, out, settings=settings, recorder=Steps(), **sets)
    if resume:
        trainer.add_callback(SaveAgain(trainer))
    if change is not None:
        change(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return Ended(recorder.by_step, out), trainer


class Steps(Recorder):
    """What Trainer logs, by step."""

    def __init__(self):
        super().__init__()
        self.by_step: dict[int, dict[str, float]] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.by_step[state.global_step] = {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}


class SaveAgain(TrainerCallback):
    """Saves what has been read before anything is trained."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._save_checkpoint(self.trainer.model, None)


def train_rank(spec: str, jobs: list[dict[str, Any]]) -> list[Ended]:
    """Several runs of `train`, one after the other, under one layout."""
    data_ranks = activate(spec or "tp=1")
    return [train(data_ranks=data_ranks, **job)[0] for job in jobs]


def trained(spec: str, *jobs: dict[str, Any]) -> list[Ended]:
    """What rank 0 of the layout, or one process, did."""
    call = partial(train_rank, spec, list(jobs))
    return run(call, axes(spec)["world"], init=False)[0] if spec else run_alone(call)


def moments(folder: str, model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state as `name/slot`, of a layout's checkpoint or of plain Trainer's."""
    if os.path.isdir(f"{folder}/optimizer"):
        return weights(f"{folder}/optimizer")
    state = torch.load(f"{folder}/optimizer.pt", weights_only=True)["state"]
    parameters = list(model.named_parameters())
    decay = [name for name, p in parameters if p.ndim > 1]  # all matrices, and nothing else, in these models
    names = decay + [name for name, p in parameters if p.ndim == 1]
    assert len(names) == len(state)
    return {
        f"{names[number]}/{slot}": tensor
        for number, slots in state.items()
        for slot, tensor in slots.items()
        if torch.is_tensor(tensor) and tensor.ndim
    }


def checkpoint_differences(folder: str, reference: str, model: Any) -> list[str]:
    """Weights and moments that are not there, or not equal bit for bit."""
    pairs = [(weights(folder), weights(reference)), (moments(folder, model), moments(reference, model))]
    found = []
    for ours, theirs in pairs:
        found += [f"{key} is on one side only" for key in ours.keys() ^ theirs.keys()]
        found += [f"{key} differs" for key in ours.keys() & theirs.keys() if not torch.equal(ours[key], theirs[key])]
    return found


def log_differences(ours: Ended, theirs: Ended, steps: range, tolerance: float) -> list[str]:
    """Losses and gradient norms of these steps that are not equal within a relative tolerance."""
    found = [] if set(ours.logs) == set(steps) else [f"logged steps {sorted(ours.logs)}, not {list(steps)}"]
    for step in sorted(set(steps) & set(ours.logs)):
        for key, expected in theirs.logs[step].items():
            if not abs(ours.logs[step][key] - expected) <= tolerance * abs(expected):
                found.append(f"{key} in step {step}: {ours.logs[step][key]!r}, without a stop {expected!r}")
    return found
