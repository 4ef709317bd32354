"""Lower clocks for actions that have time: EnvPipe (Choi et al., USENIX ATC 2023).

In a pipeline most forward and backward passes are not on the critical path: they may take longer, and no step does.
`plan_clocks` gives each action the lowest clock at which it still ends in time. It counts on the worst case, that an
action takes 1 / f times as long at the share f of the highest clock.

Clocks are NVML's locked clocks, which need administrator rights. They are reset at the end of the process; a child
process does it when this one is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_parallel.axes.pipeline.gaps import Slack
from hf_parallel.axes.pipeline.timeline import BACKWARD, FORWARD, Action, Order, order
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.stage_runner import StageRunner
    from hf_parallel.axes.pipeline.torch_stage import Mark, TorchStage

#: Shares of the highest clock between which actions choose; below about a half the energy of a task rises again.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
#: Power of a GPU that waits, as a share of its power at the highest clock; the rest grows with the cube of the clock,
#: as dynamic power C V² f does where the voltage follows the clock (Mei et al., 2017, doi 10.1016/j.dcan.2016.10.001).
WAITING = 0.3
CURVE = f"{WAITING:g} + {1 - WAITING:g} f³ of the power at the highest clock: a model, not a measurement of this GPU"
#: Resets the clocks of a GPU once its parent has ended, however it did. Arguments: module of NVML, UUID, parent.
_WATCHER = """
import importlib, os, select, sys
while os.getppid() == int(sys.argv[3]) and not select.select([sys.stdin], [], [], 0.2)[0]:
    pass
nvml = importlib.import_module(sys.argv[1])
nvml.nvmlInit()
nvml.nvmlDeviceResetGpuLockedClocks(nvml.nvmlDeviceGetHandleByUUID(sys.argv[2]))
"""


def plan_clocks(
    actions: Order, seconds: Mapping[tuple[str, int], float], shares: Sequence[float] = SHARES, switch: float = 0.0
) -> dict[Action, float]:
    """Return the share of the highest clock for each action; the whole order takes as long as at the highest.

    Args:
        seconds: of an action at the highest clock, by kind and stage.
        switch: seconds that changing a clock takes, before and after the action.
    """
    slack = Slack(actions, seconds)
    chosen = dict.fromkeys(slack.seconds, 1.0)
    free, duration = slack.find()
    for action in sorted(chosen, key=lambda one: -free[one]):
        own, room = slack.seconds[action], slack.find()[0][action] + 1e-9 * duration
        fitting = [share for share in shares if own / share - own + 2 * switch <= room]
        if fitting and own:
            chosen[action] = min(fitting)
            slack.seconds[action] = own / chosen[action] + 2 * switch
    return chosen


def predict_saving(actions: Order, seconds: Mapping[tuple[str, int], float], clocks: Mapping[Action, float]) -> float:
    """Return the share of a step's energy that clocks save, by the curve of `CURVE`."""

    def energy(shares: Mapping[Action, float]) -> float:
        busy = [(seconds[action[:2]] / share, share) for action, share in shares.items()]
        waiting = len(actions) * duration - sum(time for time, _ in busy)
        return WAITING * waiting + sum(time * (WAITING + (1 - WAITING) * share**3) for time, share in busy)

    duration = Slack(actions, seconds).duration
    return 1 - energy(clocks) / energy(dict.fromkeys(clocks, 1.0))


def compute_seconds_of(
    forward: Sequence[float], by_input: Sequence[float], by_weight: Sequence[float]
) -> dict[tuple[str, int], float]:
    """Return the seconds of each action by kind and stage, from those of a forward and the halves of a backward."""
    found = {(FORWARD, stage): seconds for stage, seconds in enumerate(forward)}
    halves = zip(by_input, by_weight, strict=True)
    return {**found, **{(BACKWARD, stage): first + second for stage, (first, second) in enumerate(halves)}}


