"""Pipeline parallelism: cut the model into stages, run torch's schedules, return one autograd node."""

from hf_parallel.axes.pipeline.engine import PipelineEngine
from hf_parallel.axes.pipeline.stages import cut_into_stages

__all__ = ["PipelineEngine", "cut_into_stages"]
