"""(d) Host syncs of a training step by file and line: of ours at most one per step, and none per micro-batch.

On a GPU torch warns of each (`torch.cuda.set_sync_debug_mode`), from whichever thread; the Python stack at that moment
says whose line it was. On a CPU what would sync is counted instead: tensors that are asked for their values. Copies to
a device and back cannot be seen there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_parallel
from benchmarks.gpu.setting import Setting
from hf_parallel.check.report import FAILED, NOTE, OK, SKIPPED, Row

NEEDS_GPU = ("syncs by copies between host and GPU", "torch's own warnings of them")
LAYOUTS = ("", "tp=2", "pp=2", "dp_shard=2")
#: The first step that is watched, how many are, calls of the model in each: calls 9 to 12. Batches are compared over
#: ranks in calls 1 to 3, then in those whose number is a power of two.
FIRST, STEPS, MICRO_BATCHES = 4, 2, 2
#: Rows for all steps on two data ranks: the last batch of an epoch is ragged, which ranks talk about once per epoch.
ONE_EPOCH = 4 * MICRO_BATCHES * (FIRST + STEPS + 1)
#: Of our lines, per step; none of them in what every micro-batch does.
ALLOWED = 1
_OWN = os.path.dirname(hf_parallel.__file__) + os.sep
_TEXT = "synchronizing"  # of torch's warning
#: Operations whose result the host needs: a value, or a number of elements.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim")


def rows(setting: Setting) -> Iterator[Row]:
    """Per layout the sum, and our lines."""
    for spec in LAYOUTS[:2] if setting.small and not setting.devices else LAYOUTS:
        world, name = (2, spec) if spec else (1, "plain Trainer")
        if spec and not setting.can(spec, world):
            yield Row("syncs", name, "needs NCCL, which does not run here", status=SKIPPED)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = setting.on_ranks("benchmarks.gpu.syncs:train", world, spec=spec, folder=folder)
        yield from shown(name, found, bool(setting.devices))


def shown(name: str, found: list[dict[str, int]], on_gpu: bool) -> Iterator[Row]:
    """`found`: by rank, how often each `file:line` synced in all steps that were watched."""
    worst = max(found, key=lambda lines: sum(count for line, count in lines.items() if is_ours(line)))
    ours = {line: count / STEPS for line, count in worst.items() if is_ours(line)}
    others = sum(worst.values()) / STEPS - sum(ours.values())
    unit = "syncs" if on_gpu else "values read"
    status = (OK if sum(ours.values()) <= ALLOWED else FAILED) if on_gpu else NOTE
    text = f"{sum(ours.values()):g} {unit} per step from our lines, {others:g} from others"
    yield Row("syncs", name, text, f"at most {ALLOWED} of ours", status, {"by_rank": found})
    for line, count in sorted(ours.items(), key=lambda pair: -pair[1]):
        yield Row("syncs", f"{name}: {line}", f"{count:g} per step", status=NOTE)


def is_ours(line: str) -> bool:
    """Is it a line of this package, not of torch or of the script?"""
    return line.startswith("hf_parallel/")


def train(spec: str, folder: str) -> dict[str, int]:
    """How often each line synced in the watched steps on this rank."""
    from transformers import TrainerCallback

    from benchmarks.gpu.training import trainer

    watch = Watch(torch.accelerator.is_available())

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == FIRST:
                watch.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == FIRST + STEPS:
                watch.__exit__(None, None, None)

    arguments = {"max_steps": FIRST + STEPS + 1, "gradient_accumulation_steps": MICRO_BATCHES}
    arguments |= {"per_device_train_batch_size": 2, "logging_steps": 100}
    trainer(spec, folder, [Watching()], rows=ONE_EPOCH, **arguments).train()
    return dict(watch.lines)


class Watch(contextlib.AbstractContextManager):
    """`lines`: how often each line made the host wait inside, whichever thread it ran in."""

    def __init__(self, on_gpu: bool) -> None:
        self.lines: Counter[str] = Counter()
        self._on_gpu, self._stack = on_gpu, contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self._stack.enter_context(_warned(self.lines) if self._on_gpu else _Reads(self.lines))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


@contextlib.contextmanager
def _warned(lines: Counter[str]) -> Iterator[None]:
    """Count torch's warnings, each at the line that was running."""

    def note(message: Any, *rest: Any) -> None:
        if _TEXT in str(message):
            lines[at()] += 1
        else:
            usual(message, *rest)

    former = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(former)


class _Reads(TorchDispatchMode):
    """Count operations that a GPU would have to be waited for."""

    def __init__(self, lines: Counter[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls its own operations on local tensors: those are seen
        if func._opname in _READS or func._opname == "index" and _has_mask(args):
            self.lines[at()] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(args: tuple) -> bool:
    return any(torch.is_tensor(index) and index.dtype == torch.bool for index in args[1])


def at() -> str:
    """The innermost line of ours on the stack; else the innermost of anybody but torch and this file."""
    passing = (__file__, inspect.getfile(warnings.catch_warnings))  # in Python 3.14 that is no longer warnings.py
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in passing]
    ours = [frame for frame in frames if frame.filename.startswith(_OWN)]
    torchs = os.path.dirname(torch.__file__)
    others = [frame for frame in frames if not frame.filename.startswith((torchs, "<"))]
    frame = ours[-1] if _is_innermost(frames, ours) else (others or frames)[-1]
    name = os.path.relpath(frame.filename, os.path.dirname(_OWN.rstrip(os.sep)))
    name = name if name.startswith("hf_parallel") else os.sep.join(frame.filename.split(os.sep)[-2:])
    return f"{name}:{frame.lineno}"


def _is_innermost(frames: list[Any], ours: list[Any]) -> bool:
    """Did our line call torch itself? What a model or Trainer does below a line of ours is theirs."""
    if not ours:
        return False
    below = frames[frames.index(ours[-1]) + 1 :]
    return all(frame.filename.startswith((os.path.dirname(torch.__file__), "<")) for frame in below)
