"""The machine that this process runs on: its accelerators, the links among them, its adapters; else its processors."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu, Link, find_gpu, find_link, read_catalogue

_SIZE = 384  # of the matrices whose product measures a processor
#: Links of processes on one machine without accelerators: copies through memory.
_SHARED_MEMORY = Link("shared memory", 2e9, 50e-6, "order of magnitude of gloo over loopback")


def detect(
    gpus: int | None = None, per_node: int | None = None, network: str | None = None, *, calibrated: bool = True
) -> Cluster:
    """Return the machine this process runs on, `gpus` of its kind.

    An accelerator is looked up by its name; its memory is what the driver reports. NVIDIA's driver says how they are
    linked (`nvidia-smi topo -m`), the kernel which InfiniBand or RoCE adapters there are. What neither says comes from
    the catalogue. Without an accelerator the processors count: their speed is measured in a moment. What `hf-parallel
    check --calibrate` has measured on this device holds instead.

    Args:
        calibrated: may measured rates and links be used?

    Raises:
        SpecError: an accelerator that the catalogue does not have.
    """
    import torch

    from hf_parallel.planner.calibration import calibrate_cluster_here, read_calibration

    found = read_calibration() if calibrated else None
    if not torch.accelerator.is_available():
        return calibrate_cluster_here(_make_processor_cluster(gpus or 1, per_node or gpus or 1), found)
    here = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    about = torch.get_device_module(kind).get_device_properties(0)
    try:
        gpu = find_gpu(about.name)
    except SpecError as error:
        refuse(f"this machine's {about.name}", error, do="--gpu or --cluster FILE.yaml says what it is", cause=error)
    gpu = dataclasses.replace(gpu, memory_gib=about.total_memory / 2**30)
    between = find_link(network) if network else _find_network_adapters(here) or find_link(gpu.scale_out)
    return calibrate_cluster_here(
        Cluster(gpu, gpus or here, per_node or here, _find_inside_link(gpu, here), between), found
    )


class Device(NamedTuple):
    """An accelerator that runs a process: its host, its name and the GiB of its memory; processors are `CPU`."""

    host: str
    name: str
    memory_gib: float


#: The name of a device that is no accelerator; its memory is the machine's, and counts as none of its own.
CPU = "cpu"
_SAME_MEMORY = 0.05  # drivers of equal GPUs report memory that differs by less


def number_kinds_of(devices: Sequence[Device]) -> list[int]:
    """Return a number for the kind of each device, by name and memory: the first rank that has one of it."""
    found: list[int] = []
    for rank, (_, name, memory) in enumerate(devices):
        firsts = (first for first in dict.fromkeys(found) if devices[first].name == name)
        alike = (first for first in firsts if abs(devices[first].memory_gib - memory) <= _SAME_MEMORY * memory)
        found.append(next(alike, rank))
    return found


def read_device_here(index: int | None = None) -> Device:
    """Return the accelerator of this process.

    Args:
        index: of the accelerators that this process sees; default: the one in use.
    """
    import torch

    host = socket.gethostname()
    if not torch.accelerator.is_available():
        return Device(host, CPU, 0.0)
    found = torch.accelerator.current_device_index() if index is None else index
    about = torch.get_device_module().get_device_properties(found)
    return Device(host, about.name, about.total_memory / 2**30)


def reduce_to_slowest(cluster: Cluster, devices: Sequence[Device]) -> Cluster:
    """Return the cluster with the GPU that all others wait for, and the memory that all of them have.

    Raises:
        SpecError: an accelerator that the catalogue does not have.
    """
    kinds = [find_gpu(name) for name in dict.fromkeys(device.name for device in devices)]
    slowest = min(kinds, key=lambda gpu: gpu.peak("bf16") * gpu.efficiency.gemm)
    gpu = dataclasses.replace(slowest, memory_gib=min(device.memory_gib for device in devices))
    return dataclasses.replace(cluster, gpu=gpu)


def _run_nvidia_smi(*argv: str) -> str:
    """Return what nvidia-smi prints; nothing where there is none."""
    try:
        return subprocess.run(["nvidia-smi", *argv], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# ---- links inside the node -----------------------------------------------------------------------------------------


def _find_inside_link(gpu: Gpu, here: int) -> Link:
    """Return the link of a ring through all GPUs: NVLink if it can go by NVLink all the way, else PCIe."""
    usual = find_link(gpu.scale_up)
    matrix = read_topology(_run_nvidia_smi("topo", "-m"), here)
    if here == 1 or not matrix:
        return usual
    counts = [[int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0 for word in row] for row in matrix]
    links = min(sum(row) for row in counts)
    reached, queue = {0}, [0]  # by NVLink
    while queue:
        for other, number in enumerate(counts[queue.pop()]):
            if number and other not in reached:
                reached.add(other)
                queue.append(other)
    # A ring has two neighbours each, unless there are only two GPUs.
    can_close = len(counts) == 2 or all(sum(n > 0 for n in row) >= 2 for row in counts)
    if links and len(reached) == len(counts) and can_close:
        # A switch shows all of a GPU's links to each of the others: more than it has do not count.
        name = usual.name if "nvlink" in usual.name else "nvlink3-bridge" if gpu.name.startswith("rtx") else "nvlink3"
        each = read_catalogue()["links"][name]["each_gb_s"] * 1e9
        if name == usual.name and links >= round(usual.bandwidth / each):
            return usual
        source = f"nvidia-smi topo -m: {links} links per GPU"
        return Link(f"{links} x {name}", links * each, find_link(name).latency, source)
    # PCIe, by the generation and the lanes that the slowest GPU has.
    said = _run_nvidia_smi("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
    found = re.findall(r"(\d+), *(\d+)", said)
    if not found:
        return usual if "pcie" in usual.name else find_link("pcie4")
    generation, lanes = (min(int(pair[i]) for pair in found) for i in (0, 1))
    link = usual if "through-host" in usual.name else find_link(f"pcie{min(5, max(3, generation))}")
    if lanes >= 16:
        return link
    return dataclasses.replace(link, name=f"{link.name} x{lanes}", bandwidth=link.bandwidth * lanes / 16)


def read_topology(text: str, here: int) -> list[list[str]]:
    """Read `nvidia-smi topo -m` for the GPUs that this process sees: NV12, PIX, PXB, PHB, NODE, SYS or X."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the driver underlines its heading
    lines = [line.split() for line in plain.splitlines()]
    heading = next((line for line in lines if line and line[0] == "GPU0"), None)
    if heading is None:
        return []
    count = sum(re.fullmatch(r"GPU\d+", word) is not None for word in heading)
    rows = {
        int(line[0][3:]): line[1 : count + 1]
        for line in lines
        if line and re.fullmatch(r"GPU\d+", line[0]) and line is not heading
    }
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = [int(word) for word in seen] if all(word.isdigit() for word in seen) else list(range(count))
    chosen = [index for index in chosen if index in rows][:here]
    return [[rows[row][column] for column in chosen] for row in chosen]