class NvmlClocks:
    """NVML's locked clocks of one GPU.

    Args:
        uuid: of the GPU.
        module: name of the module that has NVML.

    Raises:
        RuntimeError: there is no such module, or no right to lock clocks.
    """

    def __init__(self, uuid: str, module: str = "pynvml") -> None:
        try:
            self.nvml: Any = importlib.import_module(module)
            self.nvml.nvmlInit()
            self.handle = self.nvml.nvmlDeviceGetHandleByUUID(uuid)
            memory = max(self.nvml.nvmlDeviceGetSupportedMemoryClocks(self.handle))
            self.known = sorted(self.nvml.nvmlDeviceGetSupportedGraphicsClocks(self.handle, memory))
            arguments = [sys.executable, "-c", _WATCHER, module, uuid, str(os.getpid())]
            self.watcher = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
            begin = time.perf_counter()
            self.lock(1.0)
            self.switch = time.perf_counter() - begin  # seconds that a change takes
        except (ImportError, OSError) as error:
            raise RuntimeError(f"NVML cannot be used here ({error})") from error
        except Exception as error:  # NVML's errors are of its own module
            self.restore()
            raise RuntimeError(f"NVML refuses to lock clocks ({error})") from error
        atexit.register(self.restore)

    def lock(self, share: float) -> None:
        """Lock the lowest clock that is at least this share of the highest."""
        clock = next(clock for clock in self.known if clock >= share * self.known[-1])
        self.nvml.nvmlDeviceSetGpuLockedClocks(self.handle, clock, clock)

    def restore(self) -> None:
        """Reset the clocks, and end the watching process."""
        with contextlib.suppress(Exception):  # without rights there is nothing to reset
            self.nvml.nvmlDeviceResetGpuLockedClocks(self.handle)
        watcher = getattr(self, "watcher", None)
        if watcher is not None and watcher.poll() is None:
            watcher.stdin.close()
            watcher.wait()


@dataclass(eq=False)
class StageClocks:
    """Runs the stages of one rank at the clocks that their slack allows.

    The first run of each number of micro-batches is measured at the highest clock.
    """

    engine: StageRunner
    clocks: NvmlClocks
    share: float = 1.0
    planned: dict[int, dict[Action, float]] = field(default_factory=dict)
    times: dict[str, list[tuple[Mark, Mark]]] = field(default_factory=lambda: {FORWARD: [], BACKWARD: []})

    def watch(self, stage: TorchStage) -> None:
        """Choose the clock before each action of this stage."""
        watched: Any = stage
        watched.forward_one_chunk = functools.partial(self._run_at_clock, FORWARD, stage.forward_one_chunk)
        watched.backward_one_chunk = functools.partial(self._run_at_clock, BACKWARD, stage.backward_one_chunk)

    def _run_at_clock(
        self, kind: str, compute: Callable[..., object], micro_batch: int, *args: object, **kwargs: object
    ) -> object:
        planned = self.planned.get(self.engine.latest_count)
        self._lock(1.0 if planned is None else planned[Action(kind, self.engine.group.rank(), micro_batch)])
        if planned is not None:
            return compute(micro_batch, *args, **kwargs)
        start = self.engine.recorder.mark()
        result = compute(micro_batch, *args, **kwargs)
        self.times[kind].append((start, self.engine.recorder.mark()))
        return result

    def _lock(self, share: float) -> None:
        if share == self.share:
            return
        if self.engine.mesh.device.type != "cpu":  # what is queued was planned at the clock before
            torch.accelerator.current_stream(self.engine.mesh.device).synchronize()
        self.clocks.lock(share)
        self.share = share

    def end_run(self) -> None:
        """Go back to the highest clock; plan the next runs by the times of this one. Collective over the pipeline."""
        self._lock(1.0)
        count, engine = self.engine.latest_count, self.engine
        if count in self.planned:
            return
        own = [min(map(engine.recorder.seconds_between, self.times[kind])) for kind in (FORWARD, BACKWARD)]
        self.times = {FORWARD: [], BACKWARD: []}
        everywhere = messages.gather_objects((own, self.clocks.switch), engine.control)
        seconds = {
            (kind, stage): taken[place]
            for stage, (taken, _) in enumerate(everywhere)
            for place, kind in enumerate((FORWARD, BACKWARD))
        }
        actions = order(engine.config.pipeline_schedule, engine.group.size(), 1, count)
        switch = max(switch for _, switch in everywhere)
        self.planned[count] = plan_clocks(actions, seconds, switch=switch)


def open_clocks_of(device: torch.device) -> NvmlClocks:
    """Return the clocks of an NVIDIA GPU.

    Raises:
        RuntimeError: there is none, or its clocks cannot be locked.
    """
    if device.type != "cuda":
        raise RuntimeError(f"the device is {device.type}, not an NVIDIA GPU")
    return NvmlClocks(f"GPU-{cast(Any, torch.cuda.get_device_properties(device)).uuid}")
