"""Pipeline parallelism: consecutive layers on different ranks, one of torch's schedules through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, MeshAxis, key
from hf_parallel.spec import refuse, spell

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.axes.axis import Building
    from hf_parallel.axes.pipeline.read import StageFacts
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy

#: Schedules by the number of stages that each rank holds: one, several in a loop, two in a V.
SINGLE_SCHEDULES = ("1f1b", "gpipe")
LOOPED_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V_SCHEDULES = ("zbv_zero_bubble", "dualpipe_v")
SCHEDULES = SINGLE_SCHEDULES + LOOPED_SCHEDULES + V_SCHEDULES
#: Those that compute gradients of inputs and of weights at different times.
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")
_SETTINGS = ("pipeline_schedule", "pipeline_virtual_stages", "pipeline_microbatches", "pipeline_split")
_DEFAULT_SCHEDULE = "1f1b"
AUTO_SCHEDULE = "auto"  # chosen once the model is known


@dataclass(frozen=True)
class PipelineKeys(Keys):
    pp_size: int = key(1, "pipeline stages: consecutive layers on different ranks")
    pipeline_schedule: str = key(
        _DEFAULT_SCHEDULE,
        "`gpipe`, `1f1b`, `interleaved_1f1b`, `looped_bfs`, `interleaved_zero_bubble`, `zbv_zero_bubble`, "
        "`dualpipe_v`; `auto` takes the smallest bubble with the memory of `1f1b`",
        choices=(*SCHEDULES, AUTO_SCHEDULE),
    )
    pipeline_virtual_stages: int | None = key(
        None, "stages per rank of the looped schedules", shown="2 where it applies"
    )
    pipeline_microbatches: int | None = key(
        None, "parts of one batch in the pipeline; must divide it", shown="automatic"
    )
    pipeline_split: tuple[int, ...] | None = key(None, "layers per stage, for example `[9,8,8,7]`", shown="by cost")

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

    def stages_of_rank(self, rank: int) -> list[int]:
        """The stages that this pipeline rank holds."""
        return [stage for stage in range(self.pipeline_stages) if self.rank_of_stage(stage) == rank]


@dataclass(frozen=True)
class PipelinePart:
    """What the pipeline will do. `config`: with the schedule chosen; `layers_per_stage`: in order of the stages."""

    config: ParallelConfig
    layers_per_stage: tuple[int, ...]
    tied: bool  # embedding and head share their weight
    sums_over_tokens: bool  # micro-batch losses add up to the loss of the batch
    facts: StageFacts
    line: str  # how the layers are shared out, for people


class Pipeline(Axis["StageFacts", PipelinePart]):
    """Cuts the model into stages; what each rank keeps is its stages, under the names of the Hub."""

    name = "pp"
    mesh_axes = (MeshAxis("pp", distance=3, layers=True),)
    inside = True

    def check(self, config: ParallelConfig) -> None:
        """Numbers of micro-batches, stages and layers that fit each other, and a pipeline that they are of."""
        _check_alone(config)
        _check_micro_batches(config)
        _check_virtual_stages(config)
        if config.pipeline_split is not None:
            _check_split(config)

    def read(self, model: nn.Module, config: ParallelConfig) -> StageFacts:
        """Backbone, layers and their costs."""
        from hf_parallel.axes.pipeline.read import read_stages

        return read_stages(model)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: StageFacts) -> PipelinePart:
        """The schedule and how many layers each stage gets."""
        from hf_parallel.axes.pipeline.read import resolve_stages

        return resolve_stages(config, facts, anatomy.sums_over_tokens)

    def settle(self, config: ParallelConfig, part: PipelinePart | None) -> ParallelConfig:
        return config if part is None else part.config

    def notes(self, part: PipelinePart) -> list[str]:
        schedule = part.config.pipeline_schedule
        again = [f"{schedule} recomputes layers several times; 1f1b is faster here"]
        return [part.line, *(again if recomputes_in_parts(part.config, schedule) else [])]

    def apply(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Keep this rank's stages; from here on the roots of the model are its stages."""
        from hf_parallel.axes.pipeline.engine import PipelineEngine
        from hf_parallel.axes.pipeline.stages import cut_into_stages

        views, remote_modules = cut_into_stages(model, part, building.mesh.index("pp"))
        engine = PipelineEngine(model, views, building, part, remote_modules)
        building.pipeline = engine
        building.roots = [(stage, view.layers) for stage, view in zip(engine.stages, views, strict=True)]

    def finish(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Stand behind `model.forward`; sequences are padded inside of it."""
        assert building.pipeline is not None
        building.pipeline.attach()


def recomputes_in_parts(config: ParallelConfig, schedule: str) -> bool:
    """Does each part of its backward recompute checkpointed layers for itself? That costs more than a bubble."""
    return config.activation_checkpointing != "none" and schedule in SPLIT_BACKWARD


def _check_alone(config: ParallelConfig) -> None:
    """Without stages nothing is said of them; `auto` leaves open what there is nothing of."""
    if config.pp_size != 1:
        return
    for name in _SETTINGS:
        value = getattr(config, name)
        if value not in (None, _DEFAULT_SCHEDULE, AUTO_SCHEDULE):
            refuse(f"{name}={spell(value)}", "pp_size=1 has no stages", "pp_size=2")


def _check_micro_batches(config: ParallelConfig) -> None:
    micro = config.pipeline_microbatches
    # 1F1B keeps every stage busy with one micro-batch each, DualPipeV both stages of every rank.
    works = max(1, config.pp_size) * (2 if config.pipeline_schedule == "dualpipe_v" else 1)
    if micro is not None and micro < works:
        refuse(f"pipeline_microbatches={micro}", f"must be at least {works} with pp_size={config.pp_size}", works)


def _check_virtual_stages(config: ParallelConfig) -> None:
    virtual, schedule = config.pipeline_virtual_stages, config.pipeline_schedule
    if virtual is None:
        return
    single = dict.fromkeys((*SINGLE_SCHEDULES, AUTO_SCHEDULE), (1,))
    works = {**single, **dict.fromkeys(V_SCHEDULES, (2,))}.get(schedule)
    if virtual < 1 or (works is not None and virtual not in works) or (works is None and virtual < 2):
        wanted = works[0] if works else 2
        refuse(
            f"pipeline_virtual_stages={virtual}",
            f"pipeline_schedule={schedule} holds {wanted if works else 'two or more'} stages per rank",
            f"pipeline_virtual_stages={wanted}",
        )


def _check_split(config: ParallelConfig) -> None:
    if config.pipeline_schedule == AUTO_SCHEDULE:
        refuse("pipeline_split", "pipeline_schedule=auto chooses how many stages there are", do="name a schedule")
    count = len(config.pipeline_split or ())
    if config.pp_size != -1 and count != config.pipeline_stages:
        refuse(
            f"pipeline_split={spell(config.pipeline_split)}",
            (
                f"{count} numbers for {config.pipeline_stages} stages (pp_size={config.pp_size} x "
                f"{config.stages_per_rank} per rank)"
            ),
        )


PIPELINE = PipelineKeys.axis = Pipeline()
