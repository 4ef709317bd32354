"""Every process group of a layout, and every collective and point-to-point on it: right values, and how fast.

Latency is that of 8 bytes per rank, bandwidth that of a large tensor, both with all groups of the axis at work at the
same time, as in training. Bandwidth counts what a rank sends by the ring formulas, as the planner's figures do:

    all-reduce 2 (N-1)/N S      all-gather, reduce-scatter, all-to-all, broadcast (N-1)/N S      point-to-point S
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
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.tensor import TP_AXES
from hf_parallel.ask.spec import refuse
from hf_parallel.check.report import FAILED, NOTE, OK, SLOW, Row, format_ranks
from hf_parallel.check.room import Room
from hf_parallel.check.system import SLOW_SHARE
from hf_parallel.planner.candidates import to_layout
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.ledger import FACTORS, Group, compute_transfer_seconds, make_groups, ring_factor
from hf_parallel.ranks import start_all_gather, start_all_reduce, start_reduce_scatter
from hf_parallel.ranks.devices import synchronize
from hf_parallel.ranks.mesh import ParallelMesh, list_axis_ranks

# ---- Ranks that are started here, on one machine --------------------------------------------------------------------
# Several ranks may share one GPU, where there are fewer GPUs than ranks: NCCL takes each of them for a host of its own
# and sends through sockets. That shows whether code is right, never how fast a link is.


#: Seconds that ranks have to end by themselves once one has failed.
GRACE_S = 6.0


def count_ranks_to_start(asked: int | None, fixed: int | None, devices: int) -> int:
    """Return how many ranks to start: as asked, as the layout's sizes have it, one per GPU, or four without any.

    Raises:
        SpecError: less than one.
    """
    if asked is not None and asked < 1:
        refuse(f"--nproc {asked}", "is one at least", "--nproc 2")
    return asked or fixed or devices or 4


def make_environments(count: int, devices: int, backend: str | None = None) -> list[dict[str, str]]:
    """The variables of each of `count` ranks on this machine."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared |= {"LOCAL_WORLD_SIZE": str(count)}
    if not devices:
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # ranks with all cores slow one another
    if _has_loopback():
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # else the host's name is looked up
    own = (
        choose_nccl_sharing(count, devices)
        if backend != "gloo"
        else [{"LOCAL_RANK": _choose_local_device(r, devices)} for r in range(count)]
    )
    return [{**shared, "RANK": str(rank), **own[rank]} for rank in range(count)]


def free_port() -> int:
    """Return a port that nobody on this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def choose_nccl_sharing(count: int, devices: int) -> list[dict[str, str]]:
    """Return what NCCL is told where `count` ranks have fewer GPUs; else each has the GPU of its number."""
    if not 0 < devices < count:
        return [{"LOCAL_RANK": str(rank)} for rank in range(count)]
    plain = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    plain |= {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")} if _has_loopback() else {}
    hosts = [{"NCCL_HOSTID": f"hf-parallel-{os.getpid()}-{rank}"} for rank in range(count)]
    return [{**plain, **hosts[rank], "LOCAL_RANK": _choose_local_device(rank, devices)} for rank in range(count)]


def _choose_local_device(rank: int, devices: int) -> str:
    """Return the number that libraries choose a device by: of ranks that share a GPU, the GPU's."""
    return str(rank % devices if devices else rank)


def _has_loopback() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def start_ranks(argv: list[str], ranks: list[dict[str, str]], limit_s: float | None = None) -> int:
    """Run `python argv` once per rank's variables and wait: 0, or the exit code of the rank that failed first.

    Ranks that have not ended by themselves some seconds later are killed, and so are all when this thread is gone.
    """
    command = [sys.executable, *argv]
    processes = [subprocess.Popen(command, env={**os.environ, **own}, preexec_fn=_end_with_parent()) for own in ranks]
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


#: What the planner calls the groups of the mesh's axes.
_PLANNED = {"dp_shard": "zero", "dp_replicate": "replicate"}
_SMALL = 8  # bytes per rank
_MANY, _FEW = 20, 5  # calls whose time is taken: of small tensors, of large ones
_UNAVAILABLE = ("not support", "unsupported", "not implemented", "does not have")

#: A call that gives a tensor, and what that must be.
Expected = tuple[Callable[[], torch.Tensor], torch.Tensor]
#: Of a group and a tensor of the wanted size.
Operation = Callable[[dist.ProcessGroup, torch.Tensor], Expected]


def _make_own_tensor(group: dist.ProcessGroup, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, dist.get_rank(group) + 1)


