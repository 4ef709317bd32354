"""Random numbers of a rank's own, where the ranks of a group drop different things.

Ranks of a tensor-parallel group share their random state, so dropout agrees where they hold the same tensor. Where
they hold different heads or different parts of the sequence the masks must differ (Megatron-LM's two random states).
Here a rank's own state follows from the shared state and its number, and nothing is kept between calls: activation
checkpointing restores the shared state, and so finds the same masks again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.session import of_session
from hf_parallel.model.anatomy import Draws


@dataclass
class _Scopes:
    """The scopes of own random numbers that are open now, innermost last."""

    open: list[OwnRandomNumbers] = field(default_factory=list)


class OwnRandomNumbers:
    """Between `begin` and `end` random numbers differ over the group; around them all stays equal."""

    def __init__(self, owner: nn.Module, group: dist.ProcessGroup) -> None:
        self.owner, self.group = owner, group
        self._draws = Draws(owner)
        self._shared: tuple[torch.device, torch.Tensor] | None = None

    def begin(self, *args: object) -> None:
        """Change to this rank's state; nothing happens in evaluation, or where nothing is drawn. Also a pre-hook."""
        if torch.compiler.is_compiling():
            return  # layers that draw are refused: `compile.py`
        if self._shared is None and self._draws:
            self._start(next(self.owner.parameters()).device)

    def end(self, *args: object) -> None:
        """Return to the shared state, one number on: the next use must not repeat the masks. Also a forward hook."""
        if self._shared is None:
            return
        (device, state), self._shared = self._shared, None
        of_session(_Scopes).open.remove(self)
        _get_generator(device).set_state(state)
        torch.rand((), device=device)

    def _start(self, device: torch.device) -> None:
        generator = _get_generator(device)
        state = generator.get_state()
        common = int.from_bytes(hashlib.blake2b(bytes(state.tolist()), digest_size=7).digest(), "big")
        own_seed = (common + self.group.rank() * _STRIDE) % _SEEDS
        generator.manual_seed(own_seed)
        self._shared = device, state
        of_session(_Scopes).open.append(self)


@contextlib.contextmanager
def share_numbers() -> Iterator[None]:
    """Draw random numbers that are the same on all ranks, within a scope of own ones or not."""
    scopes = of_session(_Scopes).open
    if not scopes:
        yield
        return
    scope = scopes[-1]
    assert scope._shared is not None
    device, state = scope._shared
    generator = _get_generator(device)
    own = generator.get_state()
    generator.set_state(state)
    yield
    scope._shared = device, generator.get_state()
    generator.set_state(own)


@contextlib.contextmanager
def share_numbers_of_layer(device: torch.device, group: dist.ProcessGroup, number: int) -> Iterator[None]:
    """Share random numbers in a layer, inside of which a checkpoint starts that knows its own state only.

    All ranks know the seed of that state. `number` tells the users of one scope apart.
    """
    generator = _get_generator(device)
    own, common = generator.get_state(), (generator.initial_seed() - group.rank() * _STRIDE) % _SEEDS
    hashed = hashlib.blake2b(common.to_bytes(7, "big") + number.to_bytes(8, "big"), digest_size=7)
    generator.manual_seed(int.from_bytes(hashed.digest(), "big"))
    try:
        yield
    finally:
        generator.set_state(own)


@contextlib.contextmanager
def draw_own_numbers(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Draw random numbers of this rank's own, within a scope of them or not."""
    if of_session(_Scopes).open:
        yield
        return
    with draw_numbers_of_each(device, group):
        yield


@contextlib.contextmanager
def draw_numbers_of_each(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Draw random numbers that differ over the group, and agree on ranks outside of it whose state agrees."""
    scope = OwnRandomNumbers(nn.Identity(), group)
    scope._start(device)
    try:
        yield
    finally:
        scope.end()


#: Seeds of neighbouring ranks lie this far apart; mt19937 reads the low 32 bits only.
_STRIDE, _SEEDS = 0x9E3779B1, 2**56


def _get_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.get_device_module(device).default_generators[index]
