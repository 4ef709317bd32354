"""Ray: an unchanged script on the nodes of a Ray cluster, through `ray.train.torch.TorchTrainer`.

    from hf_parallel.cli.ray_launcher import trainer
    trainer("train.py", ["--output_dir", "/shared/out"], parallel="tp=2,dp_shard=-1", num_processes=8).fit()

A worker of Ray holds the ranks of one tp group, so Ray's own placement keeps the group on one node, whatever is free
there, and an elastic run never cuts one. Ranks are processes of their own that the worker starts and that end with it:
the script is `__main__` in a main thread, as under torchrun, and no process group is made beside its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from hf_parallel.ask.config import AUTO, ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.check import links

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train import Result, TrainContext
    from ray.train._internal.worker_group import WorkerGroup

#: The exit code of a script that was refused in one line: to start it again would refuse it again.
REFUSED = 2


@dataclass(frozen=True)
class Job:
    """The command that each rank runs, and where."""

    argv: tuple[str, ...]
    folder: str
    block: int
    unit: int = 1  # ranks of one replica: an elastic run may have workers that do not make up another

    def run(self) -> int:
        """Start the ranks of a worker and wait for them. Return 0, or 2 where the script was refused.

        Raises:
            RuntimeError: a rank ended otherwise. Ray starts all workers again, as often as it was told.
        """
        if not os.path.isdir(self.folder):
            raise RuntimeError(
                f"hf_parallel: {self.folder} is not on this node: start from a folder that all nodes see"
            )
        os.chdir(self.folder)
        found = self.environments()
        code = links.start_ranks([*self.argv], found) if found else 0
        if code not in (0, REFUSED):
            raise RuntimeError(
                f"hf_parallel: a rank of worker {_read_place().get_world_rank()} ended with exit code {code}"
            )
        return code

    def environments(self) -> list[dict[str, str]]:
        """Return the variables of each rank of this worker, if any. Ray numbers workers node by node, by GPUs."""
        place, block = _read_place(), self.block
        world = place.get_world_size() * block // self.unit * self.unit
        first, local = place.get_world_rank() * block, place.get_local_rank() * block
        threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or block) // block)
        shared = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": place.get_local_world_size() * block,
            "GROUP_RANK": place.get_node_rank(),
            "OMP_NUM_THREADS": threads,
        }
        own = [{"RANK": first + i, "LOCAL_RANK": local + i} for i in range(block if first < world else 0)]
        return [{name: str(value) for name, value in {**shared, **rank}.items()} for rank in own]


def _read_place() -> TrainContext:
    return ray.train.get_context()


@dataclass
class Meeting(TorchConfig):
    """Where the ranks meet and which start this is, in place of a process group between the workers."""

    run: str = ""
    starts: int = 0

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that Ray calls when workers have started."""
        return _MeetingPoint

    @property
    def train_func_context(self) -> Callable:
        """Return a context that does nothing: a worker touches no GPU, its ranks do."""
        return contextlib.nullcontext


class _MeetingPoint(Backend):
    """Tells the workers, each time they have been started. Hooks know a restart by torchrun's names of these facts."""

    share_cuda_visible_devices = True  # ranks of a node see one another's GPUs, and take the one of their LOCAL_RANK

    def on_start(self, worker_group: WorkerGroup, backend_config: Meeting) -> None:
        """Tell the workers where to meet, from Ray's controller, which lives through restarts."""
        address, port = worker_group.execute_single(0, _free_address)
        facts = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": backend_config.run}
        worker_group.execute(_set_variables, {**facts, "TORCHELASTIC_RESTART_COUNT": str(backend_config.starts)})
        backend_config.starts += 1


def _free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


class ScriptTrainer(TorchTrainer):
    """TorchTrainer of a script; `fit` raises where the script was refused."""

    def fit(self) -> Result:
        """Run to the end, through restarts.

        Raises:
            SpecError: the script was refused; the line that a rank wrote says why.
            ray.train.TrainingFailedError: a rank failed once more than `max_restarts`.
        """
        result = super().fit()
        if result.return_value:
            refuse("Ray", "the script was refused", do="see the line of its rank above")
        return result


def trainer(
    script: str,
    arguments: Sequence[str] = (),
    *,
    parallel: str,
    num_processes: int,
    min_processes: int | None = None,
    max_restarts: int = 0,
    module: bool = False,
    use_gpu: bool | None = None,
    run_config: RunConfig | None = None,
) -> ScriptTrainer:
    """Make the trainer that Ray runs; nothing starts before `.fit()`.

    Args:
        script: a file that all nodes see, or the name of a module.
        arguments: those of the script. Its output folder lies where all nodes see it.
        parallel: the spec.
        num_processes: how many ranks, over all nodes; at most, in an elastic run.
        min_processes: an elastic run: it starts, and goes on after losses, with so many ranks or more.
        max_restarts: how often to go on from the newest checkpoint after a rank was lost; -1: always.
        module: `script` is the name of a module.
        use_gpu: a GPU for each rank, a CPU otherwise; as the cluster has it, if not given.
        run_config: Ray's own settings, which say how many failures there may be, too.

    Raises:
        SpecError: the spec does not fit the number of processes.
    """
    if run_config is not None and max_restarts:
        refuse(f"max_restarts={max_restarts}", "not together with run_config", do="say it in its FailureConfig")
    block, unit = compute_ranks_per_worker(parallel, num_processes, min_processes), compute_ranks_per_replica(parallel)
    if use_gpu is None and not ray.is_initialized():
        ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) > 0 if use_gpu is None else use_gpu
    config = run_config or RunConfig(failure_config=FailureConfig(max_failures=max_restarts))
    target = ["-m", script] if module else [script]
    argv = ("-m", "hf_parallel", "--parallel", parallel, *target, *arguments)
    most, least = num_processes // block, (min_processes or num_processes) // block
    scaling = ScalingConfig(
        num_workers=most if least == most else (least, most),
        use_gpu=gpus,
        resources_per_worker={"CPU": block, **({"GPU": block} if gpus else {})},
    )
    job = Job(argv, os.getcwd(), block, unit)
    meeting = Meeting(run=f"ray-{uuid.uuid4().hex}")
    return ScriptTrainer(lambda: job.run(), torch_config=meeting, scaling_config=scaling, run_config=config)


def compute_ranks_per_worker(parallel: str, most: int, least: int | None = None) -> int:
    """Return the innermost axis of the mesh: the ranks that must share a node.

    Raises:
        SpecError: the layout does not fit the most, or the least, processes that there may be.
    """
    if least is not None and not 0 < least <= most:
        refuse(f"min_processes={least}", f"not between 1 and num_processes={most}", most)
    if parallel == AUTO:
        return 1
    configs = [ParallelConfig.parse(parallel).resolve(count) for count in {most, least or most}]
    if len({config.tp_size for config in configs}) > 1:
        refuse("tp_size=-1", "in an elastic run another number of ranks would be other tp groups", "dp_shard_size=-1")
    return configs[0].tp_size


def compute_ranks_per_replica(parallel: str) -> int:
    """Return all sizes that are given; the rest multiplies them."""
    sizes = [] if parallel == AUTO else ParallelConfig.parse(parallel).sizes.values()
    return math.prod(size for size in sizes if size != -1)
