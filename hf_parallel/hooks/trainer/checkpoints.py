"""Trainer's checkpoints: whole or not there at all, and resumed under any layout.

checkpoint-20/   weights, optimizer, schedule, random states, trainer_state.json, hf_parallel.json (layout), and
                 manifest.json, with size and checksums of the others

With async_save=true training goes on once weights and optimizer state are copied to host memory; a thread writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.apply.methods import find_models_inside, show_whole_module
from hf_parallel.ask.spec import refuse
from hf_parallel.checkpoint import slices
from hf_parallel.hooks import hangs, runtime
from hf_parallel.hooks.accelerate.processes import RandomStream, make_plain_state
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.ranks import desync
from hf_parallel.ranks.mesh import compute_data_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments

    from hf_parallel.axes.pipeline.script_loss import Plan
    from hf_parallel.hooks.trainer.rows import OfBatch
    from hf_parallel.monitor.profile import Profile


# ---- What is remembered with a Trainer: all of it at one attribute, `trainer._hf_parallel` --------------------------


_PLACE = "_hf_parallel"


@dataclass
class StepRecord:
    """The batch whose loss is being computed, in training or in evaluation.

    Attributes:
        real_rows: how many of this rank's rows are not repeated; None away from the end of a loader.
        share: how much the mean over them weighs in the data ranks' average.
        weighted: has `compute_loss` given the loss its weight?
        logged: what the script's loss logs on the last stage, for all stages to log later.
        generated: real rows of each data rank's generated batch (GRPO, RLOO); None if none is repeated.
        syncs: is the batch the last of its step? None: the accelerator knows, as no other batch runs with it.
        loss_only: does an evaluation drop what the model returns beside the loss?
        own: what comes from the batch, in a step of the script's own, which may compute losses of other batches, too.
    """

    real_rows: int | None = None
    share: float = 1.0
    weighted: bool = False
    logged: list[dict[str, object]] = field(default_factory=list)
    generated: list[int] | None = None
    syncs: bool | None = None
    loss_only: bool = False
    own: OfBatch | None = None


@dataclass
class TrainerRecord:
    """The facts that hold for all steps, and the step in progress.

    Attributes:
        step: the step in progress; outside of steps one without repeated rows.
        rows_per_example: as the last full batch told, such as two in a batch of [chosen; rejected].
        in_turns: are the rows of an example behind one another, unlike in [chosen; rejected]?
        rows_vary: have some examples of the last ragged batch's loader more rows than others?
        loss_plans: the entries of a batch -> how the script's loss is scheduled; None if it needs whole batches.
        weighs: does the script weigh means by the count of targets itself? None: not seen yet.
        computes: does the script's `compute_loss` run just now?
        evaluates: does its `prediction_step`?
        knows_mean: is it known what the script's loss is a mean over, or that this cannot be known?
        looks_at_mean: how many batches have been looked at for that.
        mean_over: tensors of the batch that tell its targets, and whether the first of each sequence is none.
        tries: is the script's loss computed only to look at it?
        kept_numbers: names of the trainer's numbers that the script's loss changes.
        held_logs: calls of `log` while the loss may have to be computed anew.
        told_unknown: has it been said that the script's loss is taken for a mean over rows?
        told_unreached: has it been said that steps of `profile_steps` come after the end?
        told_to_differ: metrics and wishes of callbacks of which it has been said that ranks differ.
        looked_at_states: is it known that checkpoints can hold the optimizer's states?
        drawn_steps: those of `profile_steps` whose timeline is drawn.
        profile: of the step in progress, if it is one of them.
        upcoming: rows of the generation batch after this one, whose completions are drawn ahead (GRPO).
        run: the name of the run that the output folder belongs to.
        unfinished_save: the checkpoint that is being written in the background.
        dealing: how examples are dealt by tokens; None: by rows.
        resumed_from: the checkpoint that the training goes on from.
        batches_of_step: of the step that begins, where they may run as one schedule.
        told_joint: has it been said whether they do?
        joint_logs: what the script's loss logs on the last stage, for each batch of a step that runs as one schedule.
        read_ahead: the step in progress and the next one, where a pipeline does not drain between them.
        reads: the batches of the pass in progress.
        loader: their loader, if it is one of accelerate's.
        eval_loader: that of the evaluation in progress.
    """

    step: StepRecord = field(default_factory=StepRecord)
    rows_per_example: int = 1
    in_turns: bool = False
    rows_vary: bool = False
    loss_plans: dict[tuple[str, ...], Plan | None] = field(default_factory=dict)
    weighs: bool | None = None
    computes: bool = False
    evaluates: bool = False
    knows_mean: bool = False
    looks_at_mean: int = 0
    mean_over: tuple[tuple[str, ...], bool] | None = None
    tries: bool = False
    kept_numbers: set[str] = field(default_factory=set)
    held_logs: list[Callable[[], object]] | None = None
    told_unknown: bool = False
    told_unreached: bool = False
    told_to_differ: set[str] = field(default_factory=set)
    looked_at_states: bool = False
    drawn_steps: set[int] = field(default_factory=set)
    profile: Profile | None = None
    upcoming: list[dict[str, object]] | None = None
    run: str | None = None
    unfinished_save: UnfinishedSave | None = None
    dealing: Any = None  # a `deal.Dealing`
    resumed_from: str | None = None
    batches_of_step: list[Any] = field(default_factory=list)
    told_joint: bool = False
    joint_logs: list[list[dict[str, object]]] = field(default_factory=list)
    read_ahead: Any = None  # a `delayed_steps.ReadAhead`
    reads: Any = None
    loader: Any = None
    eval_loader: Any = None


def record_of(trainer: Trainer) -> TrainerRecord:
    """Return the trainer's record, made when it is first asked for."""
    if _PLACE not in vars(trainer):
        vars(trainer)[_PLACE] = TrainerRecord()
    return vars(trainer)[_PLACE]


