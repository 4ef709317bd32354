"""Names of schedules -> torch's schedules, with the number of micro-batches they need."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hf_parallel.config import ParallelConfig, SpecError

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def micro_batch_count(rows: int, config: ParallelConfig) -> int:
    """How many micro-batches a batch of `rows` is cut into.

    By default the largest divisor of `rows` up to 4 x stages: a bubble of at most (p - 1) / 4p of the step, and
    micro-batches no smaller than that needs.

    Raises:
        SpecError: the batch cannot feed every stage, or `pipeline_microbatches` does not divide it.
    """
    stages, asked = config.pp_size, config.pipeline_microbatches
    if rows < stages:
        raise SpecError(
            f"a batch of {rows} rows per data rank cannot feed pp_size={stages} stages; {stages} rows work"
        )
    divisors = [n for n in range(stages, rows + 1) if rows % n == 0]
    if asked is None:
        return max((n for n in divisors if n <= 4 * stages), default=divisors[0])
    if rows % asked:
        works = " or ".join(map(str, divisors))
        raise SpecError(f"pipeline_microbatches={asked} does not divide a batch of {rows} rows; {works} works")
    return asked


def build_schedule(
    module: nn.Module,
    config: ParallelConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    micro_batches: int,
    boundary: torch.Tensor,
) -> Any:
    """One torch schedule for one shape of batch; cheap to build.

    Args:
        module: this rank's stage, called as module(hidden, micro_batch=index).
        boundary: meta tensor [rows of a micro-batch, seq, hidden] of what travels between stages. Fixing it here keeps
            torch from running a shape-inference pass, which fails on new shapes and can drop gradients.
    """
    index, stages = group.rank(), group.size()
    stage = PipelineStage(
        module,
        index,
        stages,
        device,
        group=group,
        input_args=torch.empty(1, dtype=torch.long, device="meta") if index == 0 else boundary,
        output_args=torch.empty((), device="meta") if index == stages - 1 else boundary,
    )
    schedule = _SCHEDULES[config.pipeline_schedule]
    # The stage already returns the loss; it is normalised over the whole batch, so gradients are summed, not averaged.
    return schedule(stage, micro_batches, loss_fn=lambda output, target: output, scale_grads=False)
