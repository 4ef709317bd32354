"""Objects of Python between ranks, which torch leaves in lists that the caller makes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank of a group has, in the order of its ranks; of all ranks without a group. Collective."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


class Failed(NamedTuple):
    """What a rank sends in the place of an object that it could not make."""

    error: Exception
    where: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """The error itself if others can read it, with the way to it."""
        where = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # made of what only this rank has
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error.with_traceback(None), f"on rank {dist.get_rank()}:\n{where}")

    def stop(self) -> NoReturn:
        """Fail as that rank has."""
        raise self.error from RuntimeError(self.where)


def from_one(make: Callable[[], T], group: dist.ProcessGroup | None = None, source: int = 0) -> T:
    """Return on all ranks of a group what `make` returns on its rank `source`, the only one that calls it. Collective.

    What it raises all of them raise: nobody waits for a rank that has failed.
    """
    if dist.get_rank(group) != source:
        told: list = [None]
        dist.broadcast_object_list(told, group=group, group_src=source)
        if isinstance(told[0], Failed):
            told[0].stop()
        return pickle.loads(told[0])
    with telling(group, source):
        made = make()
        packed = pickle.dumps(made)  # here, where others are told if it cannot be
    dist.broadcast_object_list([packed], group=group, group_src=source)
    return made


@contextlib.contextmanager
def telling(
    group: dist.ProcessGroup | None, source: int, is_heard: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """On the rank whose objects the others wait for: what fails in here is told in the place of one.

    Args:
        is_heard: do the others wait for an object now? To tell those that do something else would wait for them.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # where a collective has failed, this one may as well
            if is_heard():
                dist.broadcast_object_list([Failed.of(error)], group=group, group_src=source)
        raise