# ---- Numbers that a loss keeps on its trainer, such as a coefficient that follows the entropy -----------------------
# In a pipeline the last stage alone computes the loss, and rank 0 writes the checkpoint.


@contextlib.contextmanager
def note_kept_numbers(trainer: Trainer) -> Iterator[None]:
    """Note which numbers of the trainer a loss, computed inside the `with`, changes."""
    before = _list_numbers(trainer)
    yield
    record_of(trainer).kept_numbers |= dict(_list_numbers(trainer).items() - before.items()).keys()


def tell_kept_numbers(trainer: Trainer) -> None:
    """Give the last stage's numbers to all stages. Collective in a pipeline."""
    state, numbers = runtime.find_parallel_state(trainer.model), _list_numbers(trainer)
    if state is not None and state.pipeline is not None:
        kept: dict[str, object] = {name: numbers[name] for name in record_of(trainer).kept_numbers & numbers.keys()}
        state.pipeline.tell(kept)
        vars(trainer).update(kept)


def _list_numbers(trainer: Trainer) -> dict[str, object]:
    return {name: value for name, value in vars(trainer).items() if isinstance(value, int | float | str)}


# ---- What follows a save in the background: callbacks and uploads, when the folder has its name ---------------------
# They come at the end of the first step at which all ranks know that it has, and are told the step that was saved.


def on_save(
    trainer: Trainer,
    original: Callable,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **kwargs: object,
) -> object:
    """Tell callbacks of a checkpoint when it has its name; at once if it was not written in the background."""
    unfinished = record_of(trainer).unfinished_save
    if unfinished is None:
        return original(args, state, control, **kwargs)
    unfinished.announce, control.should_save = True, False
    return control


