"""Machines of unlike GPUs: groups of nodes, each of one kind, from a file or from the devices of all processes.

# mixed.yaml: a group has the keys of a cluster file, `nodes` in the place of `gpus`, and a name
groups:
  - {name: new, gpu: h100-80gb, nodes: 1, gpus_per_node: 8}
  - {name: old, gpu: a100-80gb, nodes: 1, gpus_per_node: 8, network: infiniband-hdr}
network: infiniband-hdr          # between groups; default: the slowest network of a group
one_node: false                  # true: the groups are GPUs of one machine
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.detect import CPU, Device, number_kinds_of, read_device_here, reduce_to_slowest
from hf_parallel.planner.hardware import (
    COUNT,
    ENTRY,
    FILE,
    TEXT,
    Cluster,
    Link,
    check_file_keys,
    find_gpu,
    find_link,
    load_cluster_file,
    make_cluster_from_entry,
    read_catalogue,
    read_own_link,
)

_GROUP = {"name": TEXT, "nodes": COUNT, **FILE}
_KEYS = {
    "groups": (lambda value: isinstance(value, list) and len(value) > 0, "a list of groups"),
    "network": ENTRY,
    "one_node": (lambda value: isinstance(value, bool), "true or false"),
}


@dataclass(frozen=True)
class Group:
    """Nodes of one kind of GPU, whose ranks follow each other. A node has GPUs of one group alone."""

    name: str
    cluster: Cluster

    def __post_init__(self) -> None:
        per_node = min(self.cluster.per_node, self.cluster.gpus)
        object.__setattr__(self, "cluster", dataclasses.replace(self.cluster, per_node=per_node))


@dataclass(frozen=True)
class MixedCluster:
    """Groups in the order in which their nodes are started, and the link `between` GPUs of unlike groups."""

    groups: tuple[Group, ...]
    between: Link
    one_node: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs of all groups."""
        return sum(group.cluster.gpus for group in self.groups)

    def seen_from(self, group: Group) -> Cluster:
        """Return all GPUs as if they were of this group's kind, with the slowest link between nodes."""
        links = [self.between, *(other.cluster.between for other in self.groups if other.cluster.nodes > 1)]
        slowest = min(links, key=lambda link: link.bandwidth)  # a ring through all groups waits for it
        return dataclasses.replace(group.cluster, gpus=self.gpus, between=slowest)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        named = {
            group.name: {
                "gpu": group.cluster.gpu.name,
                "memory_gib": group.cluster.gpu.memory_gib,
                "gpus": group.cluster.gpus,
                "gpus_per_node": group.cluster.per_node,
            }
            for group in self.groups
        }
        return {"groups": named, "network": self.between.name}


def read_machines(path: str, gpus: int | None = None) -> Cluster | MixedCluster:
    """Return what a cluster file describes: one kind of GPU, or groups of unlike kinds.

    Args:
        gpus: how many, for a file of one kind that does not say so.

    Raises:
        SpecError: no such file, an unknown key or name, groups of one name, or numbers that do not fit.
    """
    values = load_cluster_file(path)
    if "groups" not in values:
        return make_cluster_from_entry(path, values, gpus)
    check_file_keys(path, values, _KEYS)
    if gpus is not None:
        refuse(f"--gpus {gpus}", f"the groups of {path} say how many GPUs there are", do="drop it, or change the file")
    groups = []
    for at, entry in enumerate(values["groups"]):
        where = f"{path}: group {at}"
        if not isinstance(entry, Mapping) or "gpu" not in entry:
            refuse(where, "needs the key gpu", "{gpu: h100-80gb, nodes: 1, gpus_per_node: 8}")
        check_file_keys(where, entry, _GROUP)
        nodes, per_node = entry.get("nodes"), entry.get("gpus_per_node", 8)
        count = entry.get("gpus", None if nodes is None else nodes * per_node)
        if count is not None and nodes is not None and nodes != -(-count // per_node):
            fill = -(-count // per_node)
            refuse(f"{where}: nodes={nodes}", f"gpus={count} fill {fill} nodes of {per_node}", f"nodes: {fill}")
        if count is None:
            refuse(where, "how many GPUs?", "a key such as nodes: 1")
        own = {key: value for key, value in entry.items() if key not in ("name", "nodes")} | {"gpus": count}
        cluster = make_cluster_from_entry(where, own, None)
        groups.append(Group(entry.get("name", cluster.gpu.name), cluster))
    names = [group.name for group in groups]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        refuse(f"{path}: name={twice}", "two groups have this name", f"name: {twice}-2")
    if len(groups) == 1:
        return groups[0].cluster
    _check_vendors(groups)
    one_node = values.get("one_node", False)
    links = [group.cluster.inside if one_node else group.cluster.between for group in groups]
    slowest, given = min(links, key=lambda link: link.bandwidth), values.get("network")
    between = slowest if given is None else read_own_link(f"{path}: network", given)
    return MixedCluster(tuple(groups), between, one_node)


def _check_vendors(groups: Sequence[Group]) -> None:
    """Refuse groups of unlike vendors: NCCL and RCCL have no process group in common."""
    first = groups[0].cluster.gpu
    for group in groups[1:]:
        gpu = group.cluster.gpu
        if gpu.is_of_amd != first.is_of_amd:
            what, works = f"{gpu.name} beside {first.name}", f"{first.name} alone"
            refuse(what, "NCCL and RCCL have no process group in common", works)


# ---- the devices of all processes -----------------------------------------------------------------------------------


def gather_devices_of_all() -> list[Device]:
    """Return the device of every process of a launcher, else all GPUs of this machine.

    Collective under a launcher; processes connect by gloo for it.
    """
    import torch
    import torch.distributed as dist

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return [read_device_here(index) for index in range(torch.accelerator.device_count())]
    own = read_device_here(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo")
    found: list[Any] = [None] * world_size
    try:
        dist.all_gather_object(found, own)
    finally:
        dist.destroy_process_group()
    return found


def group_devices(here: Cluster, devices: Sequence[Device]) -> Cluster | MixedCluster:
    """Return the groups that devices make, by name and memory, in the order of their ranks.

    Args:
        here: the machine of this process, which knows its links.
        devices: of each rank.

    Raises:
        SpecError: a GPU that the catalogue does not have, or groups whose ranks do not follow each other.
    """
    kinds = number_kinds_of(devices)
    runs = [(kind, list(ranks)) for kind, ranks in itertools.groupby(range(len(kinds)), key=lambda rank: kinds[rank])]
    if len(runs) < 2:
        return here
    without = next((device.host for device in devices if device.name == CPU), None)
    if without is not None:
        refuse(f"{without}", "has no accelerator, and other machines have", do="start no process there")
    mixed_up = next((kind for kind, _ in runs if sum(kind == other for other, _ in runs) > 1), None)
    one_node = len({device.host for device in devices}) == 1
    if mixed_up is not None:
        order = sorted(range(len(kinds)), key=lambda rank: (kinds.index(kinds[rank]), rank))
        works = (
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))}" if one_node else "nodes of a kind one after another"
        )
        name = devices[mixed_up].name
        refuse(f"the order of GPUs: {name} comes in several places", "a group is ranks in a row", works)
    groups = []
    for first, ranks in runs:
        gpu = dataclasses.replace(
            find_gpu(devices[first].name), memory_gib=min(devices[rank].memory_gib for rank in ranks)
        )
        hosts = [devices[rank].host for rank in ranks]
        cluster = Cluster(gpu, len(ranks), hosts.count(hosts[0]), find_link(gpu.scale_up), here.between)
        same = gpu.name == here.gpu.name
        groups.append(Group(gpu.name, dataclasses.replace(cluster, inside=here.inside) if same else cluster))
    _check_vendors(groups)
    slowest = min((group.cluster.inside for group in groups), key=lambda link: link.bandwidth)
    names = [group.name for group in groups]
    apart = tuple(
        dataclasses.replace(group, name=f"{group.name}-{at + 1}") if names.count(group.name) > 1 else group
        for at, group in enumerate(groups)
    )
    return MixedCluster(apart, slowest if one_node else here.between, one_node)


