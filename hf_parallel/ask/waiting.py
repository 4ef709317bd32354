"""A line on the terminal of rank 0 while something takes longer than a few seconds; nothing in log files and CI."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

#: Seconds without a word.
PATIENCE_S = 3.0
#: Seconds between two versions of the line.
_EACH_S = 0.5
_BACK = "\r\x1b[K"  # to the start of the line, which is emptied


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Say what goes on inside, and for how long, once it has taken `PATIENCE_S`.

    The line is taken away at the end: print results after it.

    Args:
        what: the first thing, such as "reading the model".

    Yields:
        a function that takes what comes next; nothing empties the line, for what is printed inside.
    """
    alone = os.environ.get("RANK", "0") == "0"
    is_watched = alone and not os.environ.get("CI") and sys.stderr is not None and sys.stderr.isatty()
    if not is_watched:
        yield lambda what: None
        return
    line = _Line(what, sys.stderr)
    thread = threading.Thread(target=line.show, name="hf_parallel/waiting", daemon=True)
    thread.start()
    try:
        yield line.say
    finally:
        line.ended.set()
        thread.join()


@dataclass(eq=False)
class _Line:
    """A line that says what goes on until it is ended."""

    what: str
    stream: TextIO
    began: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    _shown: bool = False

    def say(self, what: str) -> None:
        self.what = what
        if not what and self._shown:
            self._write(_BACK)

    def show(self) -> None:
        if self.ended.wait(PATIENCE_S):
            return
        while True:
            if self.what:
                self._shown = True
                self._write(f"{_BACK}hf_parallel: {self.what} … {time.monotonic() - self.began:.0f} s")
            if self.ended.wait(_EACH_S):
                self._write(_BACK)
                return

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self.stream.write(text)
            self.stream.flush()
