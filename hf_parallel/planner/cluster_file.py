"""A cluster of your own: from a YAML file, or from the machine this runs on."""

from __future__ import annotations

import os
from typing import Any

import yaml

from hf_parallel.config import SpecError
from hf_parallel.planner.hardware import Cluster, Gpu, Link, find_gpu, find_link, gpu_from_entry, make_cluster

_KEYS = {"gpu", "gpus", "gpus_per_node", "inside", "between"}


def load_cluster(path: str) -> Cluster:
    """Read a cluster.

        gpu: h100-80gb              # a name of the catalogue, or a mapping: like: h100-80gb, memory_gib: 93, …
        gpus: 64
        gpus_per_node: 8
        between: {gb_s: 3.1, latency_us: 40}    # per GPU and direction; or a name such as ethernet-100g
        inside: pcie5                           # default: the GPU's

    Raises:
        SpecError: not a mapping, an unknown key or name.
    """
    with open(path, encoding="utf-8") as file:
        given = yaml.safe_load(file)
    if not isinstance(given, dict) or "gpu" not in given:
        raise SpecError(f"{path}: no mapping with a line `gpu: h100-80gb`")
    unknown = sorted(given.keys() - _KEYS)
    if unknown:
        raise SpecError(f"{path}: {', '.join(unknown)}: unknown key; known: {', '.join(sorted(_KEYS))}")
    cluster = make_cluster(_gpu(given["gpu"]), given.get("gpus", 8), given.get("gpus_per_node", 8))
    inside, between = (_link(given.get(key), key) for key in ("inside", "between"))
    return Cluster(cluster.gpu, cluster.gpus, cluster.per_node, inside or cluster.inside, between or cluster.between)


def _gpu(given: str | dict[str, Any]) -> Gpu:
    if isinstance(given, str):
        return find_gpu(given)
    like = find_gpu(given.get("like", "h100-80gb"))
    try:
        return gpu_from_entry(given.get("name", like.name), given, like)
    except TypeError as error:
        raise SpecError(f"gpu: {error}") from error


def _link(given: str | dict[str, Any] | None, name: str) -> Link | None:
    if given is None or isinstance(given, str):
        return given and find_link(given)  # type: ignore[return-value]
    if "gb_s" not in given:
        raise SpecError(f"{name}: gb_s is missing; `{name}: {{gb_s: 25, latency_us: 12}}` works")
    return Link(name, given["gb_s"] * 1e9, given.get("latency_us", 15) * 1e-6, given.get("source", "your file"))


def detect(gpus: int | None = None, network: str | Link | None = None) -> Cluster:
    """The cluster this process runs on: kind and number of its GPUs, number of nodes from the launcher's variables.

    Args:
        gpus: how many in all, if no launcher says.
        network: the link between nodes, which no driver tells; default: the catalogue's for the GPU.

    Raises:
        SpecError: no GPU here, or one that the catalogue does not know.
    """
    import torch

    if not torch.cuda.is_available():
        raise SpecError("no GPU on this machine; name one, for example gpu=h100-80gb")
    here = torch.cuda.device_count()
    nodes = int(os.environ.get("SLURM_NNODES") or 1)
    total = gpus or int(os.environ.get("WORLD_SIZE") or here * nodes)
    return make_cluster(find_gpu(torch.cuda.get_device_name(0)), total, min(here, total), network)
