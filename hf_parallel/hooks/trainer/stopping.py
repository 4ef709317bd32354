"""What all ranks decide on together at the end of a step.

- SIGTERM (a job that is preempted, a node that is drained): all ranks save after the same step, and end.
- A save in the background is whole: what follows it (`on_save` callbacks, uploads) follows on all ranks. It has failed
  on one of them: all of them end.

Agreed on beside the optimizer's step, in three numbers.

After an evaluation rank 0's word holds: for metrics, by which callbacks stop a training and Trainer names the best
checkpoint, and for what callbacks then ask of Trainer.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel.collectives import objects
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer.checkpoints import wait_for_save
from hf_parallel.hooks.trainer.record import record_of
from hf_parallel.hooks.trainer.save_callbacks import has_failed, is_writing

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

#: As a shell reports the end of a process by SIGTERM.
EXIT_CODE = 128 + signal.SIGTERM


class StepsTogether(TrainerCallback):
    """Turns a signal on any rank into a save and an end of the training on all ranks; notices saves that are whole."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.asked = torch.zeros(3, dtype=torch.int32)  # to stop; to leave a save to its thread; to end by its error
        self.agreed = self.asked.clone()
        mesh = runtime.mesh()
        # Apart from training's own groups, and from those of a thread that writes checkpoints.
        self.group: dist.ProcessGroup | None = mesh.new_host_group() if mesh.config.async_save else mesh.host_group
        self.pending: dist.Work | None = None
        self.stops = False

    def ask(self, number: int, frame: object) -> None:
        """The signal's handler; a second signal ends the process as if there were none."""
        print(f"hf_parallel: rank {dist.get_rank()}: SIGTERM, saving after this step", file=sys.stderr, flush=True)
        self.asked[0] = 1
        signal.signal(number, signal.SIG_DFL)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.asked[1], self.asked[2] = is_writing(self.trainer), has_failed(self.trainer)
        self.agreed.copy_(self.asked)
        self.pending = dist.all_reduce(self.agreed, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> object:
        cast(dist.Work, self.pending).wait()
        stops, writing, failed = self.agreed.tolist()
        if stops:
            self.stops = control.should_save = control.should_training_stop = True
        if failed or not writing:
            wait_for_save(self.trainer)
        return control


def on_evaluate(
    trainer: Trainer,
    original: Callable,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    metrics: dict[str, float],
    **kwargs: object,
) -> TrainerControl:
    """Call the callbacks of an evaluation with rank 0's metrics, and go on as those of rank 0 ask.

    Ranks that went different ways would wait for each other forever. Collective, as an evaluation is.
    """
    if not dist.is_initialized():
        return original(args, state, control, metrics, **kwargs)
    first, differ = _of_rank_0({key: value for key, value in metrics.items() if not _is_speed(key)})
    metrics.update(first)
    _say_different(trainer, "the value of", differ)
    control = original(args, state, control, metrics, **kwargs)
    asked, differ = _of_rank_0({key: value for key, value in vars(control).items() if key.startswith("should_")})
    vars(control).update(asked)
    _say_different(trainer, "a callback's", differ)
    return control


def _of_rank_0(own: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return rank 0's values, and the keys under which some rank has another one. Collective."""
    everywhere = objects.gather(own)
    first = everywhere[0]
    return first, [key for key in first if any(repr(one.get(key)) != repr(first[key]) for one in everywhere)]


def _is_speed(key: str) -> bool:
    return key.endswith(("_runtime", "_per_second", "_time"))


def _say_different(trainer: Trainer, what: str, keys: list[str]) -> None:
    told = record_of(trainer).told_to_differ
    new = [key for key in keys if key not in told]
    told.update(new)
    if new:
        report.say(f"{what} {', '.join(new)} differs between ranks; rank 0's holds for all")


@contextlib.contextmanager
def steps_together(trainer: Trainer) -> Iterator[None]:
    """Inside, SIGTERM leads to a checkpoint and then to the end of the process, with exit code 143.

    Not where the script never saves (save_strategy="no") or has a handler of its own. Collective.
    """
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "no":
        yield
        return
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    takes_signals = all(objects.gather(free))
    if not takes_signals and not runtime.mesh().config.async_save:
        yield
        return
    together = StepsTogether(trainer)
    trainer.add_callback(together)
    if takes_signals:
        signal.signal(signal.SIGTERM, together.ask)
    try:
        yield
    finally:
        if takes_signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        trainer.remove_callback(together)
    if together.stops:
        report.say(f"stopped by SIGTERM after step {trainer.state.global_step}, which is saved")
        raise SystemExit(EXIT_CODE)
