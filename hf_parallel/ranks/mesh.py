"""Ranks are one n-D tensor and every process group is a slice of it.

The axes, outermost first, are (dp_replicate, pp, dp_shard, cp, tp): tensor parallelism stays inside a node, replicas
sit on the slowest links. Eight processes under `pp=2,dp_shard=2,tp=2`, rank numbers in the cells:

                       tp=0  tp=1
    pp=0  dp_shard=0     0     1      ranks 0, 1, 4, 5 hold one model and see the same batch: data rank 0
          dp_shard=1     2     3      ranks 2, 3, 6, 7                                      : data rank 1
    pp=1  dp_shard=0     4     5      (0, 4) talk as a pipeline, (0, 2) shard and reduce, (0, 1) split matrices
          dp_shard=1     6     7

The data rank comes from coordinates, never from `rank // n`: here the ranks of one model are not contiguous.

Experts are distributed over a second view of the ranks of dp_shard, cp and tp. In it, ep is innermost, and ep_shard
takes the rest; dp_replicate and pp are the same in both views:

    dp_shard x cp x tp = ep_shard x ep

Sixteen processes under `pp=2,dp_shard=4,tp=2,ep=4`; this is the first stage (the second has ranks 8 … 15):

                    tp=0  tp=1                        ep=0  ep=1  ep=2  ep=3
    dp_shard=0        0     1          ep_shard=0       0     1     2     3      ranks 0 and 4 have one quarter of the
    dp_shard=1        2     3          ep_shard=1       4     5     6     7      experts, and store a half of it each
    dp_shard=2        4     5
    dp_shard=3        6     7          everything else is cut over tp and dp_shard, as on the left

`tp_mesh=ROWSxCOLS` is a third view: the ranks of tp as a grid, in which tp_col is innermost.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.ask.keys.sizes import SHARDS
from hf_parallel.ask.spec import refuse
from hf_parallel.ranks.devices import Device, measure_device_memory, measure_product_rate
from hf_parallel.ranks.groups import Groups, make_host_group, make_urgent_options

#: Time for threads of groups that are still referred to: they let go of the tensors of their last work.
_LAST_WORK_S = 0.1

#: The second view of the ranks of dp_shard, cp and tp.
EXPERT_AXES = ("ep_shard", "ep")
#: The states of torch's generators of the host and of the device.
RandomState: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


def compute_coordinates(config: ParallelConfig, rank: int, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """Return the coordinates of `rank`: {axis: index}. Pure arithmetic, no process group.

    Args:
        sizes: the sizes of the axes of a view, such as `config.expert_sizes`; default: the first view.
    """
    sizes, place = config.sizes if sizes is None else sizes, {}
    for axis, size in reversed(sizes.items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in sizes}


def get_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: Attribute of a gathered copy of a parameter: FSDP2's record, which has the stored one.
STORED = "_hf_parallel_stored"


def is_copy(parameter: torch.Tensor) -> bool:
    """Return whether this is what data ranks have gathered of a parameter."""
    return hasattr(parameter, STORED)


def find_stored_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the stored parameter, which keeps the gradient, in the place of a copy that data ranks have gathered."""
    held = getattr(parameter, STORED, None)
    return parameter if held is None else held.sharded_param


def place_as(parameter: Any, part: torch.Tensor) -> DTensor:
    """Make a DTensor with the placement of `parameter` and `part` as this rank's part. Not differentiable."""
    spec = copy.copy(parameter._spec)
    spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, spec, requires_grad=False)


def compute_data_rank(config: ParallelConfig, rank: int) -> int:
    """Return which share of the data `rank` reads, 0 … data_parallel_size - 1."""
    place, number = compute_coordinates(config, rank), 0
    for axis in _list_data_axes(config):
        number = number * config.sizes[axis] + place[axis]
    return number


def list_axis_ranks(config: ParallelConfig, *axes: str) -> list[list[int]]:
    """Return all groups along some axes of one view, as lists of global ranks."""
    sizes = config.sizes if set(axes).isdisjoint(EXPERT_AXES) else config.expert_sizes
    sizes = sizes if set(axes).isdisjoint(TP_AXES) else config.grid_sizes
    names, shape = list(sizes), tuple(sizes.values())
    inner = [names.index(axis) for name in axes for axis in config.axes_along(name)]
    outer = [dim for dim in range(len(names)) if dim not in inner]
    grid = torch.arange(math.prod(shape)).view(shape).permute(*outer, *inner)
    return grid.reshape(-1, math.prod(shape[dim] for dim in inner)).tolist()


