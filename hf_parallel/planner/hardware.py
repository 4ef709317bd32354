"""GPUs, links and what part of their data sheets they reach: from the catalogue, or a cluster of your own in YAML.

gpu = find_gpu("H100-80GB")                     # spelling, case and maker do not matter
cluster = make_cluster("h100-80gb", gpus=64)    # links as the catalogue says, or network="ethernet-25g"

# cluster.yaml; a GPU or a link is a name of the catalogue, or an entry in its form
gpu: {like: h100-80gb, name: my-h100, memory_gib: 94.0}
gpus_per_node: 4
network: {name: 2x100g, gb_s: 6.2, latency_us: 12, source: measured}
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import yaml

from hf_parallel.ask.spec import refuse

#: Percent of each GPU's memory that a plan keeps free, unless it is told otherwise.
HEADROOM = 8.0


def check_headroom(percent: float) -> None:
    """Refuse what is no percentage of a GPU's memory."""
    if not (percent == 0 or 1 <= percent < 100):
        refuse(f"headroom={percent:g}", "is a percentage of each GPU's memory, 0 or 1 to below 100", f"{HEADROOM:g}")


@dataclass(frozen=True)
class Link:
    """`bandwidth`: bytes/s per GPU and direction. `latency`: seconds per step of a ring.

    `measured`: kinds of collectives that were measured each for itself, with seconds per step of a ring and bytes/s;
    an axis before a kind ("tp all_gather") says whose they are.
    """

    name: str
    bandwidth: float
    latency: float
    source: str = ""
    measured: tuple[tuple[str, float, float], ...] = ()

    def has_measured(self, axis: str, kind: str) -> bool:
        """Return whether an axis' own collectives of this kind were measured, as it makes them."""
        return any(name == f"{axis} {kind}" for name, _, _ in self.measured)


@dataclass(frozen=True)
class Efficiency:
    """The parts of the datasheet that are reached, fitted per type of GPU: docs/reference/planner_formulas.md."""

    gemm: float = 0.75  # of the peak, by a large matrix product
    waves: float = 0.3  # how much of the last, unfilled wave of tiles is lost
    eight_bit: float = 1.0  # of that part, by products in fp8
    depth: float = 100.0  # inner dimension at which half of the peak is reached
    misaligned: float = 0.7  # of that, where a dimension is no multiple of 64
    attention: float = 0.5  # of the peak, forward
    attention_backward: float = 0.8  # of that, backward
    memory: float = 0.8  # of the memory's bandwidth
    passes: float = 1.5  # element-wise traffic in multiples of a fused implementation's
    link: float = 0.75  # of the link inside the node
    network: float = 0.75  # of the link between nodes
    taper: float = 0.0  # added to a collective's seconds on it, per doubling of the nodes that its group spans
    contention: float = 0.1  # part of the hidden communication that slows the compute down
    hidden: float = 0.8  # part of the compute behind which gradients and weights can travel
    hidden_gradients: float = 0.5  # part of the last backward behind which gradients are reduced
    wait_us: float = 100.0  # per collective that the compute waits for: launch, and ranks that are not in step
    kernel_us: float = 6.0  # of the host, per kernel of a fused implementation
    step_ms: float = 10.0  # of the host, per step
    # Of models of Transformers without a compiler; measured on an H100 (docs/reference/gpu.md), if not said otherwise.
    eager_us: float = 40.0  # of the host, per kernel: Python, autograd, hooks
    eager_step_ms: float = 12.0  # of the host, per step: what it waits for and launches outside of the layers
    eager_passes: float = 1.3  # element-wise traffic in multiples of what its kernels read and write
    update_passes: float = 1.0  # an optimizer's traffic in multiples of 40 bytes per parameter
    flash: float = 0.0  # of the peak, forward, by flash attention 2; 0: `attention`
    cudnn: float = 0.0  # of the peak, forward, by torch's sdpa on whole rows; 0: `attention`
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
    capability: tuple[int, int] = (0, 0)  # of CUDA, which decides over kernels; (0, 0): no GPU

    @property
    def is_of_amd(self) -> bool:
        """Return whether RCCL, and not NCCL, joins GPUs of this type."""
        return "infinity-fabric" in self.scale_up

    def peak(self, precision: str) -> float:
        """Return FLOP/s of dense matrix products; a precision that the GPU lacks computes in the widest it has."""
        return self.peaks.get(precision) or self.peaks["bf16"]

    def compute_room_gib(self, headroom: float = HEADROOM) -> float:
        """Return the GiB that a layout may need, where `headroom` percent stay free."""
        return self.memory_gib * (1 - headroom / 100)


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs, `per_node` in each node, the links within a node and between nodes.

    `alone`: seconds of compute while all others rest, in parts of those while all work, as they may share caches,
    memory's bandwidth or power.
    """

    gpu: Gpu
    gpus: int
    per_node: int
    inside: Link
    between: Link
    alone: float = 1.0

    @property
    def nodes(self) -> int:
        """Number of nodes, the last one perhaps not full."""
        return -(-self.gpus // self.per_node)


@functools.cache
def read_catalogue() -> dict[str, dict[str, Any]]:
    """Return the entries of `catalogue.yaml` by name: its gpus, links and hosts."""
    text = (importlib.resources.files(__package__) / "catalogue.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def _simplify_name(name: str) -> str:
    return re.sub(r"nvidia|amd|tesla|[^a-z0-9]", "", name.lower())


def _refuse_unknown(key: str, name: str, known: dict[str, str]) -> NoReturn:
    close = difflib.get_close_matches(_simplify_name(name), list(known), n=3, cutoff=0.4)
    nearest = ", ".join(dict.fromkeys(known[key] for key in close or known))
    refuse(f"{key}={name}", "not in the catalogue", do=f"did you mean {nearest}?" if close else f"it has {nearest}")


@functools.cache
def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue by any of its names: `h100-80gb`, `H100-80GB`, `NVIDIA H100 SXM5 80GB`.

    Raises:
        SpecError: no such GPU; the message names the nearest ones.
    """
    entries = read_catalogue()["gpus"]
    known = {_simplify_name(alias): own for own, entry in entries.items() for alias in (own, *entry.get("names", ()))}
    own = known.get(_simplify_name(name)) or known.get(re.sub(r"hbm\w*$", "", _simplify_name(name)))
    if own is None:
        _refuse_unknown("gpu", name, known)
    entry = entries[own]
    return _make_gpu_from_entry(own, entry, find_gpu(entry["like"]) if "like" in entry else None)


