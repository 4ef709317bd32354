"""Requests of callbacks to Trainer's loop: rank 0's word counts on every rank.

A callback may go by a clock, a file or `state.is_world_process_zero`. Then some ranks would save, evaluate or stop
alone, and all would wait for each other.

    rank 0    control.should_save = True     ┐ one all-reduce of   ┌ saves
    rank 1    control.should_save = False    ┘ 15 small numbers    └ saves; rank 0 prints a line

Ranks agree after the events that a callback of the script's own handles, on any rank. Other runs exchange nothing:
Transformers' own callbacks go by what all ranks know. Until rank 0 comes to such an exchange, the others take part in
what a callback does with the model on rank 0 alone, such as samples that it generates (`apply/alone.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.ranks import desync
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl

#: What Trainer reads of its control.
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
#: An event after which Trainer reads its control, or ends something -> all events since it was last read.
EVENTS = {
    "on_train_begin": ("on_train_begin",),
    "on_epoch_begin": ("on_epoch_begin",),
    "on_epoch_end": ("on_epoch_end",),
    "on_substep_end": ("on_substep_end",),
    "on_step_end": ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"),
    "on_log": ("on_log",),
    "on_save": ("on_save",),
    "on_train_end": ("on_train_end",),
}
#: Packages whose callbacks decide alike on all ranks.
_LIBRARIES = ("transformers", "trl", "hf_parallel")
#: What `Trainer._maybe_log_save_evaluate` logs, on all ranks; a script may log anything else on rank 0 alone.
_OF_TRAINING = {"loss", "learning_rate"}


@dataclass(eq=False)
class Control:
    """Exchanges what ranks decide, in one training."""

    trainer: Trainer
    mesh: ParallelMesh
    group: dist.ProcessGroup | None = None
    decides: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    def on_event(self, event: str, original: Callable, *args: Any, **kwargs: Any) -> TrainerControl:
        """Call the callbacks, then take rank 0's word if a callback of the script's own handles such an event."""
        if event in ("on_train_begin", "on_epoch_begin"):
            # The events after which to exchange: a script may add a callback on rank 0 alone. Collective.
            own, names = set(), {name for parts in EVENTS.values() for name in parts}
            for callback in self.trainer.callback_handler.callbacks:
                methods = {name: method for name in names if (method := getattr(callback, name, None)) is not None}
                modules = {name: getattr(method, "__module__", None) or "" for name, method in methods.items()}
                own |= {name for name, module in modules.items() if module.partition(".")[0] not in _LIBRARIES}
            found = torch.tensor([bool(own.intersection(parts)) for parts in EVENTS.values()], dtype=torch.int32)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh.host_group_of_training)
            self.decides = {one for one, handled in zip(EVENTS, found.tolist(), strict=True) if handled}
            if self.decides:
                self.group = self.mesh.host_group_of_callbacks  # made here, where no rank is late
        exchanges = event in self.decides
        if exchanges and event == "on_log":
            logs = kwargs["logs"] if "logs" in kwargs else args[3]
            exchanges = logs.keys() >= _OF_TRAINING
        if not exchanges:
            return original(*args, **kwargs)
        with desync.let_rank_0_be_alone():
            control = original(*args, **kwargs)
            self._agree(event, control)
        return control

    def _agree(self, event: str, control: TrainerControl) -> None:
        """Take rank 0's flags; rank 0 names the first rank that has others. Collective."""
        flags = torch.tensor([bool(getattr(control, flag)) for flag in FLAGS], dtype=torch.int32)
        rank, world_size = self.mesh.rank, self.mesh.config.world_size
        first = world_size - rank  # the largest of these is the first rank's
        words = torch.stack([flags * (rank == 0), flags * first, (1 - flags) * first])
        agreed = dist.all_reduce(words, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert agreed is not None
        desync.come_together(agreed, f"is at the end of {event}")
        word, *others = words.tolist()
        for i, flag in enumerate(FLAGS):
            setattr(control, flag, bool(word[i]))
            place = f"{event}:{flag}"
            if (other := others[word[i]][i]) and place not in self.said:
                self.said.add(place)
                report.say(
                    f"{event} at step {self.trainer.state.global_step}: control.{flag} is {bool(word[i])} on rank 0 "
                    f"and {not word[i]} on rank {world_size - other}: rank 0 decides for all"
                )


@contextlib.contextmanager
def agree_on_control(trainer: Trainer) -> Iterator[None]:
    """Inside, rank 0 decides what all ranks do next."""
    mesh, handler = runtime.mesh(), trainer.callback_handler
    if mesh.config.world_size == 1:
        yield
        return
    control = Control(trainer, mesh)
    methods = {event: functools.partial(control.on_event, event, getattr(handler, event)) for event in EVENTS}
    with replacing(handler, **methods):
        yield
