"""What the user asks for: one flag string, YAML file or Python call -> one validated value.

    ParallelConfig.parse("tp=2,pp=2").resolve(world_size=8)      # dp_shard takes the two remaining processes

Everything that is not known, or cannot hold, raises `SpecError` with one line that names the key, the number and
a value that would work. Nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from hf_parallel.spec import SpecError, convert, read, spell, unknown_key

__all__ = ["ParallelConfig", "SpecError"]

#: The axes of the mesh from slow links to fast links: replicas across nodes, tensor parallelism inside one.
AXES = ("dp_replicate", "pp", "dp_shard", "cp", "tp")
#: Pipeline schedules by the number of stages that each rank holds: one, several in a loop, two in a V.
SINGLE_SCHEDULES = ("1f1b", "gpipe")
LOOPED_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V_SCHEDULES = ("zbv_zero_bubble", "dualpipe_v")
SCHEDULES = SINGLE_SCHEDULES + LOOPED_SCHEDULES + V_SCHEDULES
#: Those that compute gradients of inputs and of weights at different times.
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")
AUTO_SCHEDULE = "auto"  # chosen once the model is known
#: The spec that leaves the layout to the planner.
AUTO = "auto"


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes along which axis, and how each axis behaves.

    The sizes multiply to the number of processes; 1 switches an axis off and the one axis given as -1 takes what is
    left. Short names (`tp` for `tp_size`) are accepted wherever a spec is parsed.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = -1
    pp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    zero_stage: int = 3
    sequence_parallel: bool | None = None
    tp_overlap: bool = False
    pipeline_schedule: str = "1f1b"
    pipeline_microbatches: int | None = None
    pipeline_virtual_stages: int | None = None
    pipeline_split: tuple[int, ...] | None = field(default=None, metadata={"list": True})
    profile_steps: tuple[int, ...] | None = field(default=None, metadata={"list": True})
    context_parallel: str = "ring"
    activation_checkpointing: str = "none"
    offload: str = "none"
    quantize_weights: bool = False
    quantize_gradients: bool = False
    attention: str = "auto"
    async_save: bool = False

    def __post_init__(self) -> None:
        for name in ("pipeline_split", "profile_steps"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_sizes(self)
        _check_choices(self)
        self._check_built()

    def _check_built(self) -> None:
        """Keys of the grammar that this version understands but cannot do are named, never ignored."""
        for _, refusal in not_built(self):
            raise SpecError(refusal)

    @classmethod
    def parse(cls, spec: str | ParallelConfig) -> ParallelConfig:
        """Read `key=value,…`, or a YAML file holding a mapping of the same keys.

        Raises:
            SpecError: unknown or repeated key, a value of the wrong type, or a file that is no mapping.
        """
        if isinstance(spec, ParallelConfig):
            return spec
        text = spec.strip()
        if text == AUTO:
            raise SpecError(
                "auto is chosen when a script is launched; here a layout is needed: `hf-parallel plan` ranks them, "
                "tp=2,dp_shard=-1 works"
            )
        return cls.from_mapping(read(text))

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> ParallelConfig:
        """Build from a mapping with long or short keys; values may be strings."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in values.items():
            name = f"{key}_size" if f"{key}_size" in known else key
            if name not in known:
                raise SpecError(unknown_key(str(key), list(known)))
            if name in chosen:
                raise SpecError(f"{key}: given twice (as {name} and its short form); give it once")
            chosen[name] = convert(name, known[name].type, value)
        free = [name for name, value in chosen.items() if name.endswith("_size") and value == -1]
        if len(free) > 1:
            raise SpecError(f"{' and '.join(free)} are both -1; only one axis can take the remaining processes")
        return cls(**chosen)

    def resolve(self, world_size: int) -> ParallelConfig:
        """Give the axis of size -1 the remaining processes and check that the sizes multiply to `world_size`."""
        sizes = {axis: getattr(self, f"{axis}_size") for axis in AXES}
        free = [axis for axis, size in sizes.items() if size == -1]
        used = math.prod(size for size in sizes.values() if size != -1)
        if free:
            if world_size % used:
                raise SpecError(_sizes_message(sizes, used, world_size))
            return dataclasses.replace(self, **{f"{free[0]}_size": world_size // used})
        if used != world_size:
            raise SpecError(_sizes_message(sizes, used, world_size))
        return self

    @property
    def data_parallel_size(self) -> int:
        """Number of data ranks: how many different batches are seen in one step. Needs a resolved config."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def stages_per_rank(self) -> int:
        """How many stages of the pipeline each rank holds."""
        if self.pipeline_schedule in (*SINGLE_SCHEDULES, AUTO_SCHEDULE):
            return 1
        return self.pipeline_virtual_stages or 2

    @property
    def pipeline_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.pp_size * self.stages_per_rank

    def rank_of_stage(self, stage: int) -> int:
        """Which pipeline rank holds this stage: round and round, or down and up again in a V."""
        if self.pipeline_schedule in V_SCHEDULES and stage >= self.pp_size:
            return 2 * self.pp_size - 1 - stage
        return stage % self.pp_size

    def recomputes_in_parts(self, schedule: str) -> bool:
        """Does each part of its backward recompute checkpointed layers for itself? That costs more than a bubble."""
        return self.activation_checkpointing != "none" and schedule in SPLIT_BACKWARD

    @property
    def world_size(self) -> int:
        """Number of processes of a resolved config."""
        return math.prod(getattr(self, f"{axis}_size") for axis in AXES)

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the long keys, ready for JSON or YAML."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def to_spec(self) -> str:
        """The shortest spec string that parses back to this value."""
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        spelled = ",".join(f"{f.name.removesuffix('_size')}={spell(getattr(self, f.name))}" for f in changed)
        return spelled or "dp_shard=-1"


def _sizes_message(sizes: dict[str, int], used: int, world_size: int) -> str:
    given = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
    rest = math.prod(size for axis, size in sizes.items() if size != -1 and axis != "dp_shard")
    if world_size % rest == 0:
        return f"{given} = {used}, but {world_size} processes run; dp_shard={world_size // rest} works"
    return f"{given} = {used} does not fit {world_size} processes; start {used * max(1, world_size // used)} processes"


def _check_sizes(config: ParallelConfig) -> None:
    sizes = {f"{axis}_size": getattr(config, f"{axis}_size") for axis in (*AXES, "ep")}
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise SpecError(f"{name}={size}: a size is 1 or more, or -1 for the remaining processes; {name}=1 works")
    others = [name for name, size in sizes.items() if size == -1 and name != "dp_shard_size"]
    if others and config.dp_shard_size == -1:  # the default -1 gives way when another axis asks for the rest
        object.__setattr__(config, "dp_shard_size", 1)
    if len(others) > 1:
        raise SpecError(f"{' and '.join(others)} are both -1; only one axis can take the remaining processes")


def _check_choices(config: ParallelConfig) -> None:
    choices = {
        "zero_stage": (0, 1, 2, 3),
        "pipeline_schedule": (*SCHEDULES, AUTO_SCHEDULE),
        "context_parallel": ("ring", "ulysses"),
        "activation_checkpointing": ("none", "selective", "full"),
    }
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise SpecError(f"{name}={value}: not one of {', '.join(map(str, allowed))}")
    micro = config.pipeline_microbatches
    # 1F1B keeps every stage busy with one micro-batch each, DualPipeV both stages of every rank.
    works = max(1, config.pp_size) * (2 if config.pipeline_schedule == "dualpipe_v" else 1)
    if micro is not None and micro < works:
        raise SpecError(
            f"pipeline_microbatches={micro}: must be at least {works} with pp_size={config.pp_size}; {works} works"
        )
    if config.sequence_parallel and config.tp_size == 1:
        raise SpecError(
            "sequence_parallel=true: tp_size=1 splits no sequence; tp_size=2 or sequence_parallel=false works"
        )
    if config.tp_overlap and config.tp_size == 1:
        raise SpecError("tp_overlap=true: tp_size=1 communicates nothing; tp_size=2 or tp_overlap=false works")
    _check_virtual_stages(config)
    if config.profile_steps is not None and config.pp_size == 1:
        raise SpecError(
            "profile_steps: draws what the stages of a pipeline do, and pp_size=1 has none; pp_size=2 works"
        )
    if config.pipeline_split is not None and config.pipeline_schedule == AUTO_SCHEDULE:
        raise SpecError("pipeline_split: pipeline_schedule=auto chooses how many stages there are; name a schedule")
    if config.pipeline_split is not None and config.pp_size != -1:
        count = len(config.pipeline_split)
        if count != config.pipeline_stages:
            raise SpecError(
                f"pipeline_split={spell(config.pipeline_split)}: {count} numbers for {config.pipeline_stages} stages "
                f"(pp_size={config.pp_size} x {config.stages_per_rank} per rank)"
            )


def _check_virtual_stages(config: ParallelConfig) -> None:
    virtual, schedule = config.pipeline_virtual_stages, config.pipeline_schedule
    if virtual is None:
        return
    single = dict.fromkeys((*SINGLE_SCHEDULES, AUTO_SCHEDULE), (1,))
    works = {**single, **dict.fromkeys(V_SCHEDULES, (2,))}.get(schedule)
    if virtual < 1 or (works is not None and virtual not in works) or (works is None and virtual < 2):
        wanted = works[0] if works else 2
        raise SpecError(
            f"pipeline_virtual_stages={virtual}: pipeline_schedule={schedule} holds "
            f"{wanted if works else 'two or more'} stages per rank; pipeline_virtual_stages={wanted} works"
        )


#: Settings of the grammar that this version understands but cannot do: key, the values (None: all but the default),
#: what it is, what works. A version that can do one takes its line out, and the planner then ranks it with the others.
_NOT_BUILT: list[tuple[str, tuple[Any, ...] | None, str, str]] = [
    ("cp_size", None, "context parallelism", "cp_size=1"),
    ("ep_size", None, "expert parallelism", "ep_size=1"),
    ("offload", None, "offloading", "offload=none"),
    ("quantize_weights", None, "ZeRO++ compression", "quantize_weights=false"),
    ("quantize_gradients", None, "ZeRO++ compression", "quantize_gradients=false"),
    ("zero_stage", (1,), "sharding the optimizer alone", "zero_stage=2"),
    ("zero_stage", (0,), "unsharded data parallelism by this key", "dp_replicate=-1"),
    ("activation_checkpointing", ("selective",), "selective checkpointing", "activation_checkpointing=full"),
]


def not_built(config: ParallelConfig) -> list[tuple[str, str]]:
    """What of a config this version cannot do, as `cp_size=4`, and the line that refuses it; empty: it runs."""
    found = []
    for key, values, what, works in _NOT_BUILT:
        value = getattr(config, key)
        if value in values if values is not None else value != _DEFAULTS[key]:
            spelled = f"{key}={spell(value)}"
            found.append((spelled, f"{spelled}: {what} is not part of this version; {works} works"))
    return found


@dataclass(frozen=True)
class PlannedConfig(ParallelConfig):
    """A config to think about, whether or not this version runs it."""

    def _check_built(self) -> None:
        pass


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ParallelConfig)}
