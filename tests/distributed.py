"""Run a function on several ranks by forking this process after torch and transformers are imported.

A torchrun start costs an import of torch and transformers per rank; a fork costs milliseconds. The price: the parent
may never own a process group nor torch worker threads, or its children inherit locks nobody will release.

    losses = run(step, 4, model_folder)      # fn(model_folder) on four ranks -> [result of rank 0, ..., of rank 3]
"""

import copy
import ctypes
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a bar per rank hides the error that matters

import torch
import torch.distributed as dist
import torch.distributed.pipelining
from accelerate import PartialState
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama  # noqa: F401

import hf_parallel.hooks.patches  # noqa: F401
from hf_parallel.planner.hardware import read_catalogue
from tests.ports import held_port
from tests.warm import KnownCopies, warm_up

# What each rank would spend a second on, once here: imports, patterns of all models' names, the catalogue of GPUs,
# where packages lie.
for module in (
    "axes.attention_kernel",
    "axes.context.choose",
    "axes.data.gradients",
    "axes.data.shared_towers",
    "axes.experts.balance",
    "axes.tensor.axis",
    "axes.tensor.sequence_parallel",
    "hooks.auto",
    "hooks.device_order",
    "hooks.library",
    "monitor.expected",
    "planner.calibration",
    "planner.detect",
    "planner.shape",
):
    importlib.import_module(f"hf_parallel.{module}")
get_checkpoint_conversion_mapping("llama")
read_catalogue()
COPIES = KnownCopies()
warm_up(COPIES)
torch.set_num_threads(1)  # before any operation: a pool of threads does not survive a fork

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PEER_LOST = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
    "recvValue failed",
)
LIMIT_S = 240.0  # most work is done in ten seconds on a free machine; pytest itself waits for 300
GRACE_S = 10.0  # for the others to report their own error after the first; a watchdog tells sooner


class RankFailure(RuntimeError):
    """One or more ranks failed; the text starts with the traceback of the rank that failed first.

    Attributes: `rank` (the first failing one), `kind` (name of its exception class, or "Killed", "Hung"),
    `message` (its exception's own text) and `kinds` (rank -> kind, for every rank that failed).
    """

    def __init__(self, ranks: list["_Rank"]):
        first = ranks[0]
        self.rank, self.kind, self.message = first.rank, first.kind, first.message
        self.kinds = {rank.rank: rank.kind for rank in ranks}
        self.first = first.text
        super().__init__("\n".join(f"[rank {rank.rank}] {rank.shown(rank is first).strip()}" for rank in ranks))


@dataclass
class _Rank:
    """What the parent knows about one child."""

    rank: int
    pid: int
    pipe: int
    stack_file: Path
    received: bytearray = field(default_factory=bytearray)
    done: bool = False
    value: Any = None
    kind: str | None = None
    message: str = ""
    text: str = ""
    time: float = 0.0

    @property
    def has_all(self) -> bool:
        """Has the whole outcome come, behind the 8 bytes of its length?"""
        return len(self.received) >= 8 and len(self.received) == 8 + int.from_bytes(self.received[:8], "big")

    @property
    def lost_a_peer(self) -> bool:
        return any(words in self.message for words in PEER_LOST)

    def blame_order(self) -> tuple[bool, float]:
        """A rank that only lost a peer comes after every rank with a reason of its own."""
        return self.lost_a_peer, self.time

    def shown(self, in_full: bool) -> str:
        """The text for a reader; a rank that only lost a peer has nothing to say beyond that."""
        return self.text if in_full or not self.lost_a_peer else f"lost a peer: {self.message[:200]}"

    def fail(self, kind: str, message: str, text: str, when: float | None = None) -> None:
        self.kind, self.message, self.text = kind, message, text
        self.time = time.monotonic() if when is None else when

    def finish(self) -> None:
        """Read the outcome from the bytes received until the child closed its end."""
        os.close(self.pipe)
        self.done = True
        try:
            outcome = pickle.loads(bytes(self.received[8:]))
        except (EOFError, pickle.UnpicklingError):
            self.fail("Killed", "ended without a result", "ended without a result")
            return
        if "value" in outcome:
            self.value = outcome["value"]
        else:
            self.fail(**outcome)


