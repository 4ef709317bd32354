"""The data axes: replicas, shards (ZeRO, FSDP2), and where parameters live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis, Keys, MeshAxis, NotBuilt, key
from hf_parallel.spec import SpecError

if TYPE_CHECKING:
    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy

_COMPRESSION = "ZeRO++ compression"


@dataclass(frozen=True)
class DataKeys(Keys):
    dp_replicate_size: int = key(1, "copies of the model that see different batches")
    dp_shard_size: int = key(-1, "ranks that share parameters, gradients and optimizer (FSDP2)")
    zero_stage: int = key(
        3,
        "3 frees gathered weights after use, 2 keeps them until the backward pass",
        choices=(0, 1, 2, 3),
        not_built=(
            NotBuilt("sharding the optimizer alone", "zero_stage=2", (1,)),
            NotBuilt("unsharded data parallelism by this key", "dp_replicate=-1", (0,)),
        ),
    )
    offload: str = key(
        "none", "where parameters and optimizer states rest", not_built=(NotBuilt("offloading", "offload=none"),)
    )
    quantize_weights: bool = key(
        False, "gather weights in fewer bits", not_built=(NotBuilt(_COMPRESSION, "quantize_weights=false"),)
    )
    quantize_gradients: bool = key(
        False, "reduce gradients in fewer bits", not_built=(NotBuilt(_COMPRESSION, "quantize_gradients=false"),)
    )


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Along which dim `ranks` share experts of this shape: FSDP2 pads no dim but the first."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


class Data(Axis[None, None]):
    """The last of all to be applied: it stores what the other axes have left of each parameter."""

    name = "dp"
    mesh_axes = (
        MeshAxis("dp_replicate", distance=4, data=True),
        MeshAxis("dp_shard", distance=2, data=True, cuts=True),
    )

    def is_on(self, config: ParallelConfig) -> bool:
        return True

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> None:
        """Nothing is chosen; FSDP2's own limits hold."""
        scalar = next((p.names[0] for p in anatomy.parameters if not p.shape), None)
        if scalar is not None and config.data_parallel_size > 1:
            name = "dp_shard_size" if config.dp_shard_size > 1 else "dp_replicate_size"
            raise SpecError(f"{name}={getattr(config, name)}: FSDP2 cannot shard the scalar {scalar}; {name}=1 works")

    def apply(self, model: Any, part: None, building: Building) -> None:
        """Move each root to the device, give its weights another kind if asked to, and shard it."""
        from hf_parallel.axes.data.zero import shard_data_parallel

        if not building.on_meta:
            model.to(building.mesh.device)
        if building.pack is not None:
            building.pack(model)
        splits = building.pipeline is not None and building.pipeline.splits_backward
        for root, layers in building.roots:
            shard_data_parallel(model, root, layers, building.mesh, splits)


DATA = DataKeys.axis = Data()
