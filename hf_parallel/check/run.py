"""The order of a check: what is here, which groups, how fast, how right."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_parallel.apply.parallelize import choose_default_device
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.waiting import waiting
from hf_parallel.check import calibrate, links, parity, system
from hf_parallel.check.report import Report, Row
from hf_parallel.check.room import Room
from hf_parallel.ranks import devices
from hf_parallel.ranks.mesh import ParallelMesh

_ROOM = "hf_parallel/check"
_numbers = itertools.count()  # of this process's checks: each has keys of its own in the store
_MIB = 2**20
#: Of the large tensor whose time is taken, by type of device.
_PAYLOADS = {"cpu": 4 * _MIB}
_PAYLOAD = 64 * _MIB
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Wanted:
    """The parts that are to be checked.

    parallel: the layout whose groups and links are looked at and which is compared; None: a product of the axes, and
        every axis by itself is compared too.
    dtypes: in which layouts are compared. links, parity: whether these parts run.
    limit_s: how long a step may take. payload: bytes of the large tensor.
    calibrate: measure for the planner instead, and write this file; "": the machine's.
    """

    parallel: str | None = None
    dtypes: tuple[str, ...] = ("fp32",)
    links: bool = True
    parity: bool = True
    limit_s: float = 60.0
    payload: int | None = None
    backend: str | None = None
    json: str | None = None
    calibrate: str | None = None

    def layout(self, world: int) -> ParallelConfig:
        """Return the layout whose groups and links are looked at.

        Raises:
            SpecError: it cannot be, with so many ranks.
        """
        return ParallelConfig.parse(self.parallel or parity.choose_default_product(world)).resolve(world)


def check(wanted: Wanted) -> Report:
    """Check what `wanted` says; every rank calls it. A rank that fails ends all processes with exit code 1."""
    device = choose_default_device()
    mine = not dist.is_initialized()
    if mine:
        limit = timedelta(seconds=4 * wanted.limit_s)  # the room's own limit comes first, and says where
        backend = wanted.backend or dist.get_default_backend_for_device(device)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
    report, rank, world = Report(dist.get_world_size()), dist.get_rank(), dist.get_world_size()

    def ended(reason: str) -> None:
        report.stopped = reason
        say("")
        if rank == 0:
            publish(report, wanted)

    store = dist.PrefixStore(f"{_ROOM}/{next(_numbers)}", dist.distributed_c10d._get_default_store())
    with waiting("checking what is here") as say:
        room = Room(store, rank, world, wanted.limit_s, ended, say)
        try:
            for row in _run_parts(wanted, device, room):
                report.rows.append(row)
            room.close()
        except Exception as error:
            room.fail(error)
    if mine:
        dist.destroy_process_group()
    return report


def publish(report: Report, wanted: Wanted) -> None:
    """Print the table, and write the file that was asked for."""
    print(report.render(), flush=True)
    if wanted.json:
        report.write(wanted.json)


def _run_parts(wanted: Wanted, device: torch.device, room: Room) -> Iterator[Row]:
    """Yield all rows on rank 0; the others take part."""
    began = time.monotonic()
    if wanted.calibrate is not None:
        yield from calibrate.calibrate_machine(device, room, wanted.calibrate or None)
        return
    if wanted.links:
        room.step("facts of each rank")
        ranks = room.gather(system.read_machine_facts(device))
        cluster, known = system.find_in_catalogue(ranks) if ranks else (None, [])
        if ranks:
            yield from [*system.make_system_rows(ranks), *known]
        room.step("matrix product")
        rates, crowded = room.gather(devices.measure_product_rate(device)), system.is_device_shared(ranks)
        if rates:
            yield system.make_product_row(rates, [rank["device"] for rank in ranks], cluster, crowded)
        if room.world > 1:
            config = wanted.layout(room.world)
            room.step(f"process groups of {config.to_spec()}")
            mesh = ParallelMesh.create(config, device)
            yield from links.check_groups(mesh, room)
            payload = wanted.payload or _PAYLOADS.get(device.type, _PAYLOAD)
            yield from links.check_links(mesh, cluster, room, payload, crowded)
    layouts = [wanted.parallel] if wanted.parallel else parity.list_default_layouts(room.world)
    for spec in layouts if wanted.parity and room.world > 1 else ():
        for name in wanted.dtypes:
            yield from parity.check_layout(spec, device, DTYPES[name], room, wanted.parallel is not None)
    if room.rank == 0:
        yield Row("check", "time", f"{time.monotonic() - began:.1f} s", status="")
