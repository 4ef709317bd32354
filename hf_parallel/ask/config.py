"""The config: one flag string, YAML file or Python call -> one validated value.

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

from hf_parallel.ask.keys.axes import ContextKeys, ExpertKeys, TensorKeys
from hf_parallel.ask.keys.data import CompressionKeys, DataKeys, OffloadKeys
from hf_parallel.ask.keys.layers import (
    AttentionKeys,
    CompileKeys,
    LossKeys,
    PrecisionKeys,
    RecomputeKeys,
    TiledKeys,
)
from hf_parallel.ask.keys.pipeline import FillKeys, PipelineKeys
from hf_parallel.ask.keys.run import MonitorKeys, RolloutKeys, SavingKeys, WatchKeys
from hf_parallel.ask.spec import SpecError, convert, read_spec, refuse, refuse_with, spell, suggest_key

__all__ = ["ParallelConfig", "SpecError"]

#: The spec that leaves the layout to the planner.
AUTO = "auto"
_cached: Any = functools.cache  # of classes, which mypy does not take for hashable


@dataclass(frozen=True)
class ParallelConfig(
    WatchKeys,
    MonitorKeys,
    RolloutKeys,
    AttentionKeys,
    TiledKeys,
    RecomputeKeys,
    CompileKeys,
    LossKeys,
    PrecisionKeys,
    ContextKeys,
    ExpertKeys,
    FillKeys,
    PipelineKeys,
    TensorKeys,
    CompressionKeys,
    OffloadKeys,
    DataKeys,
    SavingKeys,
):
    """The number of processes along each axis, and the settings of each axis.

    The sizes multiply to the number of processes; 1 switches an axis off and the one axis of size -1 takes the
    remaining processes. Short names (`tp` for `tp_size`) are accepted wherever a spec is parsed.
    """

    def __post_init__(self) -> None:
        for key in dataclasses.fields(self):
            if isinstance(getattr(self, key.name), list):
                object.__setattr__(self, key.name, tuple(getattr(self, key.name)))
        sizes = {key: getattr(self, key) for key in _list_keys(type(self)) if key.endswith("_size")}
        for name, size in sizes.items():
            if size != -1 and size < 1:
                refuse(f"{name}={size}", "a size is 1 or more, or -1 for the remaining processes", f"{name}=1")
        others = [name for name, size in sizes.items() if size == -1 and name != "dp_shard_size"]
        if others and self.dp_shard_size == -1:  # the default -1 gives way when another axis asks for the rest
            object.__setattr__(self, "dp_shard_size", 1)
        if len(others) > 1:
            both = f"{' and '.join(others)} are both -1"
            refuse(both, "only one axis can take the remaining processes", f"{others[0]}=1")
        for key in dataclasses.fields(self):
            value, choices = getattr(self, key.name), key.metadata["choices"]
            if choices and value not in choices:
                why, works = f"not one of {', '.join(map(str, choices))}", f"{key.name}={spell(key.default)}"
                refuse(f"{key.name}={spell(value)}", why, works)
        for keys in type(self).__mro__:
            if "check_keys" in vars(keys):
                vars(keys)["check_keys"](self)

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
        return cls.from_mapping(read_spec(text))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ParallelConfig:
        """Build from a mapping with long or short keys; values may be strings."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        chosen: dict = {}
        for key, value in values.items():
            name = f"{key}_size" if f"{key}_size" in known else key
            if name not in known:
                keys = _list_keys(cls)
                short = tuple(one.removesuffix("_size") for one in keys if one.endswith("_size"))
                refuse(key, "unknown key", do=suggest_key(str(key), keys, short))
            if name in chosen:
                refuse(key, f"given twice (as {name} and its short form)", do="give it once")
            chosen[name] = convert(name, known[name].type, value, spell(known[name].default).lower())
        free = [name for name, value in chosen.items() if name.endswith("_size") and value == -1]
        if len(free) > 1:
            both = f"{' and '.join(free)} are both -1"
            refuse(both, "only one axis can take the remaining processes", f"{free[0]}=1")
        return cls(**chosen)

    def resolve(self, world_size: int) -> ParallelConfig:
        """Give the axis of size -1 the remaining processes and check that the sizes multiply to `world_size`."""
        sizes = self.sizes
        free = [axis for axis, size in sizes.items() if size == -1]
        used = math.prod(size for size in sizes.values() if size != -1)
        fits = world_size % used == 0 if free else world_size == used
        if not fits:
            factors = [f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)]
            given = " x ".join(factors) + (f" = {used}" if len(factors) > 1 else "") or "one process"
            others = math.prod(size for axis, size in sizes.items() if size != -1 and axis != "dp_shard")
            if world_size == 1:
                start = f"torchrun --nproc-per-node {used}, hf-parallel launch --num_processes {used}"
                refuse_with(f"{given} does not fit 1 process; start {used} processes ({start})")
            if world_size % others == 0:
                refuse_with(f"{given}, but {world_size} processes run; dp_shard={world_size // others} works")
            fitting = used * max(1, world_size // used)
            refuse_with(f"{given} does not fit {world_size} processes; start {fitting} processes")
        rest: dict = {f"{axis}_size": world_size // used for axis in free}
        filled = dataclasses.replace(self, **rest) if free else self
        changed: dict = dict(filled.resolved_sizes())
        return dataclasses.replace(filled, **changed) if changed else filled

    def to_dict(self) -> dict[str, object]:
        """Return plain values under the long keys, ready for JSON or YAML."""
        values = {name: getattr(self, name) for name in _list_keys(type(self))}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def spelled(self) -> dict[str, str]:
        """Return the keys whose values are not their defaults, and these as they stand in a spec."""
        default = {key.name: key.default for key in dataclasses.fields(self)}
        values = ((name, getattr(self, name)) for name in _list_keys(type(self)))
        return {name: spell(value) for name, value in values if value != default[name]}

    def settings_alone(self) -> dict[str, str]:
        """Return the spelled keys that hold in one process too, and ask for something."""
        holding = [base for base in type(self).__mro__ if vars(base).get("holds_alone", False)]
        names = {name for base in holding for name in vars(base)["__annotations__"]}
        return {name: value for name, value in self.spelled().items() if name in names and value != "off"}

    def to_spec(self) -> str:
        """Return the shortest spec string that parses back to this value."""
        changed = (f"{name.removesuffix('_size')}={value}" for name, value in self.spelled().items())
        return ",".join(changed) or "dp_shard=-1"


def choose_spec(asked: str | None, asked_by: str = "the runner's --parallel") -> tuple[str, str] | None:
    """Return the spec and where it comes from: what was asked for, else HF_PARALLEL, else None.

    Raises:
        SpecError: both are given and mean different layouts.
    """
    environment = os.environ.get("HF_PARALLEL") or None
    if asked and environment:
        one, other = (spec if spec == AUTO else ParallelConfig.parse(spec) for spec in (asked, environment))
        if one != other:
            refuse(f"{asked_by} {asked}", f"HF_PARALLEL is {environment}", do="drop one of them")
    if asked:
        return asked, asked_by
    return (environment, "HF_PARALLEL") if environment else None


@_cached
def _list_keys(cls: type[ParallelConfig]) -> list[str]:
    """Return all keys: sizes of the mesh first, slow links first, then the other sizes, then settings."""
    keys = [key.name for key in dataclasses.fields(cls)]
    ranked = [f"{axis.name}_size" for axis in cls.mesh_axes]
    return [*ranked, *sorted(set(keys) - set(ranked), key=lambda name: (not name.endswith("_size"), keys.index(name)))]


def render_key_table(cls: type[ParallelConfig]) -> str:
    """Return all keys as the README's table: name, default and one line each."""
    rows, fields = [], {key.name: key for key in dataclasses.fields(cls)}
    for name in _list_keys(cls):
        key = fields[name]
        short = f" (`{name.removesuffix('_size')}`)" if name.endswith("_size") else ""
        default = key.metadata["shown"] or ("none" if key.default is None else f"`{spell(key.default)}`")
        rows.append(f"| `{name}`{short} | {default} | {key.metadata['doc']} |")
    return "\n".join(rows)
