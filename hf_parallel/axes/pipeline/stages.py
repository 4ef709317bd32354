"""Cut a Hugging Face model into pipeline stages without copying it.

The model object itself becomes this rank's stages: layers of other ranks turn into stand-ins, so the names of what
stays are the Hub's names and the script's own object is the one that trains. What belongs where comes from the
backbone's plan (`anatomy.py`: what runs before the layers, the layers, what runs after them); what is outside the
backbone is on the last stage.

    four layers, pp=2      embed_tokens   layers.0  layers.1  layers.2  layers.3   norm   lm_head
    stage 0                     x            x         x        exit       ->       ->      ->
    stage 1                     ->           ->       entry      x         x        x       x

The layer just before a stage's own is its entry: it gives what the previous stage computed. So what the model does
between embedding and layers (scaling, positions, dropout) happens once, on the first stage. The layer just after its
own is its exit, where the forward ends. A rank with several stages shows the model one of them at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_parallel.axes.pipeline.balance import balance, block_costs, explain
from hf_parallel.axes.pipeline.remote_modules import RemoteModules, without_values
from hf_parallel.axes.pipeline.stand_ins import AddsNothing, Entry, Exit, PassThrough, settle, stand_in_for, stand_ins
from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.model.anatomy import Backbone, backbone_plan, input_embedding, text_config, text_part, token_readers

Swap = tuple[nn.Module, str, Any]  # owner, name, what stands there


@dataclass
class StageView:
    """One stage of this rank: what the model must look like while it runs."""

    index: int
    layers: list[nn.Module]
    entry: Entry | None  # None on the first stage, which embeds
    modules: list[nn.Module]  # all that hold its parameters
    swaps: list[Swap]
    former: list[Swap] = field(default_factory=list)  # what these replace, while they do

    @contextlib.contextmanager
    def shown(self, instead_of: StageView | None = None) -> Iterator[None]:
        """Let the model be this stage, and after it again what it was: whole, or another stage of this rank."""
        outer = [] if instead_of is None else _put(instead_of.former)
        self.former = _put(self.swaps)
        try:
            yield
        finally:
            _put(self.former)
            _put(outer)


def _put(swaps: list[Swap]) -> list[Swap]:
    """Put modules in their places; returns what was there."""
    former = [(owner, name, owner._modules[name]) for owner, name, _ in swaps]
    for owner, name, module in swaps:
        owner._modules[name] = module
    return former


def layer_count(model: Any, config: ParallelConfig) -> int:
    """How many layers there are to share out."""
    plan = _plan(model, config.pp_size)
    return len(backbone_of(model).get_submodule(plan.layers))


def layers_per_stage(model: Any, config: ParallelConfig) -> tuple[tuple[int, ...], str]:
    """How many layers each stage gets, and a line about it: `pipeline_split`, else balanced by cost.

    Call it before the model is changed: costs are counted from its modules.

    Raises:
        SpecError: the order in which the model runs its modules is not known, or it has fewer layers than stages.
    """
    plan, backbone = _plan(model, config.pp_size), backbone_of(model)
    costs = block_costs(model, backbone, plan, recomputes=config.activation_checkpointing == "full")
    counts = config.pipeline_split
    _check_split(len(costs.layers), config)
    if counts is None:
        counts = balance(costs, config.pipeline_stages)
    return counts, explain(costs, counts)


def _check_split(layers: int, config: ParallelConfig) -> None:
    stages, asked = config.pipeline_stages, config.pipeline_split
    if stages > layers:
        most = layers // config.stages_per_rank
        works = f"pp_size={most}" if most > 1 else "pipeline_schedule=1f1b" if layers > 1 else "pp_size=1"
        raise SpecError(
            f"pp_size={config.pp_size}: the model has {layers} layers, {stages} stages need one each; {works} works"
        )
    if asked is not None and (sum(asked) != layers or min(asked) < 1):
        quotient, remainder = divmod(layers, stages)
        works = ",".join(str(quotient + (stage < remainder)) for stage in range(stages))
        raise SpecError(
            f"pipeline_split=[{','.join(map(str, asked))}]: needs {stages} positive numbers that add to {layers}; "
            f"[{works}] works"
        )


def cut_into_stages(
    model: Any, config: ParallelConfig, rank: int, counts: tuple[int, ...]
) -> tuple[list[StageView], RemoteModules]:
    """Keep the modules of the stages of pipeline rank `rank` in `model`, replace the others, which are returned too.

    Args:
        counts: layers of each stage, from `layers_per_stage`.
    """
    plan, backbone = _plan(model, config.pp_size), backbone_of(model)
    layers: Any = backbone.get_submodule(plan.layers)
    ends = list(itertools.accumulate(counts))
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    own = [stage for stage in range(config.pipeline_stages) if config.rank_of_stage(stage) == rank]
    whole = dict(model.named_modules(remove_duplicate=False))
    is_last, kept = len(ranges) - 1 in own, None
    for i, layer in enumerate(layers):
        if not any(ranges[stage][0] <= i < ranges[stage][1] for stage in own):
            layers[i] = stand_in_for(layer)
    if 0 not in own:
        # A tied head keeps the embedding beside it: the shared parameter's home.
        kept = model.get_input_embeddings() if is_last and has_tied_embedding(model) else None
        _replace(backbone, [name for name in plan.before if kept is None or getattr(backbone, name) is not kept])
    if not is_last:
        _replace(backbone, plan.after)
        _replace(model, [name for name, child in model.named_children() if backbone not in child.modules()])
    settle(model, _stage_of(model, backbone, plan, ranges))
    views = [_view(model, backbone, plan, ranges, stage) for stage in own]
    if kept is not None:
        views[-1].modules.append(kept)  # so that FSDP2 shards the one parameter under both its names
    return views, _remote_modules(model, whole, kept)


def _stage_of(model: Any, backbone: Any, plan: Backbone, ranges: list[tuple[int, int]]) -> Callable[[str], int]:
    """Which stage holds the module of a name in `model`."""
    prefix = "".join(f"{name}." for name, module in model.named_modules() if module is backbone and name)
    stages = {f"{prefix}{name}": 0 for name in plan.before}
    for stage, (first, last) in enumerate(ranges):
        stages.update({f"{prefix}{plan.layers}.{i}": stage for i in range(first, last)})
    return lambda name: stages.get(name, len(ranges) - 1)


def _remote_modules(model: Any, whole: dict[str, nn.Module], kept: nn.Module | None) -> RemoteModules:
    """What `model` had before it was cut and has no more; and the embedding that a tied head keeps but nobody runs."""
    gone = stand_ins(model)
    embedding = {name: module for name, module in whole.items() if kept is not None and module is kept}
    return RemoteModules({**{name: without_values(whole[name]) for name in gone}, **embedding})


def _view(model: Any, backbone: Any, plan: Backbone, ranges: list[tuple[int, int]], stage: int) -> StageView:
    layers, (first, last) = list(backbone.get_submodule(plan.layers)), ranges[stage]
    own, modules = layers[first:last], layers[first:last]
    shown: list[nn.Module] = [stand_in_for(layer, PassThrough) for layer in layers]
    entry: Any = stand_in_for(layers[first - 1], Entry) if stage > 0 else None
    shown[first:last] = own
    if last < len(layers):
        shown[last] = stand_in_for(layers[last], Exit)
    if entry is None:
        modules = [*_present(backbone, plan.before), *modules]
    else:
        shown[first - 1] = entry
    if stage == len(ranges) - 1:
        outside = [child for child in model.children() if backbone not in child.modules()]
        modules = [*modules, *_present(backbone, plan.after), *outside]
    for module in shown:
        if isinstance(module, PassThrough):
            module.tuples = plan.tuples
    swaps: list[Swap] = [(backbone, plan.layers, nn.ModuleList(shown))]
    if stage > 0:
        swaps += [(backbone, name, _pass_by(getattr(backbone, name))) for name in plan.before if _is(backbone, name)]
    return StageView(stage, own, entry, modules, swaps)


def has_tied_embedding(model: Any) -> bool:
    """Do the embedding and the head share their weight?"""
    embedding, head = input_embedding(model), model.get_output_embeddings()
    weight, head_weight = getattr(embedding, "weight", None), getattr(head, "weight", None)
    if weight is None or head_weight is None:
        return False
    # While a model is loaded on the meta device the two are tied by name only.
    names = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    by_name = any(names.get(target) is head_weight and names.get(source) is weight for target, source in tied.items())
    return weight is head_weight or by_name


def backbone_of(model: Any) -> Any:
    """The part that embeds tokens and runs the layers; the head is outside."""
    readers = token_readers(model)
    return readers[0] if len(readers) == 1 and readers[0] is not model else None


def _plan(model: Any, stages: int) -> Backbone:
    backbone, name = backbone_of(model), type(model).__name__
    base = getattr(model, "base_model", model)
    beside = backbone is not None and {id(p) for p in base.parameters()} - {id(p) for p in backbone.parameters()}
    if text_part(model) is not base or (beside and base is not model):
        raise SpecError(f"pp_size={stages}: {name} has parts beside its language model; pp_size=1 works")
    if backbone is None:
        raise SpecError(
            f"pp_size={stages}: {name} is not one stack of layers with a head behind it; pp_size=1 with dp_shard works"
        )
    plan = backbone_plan(backbone)
    if plan is None:
        raise SpecError(f"pp_size={stages}: {name} publishes no pipeline plan; pp_size=1 with dp_shard works")
    placed = (*plan.before, plan.layers, *plan.after)
    for name, _ in backbone.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in placed)):
            raise SpecError(f"pp_size={stages}: the pipeline plan says nothing about {name}; pp_size=1 works")
    if getattr(model.config, "output_router_logits", False):
        raise SpecError(f"pp_size={stages}: output_router_logits=True needs all layers on one rank; False works")
    if getattr(text_config(model), "num_kv_shared_layers", 0):
        raise SpecError(f"pp_size={stages}: {name}'s last layers use keys and values of earlier ones; pp_size=1 works")
    if "shared" in (getattr(text_config(model), "indexer_types", None) or ()):
        raise SpecError(f"pp_size={stages}: {name}'s layers use what earlier ones selected; pp_size=1 works")
    if getattr(model.config, "layerdrop", 0):
        raise SpecError(f"pp_size={stages}: layerdrop={model.config.layerdrop} skips layers at random; 0 works")
    return plan


def _replace(parent: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if _is(parent, name):
            setattr(parent, name, stand_in_for(getattr(parent, name)))


def _pass_by(module: Any) -> nn.Module:
    return stand_in_for(module, AddsNothing if isinstance(module, nn.Embedding) else PassThrough)


def _is(parent: nn.Module, name: str) -> bool:
    return isinstance(getattr(parent, name, None), nn.Module)  # some models of a family have none


def _present(parent: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    return [getattr(parent, name) for name in names if _is(parent, name)]


def boundary_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Dtype of the activations between stages: that of the residual stream, which follows the weights."""
    return next(p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
