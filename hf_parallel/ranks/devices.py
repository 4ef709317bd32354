"""Speed and memory of each process's device, measured at start."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

_SIZE, _REPEATS = {"cpu": 512}, 10


@dataclass(frozen=True)
class Device:
    """`speed`: FLOP/s of a large matrix product. `memory`: bytes of all of it."""

    speed: float
    memory: float


def measure_product_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product on this rank, in bf16 on accelerators."""
    size = _SIZE.get(device.type, 8192)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))  # of ones it would draw less power
    for _ in range(2):
        a @ b
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        a @ b
    synchronize(device)
    return _REPEATS * 2 * size**3 / (time.perf_counter() - began)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_device_memory(device: torch.device) -> float:
    """Return the bytes of an accelerator's memory; of processors, this process's part of the machine's."""
    if device.type != "cpu":
        return float(torch.get_device_module(device.type).get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def measure_free_memory(device: torch.device) -> float:
    """Return the bytes that this process could still allocate; on processors, its part of what is left."""
    if device.type != "cpu":
        module = torch.get_device_module(device.type)
        cached = module.memory_reserved(device) - module.memory_allocated(device)  # by torch, for later
        return float(module.mem_get_info(device)[0] + cached)
    try:
        with open("/proc/meminfo") as file:
            kibibytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not on Linux
        return measure_device_memory(device) / 2
    return kibibytes * 1024 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def find_memory_obstacle(size: int) -> str | None:
    """Return why blocks of `size` neighbouring ranks of this machine cannot reach each other's memory, or None.

    Ranks may share a GPU where torch is told so: TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
    """
    if not torch.cuda.is_available() or torch.version.hip or not torch.distributed.is_nccl_available():
        return "symmetric memory needs NVIDIA GPUs"
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":
        return None
    ranks, seen = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks % size or seen < ranks:
        return f"symmetric memory needs {size} ranks of a machine that see all its GPUs: {ranks} ranks, {seen} GPUs"
    for first in range(0, ranks, size):
        block = range(first, first + size)
        for one, other in ((a, b) for a in block for b in block if a != b):
            if not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot reach the memory of GPU {other}"
    return None