def _make_gpu_from_entry(name: str, entry: Mapping, like: Gpu | None) -> Gpu:
    """Make a GPU from an entry in the form of the catalogue; what the entry lacks comes from `like`."""
    known = vars(like) if like else {}
    plain = ("memory_gib", "units", "scale_up", "scale_out")
    given: dict = {key: entry[key] for key in plain if key in entry}
    if "bandwidth" in entry:
        given["bandwidth"] = entry["bandwidth"] * 1e9
    if "tflops" in entry:
        given["peaks"] = {key: tflops * 1e12 for key, tflops in entry["tflops"].items()}
    if "capability" in entry:
        given["capability"] = tuple(entry["capability"])
    if "host" in entry or like is None:
        host, hosts = entry["host"], read_catalogue()["hosts"]  # a host's name in it, or an entry of the same form
        values = hosts[host] | {"name": host} if isinstance(host, str) else {"name": "own", **host}
        rates = {key.removesuffix("_gb_s"): value * 1e9 for key, value in values.items() if key.endswith("_gb_s")}
        given["host"] = Host(**rates, **{key: value for key, value in values.items() if not key.endswith("_gb_s")})
    own = entry.get("efficiency", {})
    kernels = {"flash": 0.0, "cudnn": 0.0} if "attention" in own else {}  # what is said of attention holds for all
    given["efficiency"] = dataclasses.replace(known.get("efficiency", Efficiency()), **kernels | own)
    about = {"source": entry.get("source", ""), "note": entry.get("note", ""), "like": ""}
    if like:
        about["like"] = like.like or (like.name if entry.get("unmeasured") else "")
    return Gpu(**{**known, **given, **about, "name": name})


def find_link(name: str | Link) -> Link:
    """Return a link of the catalogue.

    Raises:
        SpecError: no such link; the message names the nearest ones.
    """
    if isinstance(name, Link):
        return name
    links = read_catalogue()["links"]
    known = {_simplify_name(own): own for own in links}
    own = known.get(_simplify_name(name))
    if own is None:
        _refuse_unknown("network", name, known)
    return _link_from_entry(own, links[own])


def _link_from_entry(name: str, entry: Mapping) -> Link:
    measured = tuple((kind, us * 1e-6, gb_s * 1e9) for kind, us, gb_s in entry.get("measured", ()))
    return Link(name, entry["gb_s"] * 1e9, entry["latency_us"] * 1e-6, str(entry.get("source", "")), measured)


def make_cluster(gpu: str | Gpu | Cluster, gpus: int, per_node: int = 8, network: str | Link | None = None) -> Cluster:
    """Make a cluster of one kind of GPU.

    Args:
        network: the link between nodes; default: the catalogue's for this GPU.

    Raises:
        SpecError: an unknown GPU or link, or no GPU at all.
    """
    if isinstance(gpu, Cluster):
        return gpu
    if gpus < 1 or per_node < 1:
        refuse(f"gpus={gpus}, gpus_per_node={per_node}", "there must be one at least", "gpus=8")
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return Cluster(found, gpus, per_node, find_link(found.scale_up), find_link(network or found.scale_out))


# ---- a cluster of your own ------------------------------------------------------------------------------------------

#: What a value of a file's key may be: a test of it, and what passes, in words.
_Kind: TypeAlias = tuple[Callable[[object], bool], str]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_measured(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and all(map(_is_number, one[1:]))
        for one in value
    )


