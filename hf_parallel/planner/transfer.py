"""One kind of collective in a step: its bytes by the ring formulas, its seconds over the slowest link of its group.

Per rank, for a tensor of S bytes among N ranks (Thakur et al., 2005; NCCL's tests call the same "bus" bytes):

    all-reduce 2 (N-1)/N S      all-gather, reduce-scatter, all-to-all (N-1)/N S      point-to-point S
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from hf_parallel.planner.hardware import Cluster, Link
from hf_parallel.planner.layout import Layout

#: Times that a tensor goes round a ring.
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
FORWARD, BACKWARD, STEP = "forward", "backward", "step"  # when: in each micro-batch, or once per step
#: What a collective runs behind, if anything: a pass's matrix products, its attention, all of its compute; gradients
#: behind the last backward; the schedule simulates sends between stages.
EXPOSED, PRODUCTS, ATTENTION, COMPUTE = "nothing", "matrix products", "attention", "compute"
LAST_BACKWARD, SCHEDULE = "last backward", "schedule"


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: how many, the slowest link among them, and a rank's share of it in bytes/s."""

    axis: str
    size: int
    link: Link
    bandwidth: float


@dataclass(frozen=True)
class Transfer:
    """`count` equal collectives of one axis, per micro-batch (forward, backward) or per step.

    `payload`: bytes of the whole tensor: what is reduced, what a gather results in, what is sent.
    """

    axis: str
    kind: str
    payload: float
    count: float
    group: Group
    what: str
    when: str = FORWARD
    behind: str = EXPOSED

    @property
    def bytes(self) -> float:
        """What a rank sends in all of them, by the ring formulas."""
        return self.count * self.payload * ring_factor(self.kind, self.group.size)

    @property
    def seconds(self) -> float:
        """How long all of them take, one after the other."""
        return self.count * transfer_seconds(self.kind, self.payload, self.group)

    def times(self, count: float) -> Transfer:
        """`count` times as many."""
        return dataclasses.replace(self, count=self.count * count)


def ring_factor(kind: str, size: int) -> float:
    """Bytes that a rank sends per byte of payload."""
    return 1.0 if kind == "p2p" else FACTORS[kind] * (size - 1) / size


def transfer_seconds(kind: str, payload: float, group: Group) -> float:
    """Latency of each step of a ring, or of a tree if that is faster, plus bytes over bandwidth."""
    if group.size == 1:
        return 0.0
    steps = 1.0 if kind == "p2p" else FACTORS[kind] * min(group.size - 1, 4 * math.log2(group.size) + 8)
    return steps * group.link.latency + payload * ring_factor(kind, group.size) / group.bandwidth


@functools.lru_cache(maxsize=4096)
def groups(layout: Layout, cluster: Cluster) -> dict[str, Group]:
    """The group of each axis on a cluster whose ranks are numbered with tp innermost, then cp, dp, pp.

    `cp`: of rings; `heads`: of Ulysses. `zero`: the ranks over which ZeRO spreads what is not an expert's; `experts`:
    those that hold the same experts.
    """
    inner, replica = layout.tp * layout.cp, layout.dp // layout.dp_replicate
    experts = expert_shards(layout)
    placed = {  # size, distance of neighbours in ranks
        "tp": (layout.tp, 1),
        "cp": (layout.cp // layout.heads_over, layout.tp * layout.heads_over),
        "heads": (layout.heads_over, layout.tp),
        "ep": (layout.ep, 1),
        "dp": (layout.dp, inner),
        "zero": (layout.shards, layout.tp),
        "within": (layout.hierarchical_shard, layout.tp),
        "across": (layout.shards // layout.hierarchical_shard, layout.tp * layout.hierarchical_shard),
        "experts": (experts, layout.tp * layout.shards // experts),
        "replicate": (layout.dp_replicate, inner * replica),
        "pp": (layout.pp, inner * layout.dp),
    }
    return {axis: _group(axis, size, stride, cluster) for axis, (size, stride) in placed.items()}


def expert_shards(layout: Layout) -> int:
    """Over how many ranks ZeRO spreads an expert's states: those of a replica that hold the same experts."""
    return max(1, layout.shards * layout.tp // layout.expert_split)


def _group(axis: str, size: int, stride: int, cluster: Cluster) -> Group:
    """Ranks of one group in one node drive that node's adapters together; pp sends from one rank to one."""
    efficiency = cluster.gpu.efficiency
    inside = Group(axis, size, cluster.inside, cluster.inside.bandwidth * efficiency.link)
    if size * stride <= cluster.per_node:
        return inside
    together = 1 if axis == "pp" else min(size, max(1, cluster.per_node // stride))
    bandwidth = cluster.between.bandwidth * efficiency.network * together
    return Group(axis, size, cluster.between, min(inside.bandwidth, bandwidth))
