"""Detection of ranks that come apart, before all of them do something together: a training, an evaluation, a save.

A script that saves under `if is_main_process:` would wait for the others until the process group's time-out. Ranks
sign in in the store; one that waits asks those that are missing, and a thread of theirs answers for them:

    rank 0   waits in model.save_pretrained, asks rank 1
    rank 1   waits in a collective of the next step, where nothing has moved for seconds; its thread says so
    rank 0   raises: nobody will come

A rank that does anything else (evaluates, tokenizes, downloads) is waited for, as in any collective.

Calls of every step (a forward, `gather`, `reduce`) are not asked about. Their threads notice when all ranks stand
still at different places without using the processor: then they wait for each other, and the run ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hf_parallel.ask.session import of_process
from hf_parallel.ranks import messages, observed
from hf_parallel.ranks.groups import time_out
from hf_parallel.ranks.requests import Requests

#: Seconds that ranks may come apart before anybody is asked, and before a line says who is waited for.
PATIENCE_S, SPEAK_S = 3.0, 15.0
#: Seconds between two looks at whether somebody asks, and for which a thread stands still before it counts as stuck.
LOOK_S, STILL_S = 1.0, 3.0
#: Seconds for which all ranks stand still until they are told apart.
DEADLOCK_S = 15.0
#: The share of a processor that a waiting process uses, and per process group: gloo looks 100 times a second.
IDLE, IDLE_PER_GROUP = 0.01, 0.004
#: Seconds for which all processes are idle, wherever they are, until a line says where.
QUIET_S = 40.0
#: Seconds that a rank of a deadlock lives on until one has told of it: a watchdog first asks the others.
TELL_S = 30.0
_ROOM = "hf_parallel/desync"
_LEFT = "has ended"
_ON_ALL_RANKS = "call {} on all ranks, without `if is_main_process`"
#: The reason that is given to what explains a deadlock; all ranks end then, whatever it says.
STANDSTILL = "all ranks stand still"
_OWN, _TORCH = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
#: Code in which a process waits for others, when it does not move.
_WAITING = (
    *(os.path.join(_OWN, place) for place in ("ranks", "axes", "hooks/trainer/training.py")),
    *(os.path.join(_TORCH, place) for place in ("distributed", "autograd")),
)
_OPERATORS = os.path.join(_TORCH, "_ops.py")
_LOADER = os.path.join(_TORCH, "utils", "data")
#: Code that is not the user's.
LIBRARIES = (_OWN, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class AloneError(RuntimeError):
    """A call that all ranks have to make was made by some of them.

    Attributes:
        is_served: all of the others wait for rank 0, at a barrier or in another call, and take part in what it asks.
        has_other_call: another rank is in a call of another name.
    """

    is_served = has_other_call = False

    @classmethod
    def of_rank_0(cls, call: str, advice: str | None) -> AloneError:
        """Make the error of a call of rank 0 while the others wait for it."""
        error = cls(
            f"hf_parallel: {call} was called on rank 0, and the others wait for it at a barrier, in another call, at "
            "the end of a callback or of the script. Every rank holds a part of the model and takes part: "
            f"{advice or _ON_ALL_RANKS.format(call)}"
        )
        error.is_served = True
        return error

    @classmethod
    def of_ranks(cls, call: str, rank: int, others: str, advice: str | None) -> AloneError:
        """Make the error of a rank in a call where others do not come to it.

        Args:
            others: which one is where.
        """
        return cls(
            f"hf_parallel: {call} was called on rank {rank}, but {others}. Every rank holds a part of the model and "
            f"takes part: {advice or _ON_ALL_RANKS.format(call)}"
        )

    @classmethod
    def of_calls(cls, call: str, other: str) -> AloneError:
        """Make the error of a rank in one call while another rank is in another."""
        error = cls(
            f"hf_parallel: this rank calls {call}, another one {other}: all ranks take part in both, one after the "
            "other"
        )
        error.has_other_call = True
        return error


@dataclass
class _Meeting:
    """A call of all ranks, in whose room of the store they sign in.

    Attributes:
        signs_later: this is rank 0 in a call that it can make alone, so it signs once another rank is in this call.
    """

    room: dist.Store
    call: str
    advice: str | None
    rank: int
    world_size: int
    signs_later: bool = False
    is_last: bool = False

    def sign(self) -> None:
        """Tell the others that this rank is here."""
        self.signs_later = False
        self.room.set(str(self.rank), "")
        self.is_last = self.room.add("count", 1) == self.world_size
        if self.is_last:
            self.room.set("all", "")

    def withdraw(self) -> None:
        """Leave the room, because what rank 0 asks for may contain calls of all ranks."""
        self.room.delete_key(str(self.rank))
        if self.room.add("count", -1) == 0:
            self.room.delete_key("count")
            self.room.delete_key("call")

    def find_other_call(self) -> str | None:
        """Return the call that another rank has signed for; None if it is this one, or nobody has signed yet."""
        first = self.room.compare_set("call", "", self.call).decode()
        return None if first == self.call else first

    def sign_or_find_others_elsewhere(self) -> bool:
        """Sign, on rank 0, if another rank is in this call; return whether all others are in another one."""
        if not self.signs_later or not self.room.check(["call"]):
            return False
        if self.room.get("call").decode() == self.call:
            self.sign()
            return False
        return self.room.check(["count"]) and self.room.add("count", 0) == self.world_size - 1


class DesyncDetector:
    """The detector of one process, with the thread that answers for it."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank, self.world_size = rank, world_size
        self.number, self.left = 0, False
        self.requests = Requests(store, rank, self._sign_in_room, self._does_rank_0_wait)
        self.is_meeting = False
        self.keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.process, self.watched = os.getpid(), threading.get_ident()
        self.closed = threading.Event()
        self.rest = _Rest(self.watched)
        self.idle = _Idle()
        self.thread = threading.Thread(target=self._answer, name="hf_parallel/desync", daemon=True)
        self.thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """End with the script; without an error, rank 0 may still ask for something."""
        if os.getpid() == self.process and not self.closed.is_set() and not hasattr(sys, "last_type"):
            self.requests.attend(_LEFT)
        self.close()

    def close(self) -> None:
        """Tell the others that this process makes no further call."""
        if os.getpid() != self.process or self.closed.is_set():
            return
        self.closed.set()
        self.thread.join(LOOK_S)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self.requests.end()
            self._leave()
            if self.keeps_store:
                # Let the others stop asking the store before it ends, which torch would report at length
                self.store.set("closing", "")
                end = time.monotonic() + 2 * LOOK_S
                while self.store.add("left", 0) < self.world_size and time.monotonic() < end:
                    time.sleep(0.02)

    def _leave(self) -> None:
        if not self.left:
            self.left = True
            self.store.set(f"still/{self.rank}", _LEFT)
            self.store.set(f"answer/{self.rank}", json.dumps([[self.number + self.requests.count, 0], _LEFT, False]))
            self.store.add("left", 1)

    # ---- a rank that is here ---------------------------------------------------------------------------------------

    def assert_all_ranks(self, call: str, advice: str | None, is_served: bool = False) -> None:
        """Return when all ranks are in this call; `advice` is for one that is alone.

        Args:
            is_served: rank 0 can make the call alone, while all others wait for it in another call.

        Raises:
            AloneError: some of them will not come, or are in another call.
        """
        self.number += 1
        room = dist.PrefixStore(str(self.number), self.store)
        meeting = _Meeting(room, call, advice, self.rank, self.world_size, signs_later=is_served and self.rank == 0)
        self._compare_calls(meeting)
        try:
            is_last = self._sign_in(meeting, may_be_alone=True)
        except AloneError:
            self.number -= 1  # the others come to this number with their next call, or are there
            if not meeting.signs_later:
                for key in (str(self.rank), "call", "count"):
                    meeting.room.delete_key(key)
            raise
        if is_last:
            for key in ("call", "count", "all"):  # of a call that all ranks have left
                self.store.delete_key(f"{self.number - 1}/{key}")

    def _compare_calls(self, meeting: _Meeting) -> None:
        other = None if meeting.signs_later else meeting.find_other_call()
        if other is not None:
            meeting.room.set("other", meeting.call)
            raise AloneError.of_calls(meeting.call, other)

    def _serve_in_meeting(self, meeting: _Meeting) -> bool:
        """Do what rank 0 asks for, if anything: its calls of all ranks come before this one."""
        if not self.requests.is_asked():
            return False
        meeting.withdraw()
        self.number -= 1
        self.requests.serve()
        self.number += 1
        meeting.room = dist.PrefixStore(str(self.number), self.store)
        self._compare_calls(meeting)
        meeting.sign()
        self.is_meeting = True
        return True

    def _sign_in_room(self, room: dist.Store, call: str, advice: str | None) -> None:
        """Wait for others that are on their way, as `Requests` does."""
        self._sign_in(_Meeting(room, call, advice, self.rank, self.world_size), may_be_alone=False)

    def _sign_in(self, meeting: _Meeting, may_be_alone: bool) -> bool:
        """Wait for the others; return whether this was the last rank.

        Args:
            may_be_alone: the others may wait for this rank; else they are on their way.
        """
        if not meeting.signs_later:
            meeting.sign()
        start, pause = time.monotonic(), 0.0005
        self.is_meeting = True
        try:
            while not self._is_over(meeting, may_be_alone):
                if self._serve_in_meeting(meeting) if may_be_alone else self.requests.serve():
                    start = time.monotonic()
                if time.monotonic() - start > PATIENCE_S:
                    self._wait_for_missing(meeting, may_be_alone)
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        finally:
            self.is_meeting = False
        meeting.room.delete_key(str(self.rank))
        return meeting.is_last

    def _is_over(self, meeting: _Meeting, may_be_alone: bool) -> bool:
        """Return whether all ranks are here.

        Raises:
            AloneError: this is rank 0, and the others wait for it elsewhere.
        """
        try:
            if meeting.room.check(["all"]):
                return True
        except RuntimeError:  # rank 0 may have ended, and the store with it
            if not self.left:
                raise
        if self.left:
            raise AloneError.of_ranks(meeting.call, self.rank, f"rank 0 {_LEFT}", meeting.advice)
        if may_be_alone and (self.requests.are_all_others_waiting() or meeting.sign_or_find_others_elsewhere()):
            raise AloneError.of_rank_0(meeting.call, meeting.advice)
        return False

    def _wait_for_missing(self, meeting: _Meeting, may_be_alone: bool) -> None:
        room, call, advice = meeting.room, meeting.call, meeting.advice
        question, said, end = 0, False, time.monotonic() + SPEAK_S
        while not self._is_over(meeting, may_be_alone):
            if may_be_alone:
                self._serve_in_meeting(meeting)
            else:
                self.requests.serve()
            room = meeting.room
            others = (rank for rank in range(self.world_size) if rank != self.rank)
            missing = [rank for rank in others if not room.check([str(rank)])]
            calls = self.number + self.requests.count  # the same number on all ranks that are in one call
            answers = {rank: self._ask(rank, [calls, question]) for rank in missing}
            if missing and all(answers.values()):
                if question == 1 and not room.check(["all"]):
                    other, where = next(iter(answers.items()))
                    more = f" and {len(answers) - 1} more are elsewhere too" if len(answers) > 1 else ""
                    raise AloneError.of_ranks(call, self.rank, f"rank {other} {where}{more}", advice)
                question = 1  # once more, for they were not asked at one time
            if room.check(["other"]):
                raise AloneError.of_calls(call, room.get("other").decode())
            if missing and not said and time.monotonic() > end:
                said, ranks = True, _format_ranks_in_words(missing)
                print(f"hf_parallel: {call} on rank {self.rank} waits for {ranks}", file=sys.stderr, flush=True)
            time.sleep(0.2)

    def _ask(self, rank: int, question: list[int]) -> str | None:
        """Return where a rank stands still, or that it has ended; None if it may still come."""
        self.store.set(f"asked/{rank}", json.dumps(question))
        if not self.store.check([f"answer/{rank}"]):
            return None
        answered, found, _ = json.loads(self.store.get(f"answer/{rank}"))
        return found if answered >= question or found == _LEFT else None

    def _does_rank_0_wait(self) -> bool:
        """Return whether rank 0 stands in a collective, or has ended; not while it meets others to ask them."""
        found = self._ask(0, [self.number + self.requests.count, 0])
        return found is not None and not json.loads(self.store.get("answer/0"))[2]

    # ---- a rank that is not ----------------------------------------------------------------------------------------

    def _answer(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may go first
            while not self.closed.wait(LOOK_S):
                if self.store.check(["closing"]):
                    return self._leave()
                if self.store.check([f"asked/{self.rank}"]):
                    question = json.loads(self.store.get(f"asked/{self.rank}"))
                    self.store.delete_key(f"asked/{self.rank}")
                    answer = json.dumps([question, self._find_stuck_place(), self.is_meeting])
                    self.store.set(f"answer/{self.rank}", answer)
                self._look_for_deadlock()
                self._look_for_idle_ranks()

    def _find_stuck_place(self) -> str | None:
        """Return where the watched thread waits for other ranks without moving; None if it does anything else."""
        if self.requests.waits_at:
            return self.requests.waits_at
        before = sys._current_frames().get(self.watched)
        place = before and before.f_lasti
        if before is None or self.closed.wait(STILL_S):
            return None
        now = sys._current_frames().get(self.watched)
        if now is not before or now.f_lasti != place or not is_waiting_for_others(now):
            return None
        return f"is at {_find_script_line(now)}"

    # ---- all ranks ----------------------------------------------------------------------------------------------

    def _look_for_deadlock(self) -> None:
        """Say where this rank stands still; end it when all do, and nobody can go on."""
        own, place = f"still/{self.rank}", self._place()
        if place is None:
            if self.rest.told:
                self.store.delete_key(own)
            self.rest.told = False
            return
        if not self.rest.told:
            self.store.set(own, place)
            self.rest.told = True
        everywhere = [f"still/{rank}" for rank in range(self.world_size)]
        if not self.store.check(everywhere) or self.closed.wait(STILL_S):
            return
        if self._place() != place or not self.store.check(everywhere):
            return
        places = [self.store.get(key).decode() for key in everywhere]
        if len(set(places)) == 1:  # where a long transfer may go on
            return
        # The main thread cannot be woken out of a collective, so the process ends from this one.
        explained_by = of_process(Answering).explained_by
        speaker = next(rank for rank, place in enumerate(places) if place != _LEFT)
        has_told = explained_by is not None and explained_by(STANDSTILL)
        if not has_told and self.rank == speaker:
            where = _group_by_place(places)
            print(
                f"hf_parallel: all ranks wait for each other: {where}. Every rank holds a part of the model and takes "
                "part in each of these calls: make them on all ranks, in the same order",
                file=sys.stderr,
                flush=True,
            )
            has_told = True
        if has_told:
            self.store.set("told", "")
        end = time.monotonic() + TELL_S
        while not self.store.check(["told"]) and time.monotonic() < end:  # a launcher ends all ranks after the first
            time.sleep(LOOK_S / 10)
        time.sleep(LOOK_S)
        exit_process()

    def _look_for_idle_ranks(self) -> None:
        """Say once where all ranks are when none has used its processor for long; the run goes on."""
        own, is_idle = f"idle/{self.rank}", self.idle.seconds() > QUIET_S
        if is_idle and not self.idle.told:
            where = self.requests.waits_at
            frame = None if where else sys._current_frames().get(self.watched)
            if frame is not None:  # which may wait for the workers of a data loader, or for its dataset
                outer: FrameType | None = frame
                while outer is not None and not outer.f_code.co_filename.startswith(_LOADER):
                    outer = outer.f_back
                where = f"is {'' if outer is None else 'in the data loader, '}at {_find_script_line(frame)}"
            self.store.set(own, where)
        elif self.idle.told and not is_idle:
            self.store.delete_key(own)
            self.idle.said = False
        self.idle.told = is_idle
        all_idle = [f"idle/{rank}" for rank in range(self.world_size)]
        if self.rank == 0 and is_idle and not self.idle.said and self.store.check(all_idle):
            self.idle.said = True
            where = _group_by_place([self.store.get(key).decode() for key in all_idle])
            print(
                f"hf_parallel: all ranks have been idle for {self.idle.seconds():.0f} s: {where}. The run goes on: "
                "hang_timeout_s says for how long",
                file=sys.stderr,
                flush=True,
            )

    def _place(self) -> str | None:
        return self.requests.waits_at or self.rest.place()


def exit_process() -> NoReturn:
    """End this process from a thread, with what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


class _Rest:
    """The time since a thread has been waiting for other ranks, without a move and with the whole process idle."""

    def __init__(self, thread: int) -> None:
        self.thread, self.told = thread, False
        self._seen: object = None
        self._since, self._used = time.monotonic(), time.process_time()

    def place(self) -> str | None:
        """Return where the thread has stood still for long; None if it has not. Called about once a second."""
        frame = sys._current_frames().get(self.thread)
        seen = frame and (id(frame), frame.f_lasti)
        now, used = time.monotonic(), time.process_time()
        busy = used - self._used > _read_idle_share() * max(now - self._since, LOOK_S)
        if frame is None or seen != self._seen or busy or not is_waiting_for_others(frame):
            self._seen, self._since, self._used = seen, now, used
            return None
        return f"is at {_find_script_line(frame)}" if now - self._since > DEADLOCK_S else None


class _Idle:
    """The time since this process has hardly used its processor."""

    def __init__(self) -> None:
        self.told = self.said = False
        self._since, self._used = time.monotonic(), time.process_time()

    def seconds(self) -> float:
        """Return how long the process has been idle. Called about once a second."""
        now, used = time.monotonic(), time.process_time()
        if used - self._used > _read_idle_share() * max(now - self._since, LOOK_S):
            self._since, self._used = now, used
        return now - self._since


def _read_idle_share() -> float:
    """Return the largest share of a processor that a process uses while it only waits."""
    return IDLE + IDLE_PER_GROUP * len(dist.distributed_c10d._world.pg_map)


def is_waiting_for_others(frame: FrameType) -> bool:
    """Return whether this is code in which a process that does not move waits for others."""
    if frame.f_code.co_filename == _OPERATORS and frame.f_back is not None:
        frame = frame.f_back  # an operator that communicates, as DTensors call
    return frame.f_code.co_filename.startswith(_WAITING)


def _find_script_line(frame: FrameType) -> str:
    """Return the innermost line of the user's own code, the call that waits, and its caller.

    Two calls of one line of a script, such as `trainer.train()`, differ in who makes them.
    """
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(LIBRARIES):
        outer = outer.f_back
    found = outer or frame
    if frame.f_code.co_filename == observed.__file__ and frame.f_back is not None:
        frame = frame.f_back  # the call that is observed
    caller: FrameType | None = frame
    while caller is not None and caller is not found and is_waiting_for_others(caller):
        caller = caller.f_back
    call = frame.f_code.co_name
    if caller is not None and caller not in (found, frame):
        call += f" in {caller.f_code.co_name}"
    return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} ({call})"


def _group_by_place(places: list[str]) -> str:
    """Join what ranks say of themselves (`is at …`, `has ended`) to one sentence, by place."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    said = []
    for place, there in ranks.items():
        verb, _, rest = place.partition(" ")
        verb = verb if len(there) == 1 else {"is": "are", "has": "have"}[verb]
        said.append(f"{_format_ranks_in_words(there)} {verb} {rest}")
    return "; ".join(said)


def _format_ranks_in_words(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


class Answering:
    """The detector of this process, until it ends.

    Attributes:
        explained_by: explains a deadlock better than the detector; takes what is known, returns whether it has told.
        rank_0_may_be_alone: the script has asked who is the main process since all ranks last called a model.
        is_in_shared_call: rank 0 calls a model now, and the others, who wait for it, do so, too.
        on_question: what another rank does when the script begins to ask.
        runs_for_rank_0: while a pipeline's last stage runs a part of the script for all its stages: is rank 0 the
            first of them?
    """

    detector: DesyncDetector | None = None
    explained_by: Callable[[str], bool] | None = None
    on_question: Callable[[], None] | None = None
    rank_0_may_be_alone = is_in_shared_call = False
    runs_for_rank_0: bool | None = None


def get_store() -> dist.Store | None:
    """Return the store of the ranks that answer each other; None where there is no detector."""
    detector = of_process(Answering).detector
    return None if detector is None else detector.store


def watch() -> None:
    """Let this process answer, from now on. Collective; does nothing the second time."""
    answering = of_process(Answering)
    if answering.detector is not None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    # A store may hold what an earlier start of the run has left.
    name = messages.send_from_one(lambda: uuid.uuid4().hex)
    # A connection of its own: the default one is taken while a thread waits in the store, as `new_group` does.
    default: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"{_ROOM}/{name}", default.clone())
    answering.detector = DesyncDetector(store, dist.get_rank(), dist.get_world_size())


def assert_all_ranks(call: str, advice: str | None = None, is_served: bool = False) -> None:
    """Return when all ranks are in this call, by the name that a script gives it.

    Args:
        is_served: rank 0 can make it alone, while all others wait for it in another call.

    Raises:
        AloneError: some of them will not come; it ends with `advice`, by default to call it on all ranks.
    """
    detector = of_process(Answering).detector
    if detector is not None:
        detector.assert_all_ranks(call, advice, is_served)


def ask_other_ranks(call: str, number: int, advice: str) -> None:
    """Ask, on rank 0 alone, the others to call `requests.on_request[number]` when they next wait for this rank, or
    end.

    Raises:
        AloneError: some of them stand elsewhere; it ends with `advice`.
    """
    detector = of_process(Answering).detector
    if detector is not None:
        detector.requests.ask(call, number, advice)


def meet_or_ask(call: str, number: int | None, advice: str) -> bool:
    """Return False when all ranks are in this call; return True on rank 0 alone, whose request the others then do.

    Args:
        number: of the request, in `requests.on_request`; None if the others cannot be asked.

    Raises:
        AloneError: the other ranks are not where they can be asked; it ends with `advice`.
    """
    try:
        assert_all_ranks(call, advice, is_served=True)
    except AloneError as error:
        if not error.is_served or number is None:
            raise
        ask_other_ranks(call, number, advice)
        return True
    return False


def note_question(asker: FrameType) -> None:
    """Note that a script has asked who is the main process; libraries ask without end, and losses of a stage alone."""
    answering = of_process(Answering)
    if answering.rank_0_may_be_alone or answering.runs_for_rank_0 is not None:
        return
    answering.rank_0_may_be_alone = not asker.f_code.co_filename.startswith(LIBRARIES)
    if answering.rank_0_may_be_alone and answering.on_question is not None and dist.get_rank() > 0:
        answering.on_question()


@contextlib.contextmanager
def run_for_stages(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a part of the script for all stages of a pipeline, whose ranks the group has in their order.

    All of them are in one call of the script's. In the place of rank 0 its last stage is the main process.
    """
    answering = of_process(Answering)
    former, answering.runs_for_rank_0 = answering.runs_for_rank_0, dist.get_process_group_ranks(group)[0] == 0
    try:
        yield
    finally:
        answering.runs_for_rank_0 = former


def is_main_process(is_first: bool) -> bool:
    """Return whether this is the main process: the first one, unless another runs a part of the script in its place.

    Args:
        is_first: is it the first process, of all or of its node?
    """
    runs_for_rank_0 = of_process(Answering).runs_for_rank_0
    return is_first if runs_for_rank_0 is None else runs_for_rank_0


def is_rank_0_alone(call: str, by_line: bool = False) -> bool:
    """Return True on rank 0 if the others wait for it; return False where all ranks come to this call.

    Ranks ask each other only after the script has asked who is the main process, and once for each time.

    Args:
        by_line: calls from two lines of the script are two calls.

    Raises:
        AloneError: another rank is in another call.
    """
    answering = of_process(Answering)
    if not answering.rank_0_may_be_alone or answering.detector is None or answering.runs_for_rank_0 is not None:
        return False
    if answering.detector.requests.are_all_others_waiting():
        return True
    if by_line:
        call += f" at {_find_script_line(sys._getframe(1))}"
    try:
        answering.detector.assert_all_ranks(call, None, is_served=True)
    except AloneError as error:  # or the others have not asked who they are, and come without this
        if error.is_served:
            return True
        if error.has_other_call:
            raise
    answering.rank_0_may_be_alone = False
    return False


def wait_for_rank_0() -> None:
    """Return when rank 0 is in this call; until then this rank takes part in what rank 0 does alone.

    After the time-out of the group without a request it goes on: what follows has that time-out, too.
    """
    detector = of_process(Answering).detector
    if detector is not None and threading.get_ident() == detector.watched and not detector.closed.is_set():
        limit = time_out()
        place = f"is at {_find_script_line(sys._getframe(1))}"
        detector.requests.wait_for_rank_0(place, math.inf if limit is None else limit.total_seconds())


def come_to_call() -> None:
    """Let rank 0 finish what it does alone, before a call of all ranks such as a training step.

    Ranks do so after the script has asked who is the main process, once for each time; rank 0 waits for nobody.
    """
    answering = of_process(Answering)
    detector = answering.detector
    if detector is None or answering.runs_for_rank_0 is not None or answering.is_in_shared_call:
        return
    requests = detector.requests
    if answering.rank_0_may_be_alone and requests.follows and threading.get_ident() == detector.watched:
        answering.rank_0_may_be_alone = False
        limit, caller = time_out(), sys._getframe(1)
        limit_s = math.inf if limit is None else limit.total_seconds()
        requests.come_to_call(lambda: f"is at {_find_script_line(caller)}", PATIENCE_S, limit_s)
    requests.calls += 1


@contextlib.contextmanager
def let_rank_0_be_alone() -> Iterator[None]:
    """Let rank 0 look for the others at a model call inside the `with`, at whose end all ranks come together."""
    answering = of_process(Answering)
    former, answering.rank_0_may_be_alone = answering.rank_0_may_be_alone, True  # a callback may evaluate, too
    try:
        yield
    finally:
        answering.rank_0_may_be_alone = former


def come_together(work: dist.Work, place: str) -> None:
    """Wait for a collective of all ranks; until rank 0 comes, the others take part in what it does alone.

    Args:
        place: where they wait, for messages.
    """
    detector = of_process(Answering).detector
    if detector is None or detector.closed.is_set():
        work.wait()
    else:
        detector.requests.come_together(work, place)


def part() -> None:
    """Serve requests before all ranks end their process groups; but not after an error, which must be heard now."""
    detector = of_process(Answering).detector
    if detector is None or detector.closed.is_set() or sys.exc_info()[0] is not None:
        return
    if dist.is_initialized() and dist.get_backend() != "fake":  # those of a dry run are not
        if detector.rank == 0:
            detector.requests.end()
        else:
            detector.requests.attend(_LEFT)


def expect_nothing() -> None:
    """Let this process, which ends by an error, not stay for what rank 0 may ask."""
    detector = of_process(Answering).detector
    if detector is not None:
        atexit.unregister(detector.end)
        atexit.register(detector.close)
