"""The state of this process while a layout is active, so that no patch needs a global of its own."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import random
import sys
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
import torch.distributed as dist

from hf_parallel.apply.parallelize import ParallelState, choose_default_device, state_of
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.session import of_process, of_session
from hf_parallel.axes.data import batch_norm
from hf_parallel.axes.experts import balance
from hf_parallel.hooks import rendezvous
from hf_parallel.hooks.patching import replacing
from hf_parallel.ranks import messages
from hf_parallel.ranks.groups import time_out
from hf_parallel.ranks.mesh import ParallelMesh
from hf_parallel.ranks.shares import Shares, SharesOfPass, Speeds

if TYPE_CHECKING:
    from accelerate.data_loader import BatchSamplerShard
    from transformers import PreTrainedModel

#: Seconds that a collective may take, unless the script's arguments say.
TIME_OUT = "HF_PARALLEL_TIMEOUT"


class LastBatch(NamedTuple):
    """A loop's last batch where rows of some data rank are repeated to fill it.

    Attributes:
        tensors: those of this rank's part, by which a model's call is known to be given it.
        rows: of this rank's part.
        real: those that are not repeated, the first ones; None where examples have several rows.
        share: how much the mean over them weighs in the data ranks' average.
        repeated: examples, on all data ranks.
        tokens: those of its tensors that have many integers, by which copies are known.
    """

    tensors: list[weakref.ref[torch.Tensor]]
    rows: int
    real: int | None
    share: float
    repeated: int
    tokens: list[torch.Tensor]


@dataclass
class LoopLosses:
    """The losses that a script without a Trainer, or with a loss of its own, has computed.

    Attributes:
        weighed: losses of models, which are means over the targets of all data ranks, under `batch_shares`.
        forwards: calls of a model that trains, whose backward pass is not begun, under `batch_shares`.
        of_models: losses of models, whatever they are means over.
        means: means of torch's own that the loop has computed, each with its number of targets.
        weighs_means: does the loop train on such means? Ranks agree in its first backward pass.
        rows: of the latest call of a model that trains.
        told: has a line said what becomes of a loss of the loop's own?
        told_of_pairs: has a line said that a script's loss compares the examples of a data rank alone?
        told_of_gathers: has a line said that a gather keeps gradients from other ranks' parts?
        last: the latest last batch that has repeated rows. Not the one that a Trainer reads, which leaves them out.
    """

    weighed: list[torch.Tensor] = field(default_factory=list)
    forwards: int = 0
    of_models: list[torch.Tensor] = field(default_factory=list)
    means: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    weighs_means: bool | None = None
    rows: int | None = None
    told: bool = False
    told_of_pairs: bool = False
    told_of_gathers: bool = False
    last: LastBatch | None = None


@dataclass
class MeasuredShares:
    """The shares that `batch_shares=auto` has measured.

    Attributes:
        first: shares by a matrix product, before anything is trained; evaluation keeps to them.
        of_pass: the shares of the training loader, which follow from seconds per example.
        sampler: what shares out the batches of the training loader.
        memory: of each rank: bytes between steps, and of its whole device; None: nobody counts them, as on CPUs.
        largest: the most examples of a micro-step that each data rank has computed.
    """

    first: Shares
    of_pass: SharesOfPass
    speeds: Speeds = field(default_factory=Speeds)
    sampler: BatchSamplerShard | None = None
    memory: list[tuple[float, float] | None] | None = None
    largest: tuple[int, ...] = ()


@dataclass
class Runtime:
    """The active layout, and who asked for it."""

    config: ParallelConfig
    source: str
    mesh: ParallelMesh
    environment: dict[str, str | None] = field(default_factory=dict)
    real_rows: int | None = None  # of the ragged batch that a Trainer computes with, on this rank; else None on all
    in_trainer: bool = False  # does a Trainer compute and weigh the loss?
    loop: LoopLosses = field(default_factory=LoopLosses)
    measured: MeasuredShares | None = None
    pretended: bool = False  # a dry run's, whose other ranks are not there
    chosen_because: tuple[str, ...] = ()  # lines about a layout that `auto` has chosen


@dataclass
class _Active:
    """The layout that is active, if any."""

    runtime: Runtime | None = None


@dataclass
class Trainers:
    """`made`: has the script made a Trainer, whose loaders are the ones that are meant?"""

    made: bool = False


class _Connection:
    """`made`: did `connect_process_group` make the process group, so that its time-out may be changed?"""

    made = False


def current() -> Runtime | None:
    """Return the active runtime, or None."""
    return of_session(_Active).runtime


def mesh() -> ParallelMesh:
    """Return the active mesh. Only patches call this function, and only while a runtime is active."""
    active = current()
    assert active is not None
    return active.mesh


def is_loop() -> bool:
    """Return whether the script has made no Trainer so far."""
    return not of_session(Trainers).made


def is_absent() -> bool:
    """Return whether this rank computes without a row of its own, only to take part in collectives."""
    active = current()
    return active is not None and active.real_rows == 0


def connect_process_group() -> None:
    """Create the process group, unless there is one."""
    connection = of_process(_Connection)
    connection.made = connection.made or not dist.is_initialized()
    _set_environment()
    # accelerate's own state creates the group, so that it agrees with what Trainer and Accelerator find later.
    from accelerate import PartialState

    # A collective may take what the script's flag says, else the environment, else what Trainer would take.
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    flags.add_argument("--ddp_timeout", "--ddp-timeout", type=float)
    seconds = None
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):  # the script itself will say
        seconds = getattr(flags.parse_known_args(sys.argv[1:])[0], "ddp_timeout", None)
    limit = timedelta(seconds=float(os.environ.get(TIME_OUT) or 1800) if seconds is None else seconds)
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=limit, **rendezvous.make_own_store())
    if state.device.type == "cpu":
        state.device = torch.device("cpu")  # as in one process, where torch.load takes it: it knows no "cpu:0"
    if connection.made:
        rendezvous.refuse_unlike_platforms(dist.distributed_c10d._get_default_store(), dist.get_rank())
    # Python and NumPy seed every process anew: a script without a seed would order its rows anew on each rank. Those
    # of one model would then train on different rows, and those of data ranks would not share them out.
    of_python, of_numpy = messages.send_from_one(lambda: (random.getstate(), numpy.random.get_state()))
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


def change_time_out(limit: timedelta) -> None:
    """Change the time-out of all process groups, unless a launcher of the script's own has made them."""
    if of_process(_Connection).made and limit != time_out():
        # torch 2.14 has made it public, and warns of its former name.
        set_of_group = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in list(dist.distributed_c10d._world.pg_map):
            set_of_group(limit, group)


