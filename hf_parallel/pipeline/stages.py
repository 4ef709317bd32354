"""Cut a Hugging Face model into pipeline stages without copying it.

The model object itself becomes this rank's stage: layers of other stages turn into pass-throughs, so the names of what
stays are the Hub's names and the script's own object is the one that trains. What belongs where comes from the
backbone's own `base_model_pp_plan` (embedding, layers, final norm); what is outside the backbone is on the last stage.

    four layers, pp=2      embed_tokens   layers.0  layers.1  layers.2  layers.3   norm   lm_head
    stage 0                     x            x         x         ->        ->       ->      ->
    stage 1                     ->           ->       entry      x         x        x       x

The layer just before a later stage's own is its entry: it gives what the previous stage computed. So what the model
does between embedding and layers (scaling, positions, dropout) happens once, on the first stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_parallel.config import ParallelConfig, SpecError


class PassThrough(nn.Module):
    """Stands where another stage's module was: hands the hidden states on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class Entry(PassThrough):
    """Stands where the previous stage's last layer was: gives that layer's output."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden


def cut_into_stage(model: Any, config: ParallelConfig, index: int) -> tuple[list[nn.Module], Entry | None]:
    """Keep the modules of stage `index` in `model`, replace the others.

    Returns:
        The layers that stay, and where the activations of the previous stage enter (None on the first stage).

    Raises:
        SpecError: the model publishes no pipeline plan, or has fewer layers than stages.
    """
    before, layers_name, after = _plan(model, config.pp_size)
    backbone = model.base_model
    layers = backbone.get_submodule(layers_name)
    first, last = layer_range(len(layers), config, index)
    for i in range(len(layers)):
        if not first <= i < last:
            layers[i] = Entry() if i == first - 1 else PassThrough()
    is_first, is_last = index == 0, index == config.pp_size - 1
    if not is_first and not (is_last and has_tied_embedding(model)):
        _replace(backbone, before)  # a tied head keeps the embedding beside it: the shared parameter's home
    if not is_last:
        _replace(backbone, after)
        _replace(model, [name for name, child in model.named_children() if child is not backbone])
    return [layers[i] for i in range(first, last)], None if is_first else layers[first - 1]


def layer_range(layers: int, config: ParallelConfig, index: int) -> tuple[int, int]:
    """First and one-past-last layer of stage `index`; without `pipeline_split`, early stages take the remainder."""
    stages = config.pp_size
    if stages > layers:
        raise SpecError(f"pp_size={stages}: the model has {layers} layers, a stage needs one; pp_size={layers} works")
    quotient, remainder = divmod(layers, stages)
    counts = config.pipeline_split or tuple(quotient + (stage < remainder) for stage in range(stages))
    if sum(counts) != layers or min(counts) < 1:
        works = ",".join(str(quotient + (stage < remainder)) for stage in range(stages))
        given = ",".join(map(str, counts))
        raise SpecError(
            f"pipeline_split=[{given}]: needs {stages} positive numbers that add to {layers}; [{works}] works"
        )
    first = sum(counts[:index])
    return first, first + counts[index]


def has_tied_embedding(model: Any) -> bool:
    """Do the embedding and the head share their weight?"""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight, head_weight = getattr(embedding, "weight", None), getattr(head, "weight", None)
    if weight is None or head_weight is None:
        return False
    # While a model is loaded on the meta device the two are tied by name only.
    names = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    by_name = any(names.get(target) is head_weight and names.get(source) is weight for target, source in tied.items())
    return weight is head_weight or by_name


def _plan(model: Any, stages: int) -> tuple[list[str], str, list[str]]:
    """Names in the backbone that come before the layers, of the layers, and after them."""
    backbone = getattr(model, "base_model", model)
    plan = dict(getattr(getattr(backbone, "config", None), "base_model_pp_plan", None) or {})
    lists = [name for name in plan if isinstance(getattr(backbone, name, None), nn.ModuleList)]
    if len(lists) != 1:
        raise SpecError(
            f"pp_size={stages}: {type(model).__name__} publishes no pipeline plan; pp_size=1 with dp_shard works"
        )
    if backbone is model:
        raise SpecError(f"pp_size={stages}: {type(model).__name__} has no head to compute a loss; pp_size=1 works")
    names = list(plan)
    place = names.index(lists[0])
    unplaced = [name for name, child in backbone.named_children() if name not in plan and any(child.parameters())]
    if unplaced:
        raise SpecError(f"pp_size={stages}: the pipeline plan says nothing about {unplaced[0]}; pp_size=1 works")
    if getattr(model.config, "output_router_logits", False):
        raise SpecError(f"pp_size={stages}: output_router_logits=True needs all layers on one rank; False works")
    return names[:place], lists[0], names[place + 1 :]


def _replace(parent: nn.Module, names: list[str]) -> None:
    for name in names:
        if isinstance(getattr(parent, name, None), nn.Module):
            setattr(parent, name, PassThrough())


def hidden_size(model: Any) -> int:
    """Width of the activations that travel between stages."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return config.hidden_size


def boundary_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Dtype of the activations between stages: that of the residual stream, which follows the weights."""
    return next(p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
