"""`pytest -p tests.cuda.plugin`: the tests' ranks, and their reference of one process, run on pretended CUDA devices.

What their scripts say of the CPU (`use_cpu`, `Accelerator(cpu=True)`) does not count here. Each process that has
trained with a Trainer, or in a loop with Accelerate's optimizer, adds a line to the file `PRETENDED_CUDA_WAITS`: how
often the host waited in each step.
"""

from __future__ import annotations

import functools
import inspect
import json
import os

from tests.cuda.worker import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import tests.cuda.device  # noqa: E402, F401 - before torch
from tests import distributed  # noqa: E402

import pretended_cuda as native  # noqa: E402 # isort: skip - the device makes it known
from accelerate import Accelerator  # noqa: E402 # isort: skip
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402 # isort: skip
from transformers import TrainingArguments  # noqa: E402 # isort: skip
from transformers.trainer_callback import CallbackHandler  # noqa: E402 # isort: skip


steps: list[dict[str, int]] = []  # lines that made the host wait, of each step of this process's Trainers


def _counted(on_step_begin, on_step_end):
    def begin(self, *args, **kwargs):
        native.forget_waits()
        native.count_waits(True)
        return on_step_begin(self, *args, **kwargs)

    def end(self, *args, **kwargs):
        native.count_waits(False)
        steps.append(dict(native.waits()))
        native.forget_waits()
        return on_step_end(self, *args, **kwargs)

    return begin, end


def _counted_in_loops(optimizers_step):
    """Count from one step of the optimizer to the next, as a loop has no begin of a step; a Trainer's have."""

    @functools.wraps(optimizers_step)
    def step(self, *args, **kwargs):
        result = optimizers_step(self, *args, **kwargs)
        if self.gradient_state.sync_gradients and not any(map(_is_of_trainer, inspect.stack(0))):
            if native.waits():
                steps.append(dict(native.waits()))
            native.forget_waits()
            native.count_waits(True)
        return result

    return step


def _is_of_trainer(frame: inspect.FrameInfo) -> bool:
    return frame.filename.endswith("transformers/trainer.py")


def _checked(fork_all):
    @functools.wraps(fork_all)
    def forked(call, *rest, **settings):
        def checked():
            steps.clear()
            value = call()
            if steps and "PRETENDED_CUDA_WAITS" in os.environ:
                with open(os.environ["PRETENDED_CUDA_WAITS"], "a") as file:
                    file.write(json.dumps({"world": int(os.environ.get("WORLD_SIZE", 1)), "steps": steps}) + "\n")
            found = native.faults()
            if found:
                raise AssertionError("streams:\n" + "\n".join(found))
            return value

        return fork_all(checked, *rest, **settings)

    return forked


def _with_device(init):
    @functools.wraps(init)
    def with_device(self, *args, **kwargs):
        init(self, *args, **{**kwargs, "cpu": False})

    return with_device


def _without_cpu(post_init):
    @functools.wraps(post_init)
    def on_device(self):
        self.use_cpu = False
        post_init(self)

    return on_device


distributed._fork_all = _checked(distributed._fork_all)
Accelerator.__init__ = _with_device(Accelerator.__init__)
TrainingArguments.__post_init__ = _without_cpu(TrainingArguments.__post_init__)
_step = CallbackHandler.on_step_begin, CallbackHandler.on_step_end
CallbackHandler.on_step_begin, CallbackHandler.on_step_end = _counted(*_step)
AcceleratedOptimizer.step = _counted_in_loops(AcceleratedOptimizer.step)
