"""`pytest -p tests.cuda.plugin`: the tests' ranks, and their reference of one process, run on pretended CUDA devices.

What their scripts say of the CPU (`use_cpu`, `Accelerator(cpu=True)`) does not count here.
"""

from __future__ import annotations

import functools
import os

from tests.cuda.worker import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import tests.cuda.device  # noqa: E402, F401 - before torch
from tests import distributed  # noqa: E402

import pretended_cuda as native  # noqa: E402 # isort: skip - the device makes it known
from accelerate import Accelerator  # noqa: E402 # isort: skip
from transformers import TrainingArguments  # noqa: E402 # isort: skip


def _checked(fork_all):
    @functools.wraps(fork_all)
    def forked(call, *rest, **settings):
        def checked():
            value = call()
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
