"""The watch over one model's training: from the meter of this rank to figures of all ranks, and what to say."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import statistics
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import refuse
from hf_parallel.monitor.meter import (
    Meter,
    RankRow,
    compute_figures,
    compute_mfu,
    gather_rows,
    make_own_row,
    round_to_significant,
)
from hf_parallel.monitor.waits import ALL
from hf_parallel.planner.dryrun.recorder import name_groups
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import compute_coordinates

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hf_parallel.planner.detect import Device
    from hf_parallel.planner.shape import ModelShape


# ---- OUTPUT_DIR/_hf_parallel_metrics.jsonl: what was measured, one JSON object per line, written by rank 0 ----------
#     {"kind": "run", "time": …, "spec": …, "axes": …, "hosts"…, "device": …, "plan": {…} or null, "why_no_plan": …}
#     {"kind": "metrics", "time": …, "step": 20, "perf": {"perf/step_time_s": …}, "ranks": [{"step": …, "data": …}, …]}
#     {"kind": "note", "time": …, "step": 20, "about": "straggler", "text": …, …}
#
# A training that goes on appends another `run`. docs/monitoring.md has every field.


FILE = "_hf_parallel_metrics.jsonl"


@dataclass(eq=False)
class Record:
    """The file of one run; a folder that takes no more loses lines, never the training."""

    folder: str
    failed: str | None = None

    def write(self, kind: str, **values: object) -> str | None:
        """Append a line; why it could not be written, the first time it could not."""
        path = os.path.join(self.folder, FILE)
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        except OSError as error:
            first, self.failed = self.failed is None, str(error)
            return f"{path} is not written: {error}; training goes on" if first else None
        return None


def read_records(folder: str) -> list[dict]:
    """All lines of a folder's file; one that was cut off while it was written is left out.

    Raises:
        SpecError: there is none.
    """
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        refuse(folder, f"holds no {FILE}, which training writes at each logging", do="give the folder of a training")
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


# ---- Which rank do the others wait for, and what is it slow at? -----------------------------------------------------
# A rank is compared with the median of the others: in reading data with all of them, in computing and in the rest of a
# step with those of its own stage, which hold the same layers. Where it is alone in its stage only a factor of two
# tells a slow rank from a larger stage.


#: A difference is clear from this share of the step, and from so many seconds of a step on.
SHARE, LEAST_S = 0.2, 0.01
_KINDS = {
    "data": "reading its data",
    "compute": "computing (forward and backward)",
    "rest": "what is around the model (optimizer, callbacks)",
}


@dataclass(frozen=True)
class Slow:
    """A rank that takes `own` seconds of each step for `kind`, the others `usual`."""

    rank: int
    kind: str
    own: float
    usual: float
    step: float

    def sentence(self, host: str, shares_evenly: bool = False) -> str:
        """Return the line for people.

        Args:
            shares_evenly: several data ranks have as many examples each, so that this one could have fewer.
        """
        remedy = "; batch_shares=auto, or a smaller share, gives it fewer examples"
        return (
            f"rank {self.rank} ({host}) is slow at {_KINDS[self.kind]}: {self.own:.3g} s of each step, where the "
            f"others take {self.usual:.3g} s; all wait for it, {self.own - self.usual:.3g} s of {self.step:.3g} s"
            f"{remedy if shares_evenly and self.kind == 'compute' else ''}"
        )


@dataclass(eq=False)
class Stragglers:
    """Looks at each gathering; of what two in a row show, it names the slowest rank, once until it is over.

    Args:
        stages: the pipeline rank of each rank.
    """

    stages: Sequence[int]
    _before: Container[tuple[int, str]] = ()
    _said: tuple[int, str] | None = None

    def look(self, rows: list[RankRow]) -> Slow | None:
        """Return the rank to name now; the same on all ranks."""
        clear: dict[tuple[int, str], Slow] = {}
        for rank, row in enumerate(rows if len(rows) > 1 else ()):
            for kind in _KINDS:
                usual, alone = self._find_usual(rows, rank, kind)
                own = getattr(row, kind)
                is_slow = own - usual > max(SHARE * row.looked, LEAST_S) + (usual if alone else 0.0)
                if is_slow and kind == "compute":
                    # With `batch_shares` it may compute more examples than the others, each in about their time
                    each = [replace(row, compute=row.compute / row.rows if row.rows else 0.0) for row in rows]
                    is_slow = each[rank].compute >= (1 + SHARE) * self._find_usual(each, rank, kind)[0]
                if is_slow:
                    clear[rank, kind] = Slow(rank, kind, own, usual, row.step)
        again = [slow for key, slow in clear.items() if key in self._before]
        self._before = clear
        found = max(again, key=lambda slow: slow.own - slow.usual, default=None)
        said, self._said = self._said, None if found is None else (found.rank, found.kind)
        return None if self._said == said else found

    def _find_usual(self, rows: list[RankRow], rank: int, kind: str) -> tuple[float, bool]:
        """Return the median of the ranks it is compared with, and whether nobody does the same work."""
        others = [i for i in range(len(rows)) if i != rank]
        peers = [i for i in others if kind == "data" or self.stages[i] == self.stages[rank]]
        return statistics.median(getattr(rows[i], kind) for i in peers or others), not peers


@dataclass(frozen=True)
class Reading:
    """The figures of one look, alike on all ranks. `said`: what it is about, and the line."""

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
        self.meter = Meter(list_known_groups(state), self.mesh.device, full)
        world = range(self.mesh.config.world_size)
        self.stragglers = Stragglers([compute_coordinates(self.mesh.config, rank)["pp"] for rank in world])
        self.devices: list[Device] = []  # of all ranks, from the first reading on
        self._config = config

    @functools.cached_property
    def peak(self) -> float | None:
        """FLOP/s of bf16 products of a mean device, as the planner's mfu has it; None: the catalogue lacks one."""
        from hf_parallel.planner.hardware import find_gpu

        try:
            return statistics.mean(find_gpu(device.name).peak("bf16") for device in self.devices)
        except SpecError:
            return None

    @functools.cached_property
    def shape(self) -> ModelShape | None:
        """The shape that the planner counts; None of a model that it cannot."""
        from hf_parallel.planner.shape import shape_of  # not needed to start

        try:
            return None if self._config is None else shape_of(self._config)
        except (SpecError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def read(self) -> Reading | None:
        """Return the steps since the last reading; None if there were none. Collective over all ranks."""
        window = self.meter.take()
        self.meter.waits.axes = list_known_groups(self.state)  # groups may have been made since
        rows = gather_rows(make_own_row(window, self.mesh.device), self.mesh.device)
        if not all(row.steps for row in rows):
            self.meter.give_back(window)
            return None
        if not self.devices:
            from hf_parallel.planner.detect import read_device_here  # not needed to start

            self.devices = messages.gather_objects(read_device_here())
        config = self.mesh.config
        sizes = {**config.sizes, "ep": config.ep_size}
        reading = Reading(compute_figures(rows, self.mesh.data_size, sizes, self.full), rows)
        rate = reading.figures.get("perf/tokens_per_second_per_device")
        if rate and self.peak is not None and self.shape is not None:
            flops = 3 * self.shape.forward_flops(reading.seq, full_attention=True)
            reading.figures["perf/mfu"] = round_to_significant(compute_mfu(rate, flops, self.peak))
        slow = self.stragglers.look(rows)
        if slow is not None:
            evenly = config.data_parallel_size > 1 and not config.shares_batches
            name = [socket.gethostname()]
            dist.broadcast_object_list(name, src=slow.rank, device=self.mesh.device)
            reading.said.append(("straggler", slow.sentence(name[0], evenly)))
        return reading


def list_known_groups(state: ParallelState) -> dict[str, str]:
    """Return the process groups of several ranks, by name: their axis, or `ALL` of those that hold every rank."""
    known, found = name_groups(state), dict[str, str]()
    for group, name in dist.distributed_c10d._world.pg_names.items():
        size = dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else 1
        axis = known.get(name) or (ALL if size == state.config.world_size else None)
        if size > 1 and axis is not None:
            found[name] = axis
    return found
