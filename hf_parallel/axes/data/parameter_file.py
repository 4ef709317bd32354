"""Parameters at rest in a file: a layer's are read ahead of its gather, and let go of after it (ZeRO-Infinity).

    gathers        layer 1      layer 2      layer 3           backward     layer 3      layer 2      layer 1
    reads             layer 2      layer 3                                     layer 2      layer 1
    lets go              layer 1      layer 2      layer 3                        layer 3      layer 2

What FSDP2 stores of each parameter is exchanged for memory that is mapped from the file; the parameter is the same
object as before. An optimizer's step on the host writes there in place. torch has no call for the exchange: a unit's
parameter group is its internal, looked at in torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hf_parallel.axes.data.state_file import StateFile, StatePart
from hf_parallel.axes.data.units import parameter_groups

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def rest_in_file(root: nn.Module, offload: str) -> None:
    """From its first forward pass on the parameters of units below `root` lie in a file; its room is taken now.

    Raises:
        SpecError: the disk has less.
    """
    groups = list(parameter_groups(root))
    file = StateFile(offload, "parameters")
    stored = ([held._sharded_param_data for held in group.fsdp_params] for group in groups)
    file.reserve(sum(file.room_of(StatePart.size_of(tensors)) for tensors in stored))
    units = [Unit(group, file) for group in groups]
    for unit, before, after in zip(units, [None, *units], [*units[1:], None], strict=False):
        unit.before, unit.after = before, after

    def move(*_: object) -> None:
        file.settle()
        for unit in units:
            unit.move()

    root.register_forward_pre_hook(move, prepend=True)  # weights are loaded by now; adapters may have come
    root.register_state_dict_pre_hook(lambda *_: file.settle())


class Unit:
    """The parameters that are gathered together, and the units whose turn is before and after theirs."""

    def __init__(self, group: Any, file: StateFile) -> None:
        self.group, self.file = group, file
        self.parts: list[StatePart] = []
        self.before: Unit | None = None
        self.after: Unit | None = None
        self._kept: dict[FSDPParam, int] = {}  # of a parameter: where it lies
        self._gather = group.unshard
        group.unshard = self.unshard

    def unshard(self, async_op: bool = False) -> None:
        """In the place of the group's own; the neighbour's parameters are on their way meanwhile."""
        at_rest = self.group.is_sharded and self.group._all_gather_result is None
        ahead = self.before if self.group._training_state == TrainingState.PRE_BACKWARD else self.after
        for part in ahead.parts if at_rest and ahead is not None else ():
            self.file.fetch(part)
        self._gather(async_op)
        for part in self.parts if at_rest else ():
            self.file.release(part)

    def move(self) -> None:
        """Into the file goes what does not lie there: at first all, then what was added, or loaded by assignment."""
        new = [held for held in self.group.fsdp_params if self._kept.get(held) != _address(held._sharded_param_data)]
        if not new or self.group.is_unsharded:
            return
        for held in new:
            held.reset_sharded_param()  # as the group will do: it may know only the meta tensor from before loading
        part = self.file.part(StatePart.size_of([held._sharded_param_data for held in new]))
        for held in new:
            _lay(held, part.keep(held._sharded_param_data))
            self._kept[held] = _address(held._sharded_param_data)
        self.parts.append(part)
        self.file.release(part)
        self.file.free()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _lay(held: Any, memory: torch.Tensor) -> None:
    """Let a parameter, which may be a part of what is stored for it, lie in this memory."""
    stored, local = held._sharded_param_data, held.sharded_param._local_tensor
    place = memory.storage_offset() + local.storage_offset() - stored.storage_offset()
    held._sharded_param_data = memory  # other objects: a view would keep the memory that it was made of
    held.sharded_param._local_tensor = memory.detach().as_strided(local.size(), local.stride(), place)
