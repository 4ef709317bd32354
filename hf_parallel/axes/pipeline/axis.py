"""Pipeline parallelism: consecutive layers on different ranks, one of torch's schedules through them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from hf_parallel.ask.keys.data import MEASURED
from hf_parallel.ask.keys.pipeline import AUTO_SCHEDULE, SPLIT_BACKWARD, V_SCHEDULES
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.pipeline.balance import Costs, balance, block_costs, explain, with_recomputation
from hf_parallel.axes.pipeline.part import PipelinePart, StageFacts, does_recompute_in_parts, find_holding_stages
from hf_parallel.axes.pipeline.timeline import split_evenly
from hf_parallel.model.anatomy import (
    find_backbone_plan,
    find_input_embedding,
    find_text_part,
    get_backbone_of,
    get_text_config,
    has_tied_embedding,
)
from hf_parallel.model.experts import has_known_balance

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy

_ONE_STAGE = "pp_size=1 works"
_SHARDS = "pp_size=1 with dp_shard works"


class Pipeline(Axis[StageFacts, PipelinePart]):
    """Cuts the model into stages. Each rank keeps its stages, under the Hub's names."""

    name = "pp"
    inside = True

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> StageFacts:
        """Read the order in which the model runs its modules, what each costs, and whether its ends share a weight.

        Returns:
            The facts; for a model that cannot be cut into stages the reason, with what works.
        """
        backbone = get_backbone_of(model)
        plan = find_backbone_plan(backbone) if backbone is not None else None
        name, base = type(model).__name__, getattr(model, "base_model", model)
        beside = backbone is not None and {id(p) for p in base.parameters()} - {id(p) for p in backbone.parameters()}
        if find_text_part(model) is not base or (beside and base is not model):
            return StageFacts(f"{name} has parts beside its language model; {_ONE_STAGE}")
        if backbone is None:
            return StageFacts(f"{name} is not one stack of layers with a head behind it; {_SHARDS}")
        if plan is None:
            return StageFacts(f"{name} publishes no pipeline plan; {_SHARDS}")
        placed = tuple(f"{part}." for part in (*plan.before, plan.layers, *plan.after))
        for parameter, _ in backbone.named_parameters():
            if not parameter.startswith(placed):
                return StageFacts(f"the pipeline plan says nothing about {parameter}; {_ONE_STAGE}")
        if getattr(model.config, "output_router_logits", False) and not has_known_balance(model):
            return StageFacts(f"output_router_logits=True: what {name} makes of all layers' is not known; False works")
        # Settings under which layers need more than the one before them.
        own, text = model.config, get_text_config(model)
        if getattr(text, "num_kv_shared_layers", 0):
            return StageFacts(f"{name}'s last layers use keys and values of earlier ones; {_ONE_STAGE}")
        if "shared" in (getattr(text, "indexer_types", None) or ()):
            return StageFacts(f"{name}'s layers use what earlier ones selected; {_ONE_STAGE}")
        if getattr(own, "layerdrop", 0):
            return StageFacts(f"layerdrop={own.layerdrop} skips layers at random; 0 works")
        names = {id(module): name for name, module in model.named_modules()}
        tied = names[id(find_input_embedding(model))] if has_tied_embedding(model) else None
        return StageFacts(None, names[id(backbone)], plan, block_costs(model, backbone, plan), tied)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: StageFacts) -> PipelinePart:
        """Choose the schedule, and layers per stage: `pipeline_split`, else balanced by cost.

        Raises:
            SpecError: the model cannot be cut, has too few layers, or the schedule does not take it;
                `pipeline_fill=kfac` with experts, or with a loss that is no mean over tokens; `chimera` with experts,
                or with a loss that is no sum over micro-batches; `pipeline_energy=slack` without an NVIDIA GPU, NVML
                or the right to lock clocks.
        """
        if facts.refusal is not None or facts.costs is None:
            refuse(f"pp_size={config.pp_size}", facts.refusal)
        tied, layers = facts.tied_embedding is not None, len(facts.costs.layers)
        if config.pipeline_schedule == AUTO_SCHEDULE:
            from hf_parallel.axes.pipeline.schedules import choose_schedule

            config = dataclasses.replace(config, pipeline_schedule=choose_schedule(config, layers, tied))
        if tied and config.pipeline_schedule in V_SCHEDULES and config.sharing_size > 1:
            # A V puts embedding and head on one rank but in two FSDP2 roots, which cannot share a parameter.
            asked, works = f"pipeline_schedule={config.pipeline_schedule}", "interleaved_zero_bubble"
            refuse(asked, "tied embeddings cannot be sharded over data ranks", works)
        check_own_functions(config)
        stages, split = config.pipeline_stages, config.split_layers
        if stages > layers:
            most = layers // config.stages_per_rank
            works = f"pp_size={most}" if most > 1 else "pipeline_schedule=1f1b" if layers > 1 else "pp_size=1"
            refuse(f"pp_size={config.pp_size}", f"the model has {layers} layers, {stages} stages need one each", works)
        if split is not None and (sum(split) != layers or min(split) < 1):
            asked = f"pipeline_split=[{','.join(map(str, split))}]"
            works = ",".join(map(str, split_evenly(layers, stages)))
            refuse(asked, f"needs {stages} positive numbers that add to {layers}", f"[{works}]")
        everywhere = config.recompute_ranks is None
        costs = with_recomputation(facts.costs, config.recompute_way if everywhere else "none")
        counts, line = _share_layers(config, facts, costs)
        if config.pipeline_split is not None:
            config = dataclasses.replace(config, pipeline_split=counts)
        has_experts = any(".experts." in name for name in anatomy.names)
        asked, works = f"pipeline_fill={config.pipeline_fill}", "pipeline_fill=none"
        if config.fills_bubbles and has_experts:
            refuse(asked, f"the experts of {anatomy.name} have too few tokens each for a curvature", works)
        if config.fills_bubbles and not anatomy.sums_over_tokens:
            refuse(asked, f"the loss of {anatomy.name} is not known to be a mean over tokens", works)
        asked, works = f"pipeline_schedule={config.pipeline_schedule}", "pipeline_schedule=1f1b"
        if config.mirrors_stages and has_experts:
            refuse(asked, f"{anatomy.name} has experts, which have not been compared with one process", works)
        if config.mirrors_stages and not anatomy.sums_over_tokens:
            refuse(asked, f"the loss of {anatomy.name} needs whole batches", works)
        if config.pipeline_energy != "none":
            from hf_parallel.axes.pipeline.energy import open_clocks_of

            try:
                open_clocks_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).restore()
            except RuntimeError as error:
                refuse(f"pipeline_energy={config.pipeline_energy}", str(error), "pipeline_energy=none", cause=error)
        part = PipelinePart(config, counts, tied, anatomy.sums_over_tokens, facts, line)
        for names in (parameter.names for parameter in anatomy.parameters if len(parameter.names) > 1):
            held = {name: find_holding_stages(part, name) for name in names}
            apart = next((name for name in names if not held[name] & held[names[0]]), None)
            if apart is not None:
                why = f"{names[0]} and {apart} are one weight, on stages {min(held[names[0]])} and {min(held[apart])}"
                refuse(f"pp_size={config.pp_size}", why, "pp_size=1")
        return part

    def settle(self, config: ParallelConfig, part: PipelinePart | None) -> ParallelConfig:
        return config if part is None else part.config

    def notes(self, part: PipelinePart) -> list[str]:
        schedule = part.config.pipeline_schedule
        again = [f"pipeline_schedule={schedule} recomputes layers several times; 1f1b is faster here"]
        return [part.line, *(again if does_recompute_in_parts(part.config, schedule) else [])]

    def apply(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Keep this rank's stages; from here on the roots of the model are its stages."""
        from hf_parallel.axes.pipeline.engine import PipelineEngine
        from hf_parallel.axes.pipeline.stages import cut_into_stages

        views, remote_modules = cut_into_stages(model, part, building.mesh.index("pp"))
        engine = PipelineEngine(model, views, building, part, remote_modules)
        if part.config.delays_updates:
            from hf_parallel.axes.pipeline.delayed import DelayedPipeline

            engine.delayed = DelayedPipeline(engine)
        if part.config.mirrors_stages:
            from hf_parallel.axes.pipeline.chimera import Mirror

            engine.mirror = Mirror(engine, part)
        if part.config.fills_bubbles:
            from hf_parallel.axes.pipeline.fill_kfac import KfacFill

            engine.fill = KfacFill(engine)
        if part.config.pipeline_energy != "none":
            from hf_parallel.axes.pipeline.energy import StageClocks, open_clocks_of

            engine.energy = StageClocks(engine, open_clocks_of(building.mesh.device))
        building.pipeline = engine
        building.roots = [(stage, view.layers) for stage, view in zip(engine.stages, views, strict=True)]

    def finish(self, model: nn.Module, part: PipelinePart, building: Building) -> None:
        """Put the engine behind `model.forward`, inside of which sequences are padded."""
        assert building.pipeline is not None
        building.pipeline.attach()


#: Bytes of a parameter's gradient and of Adam's moments, in bytes of the parameter.
_STATES = 3
#: The part of a device's memory that parameters and their states may take; activations take the rest.
_ROOM = 0.8
#: Devices whose speeds differ by less are alike.
_ALIKE = 1.1


def _share_layers(config: ParallelConfig, facts: StageFacts, costs: Costs) -> tuple[tuple[int, ...], str]:
    """Return the layers of each stage, and a line about them: as given, else by cost, and by the devices if known."""
    stages, devices = config.pipeline_stages, facts.devices
    if config.split_layers is not None:
        return config.split_layers, explain(costs, config.split_layers)
    speeds, asked = config.split_speeds, config.pipeline_split
    if asked == MEASURED and devices is not None:
        fastest = max(device.speed for device in devices)
        speeds = tuple(max(0.01, round(device.speed / fastest, 2)) for device in devices)
        speeds = speeds if _ALIKE * min(speeds) < max(speeds) else tuple(1.0 for _ in speeds)
    ranks = [config.rank_of_stage(stage) for stage in range(stages)]
    of_stage = None if speeds is None else [speeds[rank] for rank in ranks]
    counts, more = balance(costs, stages, of_stage), ""
    if asked == MEASURED and devices is not None:
        states = (1 + _STATES / (config.dp_shard_size * config.cp_size)) / config.tp_size
        rooms = [_ROOM * devices[rank].memory / config.stages_per_rank / states for rank in ranks]
        fitting = balance(costs, stages, of_stage, rooms)
        more = "" if fitting == counts else f"; by speed alone {', '.join(map(str, counts))}, which does not fit"
        counts = fitting
    line = explain(costs, counts)
    if speeds is not None:
        line += f", by speeds {':'.join(f'{speed:g}' for speed in speeds)} of the pipeline's ranks{more}"
    elif asked == MEASURED:
        line += "; pipeline_split=auto measures the devices at start"
    return counts, line


def check_own_functions(config: ParallelConfig, trainer: str | None = None) -> None:
    """Refuse our autograd functions in split backward passes: torch before 2.13 loses their nodes in between.

    Args:
        trainer: the name of a trainer whose head and loss are such a function.

    Raises:
        SpecError: such a function has a weight: that of `tp_overlap`, or that of head and loss in chunks.
    """
    old = Version(torch.__version__).release[:2] < (2, 13)
    if not old or config.pipeline_schedule not in SPLIT_BACKWARD:
        return
    needs = f"with pipeline_schedule={config.pipeline_schedule} needs torch 2.13, here is {torch.__version__}"
    if config.tp_overlap:
        refuse("tp_overlap=true", needs, "tp_overlap=false")
    if config.lean_loss == "true":
        refuse("lean_loss=true", needs, "lean_loss=auto")
    if trainer is not None:
        refuse(trainer, needs, "pipeline_schedule=1f1b")


PIPELINE = Pipeline()
