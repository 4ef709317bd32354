"""Plain Trainer, in one process or under DDP, which reads the checkpoints of layouts too.

The one process that a launcher has left of several goes on with their run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel import checkpoint as folders
from hf_parallel.hooks import report, restarts
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import is_saved_as_adapters
from hf_parallel.hooks.trainer.checkpoints import get_inner_optimizer
from hf_parallel.hooks.trainer.resuming import (
    find_checkpoint_damages,
    load_schedule,
    read_facts_of,
    read_layout_of,
    refuse_damages,
    run_of,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer


@patch("transformers.trainer:Trainer.train", "reads what is damaged", without_layout=True)
def train(
    original: Callable,
    self: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """In one process or under DDP: a checkpoint of a layout is checked, and one that is not whole not taken."""
    chosen = resume_from_checkpoint
    if chosen is True:
        chosen = next(iter(folders.list_whole_checkpoints(self.args.output_dir)), True)
    if restarts.find_agent() is None or os.environ.get("WORLD_SIZE") != "1":
        if chosen and chosen is not True and folders.has_manifest(chosen):
            refuse_damages(chosen, find_checkpoint_damages(chosen, 0, 1))
        return original(self, chosen, *args, **kwargs)
    # The last process of several, it may be: if the launcher has started it again, it goes on with their run.
    with restarts.hold_own_folder(self) as run:
        own = (path for path in folders.list_whole_checkpoints(self.args.output_dir) if run_of(path) == run.identity)
        whole = (path for path in own if not find_checkpoint_damages(path, 0, 1))
        newest = next(whole, None) if run.restarted else None
        if newest is not None:
            report.say(f"started again by the launcher: going on from {newest}")
            restarts.keep_rows_per_step(self, read_facts_of(newest).get("global_batch"), 1)
        elif chosen and chosen is not True:
            refuse_damages(chosen, find_checkpoint_damages(chosen, 0, 1))
        batch = self.get_total_train_batch_size(self.args)
        signature = restarts.Signature({"run": run.identity, "global_batch": batch})
        self.add_callback(signature)
        try:
            return original(self, newest or chosen, *args, **kwargs)
        finally:
            self.remove_callback(signature)


@patch("transformers.trainer:Trainer._load_from_checkpoint", "converts no names of the Hub", without_layout=True)
def load_from_checkpoint(
    original: Callable, self: Trainer, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """In one process or under DDP: a layout's weights have the Hub's names, which plain Trainer does not convert.

    It would go on with the experts of the start, as those of a checkpoint are one by one and a model's side by side.
    """
    target = self.model if model is None else model
    engine = self.is_fsdp_enabled or self.is_deepspeed_enabled
    if engine or is_saved_as_adapters(target) or not read_layout_of(resume_from_checkpoint):
        return original(self, resume_from_checkpoint, model)
    folders.load_weights(target, resume_from_checkpoint)


@patch("transformers.trainer:Trainer._load_optimizer_and_scheduler", "knows optimizer.pt only", without_layout=True)
def load_optimizer(original: Callable, self: Trainer, checkpoint: str | None) -> None:
    """In one process or under DDP: checkpoints of a layout, beside those of plain Trainer."""
    engine = self.is_fsdp_enabled or self.is_deepspeed_enabled
    if checkpoint is None or engine or not read_layout_of(checkpoint) or not folders.has_optimizer(checkpoint):
        return original(self, checkpoint)
    folders.load_optimizer_state(self.model, get_inner_optimizer(self.optimizer), checkpoint)
    load_schedule(self, checkpoint)