@patch("transformers.trainer:Trainer.save_model", "a plain module's shards are not a checkpoint")
def save_model(original: Callable, self: Trainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """All ranks take part, and adapters are gathered by our `save_pretrained` alone."""
    folder = self.args.output_dir if output_dir is None else output_dir
    if slices.is_alone("trainer.save_model", self.model):
        self._save(folder, state_dict=self.model.state_dict())
    else:
        wait_for_save(self)
        with hangs.allow_long_phase("a save"):
            # A transformers model saves itself, streamed; another module's weights are gathered first.
            # sentence-transformers calls its `_save` on one rank; the others give their weights.
            kinds, mesh, state_dict = type(self).__mro__, runtime.mesh(), None
            alone = any(cls.__module__ == "sentence_transformers.base.trainer" for cls in kinds)
            if not alone and not hasattr(self.model, "base_model_prefix"):
                state_dict = folders.gather_state_dict(self.model, mesh)
            with folders.join_current_save(mesh) as saving, saving.noting():
                # One rank writes what is gathered: transformers before 5.23 would let all, others with nothing.
                owner = next(cls for cls in kinds if "_save" in vars(cls))
                if self.args.should_save and state_dict is not None and owner.__module__ != "transformers.trainer":
                    # A `_save` of the script may save a part of the model, and not what it is given.
                    with show_whole_module(self.model, find_models_inside(self.model, mesh.config), state_dict):
                        self._save(folder, state_dict=state_dict)
                elif self.args.should_save or not (alone or state_dict is not None):
                    self._save(folder, state_dict=state_dict)
                elif alone:
                    self.model.save_pretrained(folder)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


@patch("transformers.trainer:Trainer._save_checkpoint", "writes where a crash leaves half of it")
def save_checkpoint(original: Callable, self: Trainer, model: PreTrainedModel, trial: object) -> None:
    """Save what Trainer saves, in its order, in a folder that gets its name when it is whole."""
    with hangs.allow_long_phase("a save"):
        wait_for_save(self)
        forget_in_flight(self)
        tell_kept_numbers(self)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run, mesh = self._get_output_dir(trial=trial), runtime.mesh()
        final = os.path.join(run, f"checkpoint-{self.state.global_step}")
        saving = folders.Checkpoint(mesh, final, in_background=mesh.config.async_save)
        saving.begin()
        with folders.make_save_current(saving):
            _write_checkpoint(self, saving, run)
        record_of(self).unfinished_save = UnfinishedSave(self, saving, run)
        if not mesh.config.async_save:
            wait_for_save(self)


def forget_in_flight(trainer: Trainer) -> None:
    """Let a pipeline begin its next step anew, without older steps, as a run does that is resumed from here."""
    state = runtime.find_parallel_state(trainer.model)
    if state is None or state.pipeline is None:
        return
    if state.pipeline.delayed is not None:
        state.pipeline.delayed.drop()
    if state.pipeline.fill is not None:
        state.pipeline.fill.drop()


class UnfinishedSave:
    """The rest of a save: in a thread if it may go on beside the training."""

    def __init__(self, trainer: Trainer, saving: folders.Checkpoint, run: str):
        self.saving, self.run, self.step = saving, run, trainer.state.global_step
        self.epoch, self.announce = trainer.state.epoch, False
        self.error: BaseException | None = None
        self.limit, self.best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        self.thread = None
        if saving.in_background:
            self.thread = threading.Thread(target=self._work, name=f"save {saving.name}", daemon=True)
            folders.start_writer(self.thread)

    def _work(self) -> None:
        from transformers.trainer_utils import sort_checkpoints

        try:
            self.saving.commit()
            if self.saving.mesh.rank > 0 or not self.limit or self.limit < 0:
                return
            # Delete old checkpoints as Trainer does: the newest and the best stay. Deleted ones lose their name first.
            found = sort_checkpoints(self.run, use_mtime=True)
            protected = set(found[-1:]) | ({str(Path(self.best))} if self.best else set())
            others = [path for path in found if path not in protected]
            for path in others[: max(0, len(found) - max(self.limit, len(protected)))]:
                folders.remove(path)
        except BaseException as error:  # raised in the main thread by `wait`
            self.error = error

    def wait(self, seconds: float | None = None) -> None:
        if self.thread is None:
            self._work()
        else:
            self.thread.join(seconds)
        if self.error is not None:
            raise self.error


def wait_for_save(trainer: Trainer) -> None:
    """Wait until the last checkpoint is whole, if one is being written, and raise what went wrong with it. Collective.

    Raises:
        CheckpointError: it could not be written.
    """
    record = record_of(trainer)
    unfinished, record.unfinished_save = record.unfinished_save, None
    if unfinished is None:
        return
    unfinished.wait()
    # Uploads and callbacks are told the step that was saved; the model has gone on, and must not be taken for its.
    late: dict[str, Callable] = {}
    if (step := trainer.state.global_step) != unfinished.step:
        why = (
            f"on_save callbacks are called when {unfinished.saving.name} is whole, and the model is at step {step} by "
            "now: save_pretrained would give it the wrong name"
        )
        do = "copy that folder instead, or async_save=false works"
        late["save_pretrained"] = lambda *args, **kwargs: refuse("async_save=true", why, do=do)
    saved = replacing(trainer.state, global_step=unfinished.step, epoch=unfinished.epoch)
    with saved, replacing(trainer.model, **late):
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(unfinished.saving.final)
        if unfinished.announce:  # by the event, not by `on_save`, which would take back a save that is due now
            call = trainer.callback_handler.call_event
            trainer.control = call("on_save", trainer.args, trainer.state, trainer.control)


def does_save_checkpoints(args: TrainingArguments) -> bool:
    """Return whether Trainer will save checkpoints by itself."""
    return str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"


def refuse_unsavable_optimizer(trainer: Trainer) -> None:
    """Look at the optimizer's states after its first step, rather than when the first checkpoint is due.

    Raises:
        NotImplementedError: the script saves them, and no checkpoint can hold them.
    """
    record, optimizer, args = record_of(trainer), get_inner_optimizer(trainer.optimizer), trainer.args
    if record.looked_at_states or not optimizer.state:  # the first steps of fp16 may be skipped
        return
    record.looked_at_states = True
    if does_save_checkpoints(args) and not args.save_only_model:
        folders.refuse_unsavable_states(trainer.model, optimizer)


def _write_checkpoint(trainer: Trainer, saving: folders.Checkpoint, run: str) -> None:
    from transformers.trainer_callback import ExportableState

    trainer.save_model(saving.folder, _internal_call=True)
    desync.wait_for_rank_0()  # a `save_model` of the script may let it save alone
    best = trainer.state.best_global_step
    if best and does_save_checkpoints(trainer.args):
        path = os.path.join(run, f"checkpoint-{best}")  # which may be the one that is being written
        if best == trainer.state.global_step or os.path.exists(path):
            trainer.state.best_model_checkpoint = path
    if not trainer.args.save_only_model:
        save_optimizer_and_scheduler(None, trainer, saving.folder)
        with saving.noting():
            save_rng_state(saving.folder)
    if trainer.args.should_save:
        with saving.noting():
            of_trainer: Layout = {
                "global_batch": trainer.get_total_train_batch_size(trainer.args),
                "accumulation": trainer.args.gradient_accumulation_steps,
                "run": record_of(trainer).run,
            }
            write_layout(saving.folder, of_trainer)
            kept = trainer.state.stateful_callbacks  # exported as Trainer does just before it writes its state
            for callback in [*trainer.callback_handler.callbacks, trainer.control]:
                if not isinstance(callback, ExportableState):
                    continue
                name, now = type(callback).__name__, callback.state()
                kept[name] = [*kept[name], now] if isinstance(kept[name], list) else now
            trainer.state.save_to_json(os.path.join(saving.folder, "trainer_state.json"))


@patch("transformers.trainer:Trainer._save_optimizer_and_scheduler", "is the state of rank 0 alone")
def save_optimizer_and_scheduler(original: Callable | None, self: Trainer, output_dir: str) -> None:
    """Write the optimizer's state, by name; all ranks do. A `_save_checkpoint` of the script may call it, too."""
    with folders.join_current_save(runtime.mesh()) as saving:
        folders.save_optimizer_state(self.model, get_inner_optimizer(self.optimizer), saving.mesh, output_dir)
        if self.args.should_save:
            with saving.noting(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                folders.write_refusal(os.path.join(output_dir, "optimizer.pt"))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))


