"""`p.data = x` of a parameter that ranks hold parts of: it shares x's memory afterwards, as an ordinary one would.

FSDP2 gathers from memory that it remembers beside the parameter, padded where ranks hold unequal parts. torch has no
call for the exchange: a unit's parameter group is its internal, looked at in torch 2.13.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.axes.data.reduction import parameter_groups
from hf_parallel.axes.offload import folder, parameters_rest
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_installed: list[RemovableHandle] = []
#: Of a parameter: the group that gathers it, and what FSDP2 knows of it.
_known: Any = WeakIdKeyDictionary()


def assign(parameter: DTensor, value: DTensor, models: Iterable[nn.Module]) -> None:
    """Let `parameter` be what `value` is, in its memory where that can be gathered from.

    Args:
        value: of the same shape and placements.
        models: among them the one that the parameter is of.
    """
    found = _held(parameter, models)
    if found is None:
        _exchange(parameter, value)
        return
    group, held, offload = found
    _check(group, parameter, value, offload)
    group.reshard()  # what was gathered is no longer what it was
    _exchange(parameter, value)
    held.reset_sharded_param()
    value._local_tensor = parameter._local_tensor  # also where FSDP2 has padded it


def _exchange(parameter: DTensor, value: DTensor) -> None:
    _SET_DATA(parameter, value)  # what the tensor around the stored part says of itself
    parameter._spec, parameter._local_tensor = copy.copy(value._spec), value._local_tensor


def refuse_replacing() -> None:
    """From here on a sharded parameter stays the one that it is. A second call changes nothing."""
    if not _installed:
        _installed.append(register_module_parameter_registration_hook(_refuse_replacing))


def _refuse_replacing(module: nn.Module, name: str, new: nn.Parameter) -> None:
    """FSDP2 puts its own parameters back at the next gather; a split layer would compute with the whole."""
    there = module._parameters.get(name)
    if new is there or not isinstance(there, DTensor) or there._local_tensor.is_meta:
        return
    if type(module).__setattr__ is nn.Module.__setattr__:
        why = "ranks hold parts of the one that is there"
        refuse(f"{type(module).__name__}.{name} = nn.Parameter(…)", why, f"{name}.data = …")


def _check(group: Any, parameter: DTensor, value: DTensor, offload: str) -> None:
    """Before anything is changed."""
    advice = "p.data.copy_(x)"
    if folder(offload) and parameters_rest(offload):
        refuse("p.data = x", f"with offload={offload} parameters lie in a file", advice)
    if type(parameter._local_tensor) is not torch.Tensor:
        refuse("p.data = x", f"of a {type(parameter._local_tensor).__name__}, whose memory is its own", advice)
    if group._reset_sharded_params and parameter._local_tensor.dtype != value.dtype:
        why = f"from {parameter._local_tensor.dtype} to {value.dtype} after a forward pass of a sharded model"
        refuse("p.data = x", why, do="give the model another dtype before it runs")


def _held(parameter: DTensor, models: Iterable[nn.Module]) -> tuple[Any, Any, str] | None:
    known = _known.get(parameter)
    held = None if known is None else known[1]()
    if known is not None and held is not None and held.sharded_param is parameter:
        return known[0](), held, known[2]
    for model in models:
        state = getattr(model, "_hf_parallel", None)
        if state is not None and state.config.sharing_size > 1:
            _remember(state.root, state.config.offload)
    known = _known.get(parameter)
    return None if known is None else (known[0](), known[1](), known[2])


def _remember(root: nn.Module, offload: str) -> None:
    for group in parameter_groups(root):
        for held in group.fsdp_params:
            _known[held.sharded_param] = weakref.ref(group), weakref.ref(held), offload