def check_alike(
    asked: str, ranks: frozenset[int] | None, config: ParallelConfig, axes: tuple[str, ...], why: str
) -> None:
    """Require that a setting of some ranks holds for all or none of the ranks along these axes.

    Args:
        asked: the setting as it stands in a spec.
        ranks: the ranks that the setting lists; None: all.
        why: what these ranks must do alike, for the error.

    Raises:
        SpecError: a listed rank does not exist, or a rank beside it is not listed.
    """
    if ranks is None:
        return
    way, world_size = asked.partition("@")[0], config.world_size
    most = max(ranks)
    if most >= world_size:
        refuse(asked, f"no rank {most} among {world_size} processes", f"{way}@{world_size - 1}")
    groups = list_axis_ranks(config, *axes)
    wanted = {rank for group in groups if ranks & set(group) for rank in group}
    if wanted != ranks:
        works = way if len(wanted) == world_size else f"{way}@{':'.join(map(str, sorted(wanted)))}"
        refuse(asked, f"ranks {' '.join(map(str, sorted(wanted)))} {why}", works)


def _list_data_axes(config: ParallelConfig) -> list[str]:
    return [axis.name for axis in config.mesh_axes if axis.data]


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """The mesh of this process: sizes, coordinates and the groups along each axis."""

    config: ParallelConfig
    device: torch.device
    device_mesh: DeviceMesh
    rank: int
    data_group: dist.ProcessGroup = field(repr=False)
    groups: Groups = field(repr=False)
    expert_mesh: DeviceMesh | None = None  # the second view, where there is expert parallelism

    @classmethod
    def create(cls, config: ParallelConfig, device: torch.device, groups: Groups | None = None) -> ParallelMesh:
        """Build all groups. Needs an initialised default process group; collective over all processes.

        Args:
            groups: those of another mesh, which are used where their ranks are the same.

        Raises:
            SpecError: the sizes do not multiply to the number of processes.
        """
        config = config.resolve(dist.get_world_size())
        if config.world_size != dist.get_world_size():
            refuse(config.to_spec(), f"does not fit {dist.get_world_size()} processes", "dp_shard=-1")
        groups = groups or Groups(device)
        device_mesh = _build_device_mesh(groups, config, config.sizes)
        data_group = groups.along(list_axis_ranks(config, *_list_data_axes(config)))
        expert_mesh = _build_device_mesh(groups, config, config.expert_sizes) if config.ep_size > 1 else None
        atexit.unregister(end_all_groups)
        atexit.register(end_all_groups)
        return cls(config, device, device_mesh, dist.get_rank(), data_group, groups, expert_mesh)

    @functools.cached_property
    def sharing_mesh(self) -> DeviceMesh:
        """Return the mesh of FSDP2: replicas, if any, x all ranks that shard weights. Collective at the first use."""
        replicas = self.size("dp_replicate") > 1
        if self.size("cp") == 1:
            return self["dp_replicate", "dp_shard"] if replicas else self["dp_shard"]
        shards = self["dp_shard", "cp"]._flatten(SHARDS)
        return DeviceMesh._concatenate([self["dp_replicate"], shards]) if replicas else shards

    @functools.cached_property
    def second_stage_group(self) -> dist.ProcessGroup:
        """Return a second group along pp: gradients travel while activations do. Collective at the first use."""
        return self.groups.along(list_axis_ranks(self.config, "pp"), apart="backward")

    @functools.cached_property
    def attention_group(self) -> dist.ProcessGroup:
        """Return a second group along cp: keys travel while weights are gathered. Collective at the first use."""
        return self.groups.along(list_axis_ranks(self.config, "cp"), apart="attention")

    @functools.cached_property
    def grid(self) -> DeviceMesh:
        """Return the ranks of tp by rows and columns, with the root of `tp`: FSDP2 joins meshes of one root only."""
        sizes = self.config.tp_row_size, self.config.tp_col_size
        # torch makes these groups: `_unflatten` takes none that exist.
        options: Any = make_urgent_options(self.device)
        return self["tp"]._unflatten(0, sizes, TP_AXES, dict.fromkeys(TP_AXES, options) if options else None)

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        return self._view(axes)[axes]

    def _view(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        asked = {axes} if isinstance(axes, str) else set(axes)
        if not asked.isdisjoint(TP_AXES):
            return self.grid
        return self.device_mesh if self.expert_mesh is None or asked.isdisjoint(EXPERT_AXES) else self.expert_mesh

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return getattr(self.config, f"{axis}_size")

    def index(self, axis: str) -> int:
        """Return this rank's place along `axis`."""
        return compute_coordinates(self.config, self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along `axis` alone."""
        return self._view(axis).get_group(axis)

    @functools.cached_property
    def host_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks over host memory, for threads that must not use the groups of training.

        Collective over all ranks at the first use.
        """
        return make_host_group()

    @functools.cached_property
    def host_group_of_training(self) -> dist.ProcessGroup:
        """Return a group of all ranks over host memory for the thread that trains; `async_save` uses `host_group`.

        Two threads on one group would meet in another order on each rank. Collective over all ranks at the first use.
        """
        return make_host_group() if self.config.async_save else self.host_group

    @functools.cached_property
    def host_group_of_callbacks(self) -> dist.ProcessGroup:
        """Return a group of all ranks over host memory where ranks wait for callbacks, which use the other groups.

        Collective over all ranks at the first use.
        """
        return make_host_group()

    def group_on_host(self, axis: str) -> dist.ProcessGroup:
        """Return a group of the ranks of `group(axis)` over host memory. Collective over all ranks."""
        return self.groups.on_host(list_axis_ranks(self.config, axis), self.group(axis))

    def data_group_on_host(self) -> dist.ProcessGroup:
        """Return a group of the ranks of `data_group` over host memory. Collective over all ranks."""
        return self.groups.on_host(list_axis_ranks(self.config, *_list_data_axes(self.config)), self.data_group)

    @property
    def data_rank(self) -> int:
        """Return which share of the data this rank reads."""
        return compute_data_rank(self.config, self.rank)

    @property
    def data_size(self) -> int:
        """Return the number of different batches in one step."""
        return self.config.data_parallel_size

    @functools.cached_property
    def pipeline_devices(self) -> tuple[Device, ...]:
        """Return the least speed and memory of the processes of each pipeline rank. Collective at the first use."""
        with self.fork_random_state():
            own = Device(measure_product_rate(self.device), measure_device_memory(self.device))
        found: dict[int, list[Device]] = {}
        devices: list = [None] * dist.get_world_size()
        dist.all_gather_object(devices, own)
        for rank, device in enumerate(devices):
            found.setdefault(compute_coordinates(self.config, rank)["pp"], []).append(device)
        each = (found[place] for place in range(self.config.pp_size))
        return tuple(Device(min(one.speed for one in own), min(one.memory for one in own)) for own in each)

    def fork_random_state(self) -> contextlib.AbstractContextManager:
        """Restore the states of this process's random generators after the `with`."""
        if self.device.type == "cpu":
            return torch.random.fork_rng([])
        return torch.random.fork_rng([self.device.index or 0], device_type=self.device.type)

    def read_random_state(self) -> RandomState:
        """Return the states of torch's generators of the host and of the device."""
        on_device = self.device.type != "cpu"
        return torch.get_rng_state(), torch.get_device_module(self.device).get_rng_state() if on_device else None

    def set_random_state(self, state: RandomState) -> None:
        """Set the states of torch's generators."""
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(self.device).set_rng_state(state[1])

    def first_and_last_stage_group(self) -> dist.ProcessGroup | None:
        """Return the group of the first and last stage, for a tied embedding; None elsewhere. Collective over all."""
        return self.groups.among([[ranks[0], ranks[-1]] for ranks in list_axis_ranks(self.config, "pp")])


def _build_device_mesh(groups: Groups, config: ParallelConfig, sizes: dict[str, int]) -> DeviceMesh:
    """Build a view of the ranks, with a group for each of its axes."""
    along = [groups.along(list_axis_ranks(config, axis), urgent=axis == "tp") for axis in sizes]
    ranks = torch.arange(config.world_size).view(tuple(sizes.values()))
    return DeviceMesh.from_group(along, groups.device.type, ranks, mesh_dim_names=tuple(sizes))


def end_all_groups() -> None:
    """Wait for the work of all process groups at the end of Python, and end them before their threads do.

    After an uncaught error, do nothing: the other ranks may never do their part of the work.
    """
    if not hasattr(sys, "last_type"):
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        time.sleep(_LAST_WORK_S)
