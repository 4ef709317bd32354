"""What rank 0 alone asks of all ranks: they do it where they next wait for it, or at the end of their script.

rank 0   saves under `if is_main_process:` what is in parts on all ranks: asks, then takes part itself
rank 1   goes past it, and comes to trainer.evaluate, or to its end: sees what is asked, does it, goes on
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

#: What may be asked for, by a number that is the same on all ranks: what it is about, if that is still there, and what
#: to do with it.
on_request: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []
#: Seconds between two looks of a rank that has come to its end.
_FIRST_PAUSE_S, _PAUSE_S = 0.005, 0.25
_NO_MORE = "no more"


class Requests:
    """The list of them, in the store in which ranks sign in.

    Args:
        sign_in: returns when all ranks have signed in a room of the store: given the room, what it is for, advice.
    """

    def __init__(self, store: dist.Store, rank: int, sign_in: Callable[[dist.Store, str, str | None], object]) -> None:
        self.store, self.rank, self.sign_in = store, rank, sign_in
        self.count, self.at_end = 0, False

    def ask(self, call: str, number: int, advice: str) -> None:
        """Rank 0: return when the others are about to do `on_request[number]`, as this one is then to do itself."""
        room = self._next_room()
        room.set("what", json.dumps([call, number]))
        self.sign_in(room, call, advice)

    def serve(self) -> bool:
        """Another rank: do what is asked for, if anything is."""
        if self.rank == 0 or not self.store.check([f"request/{self.count}/what"]):
            return False
        room = self._next_room()
        call, number = json.loads(room.get("what"))
        find, do = on_request[number]
        if (found := find()) is not None:  # else rank 0 is told that this rank has ended
            at_end, self.at_end = self.at_end, False
            self.sign_in(room, call, None)
            do(found)
            self.at_end = at_end
        return True

    def attend(self) -> None:
        """Another rank at its end: stay until rank 0 is at its own."""
        self.at_end, pause = self.rank > 0, _FIRST_PAUSE_S
        with contextlib.suppress(RuntimeError):  # the store may go first
            while self.at_end and dist.is_initialized() and not self.store.check([_NO_MORE]):
                self.serve()
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S)

    def part(self) -> None:
        """All ranks are about to end their groups: the last time that this rank may ask, or is asked."""
        if self.rank == 0:
            self.end()
        else:
            self.attend()
            self.at_end = False

    def end(self) -> None:
        """This rank asks no more."""
        if self.rank == 0:
            self.store.set(_NO_MORE, "")

    def _next_room(self) -> dist.Store:
        self.count += 1
        return dist.PrefixStore(f"request/{self.count - 1}", self.store)
