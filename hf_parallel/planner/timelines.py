"""The simulated timeline of a prediction: its schedule, with the predicted times of its stages."""

from __future__ import annotations

from hf_parallel.axes.pipeline.timeline import Timeline, simulate
from hf_parallel.planner.predict import Prediction
from hf_parallel.planner.stage_times import stage_times
from hf_parallel.planner.stages import make_stages
from hf_parallel.planner.step_time import schedule_order

_MOST_SHOWN = 16  # micro-batches; boxes of more could not be told apart


def predicted_timeline(prediction: Prediction) -> tuple[Timeline, int]:
    """The timeline in seconds and how many micro-batches it shows: all, or as many as can be seen."""
    layout, job = prediction.layout, prediction.job
    stages = make_stages(prediction.shape, layout, job)
    each = [stage_times(prediction.shape, stage, layout, job, prediction.cluster) for stage in stages]
    forward = [sum(times.forward.values()) for times in each]
    half = [sum(times.backward.values()) / 2 for times in each]
    shown = min(job.micro_batches, max(_MOST_SHOWN, 2 * layout.pp))
    shown -= shown % layout.pp if shown > layout.pp else 0
    actions, _ = schedule_order(layout.schedule, layout.pp, layout.virtual_stages, shown)
    inputs = [0.0, *half[1:]]  # the first stage needs no gradient of its input
    return simulate(actions, forward, inputs, [2 * half[0], *half[1:]]), shown
