"""The random numbers of reading data, on layouts whose ranks share a model.

In one process the loaders and the model draw from the same generators in turn. Here ranks of one model must read the
same batches, and do not all draw what the model draws: so data has a stream of its own, which goes on from loader to
loader. Where the model draws nothing, orders and masks are those of one process. As long as a rank has drawn nothing
else, its generators go on with the stream, so that the model then draws what it would in one process.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from hf_parallel.ranks import messages


class RandomStream:
    """A random stream that all ranks share."""

    latest: RandomStream | None = None

    def __init__(self, state: tuple) -> None:
        self.state = state
        self.left: tuple | None = self._get()  # None where this rank has drawn something else since
        self.is_aside = False

    @classmethod
    def here(cls) -> RandomStream:
        """Return the latest one as long as rank 0's generators are as it has left them; else a new one from there."""
        left = None if cls.latest is None else cls.latest.left
        known = left is not None and _is_equal_state(left, cls._get())
        told = messages.send_from_one(lambda: None if known else cls._get())
        if told is not None:
            cls.latest = cls(told)
        assert cls.latest is not None
        return cls.latest

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        outside = self._get()
        together = not self.is_aside and _is_equal_state(outside, self.state)
        self._set(self.state)
        try:
            yield
        finally:
            self.state = self._get()
            if not together:
                self._set(outside)
            if not self.is_aside:
                self.left = self.state if together else None

    @contextlib.contextmanager
    def aside(self, state: tuple) -> Iterator[None]:
        """Draw from another state inside the block; afterwards the stream is where it was."""
        here, self.state, self.is_aside = self.state, state, True
        try:
            yield
        finally:
            self.state, self.is_aside = here, False

    @staticmethod
    def _get() -> tuple:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    @staticmethod
    def _set(state: tuple) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


def make_plain_state(state: tuple) -> tuple:
    """A state as numbers and tensors, which can be read without running pickled code."""
    kind, keys, *rest = state[1]
    return state[0], (kind, np.asarray(keys).tolist(), *rest), state[2]


def continue_stream(state: tuple | None) -> None:
    """Let the latest stream go on from `state`, which is the same on all ranks, or from rank 0's generators.

    As of a run in one process, where data and model draw from the same ones. Collective.
    """
    if RandomStream.latest is None:
        return
    RandomStream.latest.state = messages.send_from_one(RandomStream._get) if state is None else state


def _is_equal_state(one: tuple, other: tuple) -> bool:
    (torch_one, numpy_one, python_one), (torch_other, numpy_other, python_other) = one, other
    same = torch.equal(torch_one, torch_other) and python_one == python_other
    return same and all(np.array_equal(a, b) for a, b in zip(numpy_one, numpy_other, strict=True))
