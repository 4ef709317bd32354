"""Where a part runs: how many GPUs, how large, and how functions are started on ranks.

Ranks are processes of their own, as a process that has used CUDA cannot be forked. With fewer GPUs than ranks these
share them: each is told to be a host of its own, so that NCCL takes it, which a probe finds out first; where NCCL does
not, gloo carries what tp and the data axes send.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_parallel.check import links
from hf_parallel.check.report import NOTE, Row

_LIMIT_S = 420.0
_PROBE_S = 90.0
GLOO_AXES = ("tp", "dp_shard", "dp_replicate")


def started(call: str, world: int, devices: int, backend: str | None, limit_s: float, values: dict) -> list[Any]:
    """What `module:function` returns on each rank, by rank; its values and results are JSON.

    Raises:
        RuntimeError: a rank failed, which has said why.
    """
    with tempfile.TemporaryDirectory(prefix="hf-parallel-ranks-") as folder:
        Path(folder, "values.json").write_text(json.dumps(values))
        words = ["-m", "benchmarks.gpu.setting", call, folder, *([backend] if backend else [])]
        environments = links.make_environments(world, devices, backend)
        if world == 1:
            environments = [_one_gpu(devices)]  # no rank at all: what one process does
        code = links.start_ranks(words, environments, limit_s)
        if code:
            raise RuntimeError(f"{call} on {world} ranks ended with exit code {code}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _one_gpu(devices: int) -> dict[str, str]:
    """Trainer in one process would spread its batch over all GPUs that it sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    return {"CUDA_VISIBLE_DEVICES": seen.partition(",")[0]} if devices > 1 else {}


@dataclass
class Setting:
    """What a part needs to know.

    `small`: sizes that a CPU has done in seconds. `until`: when the part has to be through, by the monotonic clock.
    `run`: see `started`.
    """

    devices: int
    small: bool
    until: float = math.inf
    run: Callable[..., list[Any]] = started

    @classmethod
    def here(cls, small: bool = False, limit_s: float = math.inf) -> Setting:
        """This machine, for so many seconds."""
        import torch

        devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        return cls(devices, small or not devices, time.monotonic() + limit_s)

    def on_ranks(self, call: str, world: int, limit_s: float = _LIMIT_S, **values: Any) -> list[Any]:
        """What a function returns on each of `world` ranks."""
        backend, left = self.backend(world) if world > 1 else None, self.until - time.monotonic()
        if left < 0:
            raise TimeoutError(f"the part's time is over before {call}")
        return self.run(call, world, self.devices, backend, min(limit_s, left), values)

    def backend(self, world: int) -> str | None:
        """None: the devices' own; gloo where NCCL does not take several ranks on one GPU."""
        return "gloo" if self.devices and self.devices < world and not self._shares else None

    @functools.cached_property
    def _shares(self) -> bool:
        """Does NCCL work among ranks that share a GPU?"""
        try:
            return all(self.run("benchmarks.gpu.setting:probe", 2, min(self.devices, 1), None, _PROBE_S, {}))
        except RuntimeError:
            return False

    def can(self, spec: str, world: int) -> bool:
        """Does the backend carry what this layout sends? gloo sends no CUDA tensors from one rank to another."""
        axes = [pair.partition("=")[0] for pair in spec.split(",")]
        return self.backend(world) is None or all(axis in GLOO_AXES for axis in axes)

    def rows(self) -> Iterator[Row]:
        """What a part says of itself first."""
        if not self.devices:
            yield Row("gpu", "device", "no GPU here: the CPU part runs, and nothing below is about CUDA", status=NOTE)
            return
        import torch

        about = torch.get_device_module().get_device_properties(0)
        yield Row("gpu", "device", f"{self.devices} x {about.name}, {about.total_memory / 2**30:.1f} GiB")
        if self.devices < 4:
            how = "NCCL between sockets" if self.backend(4) is None else "gloo, as NCCL refuses: no pipelines"
            yield Row("gpu", "ranks that share a GPU", how, status=NOTE)


def probe() -> bool:
    """One sum of two ranks."""
    import torch
    import torch.distributed as dist

    from hf_parallel.apply.parallelize import choose_default_device

    number = torch.ones((), device=choose_default_device())
    dist.all_reduce(number)
    return number.item() == dist.get_world_size()


def main() -> None:
    """A rank: call the function and write down what it returns."""
    call, folder, *backend = sys.argv[1:]
    values = json.loads(Path(folder, "values.json").read_text())
    module, _, name = call.partition(":")
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    try:
        if several:
            _connect(backend[0] if backend else None)
        found = getattr(__import__(module, fromlist=[name]), name)(**values)
        Path(folder, f"{os.environ.get('RANK') or 0}.json").write_text(json.dumps(found))
        if several:
            from hf_parallel.ranks.mesh import end_all_groups

            end_all_groups()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _connect(backend: str | None) -> None:
    from torch import distributed as dist

    from hf_parallel.apply.parallelize import choose_default_device

    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend or dist.get_default_backend_for_device(choose_default_device()), **alone)


if __name__ == "__main__":
    main()