def run(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_S,
    init: bool = True,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` forked ranks and return their results in rank order.

    Each rank has the launcher's environment (RANK, WORLD_SIZE, MASTER_PORT, ...) plus `env`, one thread, and with
    `init=True` a gloo process group; with `init=False` the function makes its own. Tensors come back as plain CPU
    tensors. Raises `RankFailure` when a rank raises, dies or is still running after `timeout` seconds.
    """
    if dist.is_initialized():
        raise RuntimeError("the forking process owns a process group; ranks would inherit its sockets")
    if PartialState._shared_state:
        raise RuntimeError("a test has made TrainingArguments or an Accelerator here; ranks would inherit its state")
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    with held_port() as port:
        launcher = {**sizes, **_rendezvous(port), **(env or {})}
        environments = [launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        return _fork_all(lambda: fn(*args, **kwargs), environments, timeout, init)


def run_alone(
    fn: Callable, *args: Any, timeout: float = LIMIT_S, env: dict[str, str] | None = None, **kwargs: Any
) -> Any:
    """The result of `fn` in one forked process without any launcher variable, as `python script.py` would have it."""
    return _fork_all(lambda: fn(*args, **kwargs), [env or {}], timeout, init=False)[0]


def run_alone_once(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return what `run_alone` does with these arguments, run once per session: the reference of a test's layouts.

    `fn` is a function of a module; it depends on nothing but its arguments, which are hashable, and writes no files.
    """
    return copy.deepcopy(_keep_result(fn, *args, **kwargs))


_keep_result = functools.lru_cache(maxsize=None, typed=True)(run_alone)  # typed: 1 is not True


def _rendezvous(port: int) -> dict[str, str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo looks the host name up, which may need a network
    return variables


def _fork_all(call: Callable[[], Any], environments: list[dict[str, str]], timeout: float, init: bool) -> list[Any]:
    COPIES.prepare()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        hold_read, hold_write = os.pipe()  # children end when the parent closes this: nobody leaves while others talk
        ranks: list[_Rank] = []
        try:
            for rank, variables in enumerate(environments):
                ranks.append(_fork(rank, call, variables, Path(folder), init, timeout, (hold_read, hold_write)))
            os.close(hold_read)
            _collect(ranks, timeout)
        finally:
            os.close(hold_write)
            _end(ranks)
        failed = sorted((rank for rank in ranks if rank.kind is not None), key=_Rank.blame_order)
        if failed:
            raise RankFailure(failed)
        return [rank.value for rank in ranks]


def _fork(rank, call, variables, folder, init, timeout, hold) -> _Rank:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    stack_file = folder / f"stack-{rank}"
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.close(hold[1])
            _prepare_child(variables, stack_file)
            _report(*_outcome(call, rank, variables, folder, init, timeout), write, hold[0])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    return _Rank(rank, pid, read, stack_file)


def _prepare_child(variables: dict[str, str], stack_file: Path) -> None:
    """Give the child its environment, and make it write its stack on SIGUSR1 and on a crash."""
    gc.freeze()  # a collection would look at, and so copy, all that is shared with the parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan spins on after a killed pytest
    stack = open(stack_file, "w")  # noqa: SIM115 - for as long as the child lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)  # a crash inside gloo says nothing else
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children itself
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)  # of loaders, also from Python 3.14 on: they are ranks' own
    torch.set_num_threads(1)  # renews the pool that a fork leaves broken, for which threads would race in torch < 2.13


def _outcome(call, rank, variables, folder, init, timeout) -> tuple[bool, bytes]:
    """Whether the call returned, and its pickled result or exception."""
    try:
        if init:
            world_size = int(variables["WORLD_SIZE"])
            store = dist.FileStore(str(folder / "store"), world_size)
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        return True, pickle.dumps({"value": _portable(call())})
    except BaseException as error:
        own = error.with_traceback(error.__traceback__.tb_next.tb_next) if error.__traceback__.tb_next else error
        text = "".join(traceback.format_exception(own))
        failure = {"kind": type(error).__name__, "message": str(error), "text": text}
        return False, pickle.dumps({**failure, "when": time.monotonic()})


def _report(returned: bool, outcome: bytes, write: int, hold: int) -> None:
    """Send the outcome; leave at once after a failure, else when the parent says that all are done."""
    with os.fdopen(write, "wb") as pipe:  # its length first: a data loader's worker that lives on holds the pipe open
        pipe.write(len(outcome).to_bytes(8, "big") + outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    if returned:
        os.read(hold, 1)
        os._exit(0)


def _portable(value: Any) -> Any:
    """The same nest of containers with every tensor a plain CPU tensor of its own memory."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"return a plain tensor from a rank, not a {type(value).__name__}: gather it or take its local part"
            )
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_portable(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _collect(ranks: list[_Rank], timeout: float) -> None:
    """Read every child's outcome until all are there, time is up, or the grace after a first failure has passed."""
    deadline = time.monotonic() + timeout
    failed = False
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, min(1.0, deadline - time.monotonic())))
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            waiting[pipe].received += data
            if data and not waiting[pipe].has_all:
                continue
            rank = waiting.pop(pipe)
            rank.finish()
            if rank.kind is not None and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    for rank in waiting.values():
        _hung(rank, "still waiting when its peers failed" if failed else f"still running after {timeout:.0f} s")


def _hung(rank: _Rank, what: str) -> None:
    """Ask a rank for the stacks of its threads; it is ended afterwards."""
    os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and not rank.stack_file.read_text().endswith("\n"):
        time.sleep(0.05)
    rank.fail("Hung", what, f"{what}; it was here:\n{_stack(rank)}")


def _stack(rank: _Rank) -> str:
    """What faulthandler wrote for a rank, without the frames of this file and of pytest below it."""
    return rank.stack_file.read_text().partition(f'  File "{__file__}"')[0]


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if not rank.done or rank.kind is not None:
            os.kill(rank.pid, signal.SIGKILL)
        if not rank.done:
            os.close(rank.pipe)
    for rank in ranks:
        _, status = os.waitpid(rank.pid, 0)
        if rank.kind == "Killed":
            rank.text += f", exit code {os.waitstatus_to_exitcode(status)}\n{_stack(rank)}"
