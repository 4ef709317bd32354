"""A cluster that is not in the catalogue, described in YAML.

# cluster.yaml; a GPU or a link is a name of the catalogue, or an entry in its form
gpu: {like: h100-80gb, name: my-h100, memory_gib: 94.0}
gpus_per_node: 4
network: {name: 2x100g, gb_s: 6.2, latency_us: 12, source: measured}
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from hf_parallel.config import SpecError
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu, Link, find_gpu, find_link, host_from_entry

_KEYS = ("gpu", "gpus", "gpus_per_node", "inside", "network")
_GPU_UNITS = {"bandwidth": 1e9}  # the catalogue has GB/s, `Gpu` bytes/s


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
        elif key == "host":
            changes[key] = host_from_entry(value)
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