def find_machines_of_ranks(here: Cluster, devices: Sequence[Device]) -> tuple[Cluster | MixedCluster, str]:
    """Return the groups that devices make, or where they make none the slowest GPU for all, and why.

    Raises:
        SpecError: a GPU that the catalogue does not have.
    """
    try:
        return group_devices(here, devices), ""
    except SpecError as error:
        return reduce_to_slowest(here, devices), str(error)


# ---- a file of what was found ---------------------------------------------------------------------------------------


def write_machines(path: str, machines: Cluster | MixedCluster) -> None:
    """Write a file from which `read_machines` reads these machines."""
    if isinstance(machines, Cluster):
        values = _make_entry_of(machines)
    else:
        named = [{"name": group.name, **_make_entry_of(group.cluster)} for group in machines.groups]
        values = {"groups": named, "network": _link_entry(machines.between), "one_node": machines.one_node}
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(values, file, sort_keys=False)


def _make_entry_of(cluster: Cluster) -> dict[str, Any]:
    """Return the keys of a cluster file; of a GPU those in which it differs from the catalogue's."""
    gpu = cluster.gpu
    base = find_gpu(gpu.name if gpu.name in read_catalogue()["gpus"] else "a100-80gb")
    rates = {f"{key}_gb_s": vars(gpu.host)[key] / 1e9 for key in ("pcie", "bandwidth", "nvme")}
    host = {"name": gpu.host.name, **rates, "memory_gib": gpu.host.memory_gib, "source": gpu.host.source}
    entry: dict[str, Any] = {
        "memory_gib": gpu.memory_gib,
        "peaks": {precision: peak / 1e12 for precision, peak in gpu.peaks.items()},
        "bandwidth": gpu.bandwidth / 1e9,
        "capability": list(gpu.capability),
        "efficiency": dataclasses.asdict(gpu.efficiency),
        "host": host,
        **{key: getattr(gpu, key) for key in ("units", "scale_up", "scale_out", "source")},
    }
    names, known = {"peaks": "tflops"}, vars(base)
    changed = {names.get(key, key): value for key, value in entry.items() if vars(gpu)[key] != known[key]}
    return {
        "gpu": {"like": base.name, "name": gpu.name, **changed} if changed else gpu.name,
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.per_node,
        "inside": _link_entry(cluster.inside),
        "network": _link_entry(cluster.between),
        **({"alone": cluster.alone} if cluster.alone != 1.0 else {}),
    }


def _link_entry(link: Link) -> str | dict[str, Any]:
    """Return a link's name, where the catalogue knows it so, or its numbers."""
    if link.name in read_catalogue()["links"] and find_link(link.name) == link:
        return link.name
    numbers = {"gb_s": link.bandwidth / 1e9, "latency_us": link.latency * 1e6}
    measured = [[name, latency * 1e6, bandwidth / 1e9] for name, latency, bandwidth in link.measured]
    return {"name": link.name, **numbers, "source": link.source, **({"measured": measured} if measured else {})}
