"""Which settings of Accelerate any layout keeps: another engine, fp8 of its own and hooks of DDP are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.arguments import by_name
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from accelerate import Accelerator, LocalSGD

#: Arguments of Accelerator, the variable by which the launcher says the same, and what works.
_ENGINES = (
    (("fsdp_plugin",), "ACCELERATE_USE_FSDP", "dp_shard in the spec"),
    (("deepspeed_plugin", "deepspeed_plugins"), "ACCELERATE_USE_DEEPSPEED", "dp_shard and zero_stage in the spec"),
    (("megatron_lm_plugin",), "ACCELERATE_USE_MEGATRON_LM", "tp and pp in the spec"),
    (("parallelism_config", "torch_tp_plugin"), "ACCELERATE_USE_PARALLELISM_CONFIG", "the spec alone"),
)


@patch(
    "accelerate.accelerator:Accelerator.__init__", "an engine of its own; hooks of DDP and time-outs have no effect"
)
def init(original: Callable, self: Accelerator, *args: object, **kwargs: object) -> None:
    """Refuse what would do the layout's work a second time; its time-out holds on all groups."""
    if runtime.current() is None:
        original(self, *args, **kwargs)
        return
    _check_engines(by_name(original, (self, *args), kwargs))
    original(self, *args, **kwargs)
    if self.mixed_precision == "fp8":
        refuse("mixed_precision=fp8", "Accelerate converts whole models", "precision=fp8 in the spec")
    hook = "no" if self.ddp_handler is None else self.ddp_handler.comm_hook.value
    if hook != "no" and _have_data_ranks():
        refuse(f"comm_hook={hook}", "there is no DDP to call it", "quantize_gradients=int8 in the spec")
    asked = self.init_handler.to_kwargs() if self.init_handler is not None else {}
    if "timeout" in asked:
        runtime.change_time_out(asked["timeout"])


def _have_data_ranks() -> bool:
    return runtime.mesh().config.data_parallel_size > 1


def _check_engines(given: dict[str, object]) -> None:
    for names, variable, works in _ENGINES:
        named = [name for name in names if given.get(name) is not None]
        named += [variable] if os.environ.get(variable, "false").lower() == "true" else []
        if named:
            refuse(f"{named[0]} of Accelerate", "a second layout beside --parallel", works)


@patch("accelerate.local_sgd:LocalSGD.__init__", "keeps weights of its own on each data rank")
def local_sgd(original: Callable, self: LocalSGD, *args: object, **kwargs: object) -> None:
    """With one data rank it does nothing, as in one process; several hold the same weights, or parts of them."""
    given = by_name(original, (self, *args), kwargs)
    if runtime.current() is not None:
        if given.get("enabled", True) and _have_data_ranks():
            refuse("LocalSGD", "data ranks share one set of weights", "LocalSGD(…, enabled=False)")
        given["enabled"] = False
    original(**given)