def _make_numbered_tensor(group: dist.ProcessGroup, like: torch.Tensor) -> torch.Tensor:
    """1, 2, … for the parts of a tensor that come from each rank."""
    count = group.size()
    return torch.arange(1, count + 1, device=like.device, dtype=like.dtype).repeat_interleave(len(like) // count)


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    return group.size() * (group.size() + 1) / 2


def _test_all_reduce(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    buffer = _make_own_tensor(group, like)
    return lambda: start_all_reduce(buffer, group).wait(), torch.full_like(like, _sum_of_ranks(group))


def _test_all_gather(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    part = _make_own_tensor(group, like[: len(like) // group.size()])
    return lambda: start_all_gather(part, group).wait().flatten(), _make_numbered_tensor(group, like)


def _test_reduce_scatter(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    whole = _make_own_tensor(group, like).view(group.size(), -1)
    return lambda: start_reduce_scatter(whole, group).wait(), torch.full_like(whole[0], _sum_of_ranks(group))


def _test_all_to_all(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    sent, got = _make_own_tensor(group, like), torch.zeros_like(like)

    def call() -> torch.Tensor:
        dist.all_to_all_single(got, sent, group=group)
        return got

    return call, _make_numbered_tensor(group, like)


def _broadcast(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    buffer, first = _make_own_tensor(group, like), dist.get_global_rank(group, 0)

    def call() -> torch.Tensor:
        dist.broadcast(buffer, first, group=group)
        return buffer

    return call, torch.ones_like(like)


def _test_p2p(group: dist.ProcessGroup, like: torch.Tensor) -> Expected:
    """Round the group: each rank sends to the next one and receives from the one before."""
    own, got, place, count = _make_own_tensor(group, like), torch.zeros_like(like), dist.get_rank(group), group.size()
    to, source = (dist.get_global_rank(group, (place + step) % count) for step in (1, -1))

    def call() -> torch.Tensor:
        pair = [dist.P2POp(dist.isend, own, to, group), dist.P2POp(dist.irecv, got, source, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return got

    return call, torch.full_like(like, (place - 1) % count + 1)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _test_all_reduce,
    "all_gather": _test_all_gather,
    "reduce_scatter": _test_reduce_scatter,
    "all_to_all": _test_all_to_all,
    "broadcast": _broadcast,
    "p2p": _test_p2p,
}


def measure_collective(
    group: dist.ProcessGroup, name: str, device: torch.device, size: int, repeats: int
) -> tuple[float, bool]:
    """Seconds of one call on a tensor of `size` bytes, and whether it gave what it must. Collective over the group."""
    count = max(1, size // 4 // group.size()) * group.size()
    call, expected = OPERATIONS[name](group, torch.zeros(count, device=device))
    got = call()
    right = torch.equal(got, expected)
    got.zero_()  # what is summed in place again and again must not grow
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats, right


class Tried(NamedTuple):
    """An operation on one rank. `missing`: what its backend says of one that it does not have."""

    ranks: list[int]
    latency: float = 0.0
    seconds: float = 0.0
    right: bool = False
    missing: str | None = None


def _try_collective(group: dist.ProcessGroup, name: str, device: torch.device, payload: int) -> Tried:
    ranks = dist.get_process_group_ranks(group)
    try:
        latency, first = measure_collective(group, name, device, _SMALL * group.size(), _MANY)
        seconds, second = measure_collective(group, name, device, payload, _FEW)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # Which takes a few operations only.
        off_its_device = dist.get_backend(group) == "gloo" and device.type != "cpu"
        known = isinstance(error, NotImplementedError) or any(word in str(error) for word in _UNAVAILABLE)
        if not known and not off_its_device:
            raise
        return Tried(ranks, missing=text)
    return Tried(ranks, latency, seconds, first and second)


# ---- groups --------------------------------------------------------------------------------------------------------


def check_groups(mesh: ParallelMesh, room: Room) -> Iterator[Row]:
    """Does every group join the ranks that it is meant for? Collective over all ranks."""
    used = _list_measured_axes(mesh)
    own: dict[str, dist.ProcessGroup] = {axis: mesh.group(axis) for axis in used}
    if mesh.data_size > 1:
        own["data"] = mesh.data_group
    own["host memory"] = mesh.host_group
    for name, group in own.items():
        room.step(f"process group {name}")
        device = torch.device("cpu") if name == "host memory" else mesh.device
        number = torch.full((), float(dist.get_rank()), device=device)
        dist.all_reduce(number, group=group)
        members = dist.get_process_group_ranks(group)
        found = room.gather((tuple(members), number.item() == sum(members)))
        if found:
            yield _group_row(name, found, list_axis_ranks(mesh.config, name) if name in used else None)


def _group_row(name: str, found: list[tuple[tuple[int, ...], bool]], planned: list[list[int]] | None) -> Row:
    members = sorted({ranks for ranks, _ in found})
    wrong = [rank for rank, (ranks, right) in enumerate(found) if rank not in ranks or not right]
    if planned is not None and sorted(map(tuple, planned)) != members:
        wrong = wrong or list(range(len(found)))
    shown = " ".join(f"({format_ranks(list(ranks))})" for ranks in members[:4]) + (" …" if len(members) > 4 else "")
    text = f"{len(members)} of {len(members[0])}: {shown}"
    values = {"ranks": [list(ranks) for ranks in members]}
    if wrong:
        return Row("groups", name, f"{text}; wrong sum on {format_ranks(wrong)}", "", FAILED, values)
    return Row("groups", name, text, values=values)


# ---- speed ---------------------------------------------------------------------------------------------------------


def check_links(mesh: ParallelMesh, cluster: Cluster | None, room: Room, payload: int, crowded: bool) -> Iterator[Row]:
    """Every operation on every axis of more than one rank. Collective over all ranks."""
    for axis in reversed(_list_measured_axes(mesh)):  # fast links first
        expected = None if cluster is None else _find_planned_group(axis, mesh.config, cluster)
        for name in OPERATIONS:
            room.step(f"{name} on {axis}")
            found = room.gather(_try_collective(mesh.group(axis), name, mesh.device, payload))
            if found:
                yield _make_link_row(axis, name, found, expected, payload, crowded)


def _list_measured_axes(mesh: ParallelMesh) -> list[str]:
    """All axes of several ranks, with rows and columns of a grid of tp, slow links first."""
    grid = TP_AXES if mesh.config.tp_col_size > 1 else ()
    return [axis for axis in (*mesh.config.sizes, *grid) if mesh.size(axis) > 1]


def _find_planned_group(axis: str, config: ParallelConfig, cluster: Cluster) -> Group | None:
    """Return the links that the planner reckons with."""
    return make_groups(to_layout(config), cluster).get(_PLANNED.get(axis, axis))


def _make_link_row(
    axis: str, name: str, found: list[Tried], planned: Group | None, payload: int, crowded: bool
) -> Row:
    what = f"{axis} {name}"
    missing = next((rank.missing for rank in found if rank.missing is not None), None)
    if missing is not None:
        return Row("links", what, f"not with this backend: {missing[:80]}", status=NOTE)
    slowest = max(found, key=lambda rank: rank.seconds)
    size, latency = len(slowest.ranks), max(rank.latency for rank in found)
    speed = payload * _get_bus_factor(name, size) / slowest.seconds
    values = {"latency_s": latency, "bytes_per_s": speed, "payload": payload, "slowest_group": slowest.ranks}
    values["seconds_by_rank"] = [rank.seconds for rank in found]
    shown = f"{latency * 1e6:.0f} us, {speed / 1e9:.3g} GB/s"
    wrong = [rank for rank, own in enumerate(found) if not own.right]
    if wrong:
        return Row("links", what, f"{shown}; wrong values on {format_ranks(wrong)}", "", FAILED, values)
    if planned is None or planned.size != size:
        return Row("links", what, shown, values=values)
    expected, text = _compute_expected_rate(name, size, planned, payload)
    values |= {"planned_bytes_per_s": expected, "link": planned.link.name}
    slow = speed < SLOW_SHARE * expected and not crowded and planned.link.name != "shared memory"
    shown += f"; slowest {format_ranks(slowest.ranks)}" if slow else ""
    return Row("links", what, shown, text, SLOW if slow else OK, values)


def _get_bus_factor(name: str, size: int) -> float:
    return ring_factor(name, size) if name == "p2p" or name in FACTORS else (size - 1) / size


def _compute_expected_rate(name: str, size: int, planned: Group, payload: int) -> tuple[float, str]:
    """Bytes per second by the planner's own formula, and how that is shown."""
    kind = name if name == "p2p" or name in FACTORS else "all_gather"
    few, all_of_it = (compute_transfer_seconds(kind, part, planned) for part in (_SMALL * size, payload))
    speed = payload * ring_factor(kind, size) / all_of_it
    return speed, f"{few * 1e6:.0f} us, {speed / 1e9:.3g} GB/s ({planned.link.name})"
