"""Resuming a Trainer's run from a checkpoint of any layout, or of plain Trainer."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.ask.spec import SpecError, refuse
from hf_parallel.checkpoint.hub_format import gather_from_stages
from hf_parallel.hooks import entries, hangs, report, restarts, runtime
from hf_parallel.hooks.accelerate.processes import continue_stream
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import is_saved_as_adapters, load_adapter_weights
from hf_parallel.hooks.trainer import bad_numbers, control, deal, joining, losses, training
from hf_parallel.hooks.trainer.checkpoints import (
    Layout,
    get_inner_optimizer,
    record_of,
    wait_for_save,
)
from hf_parallel.ranks import assert_all_ranks, messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

#: Seconds that a save in the background may still take when the training has failed.
GRACE_S = 20.0


@patch("transformers.trainer:Trainer.train", "waits for ranks that will not come; resumes from what is damaged")
def train(
    original: Callable,
    self: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Resume, on every rank, from rank 0's newest whole checkpoint; after a restart by the launcher unasked."""
    if getattr(self.args, "enable_jit_checkpoint", False):
        refuse("enable_jit_checkpoint=True", "ranks would stop at different steps", do="drop it, SIGTERM saves")
    mesh = runtime.mesh()
    losses.follow_assigned_loss(self)
    entries.begin(self.model, "trainer.train")
    with restarts.hold_own_folder(self) as run:
        chosen = _choose_checkpoint(self, resume_from_checkpoint, run)
        if chosen is not None and run.restarted:
            restarts.keep_rows_per_step(self, read_facts_of(chosen).get("global_batch"), mesh.data_size)
        if chosen is not None:  # say what cannot continue as it was
            if not folders.has_optimizer(chosen):
                new = "weights and step are resumed, moments and schedule start anew"
                report.say(f"{chosen} has no optimizer state: {new}")
            former, now = read_layout_of(chosen).get("global_batch"), self.get_total_train_batch_size(self.args)
            key, asked = joining.read_asked_key()
            dealt_by_tokens = key == "pack_tokens" and asked
            if former not in (None, now) and not self.args.ignore_data_skip and not dealt_by_tokens:
                report.say(
                    f"{chosen} was written with {former} rows per step, this run has {now}: other rows are skipped"
                )
        with contextlib.ExitStack() as beside:
            for one in (
                hangs.watch_training,
                bad_numbers.look_for_bad_numbers,
                training.end_together,
                control.agree_on_control,
                await_unfinished_save,
            ):
                beside.enter_context(one(self))
            result = original(self, chosen, *args, **kwargs)
    assert_all_ranks("the end of trainer.train", entries.ENDED)  # all end after the same step
    return result


def _choose_checkpoint(trainer: Trainer, asked: str | bool | None, run: restarts.Run) -> str | None:
    """Return the checkpoint to go on from, whole on all ranks. Collective.

    Raises:
        DamagedCheckpoint: the one that is asked for is damaged.
        SpecError: there is none, on some rank at least.
    """
    if run.restarted:
        found = _find_newest_whole(trainer.args.output_dir, run.identity)
        if found is not None:
            report.say(f"started again by the launcher: going on from {found}")
            return found
    if asked is True:
        found = _find_newest_whole(trainer.args.output_dir)
        if found is None:
            where = f"No valid checkpoint found in output directory ({trainer.args.output_dir})"
            refuse("resume_from_checkpoint=True", where, do="start without it")
        return found
    if not asked:
        return None
    own = None if os.path.isdir(asked) else "no such folder"
    if own is None and not os.path.isfile(os.path.join(asked, "trainer_state.json")) and folders.list_by_step(asked):
        own = "holds checkpoints and is none"
    wrong = messages.gather_objects(own)
    for rank, why in enumerate(wrong):
        if why:
            where = "" if all(wrong) else f" on rank {rank}"
            beside = folders.list_by_step(asked) or folders.list_by_step(os.path.dirname(asked) or ".")
            works = next((path for path in beside if path != asked), None)
            refuse(f"resume_from_checkpoint={asked}", why + where, works, do="start without it")
    refuse_damages(asked, find_all_damages(asked))
    return asked


