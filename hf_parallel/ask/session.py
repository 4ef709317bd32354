"""The session: the one object that holds what a layout remembers, from its beginning to its end.

A module that has to remember something declares a class for it and asks for its object with `of_session`; it keeps
nothing in its globals. `end_session` drops all of these objects, so that a second training in the same process starts
clean. A process without a layout has a session, too: `hf_parallel.parallelize` needs no more than that.

`of_process` holds in the same way what outlasts layouts: listeners to collectives, a thread that still writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

State = TypeVar("State")


@dataclass(eq=False)
class Session:
    """Objects of one layout by their class."""

    _held: dict[type, object] = field(default_factory=dict)

    def get(self, kind: type[State]) -> State:
        """Return the session's object of this class; the first call makes it."""
        found: Any = self._held.get(kind)
        if found is None:
            found = self._held[kind] = kind()
        return found

    def clear(self) -> None:
        """Drop all objects."""
        self._held.clear()


_session, _process = Session(), Session()


#: Return the current session's object of a class that is made without arguments.
of_session = _session.get
#: Return the process's object of such a class; it stays when a layout ends.
of_process = _process.get
#: Forget what the layout has remembered: the next call of `of_session` makes new objects.
end_session = _session.clear
