"""Keys of the pipeline: schedules, micro-batches, how layers are shared out over stages, what runs in bubbles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hf_parallel.ask.keys.data import MEASURED, parse_shares
from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import SpecError, refuse, spell

#: Schedules by the number of stages that each rank holds: one, several in a loop, two in a V.
SINGLE_SCHEDULES = ("1f1b", "gpipe")
LOOPED_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V_SCHEDULES = ("zbv_zero_bubble", "dualpipe_v")
SCHEDULES = SINGLE_SCHEDULES + LOOPED_SCHEDULES + V_SCHEDULES
#: Schedules that do not drain between optimizer steps: another algorithm, on weights that are some steps old.
DELAYED_SCHEDULES = ("pipedream_2bw", "pipedream")
#: Two pipelines in opposite directions over the same ranks: each rank holds a copy of the mirrored stage too.
MIRRORED_SCHEDULES = ("chimera",)
#: Schedules that hold as many activations whatever the number of micro-batches: all batches of a step are one run.
JOINING_SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", *V_SCHEDULES, *MIRRORED_SCHEDULES)
#: Schedules that compute gradients of inputs and of weights at different times.
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")
#: The schedule is chosen once the model is known.
AUTO_SCHEDULE = "auto"
_ONE_STAGE_EACH = (*SINGLE_SCHEDULES, *DELAYED_SCHEDULES, *MIRRORED_SCHEDULES, AUTO_SCHEDULE)
_DEFAULT_SCHEDULE = "1f1b"
#: Key -> the value that a schedule with several versions of the weights takes, and why no other.
_ONE_VERSION: dict[str, tuple[int | bool | str, str]] = {
    "cp_size": (1, "holds several versions of the weights, and FSDP2, which shards them over cp, one"),
    "ep_size": (1, "holds several versions of the weights, and FSDP2, which shards experts, one"),
    "offload": ("none", "holds several versions of the weights, and what rests on the host is one"),
    "compile": ("none", "changes the parameters of a layer from step to step, for which it would be compiled anew"),
    "precision": ("auto", "has not been compared with one process in 8 bits"),
    "activation_offload": (False, "begins a step before the one before it has ended, and copies come back in order"),
    "batch_shares": ("even", "reads batches ahead, before they are cut"),
    "tiled_mlp": (False, "has not been compared with one process in pieces"),
}
#: Key -> the value that a schedule with mirrored stages takes, and why no other.
_TWO_COPIES: dict[str, tuple[int | bool | str | None, str]] = {
    "cp_size": (1, "holds copies of two stages, and FSDP2, which shards them over cp, holds those of one"),
    "ep_size": (1, "holds copies of two stages, and FSDP2, which shards experts, holds those of one"),
    "offload": ("none", "sends weights to a mirrored rank before each run, and these rest on the host"),
    "compile": ("none", "changes the parameters of mirrored layers from step to step, for which they compile anew"),
    "precision": ("auto", "has not been compared with one process in 8 bits"),
    "activation_offload": (False, "runs two pipelines in turn, and copies come back in the order of one"),
    "batch_shares": ("even", "has not been compared with one process on unequal batches"),
    "tiled_mlp": (False, "has not been compared with one process in pieces"),
    "tp_mesh": (None, "has not been compared with one process on a grid"),
}
#: Bytes of gradients that ranks exchange at a time, where FSDP2 does not.
BUCKET = 64 * 2**20
_SETTINGS = ("pipeline_schedule", "pipeline_virtual_stages", "pipeline_microbatches", "pipeline_split")


@dataclass(frozen=True)
class PipelineKeys(Sizes):
    """Settings of `pp`."""

    pipeline_schedule: str = key(
        _DEFAULT_SCHEDULE,
        "`gpipe`, `1f1b`, `interleaved_1f1b`, `looped_bfs`, `interleaved_zero_bubble`, `zbv_zero_bubble`, "
        "`dualpipe_v`; `auto` takes the smallest bubble with the memory of `1f1b`; `chimera` holds the weights twice; "
        "`pipedream_2bw` and `pipedream` are other algorithms, whose gradients are of older weights",
        choices=(*SCHEDULES, *MIRRORED_SCHEDULES, *DELAYED_SCHEDULES, AUTO_SCHEDULE),
    )
    pipeline_virtual_stages: int | None = key(
        None, "stages per rank of the looped schedules", shown="2 where it applies"
    )
    pipeline_microbatches: int | None = key(
        None, "parts of one batch in the pipeline; must divide it", shown="automatic"
    )
    pipeline_split: tuple[int, ...] | str | None = key(
        None,
        "layers per stage, for example `[9,8,8,7]`; `3:1` shares them out by the speeds of the pipeline's ranks; "
        "`auto` measures speed and memory of their devices at start",
        shown="by cost",
    )

    @property
    def split_layers(self) -> tuple[int, ...] | None:
        """The layers of each stage, where they are given."""
        return self.pipeline_split if isinstance(self.pipeline_split, tuple) else None

    @property
    def split_speeds(self) -> tuple[float, ...] | None:
        """The speed of each pipeline rank, where they are given."""
        if not isinstance(self.pipeline_split, str) or self.pipeline_split == MEASURED:
            return None
        return tuple(map(float, parse_shares(self.pipeline_split)))

    @property
    def stages_per_rank(self) -> int:
        """Return how many stages of the pipeline each rank owns."""
        if self.pipeline_schedule in _ONE_STAGE_EACH:
            return 1
        return self.pipeline_virtual_stages or 2

    @property
    def delays_updates(self) -> bool:
        """Return whether gradients are computed on weights that are some steps old."""
        return self.pipeline_schedule in DELAYED_SCHEDULES

    @property
    def mirrors_stages(self) -> bool:
        """Return whether each rank runs a copy of the mirrored stage, for micro-batches that go the other way."""
        return self.pipeline_schedule in MIRRORED_SCHEDULES

    @property
    def sharing_size(self) -> int:
        """Return the number of ranks whose gradients FSDP2 averages: none with several versions or copies."""
        return 1 if self.delays_updates or self.mirrors_stages else super().sharing_size

    @property
    def pipeline_stages(self) -> int:
        """Return the number of stages over all ranks."""
        return self.pp_size * self.stages_per_rank

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage: round and round, or down and up again in a V."""
        if self.pipeline_schedule in V_SCHEDULES and stage >= self.pp_size:
            return 2 * self.pp_size - 1 - stage
        return stage % self.pp_size

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds."""
        return [stage for stage in range(self.pipeline_stages) if self.rank_of_stage(stage) == rank]

    def check_keys(self) -> None:
        """Reject settings without stages, and numbers of micro-batches, stages and layers that do not fit."""
        if self.pp_size == 1:
            for name in _SETTINGS:
                value = getattr(self, name)
                chosen = AUTO_SCHEDULE if name == "pipeline_schedule" else None
                if value not in (None, _DEFAULT_SCHEDULE, chosen):
                    refuse(f"{name}={spell(value)}", "pp_size=1 has no stages", self._find_stages_for(name))
        micro = self.pipeline_microbatches
        # 1F1B keeps every stage busy with one micro-batch each, DualPipeV both stages of every rank.
        # PipeDream keeps them busy with the batches of later steps.
        each = {"dualpipe_v": 2, "pipedream": 0}.get(self.pipeline_schedule, 1)
        fewest = max(1, self.pp_size * each)
        if micro is not None and micro < fewest:
            refuse(f"pipeline_microbatches={micro}", f"must be at least {fewest} with pp_size={self.pp_size}", fewest)
        virtual, schedule = self.pipeline_virtual_stages, self.pipeline_schedule
        if virtual is not None:
            exact = {**dict.fromkeys(_ONE_STAGE_EACH, 1), **dict.fromkeys(V_SCHEDULES, 2)}
            count = exact.get(schedule)
            if virtual != count if count else virtual < 2:
                refuse(
                    f"pipeline_virtual_stages={virtual}",
                    f"pipeline_schedule={schedule} holds {count or 'two or more'} stages per rank",
                    f"pipeline_virtual_stages={count or 2}",
                )
        self._check_split()
        asked, ranks = f"pipeline_schedule={schedule}", self.pp_size
        if self.mirrors_stages:  # in pairs of ranks, with micro-batches of which half can go each way
            if ranks > 1 and ranks % 2:
                refuse(f"pp_size={ranks}", f"{asked} mirrors stages in pairs of ranks", f"pp_size={ranks - 1}")
            if micro is not None and micro % 2:
                refuse(f"pipeline_microbatches={micro}", f"under {asked} half of them go each way", micro + 1)
            if isinstance(self.pipeline_split, str):
                why = f"under {asked} each rank runs the mirrored stage too"
                refuse(f"pipeline_split={self.pipeline_split}", why, "pipeline_split=none")
            refuse_settings_beside(self, asked, _TWO_COPIES, "holds copies of two stages, FSDP2 one")
        if self.delays_updates:
            one = "holds several versions of the weights, FSDP2 one"
            refuse_settings_beside(self, asked, _ONE_VERSION, one)

    def _find_stages_for(self, name: str) -> str:
        """Return the number of stages that a setting fits, or else the setting's default."""
        numbers = self.split_layers or str(self.pipeline_split).split(":")
        for ranks in (2, len(numbers) // self.stages_per_rank):
            values = {field.name: getattr(self, field.name) for field in fields(PipelineKeys)}
            try:
                PipelineKeys(**{**values, "pp_size": max(2, ranks)}).check_keys()
            except SpecError as error:
                if str(error).startswith(f"{name}="):
                    continue
            return f"pp_size={max(2, ranks)}"
        return f"{name}=none"

    def _check_split(self) -> None:
        """Require `auto`, a speed above 0 for each pipeline rank, or a number of layers for each stage."""
        split, ranks, stages = self.pipeline_split, self.pp_size, self.pipeline_stages
        if isinstance(split, str):
            what, takes_speeds = f"pipeline_split={split}", ranks != -1 and not self.mirrors_stages
            works = f"pipeline_split={':'.join(['2', *['1'] * (ranks - 1)]) if takes_speeds else 'none'}"
            try:
                speeds = self.split_speeds
            except (ValueError, ZeroDivisionError) as error:
                why = "not `auto`, not a list of layers, and not speeds with colons between them"
                refuse(what, why, works, cause=error)
            if speeds is not None and min(speeds) <= 0:
                refuse(what, "each pipeline rank has a speed above 0", works)
            if speeds is not None and ranks != -1 and len(speeds) != ranks:
                refuse(what, f"{len(speeds)} speeds for pp_size={ranks}", works)
        elif split is not None:
            what, count, layers = f"pipeline_split={spell(split)}", len(split), sum(split)
            if self.pipeline_schedule == AUTO_SCHEDULE:
                works = "pipeline_schedule=1f1b" if count == ranks else "pipeline_split=none"
                refuse(what, "pipeline_schedule=auto chooses how many stages there are", works)
            if ranks != -1 and count != stages:
                why = f"{count} numbers for {stages} stages (pp_size={ranks} x {self.stages_per_rank} per rank)"
                even = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
                refuse(what, why, f"pipeline_split={spell(even) if min(even) > 0 else 'none'}")


def refuse_settings_beside(keys: Sizes, asked: str, taken: Mapping[str, tuple[object, str]], one: str) -> None:
    """Reject the first setting that another one does not take, and suggest what it takes for all of them.

    Args:
        asked: the setting that is in force, as it stands in a spec.
        taken: key -> the value that it takes, and why no other.
        one: why it takes no `dp_shard`.
    """
    found = {name: getattr(keys, name, value) for name, (value, _) in taken.items()}
    wrong = [name for name, value in found.items() if value not in (taken[name][0], -1)]  # -1 is not known yet
    ways = [f"{name}={spell(taken[name][0])}" for name in wrong]
    if keys.dp_shard_size != 1:
        rest = [axis for axis, size in keys.sizes.items() if size == -1 and axis != "dp_shard"]
        replicas = -1 if not rest else abs(keys.dp_replicate_size * keys.dp_shard_size)
        ways.insert(0, f"dp_replicate_size={replicas},dp_shard_size=1")
    if keys.dp_shard_size > 1:
        refuse(f"dp_shard_size={keys.dp_shard_size}", f"{asked} {one}", ",".join(ways))
    for name in wrong:
        refuse(f"{name}={spell(found[name])}", f"{asked} {taken[name][1]}", ",".join(ways))


# ---- What runs in a pipeline's bubbles

KFAC = "kfac"
_DAMPING, _INTERVAL = 0.01, 4
#: Key -> the value that `pipeline_fill=kfac` takes, and why it takes no other.
_PLAIN_LAYERS: dict[str, tuple[int | bool | str, str]] = {
    "cp_size": (1, "multiplies whole sequences"),
    "tp_size": (1, "inverts the curvature of whole matrices"),
    "ep_size": (1, "has too few tokens per expert"),
    "offload": ("none", "reads gradients where the layers are"),
    "compile": ("none", "reads the inputs of each linear layer by hooks"),
    "precision": ("auto", "has not been compared with one process in 8 bits"),
    "activation_checkpointing": ("none", "would see each forward pass twice"),
    "tiled_mlp": (False, "would see each piece of an MLP's forward pass twice"),
    "activation_offload": (False, "keeps activations until a bubble has room for them"),
    "batch_shares": ("even", "takes the curvature of a whole batch"),
}


@dataclass(frozen=True)
class FillKeys(PipelineKeys):
    """Settings of the work that runs in bubbles."""

    pipeline_fill: str = key(
        "none",
        "`kfac`: bubbles compute the curvature of linear layers, by which gradients are preconditioned (K-FAC); "
        "another algorithm",
        choices=("none", KFAC),
    )
    kfac_damping: float | None = key(
        None, "damping of `pipeline_fill=kfac`, shared between both factors of a layer", shown=f"{_DAMPING}"
    )
    kfac_interval: int | None = key(
        None, "optimizer steps from one curvature of `pipeline_fill=kfac` to the next", shown=f"{_INTERVAL}"
    )

    pipeline_energy: str = key(
        "none",
        "`slack`: actions that have time run at lower clocks; needs NVML and administrator rights",
        choices=("none", "slack"),
    )

    @property
    def fills_bubbles(self) -> bool:
        """Return whether a rank computes curvature while it waits."""
        return self.pipeline_fill != "none"

    @property
    def damping(self) -> float:
        """The damping in force."""
        return _DAMPING if self.kfac_damping is None else self.kfac_damping

    @property
    def curvature_interval(self) -> int:
        """Optimizer steps from one curvature to the next."""
        return _INTERVAL if self.kfac_interval is None else self.kfac_interval

    @property
    def sharing_size(self) -> int:
        """Number of ranks whose gradients FSDP2 averages; with K-FAC the pipeline averages whole gradients itself."""
        return 1 if self.fills_bubbles else super().sharing_size

    def check_keys(self) -> None:
        """Reject layouts in which a rank has no bubble or not the whole of a layer, or actions have no slack."""
        asked, of_energy = f"pipeline_fill={self.pipeline_fill}", f"pipeline_energy={self.pipeline_energy}"
        fills, schedule = " and ".join(SINGLE_SCHEDULES), f"pipeline_schedule={self.pipeline_schedule}"
        if self.pipeline_energy != "none":
            if self.pp_size == 1:
                refuse(of_energy, "pp_size=1 has no bubbles", "pp_size=2")
            if self.pipeline_schedule not in SINGLE_SCHEDULES:
                refuse(schedule, f"{of_energy} knows the slack of {fills}", "pipeline_schedule=1f1b")
            if self.fills_bubbles:
                refuse(asked, f"{of_energy} takes the bubbles", "pipeline_fill=none")
        if not (math.isfinite(self.damping) and self.damping > 0):
            works = f"kfac_damping={_DAMPING if self.fills_bubbles else 'none'}"
            refuse(f"kfac_damping={self.damping}", "a damping is more than 0", works)
        if self.curvature_interval < 1:
            works = f"kfac_interval={_INTERVAL if self.fills_bubbles else 'none'}"
            refuse(f"kfac_interval={self.curvature_interval}", "is one step at least", works)
        if not self.fills_bubbles:
            for name in ("kfac_damping", "kfac_interval"):
                if getattr(self, name) is not None:
                    refuse(f"{name}={getattr(self, name)}", f"{asked} has no curvature", "pipeline_fill=kfac")
            return
        if self.pp_size == 1:
            refuse(asked, "pp_size=1 has no bubbles", "pp_size=2")
        if self.pipeline_schedule not in SINGLE_SCHEDULES:
            refuse(schedule, f"{asked} fills the bubbles of {fills} alone", "pipeline_schedule=1f1b")
        if getattr(self, "nan_action", "report") == "skip":
            why = f"{asked} has the curvature of the step that is left out"
            refuse("nan_action=skip", why, "nan_action=stop")
        refuse_settings_beside(self, asked, _PLAIN_LAYERS, "needs whole gradients of a layer")
