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

from hf_parallel.ask.keys.axes import TP_AXES
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
    """Return the variables of each of `count` ranks on this machine."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared |= {"LOCAL_WORLD_SIZE": str(count)}
    if not devices:
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # ranks with all cores slow one another
    has_loopback = any(name == "lo" for _, name in socket.if_nameindex())
    if has_loopback:
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # else the host's name is looked up
    shares_devices = backend != "gloo" and 0 < devices < count
    if shares_devices:
        shared |= {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        shared |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        shared |= {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")} if has_loopback else {}
    found = []
    for rank in range(count):
        # Libraries choose a device by LOCAL_RANK: of ranks that share a GPU, the GPU's number
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % devices if devices else rank)}
        own |= {"NCCL_HOSTID": f"hf-parallel-{os.getpid()}-{rank}"} if shares_devices else {}
        found.append({**shared, **own})
    return found


def free_port() -> int:
    """Return a port that nobody on this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(argv: list[str], ranks: list[dict[str, str]], limit_s: float | None = None) -> int:
    """Run `python argv` once per rank's variables and wait: 0, or the exit code of the rank that failed first.

    Ranks that have not ended by themselves some seconds later are killed, and so are all when this thread is gone.
    """
    command, end_with_parent = [sys.executable, *argv], None
    if sys.platform == "linux":
        # A launcher that is killed cannot end its ranks: they are told (PR_SET_PDEATHSIG). The function is found
        # before the fork, because a child of a process with threads may take no locks.
        end_with_parent = functools.partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)
    processes = [subprocess.Popen(command, env={**os.environ, **own}, preexec_fn=end_with_parent) for own in ranks]
    end = None if limit_s is None else time.monotonic() + limit_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = next((code for code in codes if code), None)
            if failed is not None:
                grace = time.monotonic() + GRACE_S
                while time.monotonic() < grace and any(process.poll() is None for process in processes):
                    time.sleep(0.05)
                return failed if failed > 0 else 128 - failed
            if all(code == 0 for code in codes):
                return 0
            if end is not None and time.monotonic() > end:
                print("hf_parallel: the ranks did not end in time; all were killed", file=sys.stderr)
                return 1
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


#: What the planner calls the groups of the mesh's axes.
_PLANNED = {"dp_shard": "zero", "dp_replicate": "replicate"}
_SMALL = 8  # bytes per rank
_MANY, _FEW = 20, 5  # calls whose time is taken: of small tensors, of large ones
_UNAVAILABLE = ("not support", "unsupported", "not implemented", "does not have")

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")