_NUMBER: _Kind = (_is_number, "a number above 0")
_PART: _Kind = (lambda value: _is_number(value) or (value == 0 and value is not False), "a number, 0 or more")
COUNT: _Kind = (lambda value: _is_number(value) and isinstance(value, int), "a whole number above 0")
TEXT: _Kind = (lambda value: isinstance(value, str), "a text")
ENTRY: _Kind = (lambda value: isinstance(value, (str, dict)), "a name of the catalogue, or a mapping in its form")
FILE = {"gpu": ENTRY, "gpus": COUNT, "gpus_per_node": COUNT, "inside": ENTRY, "network": ENTRY, "alone": _NUMBER}
_KINDS: _Kind = (_is_measured, "a list of kinds with microseconds and GB/s; [[all_gather, 300, 1.2]] works")
_LINK = {"name": TEXT, "gb_s": _NUMBER, "latency_us": _PART, "source": TEXT, "measured": _KINDS}
_PEAKS: _Kind = (
    lambda value: isinstance(value, dict) and all(isinstance(k, str) and _is_number(n) for k, n in value.items()),
    "a mapping of precisions to numbers above 0; {bf16: 989} works",
)
_TWO_COUNTS: _Kind = (
    lambda value: isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n >= 0 for n in value),
    "two whole numbers; [9, 0] works",
)
_HOST = {"name": TEXT, **dict.fromkeys(("pcie_gb_s", "bandwidth_gb_s", "nvme_gb_s", "memory_gib"), _NUMBER)}
_HOST |= {"source": TEXT}
_EFFICIENCY = {field.name: _PART for field in dataclasses.fields(Efficiency)}
_GPU: dict[str, _Kind] = {
    "like": TEXT,
    "name": TEXT,
    "tflops": _PEAKS,
    "memory_gib": _NUMBER,
    "bandwidth": _NUMBER,
    "units": COUNT,
    "scale_up": TEXT,
    "scale_out": TEXT,
    "host": ENTRY,
    "capability": _TWO_COUNTS,
    "efficiency": (lambda value: isinstance(value, dict), "a mapping"),
    "source": TEXT,
}


def load_cluster_file(path: str) -> Mapping[str, Any]:
    """Return the mapping of a cluster file.

    Raises:
        SpecError: no such file, or neither a GPU nor groups in it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        refuse(path, str(error).splitlines()[0], cause=error)
    if not isinstance(values, dict) or not values.keys() & {"gpu", "groups"}:
        refuse(path, "needs the key gpu", "a line such as `gpu: h100-80gb`")
    return values


def make_cluster_from_entry(path: str, values: Mapping[str, Any], gpus: int | None) -> Cluster:
    """Return the cluster of one kind of GPU that the keys of a file, or of a group in it, describe."""
    check_file_keys(path, values, FILE)
    gpus = gpus or values.get("gpus")
    if gpus is None or gpus < 1:
        refuse(path, "how many GPUs? A line `gpus: 8`, or --gpus 8, works")
    entry: str | Mapping = values["gpu"]
    if isinstance(entry, str):
        gpu = find_gpu(entry)
    else:  # a GPU like one of the catalogue; precisions whose peak the entry does not name keep theirs
        check_file_keys(f"{path}: gpu", entry, _GPU)
        check_file_keys(f"{path}: efficiency", entry.get("efficiency", {}), _EFFICIENCY)
        host, hosts = entry.get("host", {}), read_catalogue()["hosts"]
        if isinstance(host, str) and host not in hosts:
            refuse(f"{path}: host={host}", "not in the catalogue", do=f"{', '.join(hosts)} are")
        check_file_keys(f"{path}: host", {} if isinstance(host, str) else host, _HOST)
        base = find_gpu(entry.get("like", "a100-80gb"))
        gpu = _make_gpu_from_entry(entry.get("name", base.name), entry, base)
        about = {"source": entry.get("source", base.source), "like": base.like, "note": base.note}
        gpu = dataclasses.replace(gpu, peaks={**base.peaks, **gpu.peaks}, **about)
    inside = read_own_link(f"{path}: inside", values.get("inside", gpu.scale_up))
    between = read_own_link(f"{path}: network", values.get("network", gpu.scale_out))
    return Cluster(gpu, gpus, values.get("gpus_per_node", 8), inside, between, values.get("alone", 1.0))


def check_file_keys(where: str, values: Mapping, known: Mapping[str, _Kind]) -> None:
    """Require known keys with values of their kinds."""
    for key, value in values.items():
        if key not in known:
            refuse(where, f"{key} is no key", do=f"{', '.join(known)} are")
        good, kind = known[key]
        if not good(value):
            refuse(f"{where}: {key}={value}", f"is not {kind}")


def read_own_link(path: str, entry: str | Mapping) -> Link:
    """Return a link by its name in the catalogue, or from an entry in its form."""
    if isinstance(entry, str):
        return find_link(entry)
    check_file_keys(path, entry, _LINK)
    missing = [key for key in ("name", "gb_s", "latency_us") if key not in entry]
    if missing:
        refuse(path, "a link is a name, or has name, gb_s and latency_us", do=f"{', '.join(missing)} is missing")
    return _link_from_entry(entry["name"], {"source": path, **entry})
