"""The data-parallel axes: who stores which slice, how gradients are summed and measured, and stepped on."""

from hf_parallel.axes.data.gradients import clip_grad_norm, gradient_norm
from hf_parallel.axes.data.late_parameters import add_late_parameters, have_gathered, remove_late_parameters
from hf_parallel.axes.data.local_step import on_local_parts, step_on_local_parts
from hf_parallel.axes.data.zero import shard_data_parallel, sharded_modules

__all__ = [
    "remove_late_parameters",
    "add_late_parameters",
    "clip_grad_norm",
    "gradient_norm",
    "have_gathered",
    "on_local_parts",
    "shard_data_parallel",
    "sharded_modules",
    "step_on_local_parts",
]
