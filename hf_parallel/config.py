"""What the user asks for: one flag string, YAML file or Python call -> one validated value.

    ParallelConfig.parse("tp=2,pp=2").resolve(world_size=8)      # dp_shard takes the two remaining processes

Everything that is not known, or cannot hold, raises `SpecError` with one line that names the key, the number and
a value that would work. Nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_parallel.axes.attention.axis import AttentionKeys
from hf_parallel.axes.axis import Axis, MeshAxis
from hf_parallel.axes.compile import CompileKeys
from hf_parallel.axes.compression import CompressionKeys
from hf_parallel.axes.context.axis import ContextKeys
from hf_parallel.axes.data.axis import DataKeys
from hf_parallel.axes.experts.axis import ExpertKeys
from hf_parallel.axes.loss import LossKeys
from hf_parallel.axes.monitoring import MonitorKeys
from hf_parallel.axes.offload import OffloadKeys
from hf_parallel.axes.pipeline.axis import PipelineKeys
from hf_parallel.axes.precision import PrecisionKeys
from hf_parallel.axes.recompute import RecomputeKeys
from hf_parallel.axes.rollouts import RolloutKeys
from hf_parallel.axes.saving import SavingKeys
from hf_parallel.axes.tensor.axis import TensorKeys
from hf_parallel.axes.watching import WatchKeys
from hf_parallel.spec import SpecError, convert, read, refuse, refuse_with, spell, unknown_key

__all__ = ["ParallelConfig", "SpecError"]

#: The spec that leaves the layout to the planner.
AUTO = "auto"
#: All axes over which FSDP2 shards, as one dim of a parameter's mesh.
SHARDS = "shards"
_cached: Any = functools.cache  # of classes, which mypy does not take for hashable


@dataclass(frozen=True)
class ParallelConfig(
    WatchKeys,
    MonitorKeys,
    RolloutKeys,
    AttentionKeys,
    RecomputeKeys,
    CompileKeys,
    LossKeys,
    PrecisionKeys,
    TensorKeys,
    ContextKeys,
    ExpertKeys,
    PipelineKeys,
    DataKeys,
    CompressionKeys,
    OffloadKeys,
    SavingKeys,
):
    """How many processes along which axis, and how each axis behaves.

    The bases are the axes, in the order in which they are applied to a model: from inside a layer outwards, after what
    changes nothing in it. The sizes multiply to the number of processes; 1 switches an axis off and the one axis given
    as -1 takes what is left. Short names (`tp` for `tp_size`) are accepted wherever a spec is parsed.
    """

    def __post_init__(self) -> None:
        for key in dataclasses.fields(self):
            if isinstance(getattr(self, key.name), list):
                object.__setattr__(self, key.name, tuple(getattr(self, key.name)))
        _check_sizes(self)
        _check_choices(self)
        for axis in self.axes():
            axis.check(self)

    @classmethod
    def axes(cls) -> tuple[Axis, ...]:
        """All axes and settings, in the order in which they are applied."""
        return _axes(cls)

    @classmethod
    def mesh_axes(cls) -> tuple[MeshAxis, ...]:
        """The axes of the mesh from slow links to fast links: replicas across nodes, tensor parallelism inside one."""
        return _mesh_axes(cls)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis, slow links first."""
        return {axis.name: getattr(self, f"{axis.name}_size") for axis in self.mesh_axes()}

    @classmethod
    def parse(cls, spec: str | ParallelConfig) -> ParallelConfig:
        """Read `key=value,…`, or a YAML file holding a mapping of the same keys.

        Raises:
            SpecError: unknown or repeated key, a value of the wrong type, or a file that is no mapping.
        """
        if isinstance(spec, ParallelConfig):
            return spec
        text = spec.strip(", ")
        if spec and not text:
            refuse(f"{spec!r}", "holds no key=value", "tp=2")
        if text == AUTO:
            refuse(
                "auto is chosen when a script is launched; here a layout is needed",
                "`hf-parallel plan` ranks them, tp=2,dp_shard=-1 works",
            )
        return cls.from_mapping(read(text))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ParallelConfig:
        """Build from a mapping with long or short keys; values may be strings."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        chosen: dict = {}
        for key, value in values.items():
            name = f"{key}_size" if f"{key}_size" in known else key
            if name not in known:
                refuse_with(unknown_key(str(key), _names(cls)))
            if name in chosen:
                refuse(key, f"given twice (as {name} and its short form)", do="give it once")
            chosen[name] = convert(name, known[name].type, value)
        free = [name for name, value in chosen.items() if name.endswith("_size") and value == -1]
        if len(free) > 1:
            refuse(
                f"{' and '.join(free)} are both -1", "only one axis can take the remaining processes", f"{free[0]}=1"
            )
        return cls(**chosen)

    def resolve(self, world_size: int) -> ParallelConfig:
        """Give the axis of size -1 the remaining processes and check that the sizes multiply to `world_size`."""
        sizes = self.sizes
        free = [axis for axis, size in sizes.items() if size == -1]
        used = math.prod(size for size in sizes.values() if size != -1)
        if free:
            if world_size % used:
                refuse_with(_sizes_message(sizes, used, world_size))
            rest: dict = {f"{free[0]}_size": world_size // used}
            return _sized(dataclasses.replace(self, **rest))
        if used != world_size:
            refuse_with(_sizes_message(sizes, used, world_size))
        return _sized(self)

    @property
    def data_parallel_size(self) -> int:
        """Number of data ranks: how many different batches are seen in one step. Needs a resolved config."""
        return math.prod(self.sizes[axis.name] for axis in self.mesh_axes() if axis.data)

    @classmethod
    def axes_along(cls, name: str) -> tuple[str, ...]:
        """The axes that a dim of a parameter's mesh is made of, slow links first: its own, or all that shard."""
        return tuple(axis.name for axis in cls.mesh_axes() if axis.shards) if name == SHARDS else (name,)

    def size_along(self, name: str) -> int:
        """Number of ranks along such a dim."""
        return math.prod(getattr(self, f"{axis}_size") for axis in self.axes_along(name))

    @property
    def sharing_size(self) -> int:
        """Number of ranks whose gradients FSDP2 averages: data ranks, and those that hold other tokens of a batch."""
        return math.prod(self.sizes[axis.name] for axis in self.mesh_axes() if axis.data or axis.shards)

    @property
    def world_size(self) -> int:
        """Number of processes of a resolved config."""
        return math.prod(self.sizes.values())

    def to_dict(self) -> dict[str, object]:
        """Plain values under the long keys, ready for JSON or YAML."""
        values = {name: getattr(self, name) for name in _names(type(self))}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def spelled(self) -> dict[str, str]:
        """The keys whose values are not their defaults, and these as they stand in a spec."""
        default = {key.name: key.default for key in dataclasses.fields(self)}
        values = ((name, getattr(self, name)) for name in _names(type(self)))
        return {name: spell(value) for name, value in values if value != default[name]}

    def settings_alone(self) -> dict[str, str]:
        """Those of the spelled keys that hold in one process too, and ask for something."""
        names = {key.name for base in type(self).__mro__ if _holds_alone(base) for key in dataclasses.fields(base)}
        return {name: value for name, value in self.spelled().items() if name in names and value != "off"}

    def to_spec(self) -> str:
        """The shortest spec string that parses back to this value."""
        changed = (f"{name.removesuffix('_size')}={value}" for name, value in self.spelled().items())
        return ",".join(changed) or "dp_shard=-1"


