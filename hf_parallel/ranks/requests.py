"""Requests of rank 0 alone: the others do them where they next wait for it, or at the end of their script.

    rank 0   saves or generates under `if is_main_process:` with what is in parts on all ranks: asks, then takes part
    rank 1   goes past it, and comes to a barrier, a training step, or to its end: sees what is asked, does it, goes on

Ranks count their calls of all ranks. Where the script has asked who is the main process, rank 0 writes down the number
of the call that it has come to, and goes on at once; the others wait for that number before their own call.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

#: Requests by a number that is the same on all ranks: a function that finds the object, if it is still there, and one
#: that is called with it.
on_request: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []


def take_requests(held: object, do: Callable[[Any], object]) -> int | None:
    """Let rank 0 ask the others for `do(held)`. All ranks call this for the same objects in the same order.

    Returns:
        The number of the request; None in a dry run, which may be one rank's own.
    """
    if dist.get_backend() == "fake":
        return None
    on_request.append((weakref.ref(held), do))
    return len(on_request) - 1


#: Seconds between two looks of a rank that waits for rank 0 alone: the first, the longest at a barrier and at the end.
_FIRST_PAUSE_S, _BARRIER_S, _PAUSE_S = 0.0005, 0.02, 0.25
_NO_MORE, _GO_ON = "no more", "go on"
#: The key of the number of calls that rank 0 has come to.
_CALLS = "calls"


@dataclass(eq=False)
class Requests:
    """Requests of rank 0, in the store in which ranks sign in.

    Args:
        sign_in: returns when all ranks have signed in a room of the store: given the room, what it is for, advice.
        does_rank_0_wait: asked again and again, says whether rank 0 stands in a collective that others have to join.

    Attributes:
        waits_at: where this rank waits for rank 0 and does what it asks.
        calls: of all ranks, which this rank has come to.
        follows: the others wait for rank 0 before such a call; False after rank 0 has been seen to wait for them.
    """

    store: dist.Store
    rank: int
    sign_in: Callable[[dist.Store, str, str | None], object]
    does_rank_0_wait: Callable[[], bool]
    count: int = 0
    waits_at: str = ""
    meetings: int = 0
    calls: int = 0
    follows: bool = True
    _go_on: str = ""
    _counted_in: str = ""

    def ask(self, call: str, number: int, advice: str) -> None:
        """Rank 0: return when the others are about to do `on_request[number]`, as this one is then to do itself."""
        room = self._next_room()
        room.set("what", json.dumps([call, number]))
        self.sign_in(room, call, advice)

    def is_asked(self) -> bool:
        """Return, on a rank other than 0, whether rank 0 asks for anything."""
        return self.rank > 0 and self._read_next()[0] not in ("", _GO_ON)

    def serve(self) -> bool:
        """Do, on a rank other than 0, what rank 0 asks for, if anything."""
        if not self.is_asked():
            return False
        call, number = self._read_next()
        room = self._next_room()
        find, do = on_request[number]
        if (found := find()) is not None:  # else rank 0 is told that this rank has ended
            (waits_at, key), self.waits_at = (
                (self.waits_at, self._counted_in),
                "",
            )  # it may wait at a barrier of its own
            if waits_at:
                self.store.add(key, -1)
            self.sign_in(room, call, None)
            do(found)
            self.waits_at, self._counted_in = waits_at, key
            if waits_at:
                self.store.add(key, 1)
        return True

    def wait_for_rank_0(self, place: str, limit_s: float) -> None:
        """Return when rank 0 is in this call, too; until then the others do what it asks. All ranks call it.

        Args:
            limit_s: seconds without a request after which a rank goes on: what it waits for has a time-out of its own.
        """
        if self.rank == 0:
            if self._go_on:  # all have seen it
                self.store.delete_key(self._go_on)
            self._go_on = f"request/{self.count}/what"
            self._next_room().set("what", json.dumps([_GO_ON, 0]))
            return

        longest = max(_BARRIER_S, _PAUSE_S * dist.get_world_size() / 1024)
        self._wait(place, lambda: self._read_next()[0] == _GO_ON, longest, limit_s)
        self._next_room()  # rank 0 comes to this number, also after the limit

    def come_to_call(self, find_place: Callable[[], str], patience_s: float, limit_s: float) -> None:
        """Before a call of all ranks: rank 0 tells that it is here, and the others wait until it is.

        Args:
            find_place: returns where this rank is, for messages.
            patience_s: seconds after which the others ask whether rank 0 waits for them.
            limit_s: as for `wait_for_rank_0`.
        """
        if self.rank == 0:
            self.store.set(_CALLS, str(self.calls + 1))
            return
        pause, end = _FIRST_PAUSE_S, time.monotonic() + _BARRIER_S
        while not self._has_rank_0_come() and time.monotonic() < end:
            time.sleep(pause)
            pause *= 2
        if self._has_rank_0_come():
            return

        ask_at, following = time.monotonic() + patience_s, self._following

        def is_over() -> bool:
            nonlocal ask_at
            if self._has_rank_0_come():
                return True
            if time.monotonic() > ask_at and self.store.add(following, 0) == dist.get_world_size() - 1:
                ask_at = time.monotonic() + _PAUSE_S
                self.follows = not self.does_rank_0_wait()
            return not self.follows

        self._wait(find_place(), is_over, _BARRIER_S, limit_s, following)

    def come_together(self, work: dist.Work, place: str) -> None:
        """Return when a collective of all ranks is over; until rank 0 is in it, the others do what it asks."""
        if self.rank > 0:
            end = time.monotonic() + _BARRIER_S
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(_FIRST_PAUSE_S)
            if not work.is_completed():
                self._wait(place, work.is_completed, _BARRIER_S)
        work.wait()
        self.meetings += 1

    def attend(self, place: str) -> None:
        """Stay, on a rank other than 0 that is at its end, until rank 0 is at its own."""
        if self.rank > 0:
            with contextlib.suppress(RuntimeError):  # the store may go first
                self._wait(place, lambda: not dist.is_initialized() or self.store.check([_NO_MORE]), _PAUSE_S)

    def are_all_others_waiting(self) -> bool:
        """Rank 0: return whether each other rank waits for this one at a barrier, before a call or at its end."""
        if self.rank > 0:
            return False
        waiting = [key for key in (self._waiting, self._following) if self.store.check([key])]
        return any(self.store.add(key, 0) == dist.get_world_size() - 1 for key in waiting)

    def end(self) -> None:
        """Tell the others that rank 0 asks no more."""
        if self.rank == 0:
            self.store.set(_NO_MORE, "")

    def _wait(
        self, place: str, is_over: Callable[[], bool], longest: float, limit_s: float = math.inf, key: str = ""
    ) -> None:
        """Do what rank 0 asks until a wait is over; `key` counts the ranks that wait, by default `_waiting`."""
        self.waits_at, pause, start = place, _FIRST_PAUSE_S, time.monotonic()
        self._counted_in = key or self._waiting
        self.store.add(self._counted_in, 1)
        while not is_over() and time.monotonic() - start < limit_s:
            if self.serve():
                pause, start = _FIRST_PAUSE_S, time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if self.store.add(self._counted_in, -1) == 0:  # nobody waits any more
            self.store.delete_key(self._counted_in)
        self.waits_at = ""

    @property
    def _waiting(self) -> str:
        """The key of the number of ranks that wait for rank 0; those of an earlier meeting are on their way."""
        return f"waiting/{self.meetings}"

    @property
    def _following(self) -> str:
        """The key of the number of ranks that wait for rank 0 before their next call of all ranks."""
        return f"following/{self.calls + 1}"

    def _has_rank_0_come(self) -> bool:
        return self.store.add(_CALLS, 0) > self.calls

    def _read_next(self) -> tuple[str, int]:
        """Return what rank 0 asks next, and the number of the request; an empty name if it has not asked yet."""
        name = f"request/{self.count}/what"
        return tuple(json.loads(self.store.get(name))) if self.store.check([name]) else ("", 0)

    def _next_room(self) -> dist.Store:
        self.count += 1
        return dist.PrefixStore(f"request/{self.count - 1}", self.store)
