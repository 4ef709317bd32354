"""The data axes: replicas, shards (ZeRO, FSDP2), and where parameters live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class DataPart:
    """The part of the data axes in a plan. `line`: when gradients are reduced, and why."""

    line: str | None


class Data(Axis[None, DataPart]):
    """The last of all to be applied: it stores what the other axes have left of each parameter."""

    name = "dp"
    always_on = True

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> DataPart:
        """Decide when gradients are reduced."""
        scalar = next((p.names[0] for p in anatomy.parameters if not p.shape), None)
        if scalar is not None and config.sharing_size > 1 and config.pp_size > 1:
            why = f"a pipeline on several data ranks cannot reduce the gradient of the scalar {scalar}"
            refuse(f"pp_size={config.pp_size}", why, "pp_size=1")
        shards = config.dp_shard_size
        if shards == 1:
            return DataPart(None)
        if config.reduces_each_micro_batch:
            return DataPart(
                f"gradients are reduced in every accumulation step, and each rank holds 1/{shards} of them; "
                "gradient_reduction=step sends less and holds all"
            )
        if config.gradient_reduction == "step":
            why = "gradient_reduction=step"
        elif config.zero_stage < 2:
            why = f"zero_stage={config.zero_stage}"
        elif config.pp_size > 1:
            why = "micro-batches of a pipeline overlap"
        else:
            why = "replicas would reduce each time, too"
        when = "run of the schedule" if config.reduces_each_run else "step"
        return DataPart(f"gradients are reduced once per {when}; until then each rank holds all of them ({why})")

    def notes(self, part: DataPart) -> list[str]:
        return [] if part.line is None else [part.line]

    def apply(self, model: PreTrainedModel, part: DataPart, building: Building) -> None:
        """Shard each root, layer by layer: what is sharded goes to the device alone. Of no shards all goes at once."""
        from hf_parallel.axes.data.batch_norm import share_batch_norms
        from hf_parallel.axes.data.gradients import HELD, HeldGradients
        from hf_parallel.axes.data.lowered import begin_at_call, find_lowered_dtype, lower_once_per_call
        from hf_parallel.axes.data.shared_towers import share_choices, share_towers
        from hf_parallel.axes.data.zero import move_rest, shard_data_parallel

        mesh = building.mesh
        if not building.on_meta and (mesh.config.sharing_size == 1 or building.pack is not None):
            model.to(mesh.device)
        if building.pack is not None:
            building.pack(model)
        if mesh.data_size > 1:
            share_batch_norms(model, mesh)
        if mesh.config.sharing_size > 1:
            share_choices(model, mesh)
        for root, layers in building.roots:
            shard_data_parallel(model, root, layers, mesh)
        if mesh.data_size > 1 and building.pipeline is None:
            share_towers(model, mesh)
        move_rest(model, mesh)
        if mesh.config.sharing_size == 1:
            begin = lower_once_per_call(building.roots, mesh.device)
            if building.pipeline is None:
                begin_at_call(model, begin)
            else:
                building.services.before_run = begin
        if building.pipeline is not None:
            stage = building.roots[0][0]
            building.services.lowered_dtype = lambda: find_lowered_dtype(stage, mesh.device)
            if mesh.config.sharing_size > 1:
                held = HeldGradients([root for root, _ in building.roots])
                building.services.begin_held_run, building.services.reduce_stages = held.begin_run, held.reduce
                setattr(building.pipeline.stages, HELD, held)


DATA = Data()
