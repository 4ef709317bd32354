"""SIGTERM (a job that is preempted, a node that is drained): all ranks save after the same step, and end.

Whether any rank was told to stop is agreed on beside the optimizer's step, in one number of a group of its own.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel.hooks import report

#: As a shell reports the end of a process by SIGTERM.
EXIT_CODE = 128 + signal.SIGTERM


class StopTogether(TrainerCallback):
    """Turns a signal on any rank into a save and an end of the training on all ranks."""

    def __init__(self) -> None:
        self.asked = torch.zeros(1, dtype=torch.int32)
        self.agreed = self.asked.clone()
        self.group: Any = dist.new_group(backend="gloo")  # training's own may be in use by a device
        self.pending: Any = None
        self.stops = False

    def ask(self, number: int, frame: Any) -> None:
        """The signal's handler; a second signal ends the process as if there were none."""
        print(f"hf_parallel: rank {dist.get_rank()}: SIGTERM, saving after this step", file=sys.stderr, flush=True)
        self.asked.fill_(1)
        signal.signal(number, signal.SIG_DFL)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.agreed.copy_(self.asked)
        self.pending = dist.all_reduce(self.agreed, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.pending.wait()
        if self.agreed.item():
            self.stops = control.should_save = control.should_training_stop = True
        return control


@contextlib.contextmanager
def saves_on_sigterm(trainer: Any) -> Iterator[None]:
    """Inside, SIGTERM leads to a checkpoint and then to the end of the process, with exit code 143.

    Not where the script never saves (save_strategy="no") or has a handler of its own. Collective.
    """
    never = str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "no"
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ready: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ready, free and not never)
    if not all(ready):
        yield
        return
    together = StopTogether()
    trainer.add_callback(together)
    signal.signal(signal.SIGTERM, together.ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer.remove_callback(together)
    if together.stops:
        report.say(f"stopped by SIGTERM after step {trainer.state.global_step}, which is saved")
        raise SystemExit(EXIT_CODE)
