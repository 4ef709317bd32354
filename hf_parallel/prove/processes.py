"""Fork the processes of a run, wait for all, and tell which one failed first."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

#: Seconds that the other processes get to name their own reason after one has failed.
GRACE_S = 3.0
#: Messages of a process whose peer has failed: the peer's own reason counts more.
_LOST_A_PEER = ("closed by peer", "reset by peer", "Broken pipe", "Socket Timeout")
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_PARALLEL")


@dataclass
class Failure:
    """Why a process ended. `refused`: a message for people says it all."""

    who: str
    message: str
    traceback: str = ""
    refused: bool = False
    when: float = 0.0


class ForkedRun:
    """Some processes that run a function each; their output goes to files in `folder`, which is there.

    Args:
        work: called in each process with its number.
        environments: the launcher's variables of each process; none for one that nobody launched.
    """

    def __init__(
        self, name: str, folder: Path, work: Callable[[int], None], environments: list[dict[str, str]]
    ) -> None:
        self.name, self.folder = name, folder
        self.seconds, self._begin = 0.0, time.monotonic()
        self._pids: list[int] = []
        for number, own in enumerate(environments):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _become_process(folder, work, number, own)
            self._pids.append(pid)

    def wait(self, limit_s: float) -> Failure | None:
        """Wait for all processes; end the rest soon after the first has failed. Returns the first failure."""
        deadline, bad = self._begin + limit_s, False
        while self._pids and time.monotonic() < deadline:
            ended = [(pid, status) for pid, status in (os.waitpid(one, os.WNOHANG) for one in self._pids) if pid]
            for pid, status in ended:
                self._pids.remove(pid)
                if status != 0 and not bad:
                    bad, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            if not ended:
                time.sleep(0.02)
        stands = bool(self._pids) and not bad
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids = []
        self.seconds = time.monotonic() - self._begin
        found = [Failure(**json.loads(path.read_text())) for path in self.folder.glob("failure-*.json")]
        if found:
            lost = [any(words in failure.message for words in _LOST_A_PEER) for failure in found]
            order = [(not own.refused, has_lost, own.when) for own, has_lost in zip(found, lost, strict=True)]
            return found[order.index(min(order))]
        if stands:
            return Failure(self.name, f"was not done after {limit_s:.0f} s; --limit allows more")
        return Failure(self.name, "a process was killed, or left with an exit code of its own") if bad else None


def _become_process(folder: Path, work: Callable[[int], None], number: int, environment: dict[str, str]) -> NoReturn:
    code = 1
    gc.freeze()  # a collection would copy the memory of everything imported, page by page
    try:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        os.environ.update(environment)
        said = os.open(folder / f"said-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)  # everything that this process prints
        os.dup2(said, 2)
        try:
            work(number)
            atexit._run_exitfuncs()  # process groups end here, as at the end of a script
            code = 0
        except BaseException as error:
            from hf_parallel.ask.spec import SpecError

            text = "".join(traceback.format_exception(error))
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SpecError):
                cause = cause.__cause__
            refused = cause is not None or str(error).startswith("hf_parallel: ")
            message = str(cause or error) if refused else f"{type(error).__name__}: {error}"
            told = {"who": f"rank {number}", "message": message, "traceback": text, "refused": refused}
            written = folder / f"failing-{number}.json"  # a process ended while it writes must leave no half of a file
            written.write_text(json.dumps({**told, "when": time.monotonic()}))
            written.replace(folder / f"failure-{number}.json")
            print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