def choose_spec(asked: str | None, asked_by: str = "the runner's --parallel") -> tuple[str, str] | None:
    """The spec and where it comes from: what was asked for, else HF_PARALLEL, else None.

    Raises:
        SpecError: both are given and mean different layouts.
    """
    environment = os.environ.get("HF_PARALLEL") or None
    if asked and environment and _meaning(asked) != _meaning(environment):
        refuse(f"{asked_by} {asked}", f"HF_PARALLEL is {environment}", do="drop one of them")
    if asked:
        return asked, asked_by
    return (environment, "HF_PARALLEL") if environment else None


def _meaning(spec: str) -> ParallelConfig | str:
    return spec if spec == AUTO else ParallelConfig.parse(spec)


def _sized(config: ParallelConfig) -> ParallelConfig:
    for axis in config.axes():
        config = axis.sized(config)
    return config


def _holds_alone(base: type) -> bool:
    return "axis" in vars(base) and vars(base)["axis"].alone


@_cached
def _axes(cls: type[ParallelConfig]) -> tuple[Axis, ...]:
    return tuple(vars(base)["axis"] for base in cls.__mro__ if "axis" in vars(base))


@_cached
def _mesh_axes(cls: type[ParallelConfig]) -> tuple[MeshAxis, ...]:
    found = [mesh_axis for axis in cls.axes() for mesh_axis in axis.mesh_axes]
    return tuple(sorted(found, key=lambda mesh_axis: -mesh_axis.distance))


