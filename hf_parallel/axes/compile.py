"""torch.compile of each layer by itself: equal layers share one graph, and what lies between them stays as it is.

The layer's own forward is compiled, not what FSDP2, sequence parallelism and checkpointing put around it, which run as
ever. A region of tensor parallelism communicates inside the layer, where its graph would break: refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.axes.pipeline.axis import SPLIT_BACKWARD
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig

BACKEND = "inductor"


@dataclass(frozen=True)
class CompileKeys(Keys):
    compile: str = key(
        "none",
        "`regional` compiles each layer, equal ones once; over `dp_shard`, `dp_replicate` and `pp`",
        choices=("none", "regional"),
    )


class Compile(Axis[None, None]):
    """Compiles layers once every other axis has been applied."""

    name = "compile"
    alone = True

    def check(self, config: ParallelConfig) -> None:
        """Not what communicates inside of layers, nor schedules that take a backward pass apart."""
        if config.compile != "none":
            check_compiled(config, f"compile={config.compile}")

    def is_on(self, config: ParallelConfig) -> bool:
        return config.compile != "none"

    def finish(self, model: nn.Module, part: None, building: Building) -> None:
        """Compile the layers of this rank."""
        compile_layers(layer for _, layers in building.roots for layer in layers)


def check_compiled(config: ParallelConfig, asked: str) -> None:
    """Refuse what compiled layers cannot do; `asked` is what asks for them."""
    for axis in ("tp", "cp", "ep"):
        size = getattr(config, f"{axis}_size")
        if size > 1:
            refuse(asked, f"{axis}_size={size} communicates inside each layer, where graphs break", f"{axis}_size=1")
    if config.pp_size > 1 and config.pipeline_schedule in SPLIT_BACKWARD:
        why = "computes gradients of inputs and of weights at different times, a compiled layer both at once"
        refuse(asked, f"pipeline_schedule={config.pipeline_schedule} {why}", "pipeline_schedule=1f1b")


def compile_layers(layers: Iterable[nn.Module], **settings: Any) -> None:
    """Compile the forward of each, in place; `settings` are those of torch.compile."""
    import torch

    from hf_parallel.axes.data import lowered

    for layer in layers:
        lowered.leave(layer)
        if not hasattr(layer.forward, "_torchdynamo_orig_callable"):  # compiled already
            layer.forward = torch.compile(layer.forward, **{"backend": BACKEND, **settings})


COMPILE = CompileKeys.axis = Compile()
