"""`p.data = x` of a parameter that ranks hold parts of: it shares x's memory afterwards, as an ordinary one would.

FSDP2 gathers from memory that it remembers beside the parameter, padded where ranks hold unequal parts. torch has no
call for the exchange: a unit's parameter group is its internal, looked at in torch 2.13.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.axes.data.late_parameters import places
from hf_parallel.axes.data.units import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Of a parameter: the group that gathers it, and what FSDP2 knows of it.
_known: Any = WeakIdKeyDictionary()


class Held(NamedTuple):
    """The group that gathers a parameter, what FSDP2 knows of it there, and where it rests."""

    group: FSDPParamGroup
    held: FSDPParam
    offload: str

    def knows(self, parameter: torch.Tensor) -> bool:
        """Is it the one that FSDP2 has of these numbers, stored or gathered?"""
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return any(getattr(self.held, name, None) is parameter for name in names)


def assign(parameter: DTensor, value: DTensor, found: Held | None) -> None:
    """Let `parameter` be what `value` is, in its memory where that can be gathered from.

    Args:
        value: of the same shape and placements.
        found: who gathers it, if anybody does.
    """
    if found is None:
        _exchange(parameter, value)
        return
    found.group.reshard()  # what was gathered is no longer what it was
    _exchange(parameter, value)
    found.held.reset_sharded_param()
    value._local_tensor = parameter._local_tensor  # also where FSDP2 has padded it


def _exchange(parameter: DTensor, value: DTensor) -> None:
    _SET_DATA(parameter, value)  # what the tensor around the stored part says of itself
    parameter._spec, parameter._local_tensor = copy.copy(value._spec), value._local_tensor


def held_by(parameter: torch.Tensor, models: Iterable[nn.Module]) -> Held | None:
    """Who gathers a parameter of one of these models; of a gradient, nobody."""
    found = _recalled(parameter)
    if found is not None or not isinstance(parameter, nn.Parameter):
        return found
    for model in models:
        state = getattr(model, "_hf_parallel", None)
        if state is not None and state.config.sharing_size > 1:
            _remember(state.root, state.config.offload)
    return _recalled(parameter)


def held_at(module: nn.Module, name: str, models: Iterable[nn.Module]) -> Held | None:
    """Who gathers what a module has under a name, whatever is there now."""
    for model in models:
        state: Any = getattr(model, "_hf_parallel", None)
        for group in parameter_groups(state.root) if state is not None else ():
            for held in group.fsdp_params:
                if (id(module), name) in places(held._module_info):
                    return Held(group, held, state.config.offload)
    return None


def gathered(model: nn.Module) -> Iterator[nn.Parameter]:
    """What FSDP2 registers in the place of parameters between a forward and a backward pass."""
    state = getattr(model, "_hf_parallel", None)
    for group in parameter_groups(state.root) if state is not None else ():
        yield from (held._unsharded_param for held in group.fsdp_params if hasattr(held, "_unsharded_param"))


def _recalled(parameter: torch.Tensor) -> Held | None:
    group, held, offload = _known.get(parameter, (None, None, ""))
    group, held = group and group(), held and held()
    return Held(group, held, offload) if held is not None and held.sharded_param is parameter else None


def _remember(root: nn.Module, offload: str) -> None:
    for group in parameter_groups(root):
        for held in group.fsdp_params:
            _known[held.sharded_param] = weakref.ref(group), weakref.ref(held), offload
