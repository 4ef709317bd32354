"""A process that C++ ends still says where it was: gloo ends one (`std::terminate`) to which a message is too long.

`abort` raises SIGABRT in the thread that calls it, while Python goes on in the others. So the handler may run Python,
and wait for a thread that writes and sends; then whoever was there before handles the signal, and the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def before_abort(say: Callable[[], None]) -> Iterator[None]:
    """In here `say` is called before this process is ended by SIGABRT."""
    try:
        set_handler = ctypes.CDLL(None).signal
    except (OSError, AttributeError):  # not a system that has it there
        yield
        return
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    process, former = os.getpid(), ctypes.c_void_p()

    def handle(number: int) -> None:
        with contextlib.suppress(BaseException):
            if os.getpid() == process:
                say()
        set_handler(number, former)
        os.kill(os.getpid(), number)  # once this handler has returned, and in whatever thread

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    former = ctypes.c_void_p(set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p)))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, former)
