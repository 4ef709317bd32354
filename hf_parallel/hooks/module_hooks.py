"""A script's hooks on the layers of a parallel model, which see a rank's part of the tokens, and parametrizations.

Interventions, probes and adversarial trainings keep or change what a layer gives. Hooks that read numbers of their
module alone, such as its time, are right; so this is no reason to stop.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.apply.weights import list_parallel_models
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.units import let_kept_outputs_gather
from hf_parallel.axes.tensor.layers import ColumnParallel, RowParallel, SharedHeads
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.model.families import LIBRARIES, is_hook_of_script

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.apply.parallelize import ParallelState


@patch(
    "torch.nn.modules.module:Module.{register_forward_hook,register_forward_pre_hook,register_full_backward_hook,"
    "register_full_backward_pre_hook}",
    "sees a rank's part of the tokens, in silence",
)
def register_hook_on_module(original: Callable, self: nn.Module, *args: object, **kwargs: object) -> object:
    """Print a line if a script's hook will see a part of the tokens that its module sees in one process.

    What it keeps of a module may be all that a loss reads: gradients of that gather weights, too.
    """
    if _find_caller() not in LIBRARIES:
        for model in list_parallel_models():
            name = next((name for name, one in model.named_modules() if one is self), "")
            _tell_of_hook(model, name, type(self).__name__)
            if name:
                let_kept_outputs_gather(model, name)
    return original(self, *args, **kwargs)


@patch(
    "torch.nn.modules.module:register_module_{forward_hook,forward_pre_hook,full_backward_hook,full_backward_pre_hook}",
    "sees a rank's part of the tokens, in silence",
)
def register_hook_on_all_modules(original: Callable, *args: object, **kwargs: object) -> object:
    """Print such a line for a hook on every module there is."""
    if _find_caller() not in LIBRARIES:
        for model in list_parallel_models():
            _tell_of_hook(model, None)
    return original(*args, **kwargs)


@contextlib.contextmanager
def tell_of_earlier_hooks(model: nn.Module) -> Iterator[None]:
    """Print such a line for hooks that a script has set on `model`, which becomes parallel inside the `with`."""
    hooked: list[tuple[str | None, str]] = []
    for name, one in model.named_modules():
        tables = (one._forward_hooks, one._forward_pre_hooks, one._backward_hooks, one._backward_pre_hooks)
        if any(is_hook_of_script(hook) for table in tables for hook in table.values()):
            hooked.append((name, type(one).__name__))
    for table in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        if any(is_hook_of_script(hook) for hook in getattr(torch.nn.modules.module, table).values()):
            hooked.append((None, ""))
    yield
    for place, kind in hooked:
        _tell_of_hook(model, place, kind)
        if place:
            let_kept_outputs_gather(model, place)


def _tell_of_hook(model: nn.Module, name: str | None, kind: str = "") -> None:
    """Print once what a hook on this module of a parallel model sees; None: on every module."""
    state = runtime.find_parallel_state(model)
    if state is None or name == "":
        return
    parts = _list_axes_with_parts(state, model, name)
    line = (
        f"a hook on {kind or 'all modules'} sees {' and '.join(parts)}: what a script keeps, adds up or changes in it "
        "may give other numbers than in one process (docs/idioms.md)"
    )
    if parts and state.note_line(line):
        report.say(line)


def _find_caller() -> str:
    """Return the name of the package that calls a function which is replaced here."""
    frame = sys._getframe(1)
    ours = ("hf_parallel", "contextlib")  # which stands between, where a hook is set in a context of ours
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
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


@patch("torch.nn.utils.stateless:_functional_call", "gathers no weights that it is given")
def call_with_other_weights(
    original: Callable, module: nn.Module, parameters_and_buffers: dict[str, torch.Tensor], *args: Any, **kwargs: Any
) -> object:
    """Refuse `torch.func.functional_call` where a parallel model cannot compute with other weights than its own."""
    inside = set(module.modules())
    for model in list_parallel_models():
        state = runtime.find_parallel_state(model)
        if state is None or inside.isdisjoint(model.modules()):
            continue
        sharing, stages = state.mesh.config.sharing_size, state.mesh.size("pp")
        trains = torch.is_grad_enabled() and any(value.requires_grad for value in parameters_and_buffers.values())
        works = "tp_size works, and so does a copy.deepcopy(model) that takes the values by p.data.copy_(x)"
        if sharing > 1:
            what = f"functional_call with data and context ranks={sharing}"
            refuse(what, "weights of a script are not gathered over them", do=works)
        if stages > 1 and trains:
            what = f"functional_call with pp_size={stages} and weights that need gradients"
            refuse(what, "each micro-batch goes back through them by itself", do=works)
        if torch._C._functorch.peek_interpreter_stack() is not None and state.mesh.config.world_size > 1:
            why = "it cannot transform what ranks send"
            refuse("torch.func on a parallel model", why, do="call one model at a time")
    return original(module, parameters_and_buffers, *args, **kwargs)


def _list_axes_with_parts(state: ParallelState, model: nn.Module, name: str | None) -> list[str]:
    """List in words how the hooks of a module see less than in one process; None is any module."""
    parts, sizes = [], {axis: state.mesh.size(axis) for axis in ("tp", "cp", "pp")}
    module = dict(model.named_modules()).get(name or "")
    is_in_layer = name is None or any(map(str.isdigit, name.split(".")))  # layers have numbers
    split = is_in_layer and isinstance(module, ColumnParallel | RowParallel | SharedHeads)
    if sizes["tp"] > 1 and is_in_layer and state.sequence_parallel and not split:
        parts.append(f"1/{sizes['tp']} of the tokens under tp_size={sizes['tp']} (sequence_parallel=false shows all)")
    if sizes["tp"] > 1 and split:
        parts.append(f"1/{sizes['tp']} of the features, or of the tokens, under tp_size={sizes['tp']}")
    if sizes["cp"] > 1:
        parts.append(f"1/{sizes['cp']} of the tokens under cp_size={sizes['cp']}")
    if sizes["pp"] > 1:
        parts.append(f"a micro-batch at a time, on the ranks that hold it, under pp_size={sizes['pp']}")
    return parts
