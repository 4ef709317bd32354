"""Why it hangs: a thread per process that notices when nothing ends, and asks all ranks where they are.

    rank 2    marks nothing for `limit_s`: its thread asks, in the store
    all       write OUTPUT_DIR/hangs/rank_N.json (stacks of all threads, last collectives), answer in the store
    rank 0    joins the answers into one line (another rank, if rank 0 does not)
    all       end, if that is wanted and nobody does something that may take long

Ranks meet in the store and never in a collective. One that does not answer is looked for by its process id, where it
runs on the same machine. An error on one rank, for which the others would wait, is asked about at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.monitor import collective_record, hang_report
from hf_parallel.ranks.desync import STANDSTILL, AloneError, exit_process
from hf_parallel.ranks.groups import read_machine_id

if TYPE_CHECKING:
    from hf_parallel.monitor.hang_report import Facts


#: Seconds between two looks; between two signs of life; that ranks have to answer; that an error waits to be told.
LOOK_S, BEAT_S, ANSWER_S, ERROR_S = 1.0, 5.0, 3.0, 6.0
FOLDER = "hangs"


@dataclass(frozen=True)
class Settings:
    """limit_s: seconds in which something must end. ends: does the run end then, or only speak?"""

    limit_s: float
    ends: bool
    folder: str


class Watchdog:
    """This process's. `mark` says that something has begun; the time counts from there.

    Args:
        store: of all ranks, of this training alone.
        collectives: facts about the last of them, ready for JSON.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, settings: Settings, collectives: Callable[[], Facts]
    ) -> None:
        self.store, self.rank, self.world_size, self.settings = store.clone(), rank, world_size, settings
        self.collectives, self.thread = collectives, threading.get_ident()
        self.phase, self.since, self.may_take_long = "the first step", time.monotonic(), False
        self.error: str | None = None
        self.failed = False  # in a collective, which may be its peers' fault
        self.round, self._asked, self._beaten = 0, 0.0, 0.0
        self.closed, self.told = threading.Event(), threading.Event()
        self._beat(f"in {self.phase}")
        self._watcher = threading.Thread(target=self._watch, name="hf_parallel/hangs", daemon=True)
        self._watcher.start()

    # ---- the training's thread -------------------------------------------------------------------------------------

    def mark(self, phase: str, may_take_long: bool = False) -> None:
        """Note that something has ended, and this begins; no hang is made of what may take long by itself."""
        self.phase, self.may_take_long, self.since = phase, may_take_long, time.monotonic()

    def close(self) -> None:
        """End the training on this rank."""
        self.closed.set()
        self._watcher.join(2 * LOOK_S)
        if not self._watcher.is_alive():
            with contextlib.suppress(RuntimeError):  # the store may be gone by now
                self.store.set(f"ended/{self.rank}", self.place)

    def explain(self, why: str) -> bool:
        """Ask now, for another thread that has found out that nothing goes on; has it been told?"""
        if self.closed.is_set():
            return False
        self.told.clear()
        self._ask(why)
        return self.told.wait(ANSWER_S + 4 * LOOK_S)

    def tell_abort(self) -> None:
        """Tell the others that C++ ends this process, in whatever thread."""
        self.error = "SIGABRT: C++ ended its process, as gloo does where messages differ in size"
        self.explain(f"the process of rank {self.rank} is ended")

    def tell_error(self, error: Exception) -> None:
        """Tell the others of an error: they would wait for this rank, unless they have the same error."""
        if isinstance(error, AloneError):
            return  # it says where the others are
        place, self.failed = collective_record.place_of_error(error)
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({place})"
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "")
            everyone, end = [f"left/{rank}" for rank in range(self.world_size)], time.monotonic() + ERROR_S
            while (
                time.monotonic() < end and not self.told.is_set() and (self.failed or not self.store.check(everyone))
            ):
                if time.monotonic() > end - ERROR_S + LOOK_S:
                    self._ask(f"an error on rank {self.rank}")
                time.sleep(LOOK_S / 10)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        gone_since, failed = None, False
        while not self.closed.wait(min(LOOK_S, self.settings.limit_s / 4)):
            try:
                self._look()
                gone_since = None
            except RuntimeError:  # the store: its process has ended, or will end before this
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > ANSWER_S:
                    break
            except Exception as error:  # a thread that ends without a word watches nothing
                if not failed:
                    self._say(f"rank {self.rank} could not look for hangs, and tries again: {error!r}")
                failed = True
        if not self.closed.is_set() and collective_record.is_waiting(self.thread):  # the store is gone
            facts = {self.rank: self._gather_facts()}
            self._write(f"rank_{self.rank}.json", {**facts[self.rank], "stacks": collective_record.read_stacks()})
            states = hang_report.format_states_of_ranks(facts, facts)
            self._say(f"the process that keeps the store (rank 0's, or the launcher) is gone; {states}")
            if self.settings.ends:
                exit_process()

    def _look(self) -> None:
        now = time.monotonic()
        place = collective_record.place_of_thread(self.thread, self.phase)
        if now - self._beaten > BEAT_S or place != self.place:
            self._beat(place)
        if self.store.check([f"asked/{self.round}"]):
            return self._answer(self.store.get(f"asked/{self.round}").decode())
        if not self.may_take_long and now - max(self.since, self._asked) > self.settings.limit_s:
            self._ask(f"nothing has ended for {now - self.since:.0f} s")

    def _beat(self, place: str) -> None:
        """Give a sign of life, and say where to look for this process."""
        self._beaten, self.place = time.monotonic(), place
        self.store.set(f"beat/{self.rank}", json.dumps([os.getpid(), *_identify_machine(), place]))

    def _ask(self, why: str) -> None:
        self.store.compare_set(f"asked/{self.round}", "", f"{self.rank} {why}")

    def _answer(self, question: str) -> None:
        """Write and send where this rank is; one of them tells."""
        number, why = self.round, question.partition(" ")[2]
        facts = self._gather_facts()
        self._write(f"rank_{self.rank}.json", {**facts, "why": why, "stacks": collective_record.read_stacks()})
        self.store.set(f"answer/{number}/{self.rank}", json.dumps(facts))
        self._asked = time.monotonic()
        verdict = self._decide_verdict(number, why)
        self.round += 1
        if verdict:
            self.told.set()
        # A main thread cannot be woken out of a collective; one with an error goes on to its end. Where a rank is
        # leaving (fail), connections to it break: others may have an error soon
        if verdict in ("end", "fail") and self.error is None and not (verdict == "fail" and self.closed.wait(ERROR_S)):
            time.sleep(LOOK_S)  # a launcher ends all ranks once one has gone: who has an error prints it first
            exit_process()

    def _gather_facts(self) -> Facts:
        try:
            collectives = self.collectives()
        except Exception as error:  # what is broken here must not hide where the rank is
            collectives = {"pending": [], "groups": {}, "unknown": repr(error)}
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "place": collective_record.place_of_thread(self.thread, self.phase),
            "phase": self.phase,
            "seconds": round(time.monotonic() - self.since, 1),
            "may_take_long": self.may_take_long,
            "waits": collective_record.is_waiting(self.thread)
            or any(entry.get("on_device") for entry in collectives["pending"]),
            "error": self.error,
            "failed": self.failed,
            **collectives,
        }

    def _write(self, name: str, facts: Facts) -> None:
        """Write a file of the report. A full disk must not keep the line from being said."""
        folder = os.path.join(self.settings.folder, FOLDER)
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
        except OSError as error:
            self._say(f"rank {self.rank} cannot write {os.path.join(folder, name)}: {error.strerror or error}")

    # ---- one of them tells -----------------------------------------------------------------------------------------

    def _decide_verdict(self, number: int, why: str) -> str:
        """Decide for the rank that tells: end, fail (for one has left), goes on, or nothing to say."""
        told, end = f"told/{number}", time.monotonic() + ANSWER_S + (2 * LOOK_S if self.rank else 0.0)
        while time.monotonic() < end and not self.store.check([told]):
            # Rank 0 tells once each rank has answered, or its process is known to be gone
            if self.rank == 0 and all(
                self.store.check([f"answer/{number}/{rank}"])
                or (self.store.check([f"beat/{rank}"]) and self._find_answer_of(number, rank).get("state") == "gone")
                for rank in range(self.world_size)
            ):
                break
            time.sleep(LOOK_S / 20)
        if self.store.check([told]) or self.store.compare_set(f"speaker/{number}", "", str(self.rank)) != (
            str(self.rank).encode()
        ):
            end = time.monotonic() + ANSWER_S
            while not self.store.check([told]) and time.monotonic() < end:
                time.sleep(LOOK_S / 20)
            return self.store.get(told).decode() if self.store.check([told]) else ""
        verdict = self._tell(number, why)
        self.store.set(told, verdict)
        return verdict

    def _tell(self, number: int, why: str) -> str:
        facts = {rank: self._find_answer_of(number, rank) for rank in range(self.world_size)}
        lost = any(own.get("absent") for own in facts.values())
        slow = [rank for rank, own in facts.items() if own.get("may_take_long") and not own.get("error")]
        left = [rank for rank, own in facts.items() if own.get("error")]
        waiting = [rank for rank, own in facts.items() if own.get("waits")]
        failed = any(own.get("failed") for own in facts.values())
        if left and not lost and not waiting and not failed:
            return ""  # they are on their way to the same error
        debugged = any(own.get("absent", "").startswith("is held") for own in facts.values())
        ends = (self.settings.ends and not slow and not debugged) or bool(left)
        goes_on = "The run ends (hang_action=report goes on)" if ends else "The run goes on"
        if why == STANDSTILL and not ends:
            goes_on = "Nobody can go on: the run ends"
        elif slow and not left:
            goes_on = f"{hang_report.format_rank_numbers(slow).capitalize()} may take long: the run goes on"
        line = f"{why}: {hang_report.format_hang(facts)}"
        self._say(f"{line}. {goes_on}. Stacks and last collectives: {os.path.join(self.settings.folder, FOLDER)}")
        kept = ("absent", "error", "place", "phase", "seconds", "pending")
        short = {rank: {key: own[key] for key in kept if own.get(key)} for rank, own in facts.items()}
        self._write("report.json", {"sentence": line, "ranks": short})
        if ends:
            # A stopped process would let a launcher wait: it takes no other signal
            for own in facts.values():
                if own.get("state") == "stopped":
                    with contextlib.suppress(OSError):
                        os.kill(own["pid"], signal.SIGKILL)
        return "goes on" if not ends else "fail" if left else "end"

    def _find_answer_of(self, number: int, rank: int) -> Facts:
        """Return what a rank has answered, or what is known of one that does not."""
        if self.store.check([f"answer/{number}/{rank}"]):
            return json.loads(self.store.get(f"answer/{number}/{rank}"))
        if not self.store.check([f"beat/{rank}"]):
            return {"absent": "has never come to the training"}
        if self.store.check([f"ended/{rank}"]):
            place = self.store.get(f"ended/{rank}").decode()
            return {"absent": f"has left: it has ended by itself, and does not come any more (last seen {place})"}
        pid, *there, place = json.loads(self.store.get(f"beat/{rank}"))
        state = collective_record.state_of_process(pid) if there == _identify_machine() else "away"
        said = {
            "gone": "is gone: its process ended without a word, as one that is killed",
            "stopped": "is stopped (SIGSTOP)",
            "traced": "is held by a debugger",
            "alive": "does not answer: its process runs code that holds Python's lock",
            "away": "does not answer: its process or its machine is gone or stopped",
        }[state]
        return {"absent": f"{said} (pid {pid} on {there[0]}, last seen {place})", "pid": pid, "state": state}

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"hf_parallel: {line}", file=sys.stderr, flush=True)


def _identify_machine() -> list[str]:
    """Return where process ids mean the same: machines may share a name, and containers a machine."""
    return [socket.gethostname(), read_machine_id()]