def _find_newest_whole(folder: str, run: str | None = None) -> str | None:
    """Return the newest checkpoint, of this run if one is named, that is whole; damaged ones are told about.

    Collective.
    """

    def looked_at() -> list[tuple[str, list[str]]]:
        found = [(path, folders.find_flaws(path)) for path in folders.list_by_step(folder)]
        return [(path, flaws) for path, flaws in found if run is None or (not flaws and run_of(path) == run)]

    for path, flaws in messages.send_from_one(looked_at):
        wrong = flaws or find_all_damages(path)
        if not wrong:
            return path
        report.say(f"{path} is not whole and is left out: {'; '.join(wrong)}")
    return None


def run_of(folder: str) -> str | None:
    """Return the name of the run that wrote a checkpoint."""
    with contextlib.suppress(ValueError):  # damaged
        return read_facts_of(folder).get("run")
    return None


def read_facts_of(folder: str) -> Layout:
    """Return which run wrote a checkpoint, and its rows per step, as far as that is known."""
    path = os.path.join(folder, "trainer_state.json")
    layout = read_layout_of(folder)
    if layout or not os.path.isfile(path):
        return layout
    with open(path, encoding="utf-8") as file:
        found: Layout | None = json.load(file).get("stateful_callbacks", {}).get(restarts.SIGNED)
    return found if isinstance(found, dict) else {}


def find_all_damages(folder: str) -> list[str]:
    """Return what is wrong with a checkpoint, in equal lines on all ranks, which share the reading. Collective."""
    found = messages.gather_objects(find_checkpoint_damages(folder, dist.get_rank(), dist.get_world_size()))
    return sorted({line for lines in found for line in lines})


def find_checkpoint_damages(folder: str, share: int, shares: int) -> list[str]:
    """Return what is wrong with a checkpoint, also where its manifest is lost; of its bytes this share is read."""
    try:
        if folders.has_manifest(folder):
            return folders.find_damages(folder, share, shares)
        return ["manifest.json is missing"] if os.path.isfile(os.path.join(folder, folders.LAYOUT)) else []
    except OSError as error:
        return [f"rank {share}: {error}"]


def refuse_damages(folder: str, found: list[str]) -> None:
    """Raise a `DamagedCheckpoint` that names them, and a checkpoint beside this one that may do."""
    if found:
        whole = folders.list_whole_checkpoints(os.path.dirname(os.path.abspath(folder)))
        works = next((path for path in whole if path != os.path.abspath(folder)), None)
        hint = f"; {works} looks whole" if works else ""
        raise folders.DamagedCheckpoint(f"{folder} is damaged: {'; '.join(found)}{hint}")


@contextlib.contextmanager
def await_unfinished_save(trainer: Trainer) -> Iterator[None]:
    """Wait, also after an error, for a checkpoint that can still become whole; the error inside is raised."""
    try:
        yield
    except BaseException:
        record = record_of(trainer)
        unfinished, record.unfinished_save = record.unfinished_save, None
        if unfinished is not None:
            with contextlib.suppress(Exception):
                unfinished.wait(GRACE_S)
        raise
    wait_for_save(trainer)


def read_layout_of(folder: str) -> Layout:
    """Return the layout that wrote a checkpoint; empty if it was plain Trainer."""
    path = os.path.join(folder, folders.LAYOUT)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