def _sizes_message(sizes: dict[str, int], used: int, world_size: int) -> str:
    factors = [f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)]
    given = " x ".join(factors) + (f" = {used}" if len(factors) > 1 else "") or "one process"
    rest = math.prod(size for axis, size in sizes.items() if size != -1 and axis != "dp_shard")
    if world_size == 1:
        start = f"torchrun --nproc-per-node {used}, hf-parallel launch --num_processes {used}"
        return f"{given} does not fit 1 process; start {used} processes ({start})"
    if world_size % rest == 0:
        return f"{given}, but {world_size} processes run; dp_shard={world_size // rest} works"
    return f"{given} does not fit {world_size} processes; start {used * max(1, world_size // used)} processes"


def _check_sizes(config: ParallelConfig) -> None:
    sizes = {key: getattr(config, key) for key in _names(type(config)) if key.endswith("_size")}
    for name, size in sizes.items():
        if size != -1 and size < 1:
            refuse(f"{name}={size}", "a size is 1 or more, or -1 for the remaining processes", f"{name}=1")
    others = [name for name, size in sizes.items() if size == -1 and name != "dp_shard_size"]
    if others and config.dp_shard_size == -1:  # the default -1 gives way when another axis asks for the rest
        object.__setattr__(config, "dp_shard_size", 1)
    if len(others) > 1:
        refuse(
            f"{' and '.join(others)} are both -1", "only one axis can take the remaining processes", f"{others[0]}=1"
        )


@_cached
def _names(cls: type[ParallelConfig]) -> list[str]:
    """All keys: sizes of the mesh first, slow links first, then the other sizes, then settings."""
    keys = [key.name for key in dataclasses.fields(cls)]
    ranked = [f"{axis.name}_size" for axis in cls.mesh_axes()]
    return [*ranked, *sorted(set(keys) - set(ranked), key=lambda name: (not name.endswith("_size"), keys.index(name)))]


def _check_choices(config: ParallelConfig) -> None:
    for key in dataclasses.fields(config):
        value, choices = getattr(config, key.name), key.metadata["choices"]
        if choices and value not in choices:
            refuse(f"{key.name}={spell(value)}", f"not one of {', '.join(map(str, choices))}")


def key_table(cls: type[ParallelConfig]) -> str:
    """All keys as the README's table: name, default and one line each."""
    rows, fields = [], {key.name: key for key in dataclasses.fields(cls)}
    for name in _names(cls):
        key = fields[name]
        short = f" (`{name.removesuffix('_size')}`)" if name.endswith("_size") else ""
        default = key.metadata["shown"] or ("none" if key.default is None else f"`{spell(key.default)}`")
        rows.append(f"| `{name}`{short} | {default} | {key.metadata['doc']} |")
    return "\n".join(rows)
