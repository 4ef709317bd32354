"""What travels: bytes and number of collectives per axis and step, and over which link.

Ring formulas, per rank, for a message of S bytes among N ranks (Thakur et al., 2005; NCCL's tests call the same
"bus" bytes):

    all-reduce 2 (N-1)/N S      all-gather, reduce-scatter, all-to-all (N-1)/N S      point-to-point S
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_parallel.planner.hardware import Cluster, Link
from hf_parallel.planner.layout import Layout

FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: how many, how far apart, the slowest link among them and a rank's share of it."""

    axis: str
    size: int
    link: Link
    bandwidth: float  # bytes/s that a rank's ring has

    @property
    def latency(self) -> float:
        """Seconds per step of a ring."""
        return self.link.latency


@dataclass(frozen=True)
class Transfer:
    """`count` equal collectives of one axis in one step of one rank.

    `payload`: bytes of the whole tensor of one of them: what is reduced, what a gather results in, what is sent.
    """

    axis: str
    kind: str
    payload: float
    count: float
    group: Group
    what: str = ""

    @property
    def bytes(self) -> float:
        """What a rank sends in all of them, by the ring formulas."""
        return self.count * self.payload * ring_factor(self.kind, self.group.size)

    @property
    def seconds(self) -> float:
        """How long all of them take, one after the other."""
        return self.count * transfer_seconds(self.kind, self.payload, self.group)


def ring_factor(kind: str, size: int) -> float:
    """Bytes that a rank sends per byte of payload."""
    return 1.0 if kind == "p2p" else FACTORS[kind] * (size - 1) / size


def transfer_seconds(kind: str, payload: float, group: Group) -> float:
    """Latency of each step of a ring, or of a tree if that is faster, plus bytes over bandwidth."""
    if group.size == 1 and kind != "p2p":
        return 0.0
    steps = 1.0 if kind == "p2p" else FACTORS[kind] * min(group.size - 1, 4 * math.log2(group.size) + 8)
    return steps * group.latency + payload * ring_factor(kind, group.size) / group.bandwidth


def groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """The group of each axis on a cluster whose ranks are numbered with tp innermost, then cp, dp, pp."""
    strides = {"tp": 1, "cp": layout.tp, "dp": layout.tp * layout.cp, "pp": layout.tp * layout.cp * layout.dp}
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    found = {axis: _group(axis, sizes[axis], strides[axis], cluster) for axis in sizes}
    found["zero"] = _group("zero", layout.shards, layout.tp, cluster)
    found["replicate"] = _group(
        "replicate", layout.dp_replicate, strides["dp"] * layout.dp // layout.dp_replicate, cluster
    )
    found["ep"] = _group("ep", layout.ep, 1, cluster)
    return found


def _group(axis: str, size: int, stride: int, cluster: Cluster) -> Group:
    efficiency = cluster.gpu.efficiency
    inside = Group(axis, size, cluster.inside, cluster.inside.bandwidth * efficiency.link)
    if size * stride <= cluster.per_node:
        return inside
    together = max(1, cluster.per_node // stride)  # members of one group in one node: they share the node's adapters
    bandwidth = cluster.between.bandwidth * efficiency.network * (1 if axis == "pp" else min(together, size))
    return Group(axis, size, cluster.between, min(inside.bandwidth, bandwidth))