@patch("transformers.trainer:Trainer._init_training_state", "repeats rows of a stream that ended")
def init_training_state(
    original: Callable,
    self: Trainer,
    max_steps: int,
    num_update_steps_per_epoch: int,
    num_train_epochs: int,
    resume_from_checkpoint: str | None,
    trial: object,
) -> tuple[int, int]:
    """Say where in a stream to go on: Trainer counts steps from its beginning, also after it was read to its end.

    `state.epoch` is the number of ended passes, plus batches of this pass over all that `max_steps` would take.
    """
    from transformers.trainer_utils import has_length

    counts = (max_steps, num_update_steps_per_epoch, num_train_epochs)
    found = deal.find_place_to_go_on(original, self, *counts, resume_from_checkpoint, trial)
    if resume_from_checkpoint is None or self.args.ignore_data_skip or has_length(self.train_dataset):
        return found
    with open(os.path.join(resume_from_checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        saved = json.load(file)
    now = self.args.gradient_accumulation_steps
    then = read_layout_of(resume_from_checkpoint).get("accumulation", now)
    batches = round(saved["epoch"] * saved["max_steps"] * then)
    passes, rest = divmod(batches, saved["max_steps"] * then)
    return passes, math.ceil(rest * now / then)


@patch("transformers.trainer:Trainer._load_from_checkpoint", "reads whole weights")
def load_from_checkpoint(
    original: Callable, self: Trainer, resume_from_checkpoint: str, model: PreTrainedModel | None = None
) -> None:
    """Read this rank's slices of the weights."""
    with _read_as_of_this_model(resume_from_checkpoint):
        _load_weights_of(self.model if model is None else model, resume_from_checkpoint)


@patch("transformers.trainer:Trainer._load_best_model", "reads whole weights")
def load_best_model(original: Callable, self: Trainer) -> None:
    """Read this rank's slices of the best checkpoint."""
    _load_weights_of(self.model, self.state.best_model_checkpoint)


@contextlib.contextmanager
def _read_as_of_this_model(folder: str) -> Iterator[None]:
    """Read a checkpoint; refuse that of another model, or optimizer, in one line."""
    try:
        yield
    except SpecError:
        raise
    except (KeyError, ValueError, FileNotFoundError) as error:
        why = error.args[0] if error.args and isinstance(error.args[0], str) else error
        why = str(why).removeprefix(f"{folder} ")
        refuse(
            f"resume_from_checkpoint={folder}", why, do="give the model and optimizer it was written with", cause=error
        )


def _load_weights_of(model: PreTrainedModel, folder: str) -> None:
    if is_saved_as_adapters(model):
        load_adapter_weights(model, folder)
    else:
        _say_useless(folder, messages.gather_objects(folders.load_weights(model, folder)))


def _say_useless(folder: str, useless: list[set[str]]) -> None:
    """Name the tensors that no stage uses."""
    names = sorted(set.intersection(*useless))
    if names:
        report.say(f"{folder} holds {len(names)} weights that this model does not have, {names[0]} first: left out")


@patch("transformers.trainer:Trainer._load_optimizer_and_scheduler", "optimizer state is sharded")
def load_optimizer(original: Callable, self: Trainer, checkpoint: str | None) -> None:
    """Read this rank's slices of the optimizer's state, by name, and the schedule."""
    if checkpoint is None or not folders.has_optimizer(checkpoint):
        return
    with _read_as_of_this_model(checkpoint):
        # Parameters in groups as plain Trainer makes them: those that decay and the others, or all in one.
        mesh, model = runtime.mesh(), self.model
        order, decays = folders.list_names_in_order(model, mesh), set(self.get_decay_parameter_names(model))
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        of_stages = zip(*gather_from_stages((decays, trains), mesh), strict=True)
        decays, trains = (set().union(*part) for part in of_stages)
        kept = [name for name in order if name in trains]
        groups = [[[n for n in kept if n in decays], [n for n in kept if n not in decays]], [kept], [order]]
        folders.load_optimizer_state(model, get_inner_optimizer(self.optimizer), checkpoint, groups)
    load_schedule(self, checkpoint)


def load_schedule(trainer: Trainer, checkpoint: str) -> None:
    """Load the schedule, with numbers per group from the optimizer, whose groups a layout may cut in another way."""
    state = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
    own, groups = trainer.lr_scheduler.state_dict(), get_inner_optimizer(trainer.optimizer).param_groups
    for key, value in own.items():
        if isinstance(value, list) and isinstance(state.get(key), list) and len(value) != len(state[key]):
            state[key] = value
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state and all(option in group for group in groups):
            state[key] = [group[option] for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer.lr_scheduler.load_state_dict(state)


@patch("transformers.trainer:Trainer._load_rng_state", "looks for a file per data rank")
def load_rng_state(original: Callable, self: Trainer, checkpoint: str | None) -> None:
    """Load this rank's random states; under another layout those of a rank that read the same share of the data."""
    if checkpoint is None:
        return
    names = (f"rng_state_{choose_rng_rank(read_layout_of(checkpoint))}.pth", "rng_state.pth")
    path = next((p for p in (os.path.join(checkpoint, name) for name in names) if os.path.isfile(p)), None)
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
    continue_stream(state.get("data"))


def choose_rng_rank(layout: Layout) -> int:
    """Choose the rank whose random states this rank takes; `layout` is empty for plain Trainer and accelerate."""
    mesh = runtime.mesh()
    if not layout:
        return mesh.data_rank
    if layout["axes"] == mesh.config.sizes:
        return mesh.rank
    return layout["data_ranks"].index(mesh.data_rank % (max(layout["data_ranks"]) + 1))
