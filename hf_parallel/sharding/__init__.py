"""The data-parallel axes: who stores which slice, how gradients are summed and measured, and stepped on."""

from hf_parallel.sharding.adopt import abandon_parameters, adopt_parameters, have_gathered
from hf_parallel.sharding.gradients import clip_grad_norm, gradient_norm
from hf_parallel.sharding.local_step import on_local_parts, step_on_local_parts
from hf_parallel.sharding.zero import shard_data_parallel, sharded_modules

__all__ = [
    "abandon_parameters",
    "adopt_parameters",
    "clip_grad_norm",
    "gradient_norm",
    "have_gathered",
    "on_local_parts",
    "shard_data_parallel",
    "sharded_modules",
    "step_on_local_parts",
]
