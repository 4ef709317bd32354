"""Where a rank stands: in which code its thread is, whether it waits for others, and whether its process lives."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType, TracebackType

import torch

from hf_parallel.collectives import observed
from hf_parallel.collectives.desync import LIBRARIES, waits_for_others

_LOADER = os.path.join(os.path.dirname(torch.__file__), "utils", "data")
_DISTRIBUTED, _OBSERVED = os.path.join(os.path.dirname(torch.__file__), "distributed"), observed.__file__
_CALLBACKS = os.path.join("transformers", "trainer_callback.py")


def stacks() -> dict[str, list[str]]:
    """Of every thread that runs Python, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident})": "".join(traceback.format_stack(frame)).splitlines()
        for ident, frame in sys._current_frames().items()
    }


def waits(thread: int) -> bool:
    """Is it in code in which a process waits for others?"""
    frame = sys._current_frames().get(thread)
    return frame is not None and waits_for_others(frame)


def place_of_thread(thread: int, phase: str) -> str:
    """In words, such as: in the data loader (`my_dataset.py:41`).

    Args:
        phase: what the training was at when it last said so, where its code does not tell.
    """
    frame = sys._current_frames().get(thread)
    return f"in {phase}" if frame is None else _place(_outwards(frame), phase)


def place_of_error(error: BaseException) -> str:
    """Where it was raised, in the same words."""
    return _place(_raised(error.__traceback__), "")


def is_of_collective(error: BaseException) -> bool:
    """Was it raised by one, or by the wait for it?"""
    frames = _raised(error.__traceback__)
    return bool(frames) and (frames[0][0].f_code.co_filename.startswith((_DISTRIBUTED, _OBSERVED)))


def _place(frames: list[tuple[FrameType, int]], phase: str) -> str:
    """Of frames from inside out, with the lines that they are at."""
    files = [frame.f_code.co_filename for frame, _ in frames]
    own = next((found for found in frames if not found[0].f_code.co_filename.startswith(LIBRARIES)), frames[0])
    line = f"`{os.path.basename(own[0].f_code.co_filename)}:{own[1]}`"
    if any(name.startswith(_LOADER) for name in files):
        return f"in the data loader ({line})"
    outer = next((i for i, name in enumerate(files) if name.endswith(_CALLBACKS)), 0)
    if outer:
        return f"in a callback ({line}, {frames[outer - 1][0].f_code.co_name})"
    return f"in {phase} ({line})" if phase else f"at {line}"


def _outwards(frame: FrameType) -> list[tuple[FrameType, int]]:
    found, outer = [], frame
    while outer is not None:
        found.append((outer, outer.f_lineno))
        outer = outer.f_back  # type: ignore[assignment]
    return found


def _raised(step: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while step is not None:
        found.append((step.tb_frame, step.tb_lineno))
        step = step.tb_next
    return found[::-1]


def state_of_process(pid: int) -> str:
    """Of a process of this machine: gone, stopped (SIGSTOP), traced (by a debugger) or alive."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]  # its name may hold anything
    except OSError:
        return "alive" if os.path.exists(f"/proc/{pid}") or not os.path.isdir("/proc/self") else "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "traced"}.get(letter, "alive")
