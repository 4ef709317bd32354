"""The data axes: replicas, shards (ZeRO, FSDP2), and where parameters live."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hf_parallel.axes.axis import Axis, Keys, MeshAxis, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class DataKeys(Keys):
    dp_replicate_size: int = key(1, "copies of the model that see different batches")
    dp_shard_size: int = key(-1, "ranks that share parameters, gradients and optimizer (FSDP2)")
    zero_stage: int = key(
        3,
        "what `dp_shard` shards: nothing (0), optimizer states (1), gradients too (2), weights too (3)",
        choices=(0, 1, 2, 3),
    )
    gradient_reduction: str = key(
        "auto",
        "`micro_step` reduces gradients in every micro-step of an accumulation; `step` once, and holds them whole",
        choices=("auto", "micro_step", "step"),
    )
    pack_tokens: int = key(
        0,
        "a Trainer's batch of a data rank is whole examples of at most so many tokens, joined to one row without "
        "padding, and all data ranks have about as many; 0: per_device_train_batch_size",
    )
    padding_free: bool = key(
        False, "a Trainer's batches keep their rows, joined to one without padding; `--parallel auto` may choose it"
    )

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Are gradients reduced in every micro-step of an accumulation? By default where less of them is then held.

        Not where replicas would have to reduce them as often over slow links. Needs a resolved config.
        """
        if self.gradient_reduction != "auto":
            return self.gradient_reduction == "micro_step"
        sizes = cast("ParallelConfig", self).sizes
        return self.zero_stage >= 2 and self.dp_shard_size > 1 and self.dp_replicate_size == sizes["pp"] == 1

    @property
    def reduces_each_run(self) -> bool:
        """Does a pipeline reduce gradients in every run of its schedule, rather than once per step?"""
        return (
            cast("ParallelConfig", self).sizes["pp"] > 1 and self.zero_stage >= 2 and self.gradient_reduction == "auto"
        )


@dataclass(frozen=True)
class DataPart:
    """What the data axes will do. `line`: when gradients are reduced, and why."""

    line: str | None


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Along which dim `ranks` share experts of this shape: FSDP2 pads no dim but the first."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


class Data(Axis[None, DataPart]):
    """The last of all to be applied: it stores what the other axes have left of each parameter."""

    name = "dp"
    mesh_axes = (
        MeshAxis("dp_replicate", distance=4, data=True),
        MeshAxis("dp_shard", distance=2, data=True, cuts=True, shards=True),
    )

    def is_on(self, config: ParallelConfig) -> bool:
        return True

    def check(self, config: ParallelConfig) -> None:
        """A reduction in every micro-step needs shards to hold what is reduced; a joined row is not to be cut."""
        if config.pack_tokens < 0:
            refuse(f"pack_tokens={config.pack_tokens}", "not a number of tokens", "pack_tokens=8192")
        if config.pack_tokens and config.pp_size != 1:
            why = f"a pipeline (pp_size={config.pp_size}) cuts batches by rows, and a packed batch is one row"
            refuse(f"pack_tokens={config.pack_tokens}", why, "dp_shard in the place of pp")
        if config.padding_free and config.pp_size != 1:
            why = f"a pipeline (pp_size={config.pp_size}) cuts batches by rows, and a joined batch is one row"
            refuse("padding_free=true", why, "dp_shard in the place of pp")
        if config.padding_free and config.pack_tokens:
            why = f"pack_tokens={config.pack_tokens} makes batches of its own, without padding"
            refuse("padding_free=true", why, "padding_free=false")
        if config.gradient_reduction != "micro_step":
            return
        what = "gradient_reduction=micro_step"
        if config.zero_stage < 2:
            refuse(what, f"zero_stage={config.zero_stage} holds whole gradients", "zero_stage=2")
        if config.pp_size != 1:
            refuse(what, "a pipeline reduces once per run of its schedule at most", "gradient_reduction=step")

    def sized(self, config: ParallelConfig) -> ParallelConfig:
        """ZeRO-0 is what replicas are."""
        if config.zero_stage or config.dp_shard_size == 1:
            return config
        return replace(config, dp_replicate_size=config.dp_replicate_size * config.dp_shard_size, dp_shard_size=1)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> DataPart:
        """When gradients are reduced; FSDP2's own limits hold."""
        scalar = next((p.names[0] for p in anatomy.parameters if not p.shape), None)
        if scalar is not None and config.sharing_size > 1:
            sizes = {name: getattr(config, name) for name in ("dp_shard_size", "cp_size", "dp_replicate_size")}
            name = next(name for name, size in sizes.items() if size > 1)
            refuse(f"{name}={sizes[name]}", f"FSDP2 cannot shard the scalar {scalar}", f"{name}=1")
        return DataPart(_when_reduced(config) if config.dp_shard_size > 1 else None)

    def notes(self, part: DataPart) -> list[str]:
        return [] if part.line is None else [part.line]

    def apply(self, model: PreTrainedModel, part: DataPart, building: Building) -> None:
        """Shard each root, layer by layer: what is sharded goes to the device alone. Of no shards all goes at once."""
        from hf_parallel.axes.data.batch_norm import share_batch_norms
        from hf_parallel.axes.data.held_gradients import HeldGradients
        from hf_parallel.axes.data.lowered import before_call, lower_once_per_call
        from hf_parallel.axes.data.mixed_precision import lowered_dtype
        from hf_parallel.axes.data.reduction import HELD, at_rest
        from hf_parallel.axes.data.zero import move_rest, shard_data_parallel

        mesh = building.mesh
        if not building.on_meta and (mesh.config.sharing_size == 1 or building.pack is not None):
            model.to(mesh.device)
        if building.pack is not None:
            building.pack(model)
        if mesh.data_size > 1:
            share_batch_norms(model, mesh)
        for root, layers in building.roots:
            shard_data_parallel(model, root, layers, mesh)
        move_rest(model, mesh)
        if mesh.config.sharing_size == 1:
            begin = lower_once_per_call(building.roots, mesh.device)
            if building.pipeline is None:
                before_call(model, begin)
            else:
                building.pipeline.before_run = begin
        if building.pipeline is not None:
            stage = building.roots[0][0]
            building.pipeline.lowered_dtype = lambda: lowered_dtype(stage, mesh.device)
            if mesh.config.sharing_size > 1:
                roots = [root for root, _ in building.roots]
                building.pipeline.at_rest = functools.partial(at_rest, roots)
                building.pipeline.held = HeldGradients(roots)
                setattr(building.pipeline.stages, HELD, building.pipeline.held)


def _when_reduced(config: ParallelConfig) -> str:
    shards = config.dp_shard_size
    if config.reduces_each_micro_batch:
        return (
            f"gradients are reduced in every micro-step: each rank holds 1/{shards} of them; "
            "gradient_reduction=step sends them once per step and holds all"
        )
    if config.gradient_reduction == "step":
        why = "as asked for"
    elif config.zero_stage < 2:
        why = f"zero_stage={config.zero_stage}"
    else:
        why = "micro-batches of a pipeline overlap" if config.pp_size > 1 else "replicas would reduce as often"
    when = "run of the schedule" if config.reduces_each_run else "step"
    return f"gradients are reduced once per {when}, and whole on each rank until then: {why}"


DATA = DataKeys.axis = Data()
