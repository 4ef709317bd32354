"""Output and end of a rank among several: it ends as Python does, up to the point where Python takes itself apart.

    threads are joined ─> exit callbacks, the last of which ends the process groups ─> open files ─> os._exit

A worker thread of a gloo group drops the tensors of its last work when it comes to it. Once Python is finalizing, that
ends the process by "terminate called without an active exception" (exit code 134, torch issue 190489), and whoever
still refers to a group keeps its threads alive.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import signal
import sys
import threading
import warnings
from typing import IO, Any, NoReturn

#: The exit status of a process whose output could not be written, as in plain Python.
_UNWRITTEN = 120

#: On ranks beside rank 0, whose warnings and bars are enough. What the user has set stays.
_QUIET = {
    "TORCH_LOGS": "-all",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def order_sets_alike() -> None:
    """Start this process anew with PYTHONHASHSEED=0, unless it is set: sets then have one order on all ranks.

    Python hashes words in another way in each process, so that `list(set(labels))` would number the labels of a data
    set in another order on each rank. A process whose command is not the runner's own stays as it is.
    """
    arguments = sys.orig_argv[1:]
    module = arguments.index("-m") + 1 if "-m" in arguments else len(arguments)
    is_runner = arguments[module : module + 1] == ["hf_parallel"]
    if "PYTHONHASHSEED" not in os.environ and is_runner and os.name == "posix":
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONHASHSEED": "0"})


def silence_other_ranks() -> None:
    """Leave warnings and progress bars of libraries to rank 0; errors stay. Before torch is imported."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    if logging.lastResort is not None:  # prints what libraries log without a handler
        logging.lastResort.setLevel(logging.ERROR)


def end_rank(code: object) -> NoReturn:
    """End a rank with its script, by itself or by SystemExit with this code."""
    if code is None or isinstance(code, int):
        status = (code or 0) & 0xFF
    else:
        print(code, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # by this name Python itself calls it, before exit callbacks
    leave_now(status)


def leave_now(status: int) -> NoReturn:
    """Leave with this exit code, without waiting for threads: they may wait for a peer that is gone."""
    os._exit(_finish_process(status))


def leave_interrupted() -> NoReturn:
    """End as Python ends by Ctrl-C: killed by that signal, so that a shell sees it."""
    _finish_process(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)


def _finish_process(status: int) -> int:
    held = _list_open_files()  # one that is collected in a cycle may be closed before what it buffers is written
    atexit._run_exitfuncs()
    gc.collect()
    files = held + _list_open_files()
    buffers = (io.BufferedWriter, io.BufferedRandom)
    for file in sorted(files, key=lambda file: isinstance(file, buffers) - isinstance(file, io.TextIOBase)):
        if isinstance(file, io.RawIOBase) or _is_standard(file):
            continue
        with contextlib.suppress(Exception):
            if file.writable():  # a thread may hold the lock of what it reads from
                file.close()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return _UNWRITTEN
    return status


def _list_open_files() -> list[IO]:
    base: Any = io.IOBase.__base__  # of all of them; looked for by type, as objects may answer for others' classes
    return [thing for thing in gc.get_objects() if issubclass(type(thing), base)]


def _is_standard(file: IO) -> bool:
    with contextlib.suppress(Exception):
        return file.fileno() <= 2
    return False