# ---- links between nodes -------------------------------------------------------------------------------------------


def _find_network_adapters(gpus: int, folder: str = "/sys/class/infiniband") -> Link | None:
    """Return the fastest active InfiniBand or RoCE ports of this machine, shared by its GPUs."""
    rates: list[tuple[float, str]] = []
    for port in glob.glob(f"{folder}/*/ports/*"):
        if "ACTIVE" in _read_text_file(f"{port}/state"):
            rate = re.match(r"([\d.]+) Gb/sec", _read_text_file(f"{port}/rate"))
            rates += [(float(rate.group(1)), _read_text_file(f"{port}/link_layer"))] if rate else []
    if not rates:
        return None
    fastest, layer = max(rates)
    number = sum(rate == fastest for rate, _ in rates)
    name = f"{number} x {layer or 'InfiniBand'} {fastest:g} Gbit/s"
    return Link(name, number * fastest / 8 * 1e9 / gpus, 12e-6 if layer == "InfiniBand" else 15e-6, folder)


def _read_text_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


# ---- processors ----------------------------------------------------------------------------------------------------


def _make_processor_cluster(count: int, per_node: int) -> Cluster:
    """Give each process its share of this machine's memory and cores, at the speed of a matrix product by a thread."""
    import torch

    threads, a = torch.get_num_threads(), torch.ones(_SIZE, _SIZE)
    torch.set_num_threads(1)  # as ranks without accelerators compute
    try:
        a @ a
        began = time.perf_counter()
        for _ in range(5):
            a @ a
        flops = 5 * 2 * _SIZE**3 / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    base, processes = find_gpu("a100-80gb"), min(count, per_node)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes / 2**30
    share = min(1.0, (os.cpu_count() or 1) / processes)
    rate = flops * share
    launches = {"kernel_us": 20.0, "eager_us": 6.0, "eager_step_ms": 10.0}  # nothing waits for a kernel's launch
    efficiency = dataclasses.replace(Efficiency(), gemm=1.0, attention=1.0, waves=0.0, **launches)
    gpu = dataclasses.replace(
        base,
        name="cpu",
        peaks=dict.fromkeys(("fp32", "bf16", "fp16"), rate),
        memory_gib=memory,
        bandwidth=1e10 * share,
        units=1,
        capability=(0, 0),
        efficiency=efficiency,
        source="measured on this machine",
    )
    return Cluster(gpu, count, per_node, _SHARED_MEMORY, find_link("ethernet-25g"))