def start(config: ParallelConfig, source: str) -> Runtime:
    """Create the process group (unless there is one) and the mesh."""
    environment = _set_environment()
    connect_process_group()
    balance.is_absent = batch_norm.is_absent = is_absent
    started = Runtime(config, source, ParallelMesh.create(config, choose_default_device()), environment)
    of_session(_Active).runtime = started
    atexit.register(stop)  # before the groups end, which nothing may refer to then
    if dist.get_rank() > 0:  # the others report errors only, where the user does not ask for more
        from transformers.utils import logging

        if "TRANSFORMERS_VERBOSITY" not in os.environ:
            logging.set_verbosity_error()
        logging.disable_progress_bar()
    return started


def stop() -> None:
    """Forget the layout and restore the environment variables."""
    active = current()
    if active is None:
        return
    for name, value in active.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    of_session(_Active).runtime = None


def pretend_mesh(mesh: ParallelMesh) -> contextlib.AbstractContextManager[None]:
    """Let patches see the mesh of a dry run inside the `with`."""
    return replacing(of_session(_Active), runtime=Runtime(mesh.config, "a dry run", mesh, pretended=True))


def set_layout_aside() -> contextlib.AbstractContextManager[None]:
    """Let patches do inside the `with` what they do without a layout, as for a plain copy of a model."""
    return replacing(of_session(_Active), runtime=None)


def find_parallel_state(model: PreTrainedModel) -> ParallelState | None:
    """Return the state of a model as Trainer or Accelerator hold it, wrapped by torch.compile or not."""
    return state_of(getattr(model, "_orig_mod", model))


def list_parallel_states(model: PreTrainedModel) -> list[ParallelState]:
    """Return the state of a model that `accelerator.prepare` gives, and those of the parallel models inside it."""
    state = find_parallel_state(model)
    return [] if state is None else [state, *(part._hf_parallel for part in state.parts)]


def compare_batches(model: PreTrainedModel, inputs: object, kind: str) -> None:
    """Check that the ranks of this model read the same rows, also if a script's loss calls a part of the model."""
    state = find_parallel_state(model)
    if state is not None:
        state.batches.check(inputs, kind)


def equalise_random_state(axis: str, source: int = -1, of: ParallelMesh | None = None) -> None:
    """Set the random state of all ranks along `axis` to that of rank `source` of it. Collective along `axis`.

    Args:
        of: the mesh; default: the active one.
    """
    of = of or mesh()
    active = current()
    if of.size(axis) == 1 or (active is not None and active.pretended):
        return
    group = of.group(axis)
    of.set_random_state(messages.send_from_one(of.read_random_state, group, source % group.size()))


def equalise_within_model(source: int = -1, of: ParallelMesh | None = None) -> None:
    """Make random states equal on the ranks that run the same layers, so that their dropout is the same."""
    for axis in ("tp", "cp"):
        equalise_random_state(axis, source, of)


def _set_environment() -> dict[str, str | None]:
    """Set variables that accelerate and transformers read; return their former values."""
    wanted = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # load one tensor at a time: all at once would need the whole model
    if not torch.accelerator.is_available():
        wanted["ACCELERATE_USE_CPU"] = "true"  # else accelerate takes several CPU processes for single ones
    wanted |= choose_nccl_diagnostics() | choose_allocation()
    former = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    return former


def choose_nccl_diagnostics() -> dict[str, str]:
    """Return the variables by which NCCL says, when collectives time out, which rank was where.

    The flight recorder keeps the last 2,000 collectives of each process; before torch 2.13 it is off by default. torch
    warns of the second name. What the script's environment says stays.

    TORCH_NCCL_DESYNC_DEBUG is left alone: with it NCCL's watchdog writes the begin and end of each collective to the
    store while it holds the lock that every launch of a collective takes.
    """
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    wanted = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if not any(name in os.environ for name in sizes):
        wanted |= {sizes[0]: "2000"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def choose_allocation() -> dict[str, str]:
    """Let a GPU's memory grow in place: blocks of fixed sizes would leave gaps between them (ZeRO-R, 6.3).

    What is gathered and what batches take differ in size from layer to layer and step to step. Read when memory is
    first taken. What the script's environment says stays. The former name is set, which torch reads too: vLLM looks
    at that name alone, and switches the segments off around memory that its sleep mode gives back.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if not torch.cuda.is_available() or torch.version.hip or any(name in os.environ for name in names):
        return {}
    # Pinned memory is rounded up to powers of two unless torch is told where to stop: up to twice what is offloaded.
    pinned = ",pinned_max_round_threshold_mb:1" if torch.__version__ >= "2.13" else ""
    return {names[0]: f"expandable_segments:True{pinned}"}
