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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_parallel.axes.pipeline.read import layer_ranges
from hf_parallel.axes.pipeline.remote_modules import RemoteModules, without_values
from hf_parallel.axes.pipeline.stand_ins import (
    AddsNothing,
    Entry,
    Exit,
    PassThrough,
    StandIn,
    settle,
    stand_in_for,
    stand_ins,
)
from hf_parallel.model.anatomy import Backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.pipeline.part import PipelinePart

Swap = tuple[nn.Module, str, nn.Module | None]  # owner, name, what stands there


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


def cut_into_stages(model: PreTrainedModel, part: PipelinePart, rank: int) -> tuple[list[StageView], RemoteModules]:
    """Keep the modules of pipeline rank `rank`'s stages in `model`, replace the others, which are returned too."""
    plan, backbone = part.facts.plan, model.get_submodule(part.facts.backbone)
    layers = backbone.get_submodule(plan.layers)
    ranges, own = layer_ranges(part), part.config.stages_of_rank(rank)
    whole = dict(model.named_modules(remove_duplicate=False))
    is_last, kept = len(ranges) - 1 in own, None
    for i, layer in enumerate(layers):
        if not any(ranges[stage][0] <= i < ranges[stage][1] for stage in own):
            layers[i] = stand_in_for(layer, StandIn)
    if 0 not in own:
        # A tied head keeps the embedding beside it: the shared parameter's home.
        kept = model.get_input_embeddings() if is_last and part.tied else None
        _replace(backbone, [name for name in plan.before if kept is None or getattr(backbone, name) is not kept])
    if not is_last:
        _replace(backbone, plan.after)
        _replace(model, [name for name, child in model.named_children() if backbone not in child.modules()])
    settle(model, _stage_of(model, backbone, plan, ranges))
    views = [_view(model, backbone, plan, ranges, stage) for stage in own]
    if kept is not None:
        views[-1].modules.append(kept)  # so that FSDP2 shards the one parameter under both its names
    return views, _remote_modules(model, whole, kept)


def _stage_of(
    model: nn.Module, backbone: nn.Module, plan: Backbone, ranges: list[tuple[int, int]]
) -> Callable[[str], int]:
    """Which stage holds the module of a name in `model`."""
    prefix = "".join(f"{name}." for name, module in model.named_modules() if module is backbone and name)
    stages = {f"{prefix}{name}": 0 for name in plan.before}
    for stage, (first, last) in enumerate(ranges):
        stages.update({f"{prefix}{plan.layers}.{i}": stage for i in range(first, last)})
    return lambda name: stages.get(name, len(ranges) - 1)


def _remote_modules(model: nn.Module, whole: dict[str, nn.Module], kept: nn.Module | None) -> RemoteModules:
    """What `model` had before it was cut and has no more; and the embedding that a tied head keeps but nobody runs."""
    gone = stand_ins(model)
    embedding = {name: module for name, module in whole.items() if kept is not None and module is kept}
    return RemoteModules({**{name: without_values(whole[name]) for name in gone}, **embedding})


def _view(
    model: nn.Module, backbone: PreTrainedModel, plan: Backbone, ranges: list[tuple[int, int]], stage: int
) -> StageView:
    layers, (first, last) = list(backbone.get_submodule(plan.layers)), ranges[stage]
    own, modules = layers[first:last], layers[first:last]
    shown: list[nn.Module] = [stand_in_for(layer, PassThrough) for layer in layers]
    entry = stand_in_for(layers[first - 1], Entry) if stage > 0 else None
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


def _replace(parent: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if _is(parent, name):
            setattr(parent, name, stand_in_for(getattr(parent, name), StandIn))


def _pass_by(module: nn.Module) -> nn.Module:
    return stand_in_for(module, AddsNothing if isinstance(module, nn.Embedding) else PassThrough)


def _is(parent: nn.Module, name: str) -> bool:
    return isinstance(getattr(parent, name, None), nn.Module)  # some models of a family have none


def _present(parent: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    return [getattr(parent, name) for name in names if _is(parent, name)]


def boundary_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Dtype of the activations between stages: that of the residual stream, which follows the weights."""
    return next(p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
