"""A cluster that is not in the catalogue: described in YAML, or the machine that this process runs on.

# cluster.yaml; a GPU or a link is a name of the catalogue, or an entry in its form
gpu: {like: h100-80gb, name: my-h100, memory_gib: 94.0}
gpus_per_node: 4
network: {name: 2x100g, gb_s: 6.2, latency_us: 12, source: measured}
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from typing import Any

import yaml

from hf_parallel.config import SpecError
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu, Link, find_gpu, find_link

_KEYS = ("gpu", "gpus", "gpus_per_node", "inside", "network")
_GPU_UNITS = {"bandwidth": 1e9}  # the catalogue has GB/s, `Gpu` bytes/s
#: Links of processes on one machine without accelerators: copies through memory.
_SHARED_MEMORY = Link("shared memory", 2e9, 50e-6, "order of magnitude of gloo over loopback")


def read_cluster(path: str, gpus: int | None = None) -> Cluster:
    """The cluster that a YAML file describes.

    Args:
        gpus: how many; default: what the file says.

    Raises:
        SpecError: no such file, an unknown key or name, or no number of GPUs.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"{path}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or "gpu" not in values:
        raise SpecError(f"{path}: needs the key gpu; a line such as `gpu: h100-80gb` works")
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise SpecError(f"{path}: {unknown[0]} is no key; {', '.join(_KEYS)} are")
    gpus = gpus or values.get("gpus")
    if not isinstance(gpus, int) or gpus < 1:
        raise SpecError(f"{path}: how many GPUs? A line `gpus: 8`, or --gpus 8, works")
    gpu = _gpu(path, values["gpu"])
    inside = _link(path, values.get("inside", gpu.scale_up))
    between = _link(path, values.get("network", gpu.scale_out))
    return Cluster(gpu, gpus, int(values.get("gpus_per_node", 8)), inside, between)


def _gpu(path: str, entry: Any) -> Gpu:
    if isinstance(entry, str):
        return find_gpu(entry)
    entry = dict(entry)
    base = find_gpu(entry.pop("like", "a100-80gb"))
    changes: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "tflops":
            changes["peaks"] = {**base.peaks, **{name: number * 1e12 for name, number in value.items()}}
        elif key == "efficiency":
            changes[key] = dataclasses.replace(base.efficiency, **_known(path, key, value, Efficiency))
        else:
            changes.update(_known(path, "gpu", {key: value}, Gpu))
    changes.update({key: changes[key] * factor for key, factor in _GPU_UNITS.items() if key in changes})
    return dataclasses.replace(base, **changes)


def _known(path: str, where: str, values: dict[str, Any], kind: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    wrong = [key for key in values if key not in names]
    if wrong:
        raise SpecError(f"{path}: {wrong[0]} is no key of {where}; tflops, {', '.join(names)} are")
    return values


def _link(path: str, entry: Any) -> Link:
    if isinstance(entry, str):
        return find_link(entry)
    try:
        return Link(
            str(entry["name"]), entry["gb_s"] * 1e9, entry["latency_us"] * 1e-6, str(entry.get("source", path))
        )
    except (KeyError, TypeError) as error:
        raise SpecError(f"{path}: a link is a name, or has name, gb_s and latency_us; {error} is missing") from error


# ---- this machine ----------------------------------------------------------------------------------------------------


def detect(gpus: int | None = None, per_node: int | None = None) -> Cluster:
    """The machine this process runs on, `gpus` of its kind.

    An accelerator is looked up by its name; its memory is what the driver reports, and its link inside the node is
    PCIe where `nvidia-smi` shows no NVLink. Without one, the processors count: their speed is measured in a moment.

    Raises:
        SpecError: an accelerator that the catalogue does not have.
    """
    import torch

    if not torch.accelerator.is_available():
        return _processors(gpus or 1, per_node or gpus or 1)
    here = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    about = torch.get_device_module(kind).get_device_properties(0)
    try:
        gpu = find_gpu(about.name)
    except SpecError as error:
        raise SpecError(
            f"this machine's {about.name}: {error}; --gpu or --cluster FILE.yaml says what it is"
        ) from error
    gpu = dataclasses.replace(gpu, memory_gib=about.total_memory / 2**30)
    inside = find_link(gpu.scale_up)
    if "nvlink" in inside.name and here > 1 and not _has_nvlink():
        inside = find_link("pcie4")
    return Cluster(gpu, gpus or here, per_node or here, inside, find_link(gpu.scale_out))


def _has_nvlink() -> bool:
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return True  # not known: what the catalogue says
    return any(word.startswith("NV") and word[2:].isdigit() for word in shown.split())


def _processors(count: int, per_node: int) -> Cluster:
    """Each process with its share of this machine's memory and cores."""
    base, processes = find_gpu("a100-80gb"), min(count, per_node)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes / 2**30
    share = min(1.0, (os.cpu_count() or 1) / processes)
    rate = _measured_flops() * share
    efficiency = dataclasses.replace(Efficiency(), gemm=1.0, attention=1.0, waves=0.0, kernel_us=20.0)
    gpu = dataclasses.replace(
        base,
        name="cpu",
        peaks=dict.fromkeys(("fp32", "bf16", "fp16"), rate),
        memory_gib=memory,
        bandwidth=1e10 * share,
        units=1,
        efficiency=efficiency,
        source="measured on this machine",
    )
    return Cluster(gpu, count, per_node, _SHARED_MEMORY, find_link("ethernet-25g"))


def _measured_flops(size: int = 384) -> float:
    """FLOP/s of one thread in a matrix product, as ranks without accelerators compute."""
    import torch

    threads, a = torch.get_num_threads(), torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        a @ a
        began = time.perf_counter()
        for _ in range(5):
            a @ a
        return 5 * 2 * size**3 / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
