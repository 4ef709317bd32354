"""Replicas that share nothing out: FSDP2 without the copies that it makes where each rank owns the whole weight.

                            torch 2.13                              here
    weights, each pass      copied into memory made for them        the stored ones
    gradients               copied into a buffer, and from there    copied into a buffer
                            into another, which is reduced          that is reduced

Weights that are computed with in another dtype, or rest on the host, are copied as torch does. It has no call for
this: a parameter's memory is an internal of its units, looked at in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from hf_parallel.axes.data.units import parameter_groups


def work_in_place(root: nn.Module) -> None:
    """Let the units below `root` whose weights no other rank has a part of compute with the stored ones."""
    for group in parameter_groups(root):
        if isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size == 1:
            group._reduce_scatter_comm = _OneBuffer()
            for held in group.fsdp_params:
                lend(held)


def lend(held: FSDPParam) -> None:
    """Let a parameter that is whole on each rank be computed with where it is stored."""
    if held.mesh_info.shard_mesh_size == 1:
        held.__class__ = _Lent


class _Lent(FSDPParam):
    """What torch gathers is what is stored: copying it to itself does nothing, and it is never freed."""

    lent: torch.Tensor | None = None  # what is computed with now, where that is what is stored

    @property
    def _lends(self) -> bool:
        """Is it computed with as it is stored, in memory of its own? torch would resize what is larger."""
        stored = self._sharded_param_data
        own = stored.untyped_storage().nbytes() == stored.nbytes
        packed = hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        return own and not packed and self.param_dtype is None and not self.offload_to_cpu

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        stored = self._sharded_param_data if self._lends else None
        if self.lent is not stored:  # also after `to`, after loading, and where autocast begins or ends
            self.all_gather_outputs = []
            if hasattr(self, "_unsharded_param"):
                del self._unsharded_param
        self.lent = stored
        if stored is None:
            super().init_all_gather_outputs(*args, **kwargs)
        else:
            self.all_gather_outputs = [stored]

    def free_unsharded_param(self) -> None:
        if self.lent is None:  # else somebody may hold it, as a state dict from before it was replaced
            super().free_unsharded_param()


class _OneBuffer(DefaultReduceScatter):
    """torch asks for what it scatters, then for what arrives, and copies: of one rank both are the same numbers."""

    _given: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        given, self._given = self._given, None
        if given is None or given.shape != tuple(size) or given.dtype != dtype:
            given = self._given = super().allocate(size, dtype=dtype, device=device)
        return given
