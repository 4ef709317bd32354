"""Keys of ZeRO++ (Wang et al., 2023): fewer bytes over slow links, for weights gathered and gradients reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


class Compression(Axis[None, list[str]]):
    """Other collectives for the units that the data axes have sharded."""

    name = "compression"

    def is_on(self, config: ParallelConfig) -> bool:
        return bool(config.compressed)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> list[str]:
        """Nothing is chosen but what to tell; the ranks must be there."""
        ranks, group = config.dp_shard_size, config.hierarchical_shard
        if ranks == 1:
            asked = config.compressed[0]
            refuse(asked, "dp_shard_size=1 gathers no weights and scatters no gradients", "dp_shard_size=2")
        if group is not None and (ranks % group or group == ranks):
            divisors = [n for n in range(2, ranks) if ranks % n == 0]
            works = f"hierarchical_shard={divisors[-1]}" if divisors else "hierarchical_shard=none"
            refuse(f"hierarchical_shard={group}", f"no whole part of dp_shard_size={ranks}", works)
        if group is None or config.pp_size == 1:
            return []
        return ["hierarchical_shard saves traffic but no memory here: a pipeline keeps weights for its backward pass"]

    def notes(self, part: list[str]) -> list[str]:
        return part

    def finish(self, model: nn.Module, part: list[str], building: Building) -> None:
        """Give each unit its collectives."""
        from hf_parallel.axes.data.compressed import compress

        for root, _ in building.roots:
            compress(root, building.mesh)


COMPRESSION = Compression()
