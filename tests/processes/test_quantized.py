"""Error feedback makes up for what packing loses, over ranks."""

import torch
import torch.distributed as dist

from hf_parallel.ranks.all_to_all import BLOCK, reduce_scatter
from tests.distributed import run
from tests.unit.test_quantized import ODD


def scattered() -> dict:
    """What four ranks' numbers sum to, with and without error feedback."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Beside a large number small ones are lost in 4 bits, unless they are made up for.
    parts = torch.full((ranks, ODD), 0.05 * (rank + 1))
    parts[:, ::BLOCK] = 1.0
    summed = parts.clone()
    dist.all_reduce(summed)
    expected, steps, error = summed[rank], 20, torch.zeros(ranks, ODD)
    plain = sum(reduce_scatter(parts, dist.group.WORLD, "int4") for _ in range(steps)) / steps
    fed = sum(reduce_scatter(parts, dist.group.WORLD, "int4", error) for _ in range(steps)) / steps
    return {"plain": (plain - expected).abs().max().item(), "fed": (fed - expected).abs().max().item()}


def test_error_feedback_makes_up_for_what_packing_loses():
    for found in run(scattered, 4):
        assert found["plain"] > 0.05, found  # 0.05 of a largest 1.0 is below half a step, 0.07
        assert found["fed"] < 0.03, found  # what is left of four ranks' last step, a 20th of 4 x 0.07 at most
