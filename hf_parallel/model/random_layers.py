"""Which modules draw random numbers while they train: dropout, and noise on what routers read."""

from __future__ import annotations

from torch import nn

#: How often layers that draw have come into a model.
_changes = [0]
#: Numbers above zero by such names say how much a module drops, or how large its noise is.
_NAMES = ("drop", "jitter", "noise")
#: NEFTune's noise is none of these: it is drawn for whole examples, by the same numbers on all ranks.
_DRAWN_TOGETHER = "neftune_noise_alpha"


class Draws:
    """Whether a module draws random numbers in training: looked up once, and again where layers have come in."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: tuple[int, bool] | None = None

    def __bool__(self) -> bool:
        if not self.module.training:
            return False
        if self._known is None or self._known[0] != _changes[0]:
            self._known = _changes[0], draws_random_numbers(self.module)
        return self._known[1]


def look_again() -> None:
    """Layers that draw have come into a model: who has looked must look again."""
    _changes[0] += 1


def draws_random_numbers(module: nn.Module) -> bool:
    """Is any dropout probability or size of a noise in the module above zero, kept by a Dropout or as a number?"""
    for child in module.modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            return True
        for key, value in vars(child).items():
            if key == _DRAWN_TOGETHER or not isinstance(value, float) or value <= 0:
                continue
            if any(name in key for name in _NAMES):
                return True
    return False
