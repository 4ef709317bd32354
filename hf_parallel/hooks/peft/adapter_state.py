"""Which adapters are on: a script switches them on the last stage of a pipeline, the other stages follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class AdapterState:
    """Reads and sets what `disable_adapter()` and `set_adapter()` change, but for what trains."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def read(self) -> tuple[bool, tuple[str, ...]] | None:
        """Whether adapters are off, and which are active otherwise; None for a stage without any."""
        if not self.layers:
            return None
        return self.layers[0]._disable_adapters, tuple(self.layers[0].active_adapters)

    @contextlib.contextmanager
    def as_in(self, state: tuple[bool, tuple[str, ...]] | None) -> Iterator[None]:
        """In here adapters are as `read` found them on another stage."""
        former = [(layer, layer._disable_adapters, layer._active_adapter) for layer in self.layers]
        if state is not None:
            for layer in self.layers:
                layer._disable_adapters, layer._active_adapter = state[0], list(state[1])
        try:
            yield
        finally:
            for layer, disabled, active in former:
                layer._disable_adapters, layer._active_adapter = disabled, active
