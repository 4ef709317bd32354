"""Objects of Python between ranks, which torch leaves in lists that the caller makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank of a group has, in the order of its ranks; of all ranks without a group. Collective."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def from_one(
    make: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    source: int = 0,
    errors: tuple[type[Exception], ...] = (),
) -> T:
    """Return on all ranks of a group what `make` returns on its rank `source`, the only one that calls it. Collective.

    Args:
        errors: kinds that are raised on all ranks if `make` raises them.
    """
    told: list = [None]
    if dist.get_rank(group) == source:
        try:
            told = [make()]
        except errors as error:
            told = [error]
    dist.broadcast_object_list(told, group=group, group_src=source)
    if isinstance(told[0], errors):
        raise told[0]
    return told[0]
