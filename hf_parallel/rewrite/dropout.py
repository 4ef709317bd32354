"""Random numbers of a rank's own, where ranks drop different things.

Ranks of a tensor-parallel group share their random state, so dropout agrees where they hold the same tensor. Where
they hold different heads or different parts of the sequence the masks must differ (Megatron-LM's two random states).
Here the own state follows from the shared one and the rank, and nothing is kept between calls: activation
checkpointing, which restores the shared state, finds the same masks again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: The scopes that are open now, innermost last.
_open: list[OwnRandomNumbers] = []


class OwnRandomNumbers:
    """Between `begin` and `end` random numbers differ over the group; around them all stays equal."""

    def __init__(self, owner: nn.Module, group: dist.ProcessGroup) -> None:
        self.owner, self.group = owner, group
        self._needed: bool | None = None
        self._shared: tuple[torch.device, torch.Tensor] | None = None

    def begin(self, *args: Any) -> None:
        """Change to this rank's state; nothing happens in evaluation, or where nothing drops. Also a pre-hook."""
        if not self.owner.training or self._shared is not None:
            return
        if self._needed is None:
            self._needed = drops_out(self.owner)
        if not self._needed:
            return
        self._start(next(self.owner.parameters()).device)

    def end(self, *args: Any) -> None:
        """Back to the shared state, one number on: the next use must not repeat the masks. Also a forward hook."""
        if self._shared is None:
            return
        (device, state), self._shared = self._shared, None
        _open.remove(self)
        _set_state(device, state)
        torch.rand((), device=device)

    def _start(self, device: torch.device) -> None:
        state = _get_state(device)
        digest = hashlib.blake2b(bytes(state.tolist()) + self.group.rank().to_bytes(4, "big"), digest_size=7)
        _generator(device).manual_seed(int.from_bytes(digest.digest(), "big"))
        self._shared = device, state
        _open.append(self)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Draw from the shared state for a while, as all ranks do."""
        assert self._shared is not None
        device, state = self._shared
        own = _get_state(device)
        _set_state(device, state)
        yield
        self._shared = device, _get_state(device)
        _set_state(device, own)


def shared_numbers() -> contextlib.AbstractContextManager:
    """Random numbers that are the same on all ranks, within a scope of own ones or not."""
    return _open[-1].suspended() if _open else contextlib.nullcontext()


@contextlib.contextmanager
def own_numbers(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Random numbers of this rank's own, within a scope of them or not."""
    if _open:
        yield
        return
    scope = OwnRandomNumbers(nn.Identity(), group)
    scope._start(device)
    try:
        yield
    finally:
        scope.end()


def drops_out(module: nn.Module) -> bool:
    """Is any dropout probability in the module above zero, kept by a Dropout or as a number?"""
    for child in module.modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return True
        if any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(child).items()):
            return True
    return False


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]


def _get_state(device: torch.device) -> torch.Tensor:
    return _generator(device).get_state()


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    _generator(device).set_state(state)
