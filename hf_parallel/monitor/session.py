"""One model's training while it is watched: from the meter of this rank to figures of all ranks, and what to say."""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.config import SpecError
from hf_parallel.dryrun.observe import axis_names
from hf_parallel.mesh import coordinates
from hf_parallel.monitor.clock import ALL
from hf_parallel.monitor.figures import RankRow, figures, gather, mfu, own_row, significant
from hf_parallel.monitor.meter import Meter
from hf_parallel.monitor.stragglers import Stragglers
from hf_parallel.parallelize import ParallelState

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hf_parallel.planner.shape import ModelShape


@dataclass(frozen=True)
class Reading:
    """What one look shows, the same on all ranks. `said`: what it is about, and the line."""

    figures: dict[str, float]
    rows: list[RankRow]
    said: list[tuple[str, str]] = field(default_factory=list)

    @property
    def seq(self) -> int:
        """Tokens of a mean row."""
        samples = sum(row.rows for row in self.rows)
        return round(sum(row.tokens for row in self.rows) / samples) if samples else 0


class Session:
    """Watches a model from its first step on.

    Args:
        state: of the parallel model.
        config: of the model, as transformers has it; None: its FLOPs are not known.
    """

    def __init__(self, state: ParallelState, config: PretrainedConfig, full: bool) -> None:
        self.state, self.mesh, self.full = state, state.mesh, full
        self.meter = Meter(known_groups(state), self.mesh.device, full)
        world = range(self.mesh.config.world_size)
        self.stragglers = Stragglers([coordinates(self.mesh.config, rank)["pp"] for rank in world])
        self.peak = _peak(self.mesh.device)
        self._config = config

    @functools.cached_property
    def shape(self) -> ModelShape | None:
        """What the planner counts; None of a model that it cannot."""
        from hf_parallel.planner.shape import shape_of  # not needed to start

        try:
            return None if self._config is None else shape_of(self._config)
        except (SpecError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def read(self) -> Reading | None:
        """The steps since the last reading; None if there were none. Collective over all ranks."""
        window = self.meter.take()
        self.meter.waits.axes = known_groups(self.state)  # groups may have been made since
        rows = gather(own_row(window, self.mesh.device), self.mesh.device)
        if not all(row.steps for row in rows):
            self.meter.give_back(window)
            return None
        config = self.mesh.config
        sizes = {**config.sizes, "ep": config.ep_size}
        reading = Reading(figures(rows, self.mesh.data_size, sizes, self.full), rows)
        self._add_mfu(reading)
        slow = self.stragglers.look(rows)
        if slow is not None:
            reading.said.append(("straggler", slow.sentence(_host_of(slow.rank, self.mesh.device))))
        return reading

    def _add_mfu(self, reading: Reading) -> None:
        rate = reading.figures.get("perf/tokens_per_second_per_device")
        if rate and self.peak is not None and self.shape is not None:
            flops = 3 * self.shape.forward_flops(reading.seq, full_attention=True)
            reading.figures["perf/mfu"] = significant(mfu(rate, flops, self.peak))

    def stop(self) -> None:
        """Measure no more."""
        self.meter.stop()


def known_groups(state: ParallelState) -> dict[str, str]:
    """The process groups of several ranks, by name: their axis, or `ALL` of those that hold every rank."""
    known, found = axis_names(state), dict[str, str]()
    for group, name in dist.distributed_c10d._world.pg_names.items():
        size = dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else 1
        axis = known.get(name) or (ALL if size == state.config.world_size else None)
        if size > 1 and axis is not None:
            found[name] = axis
    return found


def _peak(device: torch.device) -> float | None:
    """FLOP/s of bf16 products, as the planner's mfu has it; None of a device that its catalogue lacks."""
    if device.type == "cpu":
        return None
    from hf_parallel.planner.hardware import find_gpu

    try:
        return find_gpu(torch.get_device_module(device).get_device_name(device)).peak("bf16")
    except SpecError:
        return None


def _host_of(rank: int, device: torch.device) -> str:
    """The name of its machine: only asked for when somebody is named. Collective."""
    name = [socket.gethostname()]
    dist.broadcast_object_list(name, src=rank, device=device)
    return name[0]