@patch("transformers.trainer:Trainer._save_rng_state", "is one file per data rank")
def save_random_state(original: Callable, self: Trainer, output_dir: str) -> None:
    """Write a file per process, as a checkpoint of ours has."""
    save_rng_state(output_dir)


class Layout(TypedDict, total=False):
    """The layout that wrote a checkpoint. A folder of `save_state` has no rows per step, plain Trainer's is empty."""

    spec: str
    axes: dict[str, int]
    data_ranks: list[int]
    global_batch: int
    accumulation: int
    run: str | None


def write_layout(folder: str, of_trainer: Layout) -> None:
    """Write which layout wrote a checkpoint, which share of the data each rank reads, and a Trainer's facts."""
    config = runtime.mesh().config
    ranks = [compute_data_rank(config, rank) for rank in range(config.world_size)]
    facts: Layout = {"spec": config.to_spec(), "axes": config.sizes, "data_ranks": ranks, **of_trainer}
    with open(os.path.join(folder, folders.LAYOUT), "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=2)


def get_inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself, without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def save_rng_state(output_dir: str) -> None:
    """Write a file per process: stages of one model use their random numbers unequally. One process reads rank 0's."""
    os.makedirs(output_dir, exist_ok=True)
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    stream = RandomStream.latest
    if stream is not None:
        state["data"] = make_plain_state(stream.state)
    written = {f"rng_state_{dist.get_rank()}.pth": state}
    if dist.get_rank() == 0:
        written["rng_state.pth"] = alone = dict(state)
        if stream is not None:  # in one process data draws from the generators that all draw from
            alone["cpu"], alone["numpy"], alone["python"] = stream.state
    for name, values in written.items():
        with open(os.path.join(output_dir, name), "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())  # rank 0 can do so only for files that this machine's system has written
