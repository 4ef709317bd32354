"""Keys of ZeRO++ (Wang et al., 2023): fewer bytes over slow links, for weights gathered and gradients reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class CompressionKeys(Keys):
    hierarchical_shard: int | None = key(
        None, "ranks of dp_shard that are close: the backward pass gathers weights among these alone (hpZ)"
    )
    quantize_weights: str = key(
        "none", "`int8` or `fp8`: gather weights in 8 bits (qwZ)", choices=("none", "int8", "fp8")
    )
    quantize_gradients: str = key(
        "none", "`int8` or `int4`: reduce gradients in fewer bits (qgZ)", choices=("none", "int8", "int4")
    )
    gradient_error_feedback: bool = key(False, "add what quantize_gradients has lost to the next step's gradients")


class Compression(Axis[None, list[str]]):
    """Other collectives for the units that the data axes have sharded."""

    name = "compression"

    def check(self, config: ParallelConfig) -> None:
        """One key needs another."""
        if config.gradient_error_feedback and config.quantize_gradients == "none":
            refuse("gradient_error_feedback=true", "quantize_gradients=none loses nothing", "quantize_gradients=int4")
        for asked in _asked(config):
            if config.zero_stage == 0:
                refuse(asked, "zero_stage=0 shards nothing", "zero_stage=3")
        group = config.hierarchical_shard
        if group is not None and config.zero_stage != 3:
            why = f"zero_stage={config.zero_stage} keeps weights until the backward pass, which gathers none"
            refuse(f"hierarchical_shard={group}", why, "zero_stage=3")
        if group is not None and group < 2:
            refuse(f"hierarchical_shard={group}", "a group has 2 ranks or more", "hierarchical_shard=2")

    def is_on(self, config: ParallelConfig) -> bool:
        return bool(_asked(config))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> list[str]:
        """Nothing is chosen but what to tell; the ranks must be there."""
        ranks, group = config.dp_shard_size, config.hierarchical_shard
        if ranks == 1:
            asked = _asked(config)[0]
            refuse(asked, "dp_shard_size=1 gathers no weights and scatters no gradients", "dp_shard_size=2")
        if group is not None and (ranks % group or group == ranks):
            divisors = [n for n in range(2, ranks) if ranks % n == 0]
            works = f"hierarchical_shard={divisors[-1]}" if divisors else "hierarchical_shard=none"
            refuse(f"hierarchical_shard={group}", f"no whole part of dp_shard_size={ranks}", works)
        if group is None or config.pp_size == 1:
            return []
        return ["a pipeline keeps weights for its backward pass: hierarchical_shard saves it traffic, no memory"]

    def notes(self, part: list[str]) -> list[str]:
        return part

    def finish(self, model: nn.Module, part: list[str], building: Building) -> None:
        """Give each unit its collectives."""
        from hf_parallel.axes.data.compressed import compress

        for root, _ in building.roots:
            compress(root, building.mesh)


def _asked(config: ParallelConfig) -> list[str]:
    found = [] if config.hierarchical_shard is None else [f"hierarchical_shard={config.hierarchical_shard}"]
    quantized = ("quantize_weights", "quantize_gradients")
    return found + [f"{name}={getattr(config, name)}" for name in quantized if getattr(config, name) != "none"]


COMPRESSION = CompressionKeys.axis = Compression()
