"""Which GPU, which links, and what part of their datasheet they reach: a catalogue in YAML, or a cluster of your own.

gpu = find_gpu("H100-80GB")                                    # spelling, case and maker do not matter
cluster = Cluster(gpu, gpus=64, per_node=8)                    # links as the catalogue says, or network="ethernet-25g"
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import re
from dataclasses import dataclass
from typing import Any

import yaml

from hf_parallel.config import SpecError


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s per GPU and direction. `latency`: seconds per step of a ring."""

    name: str
    bandwidth: float
    latency: float
    source: str = ""


@dataclass(frozen=True)
class Efficiency:
    """What part of the datasheet is reached; fitted once per type of GPU. See docs/planner.md for each formula."""

    gemm: float = 0.75  # of the peak, by a large matrix product
    waves: float = 0.3  # how much of the last, unfilled wave of tiles is lost
    depth: float = 100.0  # inner dimension at which half of the peak is reached
    misaligned: float = 0.7  # of that, where a dimension is no multiple of 64
    attention: float = 0.5  # of the peak, forward
    attention_backward: float = 0.8  # of that, backward
    memory: float = 0.8  # of the memory's bandwidth
    passes: float = 1.5  # element-wise traffic in multiples of a fused implementation's
    link: float = 0.75  # of the link inside the node
    network: float = 0.75  # of the link between nodes
    contention: float = 0.1  # part of the hidden communication that slows the compute down
    hidden: float = 0.8  # part of the compute behind which gradients and weights can travel
    hidden_gradients: float = 0.5  # part of the last backward behind which gradients are reduced
    wait_us: float = 100.0  # per collective that the compute waits for: launch, and ranks that are not in step
    kernel_us: float = 6.0  # of the host, per kernel
    step_ms: float = 10.0  # of the host, per step
    node_noise: float = 0.0  # added per doubling of the number of nodes


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs, for what is offloaded: bytes and bytes/s of the whole node, `pcie` of each GPU."""

    name: str = "server"
    pcie: float = 25e9
    bandwidth: float = 110e9
    nvme: float = 12e9
    memory_gib: float = 1000.0
    source: str = ""


@dataclass(frozen=True)
class Gpu:
    """Peaks in FLOP/s by precision, memory in GiB, memory bandwidth in bytes/s."""

    name: str
    peaks: dict[str, float] = dataclasses.field(hash=False)
    memory_gib: float
    bandwidth: float
    units: int
    scale_up: str
    scale_out: str
    efficiency: Efficiency
    source: str = ""
    host: Host = Host()
    like: str = ""  # the type whose efficiencies were measured, if not this one's
    note: str = ""  # what a user must know

    def peak(self, precision: str) -> float:
        """FLOP/s of dense matrix products; a precision that the GPU lacks computes in the widest it has."""
        return self.peaks.get(precision) or self.peaks["bf16"]


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs, `per_node` in each node, the links within a node and between nodes."""

    gpu: Gpu
    gpus: int
    per_node: int
    inside: Link
    between: Link

    @property
    def nodes(self) -> int:
        """Number of nodes, the last one perhaps not full."""
        return -(-self.gpus // self.per_node)


@functools.cache
def _catalogue() -> dict[str, Any]:
    text = (importlib.resources.files(__package__) / "catalogue.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def gpu_names() -> list[str]:
    """The catalogue's own names."""
    return list(_catalogue()["gpus"])


def link_names() -> list[str]:
    """The catalogue's names of links."""
    return list(_catalogue()["links"])


def _plain(name: str) -> str:
    return re.sub(r"nvidia|amd|tesla|[^a-z0-9]", "", name.lower())


def _nearest(name: str, known: dict[str, str]) -> str:
    close = difflib.get_close_matches(_plain(name), list(known), n=3, cutoff=0.4)
    return ", ".join(dict.fromkeys(known[key] for key in close)) or ", ".join(dict.fromkeys(known.values()))


@functools.cache
def find_gpu(name: str) -> Gpu:
    """A GPU of the catalogue by any of its names: `h100-80gb`, `H100-80GB`, `NVIDIA H100 SXM5 80GB`.

    Raises:
        SpecError: no such GPU; the message names the nearest ones.
    """
    entries = _catalogue()["gpus"]
    known = {_plain(alias): own for own, entry in entries.items() for alias in (own, *entry.get("names", ()))}
    own = known.get(_plain(name)) or known.get(re.sub(r"hbm\w*$", "", _plain(name)))
    if own is None:
        raise SpecError(f"gpu={name}: not in the catalogue; nearest: {_nearest(name, known)}")
    return gpu_from_entry(own, entries[own])


def gpu_from_entry(name: str, entry: dict[str, Any], like: Gpu | None = None) -> Gpu:
    """A GPU from an entry in the form of the catalogue; what the entry lacks comes from `like`."""
    like = like or (find_gpu(entry["like"]) if "like" in entry else None)
    efficiency = dataclasses.replace(like.efficiency if like else Efficiency(), **entry.get("efficiency", {}))

    def value(key: str, scale: float = 1) -> Any:
        return entry[key] * scale if key in entry or like is None else getattr(like, key)

    peaks = (
        {key: tflops * 1e12 for key, tflops in entry["tflops"].items()}
        if "tflops" in entry or not like
        else like.peaks
    )
    return Gpu(
        name,
        peaks,
        value("memory_gib"),
        value("bandwidth", 1e9),
        value("units"),
        value("scale_up"),
        value("scale_out"),
        efficiency,
        entry.get("source", ""),
        host_from_entry(entry["host"]) if "host" in entry or like is None else like.host,
        like.like or like.name if like and entry.get("unmeasured") else "",
        entry.get("note", ""),
    )


def host_from_entry(entry: str | dict[str, Any]) -> Host:
    """A host from its name in the catalogue, or an entry of the same form."""
    values = _catalogue()["hosts"][entry] | {"name": entry} if isinstance(entry, str) else {"name": "own", **entry}
    own = {key.removesuffix("_gb_s"): value * 1e9 for key, value in values.items() if key.endswith("_gb_s")}
    return Host(**own, **{key: value for key, value in values.items() if not key.endswith("_gb_s")})


def find_link(name: str | Link) -> Link:
    """A link of the catalogue.

    Raises:
        SpecError: no such link; the message names the nearest ones.
    """
    if isinstance(name, Link):
        return name
    entries = _catalogue()["links"]
    known = {_plain(own): own for own in entries}
    own = known.get(_plain(name))
    if own is None:
        raise SpecError(f"network={name}: not in the catalogue; nearest: {_nearest(name, known)}")
    entry = entries[own]
    return Link(own, entry["gb_s"] * 1e9, entry["latency_us"] * 1e-6, entry["source"])


def make_cluster(gpu: str | Gpu | Cluster, gpus: int, per_node: int = 8, network: str | Link | None = None) -> Cluster:
    """A cluster of one kind of GPU.

    Args:
        network: the link between nodes; default: the catalogue's for this GPU.

    Raises:
        SpecError: an unknown GPU or link, or no GPU at all.
    """
    if isinstance(gpu, Cluster):
        return gpu
    if gpus < 1 or per_node < 1:
        raise SpecError(f"gpus={gpus}, gpus_per_node={per_node}: there must be one at least; gpus=8 works")
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return Cluster(found, gpus, per_node, find_link(found.scale_up), find_link(network or found.scale_out))
