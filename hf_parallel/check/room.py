"""All ranks of a check, through the store: what each has found goes to rank 0, and one that fails ends all.

Nothing here uses a collective, as it is collectives that are checked. Each rank has a thread with its own connection:

    rank 2    raises: writes its name into the store, prints its traceback, leaves
    others    their threads read the name within a second, and leave too, whatever their main threads wait in
    rank 0    prints what has been found so far, with the verdict, before it leaves
    a rank that stands in one step for longer than the limit says where, as one that fails; those that are further on
    and wait for it leave it the time to
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

_LOOK_S = 0.3
#: What a rank that waits for one behind it gives that one to speak first.
_BEHIND_S = 3 * _LOOK_S
#: Rank 0's process may keep the store, which others read; and a launcher ends all ranks once one has gone.
_LINGER_S = 1.5


Value = TypeVar("Value")


class Room:
    """This rank's place.

    Args:
        limit_s: how long a step may take.
        ended: called with the reason before this process leaves.
        say: called with each step that begins.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        limit_s: float,
        ended: Callable[[str], None],
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.store, self.rank, self.world, self.limit_s = store, rank, world, limit_s
        self.ended, self._say = ended, say
        self._own = store.clone() if hasattr(store, "clone") else store
        self._step, self._until, self._count = "its start", time.monotonic() + limit_s, 0
        self._progress = 0  # steps begun and values gathered, as in the store
        self._done, self._leaving = threading.Event(), threading.Lock()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._look, name="hf_parallel/check", daemon=True)
        self._thread.start()

    def step(self, what: str, times: float = 1.0) -> None:
        """From here on this rank is at `what`, for at most `times` the limit."""
        self._advance()
        self._say(f"checking {what}")
        self._step, self._until = what, time.monotonic() + times * self.limit_s

    def gather(self, value: Value) -> list[Value]:
        """Gather a value of every rank, by rank, on rank 0. All ranks call in the same order."""
        self._count += 1
        self._advance()
        if self.rank:
            self.store.set(f"{self._count}/{self.rank}", pickle.dumps(value))
            return []
        found = [value]
        for rank in range(1, self.world):
            key = f"{self._count}/{rank}"
            while not self.store.check([key]):  # `get` would end at the store's own time-out
                time.sleep(0.005)
            found.append(pickle.loads(self.store.get(key)))
            self.store.delete_key(key)
        return found

    def _advance(self) -> None:
        self._progress += 1
        self.store.set(f"progress/{self.rank}", str(self._progress))

    def close(self) -> None:
        """All ranks have come to the end; none leaves before rank 0 knows."""
        self.gather(None)
        if self.rank == 0:
            self.store.set("closed", "1")
            self._done.set()
            while self.store.add("left", 0) < self.world - 1:  # the store may go with this process
                time.sleep(0.005)
        else:
            while not self.store.check(["closed"]):
                time.sleep(0.005)
            self._done.set()
            self._thread.join()
            self.store.add("left", 1)
        self._thread.join()

    def fail(self, error: BaseException) -> None:
        """End all ranks; this one prints its traceback unless another was first. Does not return."""
        text = "".join(traceback.format_exception(error)).rstrip()
        short = " ".join([f"{type(error).__name__}:", *str(error).split()])[:200]
        self._end(f"{self._step}: {short}", text)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        others = [f"progress/{rank}" for rank in range(self.world) if rank != self.rank]
        while not self._done.wait(_LOOK_S):
            late = time.monotonic() - self._until
            try:
                found = self._own.check(["failed"])
                # A rank that has not come as far as this one speaks first
                stands = late > 0 and late > _BEHIND_S * any(
                    not self._own.check([key]) or int(self._own.get(key)) < self._progress for key in others
                )
            except Exception:  # each version of torch raises another one when the store is gone
                found = None
            if self._done.is_set():
                return
            if found is None:
                self._leave("rank 0, which keeps the store, has gone", None)
            elif found:
                self._leave(self._own.get("failed").decode(), None)
            elif stands:
                frame = sys._current_frames().get(self._watched)
                where = "".join(traceback.format_stack(frame)[-12:]).rstrip() if frame else ""
                self._end(f"stands in {self._step} for more than {self.limit_s:.0f} s", where)

    def _end(self, reason: str, text: str) -> None:
        line = f"rank {self.rank}: {reason}"
        with contextlib.suppress(Exception):
            first = self._own.compare_set("failed", "", line).decode()
            if first != line:
                self._leave(first, None)
        self._leave(line, text)

    def _leave(self, line: str, text: str | None) -> None:
        with self._leaving:  # the thread and the main thread may both come here
            if text is not None:
                print(f"hf_parallel: check: rank {self.rank} failed\n{text}", file=sys.stderr, flush=True)
            with contextlib.suppress(Exception):
                self.ended(line)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            if self.rank == 0 or text is not None:
                time.sleep(_LINGER_S)
            os._exit(1)
