"""What all ranks call together, and seldom: each call first asks whether all of them are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_parallel.collectives import assert_all_ranks
from hf_parallel.hooks import runtime

_ENDED = "decide alike on all ranks when to stop: control.should_training_stop of one rank stops that one alone"


def attended(call: str) -> Callable:
    """The others come too, and the first batches of the loader that follows are compared."""

    def make(original: Callable) -> Callable:
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            assert_all_ranks(call)
            _begin(self.model)
            return original(self, *args, **kwargs)

        return replacement

    return make


def train(original: Callable) -> Callable:
    """All ranks begin, and all end after the same step."""

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert_all_ranks("trainer.train")
        _begin(self.model)
        found = original(self, *args, **kwargs)
        assert_all_ranks("the end of trainer.train", _ENDED)
        return found

    return replacement


def _begin(model: Any) -> None:
    state = None if model is None else runtime.parallel_state(model)
    if state is not None:
        state.batches.begin()
