"""Will anybody but a model's own loss read the logits of the call in progress? Who calls the model may know.

A Trainer takes the loss alone from a model that computes it, a pipeline frees what else a micro-batch gives. Nobody
can miss logits there; of a loop written by hand nothing is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_unread = False


@contextlib.contextmanager
def unread_logits(unread: bool = True) -> Iterator[None]:
    """In here models are called for their loss alone, or not."""
    global _unread
    former, _unread = _unread, unread
    try:
        yield
    finally:
        _unread = former


def logits_are_unread() -> bool:
    """Does nobody read what the call in progress returns beside its loss?"""
    return _unread
