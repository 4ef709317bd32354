"""Ranks that are started here, on one machine.

Several ranks may share one GPU, where there are fewer GPUs than ranks: NCCL takes each of them for a host of its own
and sends through sockets. That shows whether code is right, never how fast a link is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from hf_parallel.spec import refuse

#: Seconds that ranks have to end by themselves once one has failed.
GRACE_S = 6.0


def how_many(asked: int | None, fixed: int | None, devices: int) -> int:
    """How many ranks to start: as asked, as the layout's sizes have it, one per GPU, or four without any.

    Raises:
        SpecError: less than one.
    """
    if asked is not None and asked < 1:
        refuse(f"--nproc {asked}", "is one at least", "--nproc 2")
    return asked or fixed or devices or 4


def environments(count: int, devices: int, backend: str | None = None) -> list[dict[str, str]]:
    """The variables of each of `count` ranks on this machine."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared |= {"LOCAL_WORLD_SIZE": str(count)}
    if not devices:
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # ranks with all cores slow one another
    if _has_loopback():
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # else the host's name is looked up
    own = sharing(count, devices) if backend != "gloo" else [{"LOCAL_RANK": _local(r, devices)} for r in range(count)]
    return [{**shared, "RANK": str(rank), **own[rank]} for rank in range(count)]


def free_port() -> int:
    """One that nobody on this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sharing(count: int, devices: int) -> list[dict[str, str]]:
    """What NCCL needs to be told where `count` ranks have fewer GPUs; else each has the one of its number."""
    if not 0 < devices < count:
        return [{"LOCAL_RANK": str(rank)} for rank in range(count)]
    plain = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    plain |= {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")} if _has_loopback() else {}
    hosts = [{"NCCL_HOSTID": f"hf-parallel-{os.getpid()}-{rank}"} for rank in range(count)]
    return [{**plain, **hosts[rank], "LOCAL_RANK": _local(rank, devices)} for rank in range(count)]


def _local(rank: int, devices: int) -> str:
    """What shares a GPU is told the GPU's number: libraries choose their device by it."""
    return str(rank % devices if devices else rank)


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def start(argv: list[str], ranks: list[dict[str, str]], limit_s: float | None = None) -> int:
    """Run `python argv` once per rank's variables and wait: 0, or the exit code of the rank that failed first.

    Ranks that have not ended by themselves some seconds later are killed, and so are all when this thread is gone.
    """
    command = [sys.executable, *argv]
    processes = [subprocess.Popen(command, env=_with(os.environ, own), preexec_fn=_end_with_parent()) for own in ranks]
    end = None if limit_s is None else time.monotonic() + limit_s
    try:
        return _wait(processes, end)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _end_with_parent() -> Callable[[], object] | None:
    """A launcher that is killed cannot end its ranks: on Linux they are told (PR_SET_PDEATHSIG)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork: a child of a process with threads may take no locks
    return functools.partial(prctl, 1, signal.SIGKILL)


def _with(environment: Mapping[str, str], own: dict[str, str]) -> dict[str, str]:
    return {**environment, **own}


def _wait(processes: list[subprocess.Popen], end: float | None) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _let_end(processes)
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        if end is not None and time.monotonic() > end:
            print("hf_parallel: the ranks did not end in time; all were killed", file=sys.stderr)
            return 1
        time.sleep(0.05)


def _let_end(processes: list[subprocess.Popen]) -> None:
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)
