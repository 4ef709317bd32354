"""Pipeline parallelism: consecutive layers on different ranks, one of torch's schedules through them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis
from hf_parallel.axes.pipeline.part import PipelinePart, StageFacts, does_recompute_in_parts

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


class Pipeline(Axis[StageFacts, PipelinePart]):
    """Cuts the model into stages; what each rank keeps is its stages, under the names of the Hub."""

    name = "pp"
    inside = True

    def read(self, model: nn.Module, config: ParallelConfig) -> StageFacts:
        """Backbone, layers and their costs."""
        from hf_parallel.axes.pipeline.read import read_stages

        return read_stages(model)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: StageFacts) -> PipelinePart:
        """The schedule and how many layers each stage gets."""
        from hf_parallel.axes.pipeline.read import resolve_stages

        return resolve_stages(config, facts, anatomy)

    def settle(self, config: ParallelConfig, part: PipelinePart | None) -> ParallelConfig:
        return config if part is None else part.config

    def notes(self, part: PipelinePart) -> list[str]:
        schedule = part.config.pipeline_schedule
        again = [f"pipeline_schedule={schedule} recomputes layers several times; 1f1b is faster here"]
        return [part.line, *(again if does_recompute_in_parts(part.config, schedule) else [])]

    def apply(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Keep this rank's stages; from here on the roots of the model are its stages."""
        from hf_parallel.axes.pipeline.engine import PipelineEngine
        from hf_parallel.axes.pipeline.stages import cut_into_stages

        views, remote_modules = cut_into_stages(model, part, building.mesh.index("pp"))
        engine = PipelineEngine(model, views, building, part, remote_modules)
        if part.config.delays_updates:
            from hf_parallel.axes.pipeline.delayed import DelayedPipeline

            engine.delayed = DelayedPipeline(engine)
        if part.config.mirrors_stages:
            from hf_parallel.axes.pipeline.chimera import Mirror

            engine.mirror = Mirror(engine, part)
        if part.config.fills_bubbles:
            from hf_parallel.axes.pipeline.fill_kfac import KfacFill

            engine.fill = KfacFill(engine)
        if part.config.pipeline_energy != "none":
            from hf_parallel.axes.pipeline.energy import StageClocks, open_clocks_of

            engine.energy = StageClocks(engine, open_clocks_of(building.mesh.device))
        building.pipeline = engine
        building.roots = [(stage, view.layers) for stage, view in zip(engine.stages, views, strict=True)]

    def finish(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Stand behind `model.forward`; sequences are padded inside of it."""
        assert building.pipeline is not None
        building.pipeline.attach()


PIPELINE = Pipeline()
