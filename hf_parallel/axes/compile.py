"""torch.compile of each layer by itself: equal layers share one graph, and what lies between them stays as it is.

The layer's own forward is compiled, not what FSDP2, sequence parallelism and checkpointing put around it, which run as
ever. A region of tensor parallelism communicates inside the layer, where its graph would break: refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building

BACKEND = "inductor"


class Compile(Axis[None, None]):
    """Compiles layers once every other axis has been applied."""

    name = "compile"

    def is_on(self, config: ParallelConfig) -> bool:
        return config.compile != "none"

    def finish(self, model: nn.Module, part: None, building: Building) -> None:
        """Compile the layers of this rank."""
        compile_layers(layer for _, layers in building.roots for layer in layers)


def compile_layers(layers: Iterable[nn.Module], **settings: Any) -> None:
    """Compile the forward of each, in place; `settings` are those of torch.compile."""
    import torch

    from hf_parallel.axes.data import lowered

    for layer in layers:
        lowered.leave_layer(layer)
        number_hooks_alike(layer)
        if not hasattr(layer.forward, "_torchdynamo_orig_callable"):  # compiled already
            layer.forward = torch.compile(layer.forward, **{"backend": BACKEND, **settings})


def number_hooks_alike(layer: nn.Module) -> None:
    """Give this package's hooks inside a layer the numbers -1, -2, … in the place of torch's, in the same order.

    torch counts hooks over all modules of a process, and a graph holds for the numbers that it has seen: with those of
    torch each layer would have a graph of its own.
    """
    for module in layer.modules():
        if module is layer:
            continue  # its hooks run outside of the graph
        for hooks, *flags in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ):
            numbers = {number: -place for place, number in enumerate(hooks, start=1)}
            for numbered in (hooks, *flags):
                entries = {numbers[number]: value for number, value in numbered.items()}
                numbered.clear()
                numbered.update(entries)


COMPILE = Compile()