def _prepare_operation(
    group: dist.ProcessGroup, name: str, like: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return a call of an operation on a tensor of this size, and what it must give. Each rank sends its number."""
    place, count = dist.get_rank(group), group.size()
    own, total = torch.full_like(like, place + 1), _sum_of_ranks(group)
    # 1, 2, … for the parts of a tensor that come from each rank
    numbered = torch.arange(1, count + 1, device=like.device, dtype=like.dtype).repeat_interleave(len(like) // count)
    if name == "all_reduce":
        return lambda: start_all_reduce(own, group).wait(), torch.full_like(like, total)
    if name == "all_gather":
        part = own[: len(like) // count]
        return lambda: start_all_gather(part, group).wait().flatten(), numbered
    if name == "reduce_scatter":
        whole = own.view(count, -1)
        return lambda: start_reduce_scatter(whole, group).wait(), torch.full_like(whole[0], total)
    # Of messages between two ranks each sends to the next of the group, and receives from the one before
    first, to, source = (dist.get_global_rank(group, of % count) for of in (0, place + 1, place - 1))
    got = own if name == "broadcast" else torch.zeros_like(like)

    def call() -> torch.Tensor:
        if name == "broadcast":
            dist.broadcast(got, first, group=group)
        elif name == "all_to_all":
            dist.all_to_all_single(got, own, group=group)
        else:
            pair = [dist.P2POp(dist.isend, own, to, group), dist.P2POp(dist.irecv, got, source, group)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        return got

    sent = {"broadcast": torch.ones_like(like), "all_to_all": numbered}
    return call, sent[name] if name in sent else torch.full_like(like, (place - 1) % count + 1)


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    return group.size() * (group.size() + 1) / 2


def measure_collective(
    group: dist.ProcessGroup, name: str, device: torch.device, size: int, repeats: int
) -> tuple[float, bool]:
    """Return seconds of one call on a tensor of `size` bytes, and whether its result is right. Collective."""
    count = max(1, size // 4 // group.size()) * group.size()
    call, expected = _prepare_operation(group, name, torch.zeros(count, device=device))
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
    """Check that every group joins the ranks that it is meant for. Collective over all ranks."""
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
        own_members = dist.get_process_group_ranks(group)
        found = room.gather((tuple(own_members), number.item() == sum(own_members)))
        if not found:
            continue
        members = sorted({ranks for ranks, _ in found})
        wrong = [rank for rank, (ranks, right) in enumerate(found) if rank not in ranks or not right]
        if name in used and sorted(map(tuple, list_axis_ranks(mesh.config, name))) != members:
            wrong = wrong or list(range(len(found)))
        shown = " ".join(f"({format_ranks(list(ranks))})" for ranks in members[:4])
        text = f"{len(members)} of {len(members[0])}: {shown}" + (" …" if len(members) > 4 else "")
        text += f"; wrong sum on {format_ranks(wrong)}" if wrong else ""
        values = {"ranks": [list(ranks) for ranks in members]}
        yield Row("groups", name, text, status=FAILED if wrong else OK, values=values)


# ---- speed ---------------------------------------------------------------------------------------------------------


def check_links(mesh: ParallelMesh, cluster: Cluster | None, room: Room, payload: int, crowded: bool) -> Iterator[Row]:
    """Measure every operation on every axis of more than one rank. Collective over all ranks."""
    for axis in reversed(_list_measured_axes(mesh)):  # fast links first
        # The links that the planner reckons with
        groups = {} if cluster is None else make_groups(to_layout(mesh.config), cluster)
        expected = groups.get(_PLANNED.get(axis, axis))
        for name in OPERATIONS:
            room.step(f"{name} on {axis}")
            found = room.gather(_try_collective(mesh.group(axis), name, mesh.device, payload))
            if found:
                yield _make_link_row(axis, name, found, expected, payload, crowded)


def _list_measured_axes(mesh: ParallelMesh) -> list[str]:
    """Return all axes of several ranks, with rows and columns of a grid of tp, slow links first."""
    grid = TP_AXES if mesh.config.tp_col_size > 1 else ()
    return [axis for axis in (*mesh.config.sizes, *grid) if mesh.size(axis) > 1]


def _make_link_row(
    axis: str, name: str, found: list[Tried], planned: Group | None, payload: int, crowded: bool
) -> Row:
    what = f"{axis} {name}"
    missing = next((rank.missing for rank in found if rank.missing is not None), None)
    if missing is not None:
        return Row("links", what, f"not with this backend: {missing[:80]}", status=NOTE)
    slowest = max(found, key=lambda rank: rank.seconds)
    size, latency = len(slowest.ranks), max(rank.latency for rank in found)
    is_planned = name == "p2p" or name in FACTORS
    speed = payload * (ring_factor(name, size) if is_planned else (size - 1) / size) / slowest.seconds
    values = {"latency_s": latency, "bytes_per_s": speed, "payload": payload, "slowest_group": slowest.ranks}
    values["seconds_by_rank"] = [rank.seconds for rank in found]
    shown = f"{latency * 1e6:.0f} us, {speed / 1e9:.3g} GB/s"
    wrong = [rank for rank, own in enumerate(found) if not own.right]
    if wrong:
        return Row("links", what, f"{shown}; wrong values on {format_ranks(wrong)}", "", FAILED, values)
    if planned is None or planned.size != size:
        return Row("links", what, shown, values=values)
    # The planner's own formula: of a gather for what it does not reckon with
    kind = name if is_planned else "all_gather"
    few, all_of_it = (compute_transfer_seconds(kind, part, planned) for part in (_SMALL * size, payload))
    expected = payload * ring_factor(kind, size) / all_of_it
    text = f"{few * 1e6:.0f} us, {expected / 1e9:.3g} GB/s ({planned.link.name})"
    values |= {"planned_bytes_per_s": expected, "link": planned.link.name}
    slow = speed < SLOW_SHARE * expected and not crowded and planned.link.name != "shared memory"
    shown += f"; slowest {format_ranks(slowest.ranks)}" if slow else ""
    return Row("links", what, shown, text, SLOW if slow else OK, values)
