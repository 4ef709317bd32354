"""Gathered copies of weights: what a script does to them is done to the stored weights.

FSDP2 registers a copy in the place of a stored parameter from a forward pass to its backward pass, and drops it. Where
no backward pass follows, a script finds copies in the model until the next forward pass:

    module.parameters(), named_parameters()     give stored parameters (hooks/own_loops.py)
    module.weight.requires_grad_(False)         is carried to the stored one when the copy is dropped
    nn.init.normal_(module.weight), .data = x   are written to this rank's part of it then; refused of rounded copies
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data.compressed import GatherWeights
from hf_parallel.axes.data.units import get_groups_of, get_state_of, iterate_parameter_groups
from hf_parallel.ranks.mesh import STORED, get_stored, is_copy

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

#: Attribute of a pipeline's stage, whose schedule asks for copies between its passes.
SCHEDULED = "_hf_parallel_scheduled"
#: Of FSDP2's record of a parameter: what follows its copies.
_FOLLOWS = "_hf_parallel_follows_copy"


def follow_copies(root: nn.Module) -> None:
    """Let what a script does to copies that the units below `root` have gathered reach the stored weights."""
    for group in iterate_parameter_groups(root):
        for held in group.fsdp_params:
            if _FOLLOWS not in vars(held):
                setattr(held, _FOLLOWS, _Followed(held, get_state_of(group.modules[0])))


def find_resting_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the stored parameter in the place of a copy, but while the model runs, which computes with copies."""
    held = getattr(parameter, STORED, None)
    if held is None:
        return parameter
    followed = vars(held)[_FOLLOWS]
    return parameter if followed.runs or followed.is_scheduled else held.sharded_param


class Copy(nn.Parameter):
    """A gathered parameter whose `data` counts writes as its own, and keeps its memory."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not is_copy(self):  # what `deepcopy` has made of one
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif value.shape == self.shape:
            self.detach().copy_(value)
        else:
            shapes = f"{tuple(value.shape)} for one of {tuple(self.shape)}"
            raise NotImplementedError(f"hf_parallel: p.data = x: a tensor of {shapes}, of which data ranks hold parts")


Copy.__name__ = nn.Parameter.__name__  # for scripts


class _Followed:
    """What becomes of one parameter's copy.

    Attributes:
        state: FSDP2's, of the unit.
        trained: did the parameter train when it was gathered?
        version: how often the copy had been written to by then.
        stored_version: how often the stored parameter had been.
    """

    def __init__(self, held: FSDPParam, state: FSDPState) -> None:
        self.held, self.state = held, state
        self.trained, self.version, self.stored_version = False, 0, 0
        self._gather, self._free = held.to_unsharded, held.to_sharded
        held.to_unsharded, held.to_sharded = self.begin, self.end  # type: ignore[method-assign]

    @property
    def runs(self) -> bool:
        """Is the unit computing, or the model around it, forward or backward?"""
        states = (self.state, *self.state._state_ctx.all_states[:1])  # the root's is the first
        return any(state._training_state is not TrainingState.IDLE for state in states)

    @property
    def is_scheduled(self) -> bool:
        """Is the unit in a stage? Only its schedule knows whether it runs, and asks for copies between passes."""
        return any(getattr(state._modules[0], SCHEDULED, False) for state in self.state._state_ctx.all_states[:1])

    def begin(self) -> None:
        """Register a copy."""
        self._gather()
        copy: Any = self.held._unsharded_param
        stored: Any = self.held.sharded_param
        if STORED not in copy.__dict__:
            setattr(copy, STORED, self.held)
            if type(copy) is nn.Parameter and type(copy.data) is torch.Tensor:
                copy.__class__ = Copy
        self.trained = stored.requires_grad
        if not stored.is_inference() and not copy.is_inference():
            self.stored_version = stored._version + stored._local_tensor._version
            self.version = copy._version + (copy._local_tensor._version if isinstance(copy, DTensor) else 0)

    def end(self) -> None:
        """Drop the copy, after which the stored parameter has what a script has changed of it."""
        if self.state._training_state is TrainingState.IDLE and not self.runs:  # else it is a pass that drops it
            owner = self.held._module_info
            copy = owner.module._parameters.get(owner.param_name)
            if copy is not None and getattr(copy, STORED, None) is self.held:
                if copy.requires_grad != self.trained:
                    self.held.sharded_param.requires_grad_(copy.requires_grad)
                self._keep_writes(copy)
        self._free()

    def _keep_writes(self, copy: nn.Parameter) -> None:
        whole, part = get_stored(copy), get_stored(self.held.sharded_param)
        if self.held.sharded_param.is_inference() or copy.is_inference():  # torch counts no changes of these
            return
        if _count_changes(copy) == self.version or whole.data_ptr() == part.data_ptr():
            return
        why = None
        if _count_changes(self.held.sharded_param) != self.stored_version:
            why = "and as one of model.parameters(), too"
        elif not self._is_exact(whole, part):
            why = f"where it is a rounded copy ({whole.dtype}) of what is stored ({part.dtype})"
        if why is not None:
            owner = self.held._module_info
            raise NotImplementedError(
                f"hf_parallel: {type(owner.module).__name__}.{owner.param_name} was written to after a forward pass "
                f"without a backward pass, {why}; a write to one of model.parameters() alone works"
            )
        mesh, dim = self.held.mesh_info, self.held.fsdp_placement.dim
        parts = whole.chunk(mesh.shard_mesh_size, dim)
        with torch.no_grad():
            if mesh.shard_mesh_rank < len(parts):
                part.copy_(parts[mesh.shard_mesh_rank])

    def _is_exact(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Does the copy have the very numbers that are stored? Mixed precision and quantised gathers round them."""
        gathers = [group._all_gather_comm for group in get_groups_of(self.state._modules[0])]
        rounds = any(isinstance(gather, GatherWeights) and gather.kind != "none" for gather in gathers)
        return type(whole) in (Copy, torch.Tensor) and whole.dtype == part.dtype and not (rounds and whole.ndim > 1)


def _count_changes(parameter: torch.Tensor) -> int:
    """Return how often a tensor was written to: by itself, or past a DTensor to the part in it."""
    return parameter._version + (parameter._local_tensor._version if isinstance(parameter, DTensor) else 0)
