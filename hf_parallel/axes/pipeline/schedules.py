"""Names of schedules -> torch's schedules, with the number of micro-batches they need.

name                      stages per rank   bubble, share of a step of m micro-batches on p ranks
gpipe, 1f1b               1                 (p - 1) / (m + p - 1); 1f1b keeps at most p micro-batches alive
interleaved_1f1b          v, in a loop      (p - 1) / (v m + p - 1)               (Narayanan et al., 2021)
looped_bfs                v, in a loop      the same, all forwards first          (Lamy-Poirier, 2022)
interleaved_zero_bubble   v, in a loop      weight gradients fill most of it      (Qi et al., 2023)
zbv_zero_bubble           2, in a V         the same, memory of 1f1b              (Qi et al., 2024)
dualpipe_v                2, in a V         forward beside backward               (DeepSeek-V3; Sea AI Lab's cut)

`chimera` and the schedules without a flush are run by this package: `chimera.py`, `delayed.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.pipeline import LOOPED_SCHEDULES, SCHEDULES, SINGLE_SCHEDULES, V_SCHEDULES
from hf_parallel.ask.spec import SpecError, refuse
from hf_parallel.axes.pipeline import timeline
from hf_parallel.axes.pipeline.part import does_recompute_in_parts
from hf_parallel.axes.pipeline.torch_stage import Recorder

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    from hf_parallel.axes.pipeline.torch_stage import TorchStage


def choose_schedule(config: ParallelConfig, layers: int, tied: bool) -> str:
    """pipeline_schedule=auto: the smallest simulated bubble among those that hold no more activations than 1F1B does.

    Raises:
        SpecError: none can run `pipeline_microbatches`.
    """
    allowed = [name for name in SCHEDULES if not (tied and config.sharing_size > 1 and name in V_SCHEDULES)]
    allowed = [name for name in allowed if not does_recompute_in_parts(config, name)]
    count = config.pipeline_microbatches or 4 * config.pp_size
    return timeline.choose_fastest_schedule(config.pp_size, count, layers, allowed, most_live=config.pp_size)


def predict_bubble(config: ParallelConfig, layers: tuple[int, ...], micro_batches: int) -> float:
    """Return the idle share of a step, simulated for layers of equal cost."""
    if config.delays_updates:
        return timeline.simulate_without_flush(
            config.pp_size, micro_batches, *timeline.compute_layer_costs(layers)
        ).bubble
    actions = timeline.order(config.pipeline_schedule, config.pp_size, config.stages_per_rank, micro_batches)
    return timeline.simulate(actions, *timeline.compute_layer_costs(layers)).bubble


def count_micro_batches(rows: int, config: ParallelConfig) -> int:
    """Return how many micro-batches a batch of `rows` is cut into.

    By default the largest divisor of `rows` up to 4 x ranks that the schedule takes: a bubble of at most (p - 1) / 4p
    of the step, and micro-batches no smaller than that needs.

    Raises:
        SpecError: the batch cannot feed every stage, or `pipeline_microbatches` does not divide it.
    """
    ranks, asked = config.pp_size, config.pipeline_microbatches
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and can_run_micro_batches(config, n)]
    if not counts:
        fewest = next(n for n in range(ranks, 4 * ranks + 1) if can_run_micro_batches(config, n))
        refuse(
            f"a batch of {rows} rows per data rank",
            f"cannot feed pp_size={ranks} with pipeline_schedule={config.pipeline_schedule}",
            f"a batch of {fewest}",
        )
    if asked is None:
        return max((n for n in counts if n <= 4 * ranks), default=counts[0])
    if asked not in counts:
        works = " or ".join(map(str, counts))
        refuse(
            f"pipeline_microbatches={asked}",
            f"does not cut a batch of {rows} rows for pipeline_schedule={config.pipeline_schedule}",
            works,
        )
    return asked


def can_be_cut(rows: int, config: ParallelConfig) -> bool:
    """Return whether the schedule can run a batch of this many rows. Others run whole: exact, only less overlapped."""
    try:
        return count_micro_batches(rows, config) > 0
    except SpecError:
        return False


def can_run_micro_batches(config: ParallelConfig, micro_batches: int) -> bool:
    """Return whether the schedule can run this many micro-batches."""
    name, ranks = config.pipeline_schedule, config.pp_size
    if name == "pipedream":  # batches of later steps fill its stages
        return micro_batches >= 1
    if name in LOOPED_SCHEDULES and micro_batches >= ranks:  # they go in rounds of equal size
        return micro_batches % (micro_batches // ranks) == 0
    if config.mirrors_stages:  # half of them go each way
        return micro_batches >= ranks and micro_batches % 2 == 0
    return micro_batches >= (config.pipeline_stages if name == "dualpipe_v" else ranks)


def build_schedule(
    modules: dict[int, nn.Module],
    config: ParallelConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    micro_batches: int,
    boundary: torch.Tensor,
    recorder: Recorder,
    connected: bool,
) -> tuple[_PipelineSchedule, list[TorchStage]]:
    """Build a torch schedule, and its stages, for one number of micro-batches, of any shape.

    Args:
        modules: this rank's stages by index, each called as module(hidden, micro_batch=index).
        boundary: meta tensor [rows of a micro-batch, seq, hidden] of what travels between stages at first. Fixing it
            here keeps torch from running a shape-inference pass, which fails on new shapes and can drop gradients.
        connected: these ranks have exchanged messages before.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class  # slow to import: for pipelines only

    from hf_parallel.axes.pipeline.torch_stage import TorchStage

    count = config.pipeline_stages
    stages = [
        TorchStage(
            module,
            index,
            count,
            device,
            group=group,
            input_args=torch.empty(1, dtype=torch.long, device="meta") if index == 0 else boundary,
            output_args=torch.empty((), device="meta") if index == count - 1 else boundary,
        )
        for index, module in modules.items()
    ]
    for stage in stages:
        stage.connected, stage.recorder = connected, recorder
    name = config.pipeline_schedule
    single = name in SINGLE_SCHEDULES
    schedule = get_schedule_class(name.replace("_", ""))
    # The stage already returns the loss; it is normalised over the whole batch, so gradients are summed, not averaged.
    built = schedule(
        stages[0] if single else stages, micro_batches, loss_fn=lambda output, target: output, scale_grads=False
    )
    return built, stages
