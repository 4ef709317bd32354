"""The system of each rank: versions, devices, links as the driver shows them; alike on all ranks?"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hf_parallel.ask.config import SpecError
from hf_parallel.check.report import FAILED, NOTE, OK, SLOW, Row, format_ranks
from hf_parallel.planner.detect import detect
from hf_parallel.planner.hardware import Cluster

Facts = dict[str, object]  # of one rank
_LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "peft", "trl")
#: Of which other versions on other ranks mean other numbers, or calls that the peers do not make.
_MUST_AGREE = ("python", *_LIBRARIES, "cuda", "nccl")
#: Below this part of what the planner expects a row is marked.
SLOW_SHARE = 0.5


def read_machine_facts(device: torch.device) -> Facts:
    """Return the facts of this rank."""
    found: dict[str, object] = {"host": socket.gethostname(), "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found |= {"pid": os.getpid(), "backend": dist.get_backend(), "device": "cpu", "place": "", "cuda": None}
    found["nccl"] = None
    if device.type == "cpu":
        return found
    about = torch.get_device_module(device).get_device_properties(device)
    found |= {"device": about.name, "memory": about.total_memory, "cuda": torch.version.cuda or torch.version.hip}
    found["place"] = str(getattr(about, "uuid", device.index))
    if device.type == "cuda" and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def make_system_rows(ranks: list[Facts]) -> Iterator[Row]:
    """Yield the rows that rank 0 prints about all ranks."""
    first = ranks[0]
    shown = [f"{name} {first[name]}" for name in ("python", *_LIBRARIES, "cuda", "nccl") if first.get(name)]
    yield Row("system", "versions", ", ".join(shown), values=dict(first))
    for name in (*_MUST_AGREE, "device"):
        holders: dict[object, list[int]] = {}
        for number, rank in enumerate(ranks):
            holders.setdefault(rank.get(name), []).append(number)
        if len(holders) > 1:
            expected, status = "the same on all ranks", FAILED
            if name == "device":
                expected, status = "a layout waits for the slowest kind: compare with the fast ones alone", NOTE
            text = "; ".join(f"{value or 'none'} on {format_ranks(numbers)}" for value, numbers in holders.items())
            yield Row("system", name, text, expected, status)
    hosts = len({rank["host"] for rank in ranks})
    kinds = Counter[str]()
    for rank in ranks:  # cards of one kind read alike, though drivers report some MiB more or less
        memory = rank.get("memory")
        kinds[str(rank["device"]) + (f", {memory / 2**30:.1f} GiB" if isinstance(memory, int) else "")] += 1
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    text += f", {hosts} host{'s' * (hosts > 1)}, {first['backend']}"
    yield Row("system", "devices", text, values={"hosts": hosts})
    places: dict[tuple[object, object], list[int]] = {}
    for number, rank in enumerate(ranks):
        if rank["place"]:
            places.setdefault((rank["host"], rank["place"]), []).append(number)
    crowded = [numbers for numbers in places.values() if len(numbers) > 1]
    if crowded:
        meant = "NCCL_HOSTID" in os.environ or first["backend"] == "gloo"
        text = f"ranks {format_ranks(crowded[0])} share one; no time here is that of a link"
        yield Row("system", "devices shared", text, "one for each rank", NOTE if meant else FAILED)
    names = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_"))]
    names += [name for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES") if name in os.environ]
    settings = {name: os.environ[name] for name in names}
    text = " ".join(f"{name}={value}" for name, value in settings.items())
    text = text or "none of NCCL_*, GLOO_*, CUDA_* is set"
    yield Row("system", "environment", text, status=NOTE, values=settings)


def is_device_shared(ranks: list[Facts]) -> bool:
    """Return whether several ranks compute on one accelerator."""
    places = [(rank["host"], rank["place"]) for rank in ranks if rank["place"]]
    return len(set(places)) < len(places)


def find_in_catalogue(ranks: list[Facts]) -> tuple[Cluster | None, list[Row]]:
    """Return what the planner takes this machine for, and rows that say so; None if the catalogue lacks its GPU."""
    hosts = Counter(rank["host"] for rank in ranks)
    try:
        cluster = detect(len(ranks), max(hosts.values()), calibrated=False)
    except SpecError as error:
        return None, [Row("links", "catalogue", str(error), status=NOTE)]
    where = {"inside a host": cluster.inside, **({"between hosts": cluster.between} if len(hosts) > 1 else {})}
    rows = []
    for what, link in where.items():
        shown = f"{link.name}, {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us"
        rows.append(Row("links", what, shown, status=NOTE, values={"source": link.source}))
    return cluster, rows


# ---- speed of a device ---------------------------------------------------------------------------------------------


def make_product_row(rates: list[float], kinds: list[object], cluster: Cluster | None, crowded: bool) -> Row:
    """Show the slowest rank's rate beside the planner's and the others'; of unlike devices, the slowest of each kind.

    Args:
        rates: FLOP/s of each rank.
        kinds: the name of each rank's device.
    """
    if len(set(kinds)) > 1:
        # A rank is slow beside others of its kind only: unlike devices may differ as they like
        each, slow = [], False
        for kind in dict.fromkeys(kinds):
            own = sorted(rate for rate, other in zip(rates, kinds, strict=True) if other == kind)
            each.append(f"{kind} {own[0] / 1e12:.3g} TFLOP/s")
            slow |= own[0] < SLOW_SHARE * own[len(own) // 2]
        text, status = "slowest of each: " + ", ".join(each), SLOW if slow and not crowded else OK
        return Row("system", "matrix product", text, "", status, {"flops_per_s": rates})
    slowest, usual = min(rates), sorted(rates)[len(rates) // 2]
    values: dict[str, object] = {"flops_per_s": rates}
    expected, wanted = "", usual
    if cluster is not None and cluster.gpu.name != "cpu" and not crowded:
        wanted = cluster.gpu.peak("bf16") * cluster.gpu.efficiency.gemm
        expected = f"{wanted / 1e12:.0f} TFLOP/s"
    shown = f"{slowest / 1e12:.3g} TFLOP/s on the slowest, rank {rates.index(slowest)}; {usual / 1e12:.3g} usual"
    on_processors = cluster is not None and cluster.gpu.name == "cpu"  # whose other work is not ours to judge
    status = SLOW if slowest < SLOW_SHARE * wanted and not crowded and not on_processors else OK
    return Row("system", "matrix product", shown, expected, status, values)
