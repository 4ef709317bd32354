"""A script's hooks on the layers of a parallel model, which see a rank's part of the tokens, and parametrizations.

Interventions, probes and adversarial trainings keep or change what a layer gives. Hooks that read numbers of their
module alone, such as its time, are right; so this is no reason to stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.apply.weights import list_parallel_models
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.apply.parallelize import ParallelState

#: Libraries whose hooks know the layout, or look at no tokens.
_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "trl", "sentence_transformers", "hf_parallel"}


@patch(
    "torch.nn.modules.module:Module.{register_forward_hook,register_forward_pre_hook,register_full_backward_hook,"
    "register_full_backward_pre_hook}",
    "sees a rank's part of the tokens, in silence",
)
def register_hook_on_module(original: Callable, self: nn.Module, *args: object, **kwargs: object) -> object:
    """Print a line if a script's hook will see a part of the tokens that its module sees in one process."""
    if _find_caller() not in _LIBRARIES:
        for model in list_parallel_models():
            state = runtime.find_parallel_state(model)
            if state is not None and (parts := _list_axes_with_parts(state)) and _is_in_layer(model, self):
                line = (
                    f"a hook on {type(self).__name__} sees {' and '.join(parts)}: what a script keeps, adds up or "
                    "changes in it may give other numbers than in one process (docs/idioms.md)"
                )
                if state.note_line(line):
                    report.say(line)
    return original(self, *args, **kwargs)


def _find_caller() -> str:
    """Return the name of the package that calls a function which is replaced here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hf_parallel":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0]


@patch("torch.nn.utils.parametrize:register_parametrization", "computes with a rank's part of a weight")
def register_parametrization(original: Callable, module: nn.Module, *args: object, **kwargs: object) -> object:
    """Refuse to compute a weight from one that is in parts, or from what a stage alone has drawn, as minLoRA does.

    PEFT's own, of `target_parameters`, know the layout.
    """
    for model in list_parallel_models() if _find_caller() != "peft" else ():
        state = runtime.find_parallel_state(model)
        name = next((name for name, one in model.named_modules() if one is module), None)
        if state is not None and name is not None and state.mesh.config.world_size > 1:
            works = "register it before the model is made parallel, on one of from_config, or train PEFT's LoRA"
            refuse(f"a parametrization of {name}", "ranks have parts of the model already", do=works)
    return original(module, *args, **kwargs)


def _list_axes_with_parts(state: ParallelState) -> list[str]:
    """List in words how the hooks of a layer see less than in one process."""
    parts, sizes = [], {axis: state.mesh.size(axis) for axis in ("tp", "cp", "pp")}
    if sizes["tp"] > 1 and state.sequence_parallel:
        parts.append(f"1/{sizes['tp']} of the tokens under tp_size={sizes['tp']} (sequence_parallel=false shows all)")
    if sizes["cp"] > 1:
        parts.append(f"1/{sizes['cp']} of the tokens under cp_size={sizes['cp']}")
    if sizes["pp"] > 1:
        parts.append(f"a micro-batch at a time, on the ranks that hold it, under pp_size={sizes['pp']}")
    return parts


def _is_in_layer(model: nn.Module, module: nn.Module) -> bool:
    """Return whether the module is one of the layers, which a list numbers, or a part of one."""
    return any(one is module and any(map(str.isdigit, name.split("."))) for name, one in model.named_modules())
