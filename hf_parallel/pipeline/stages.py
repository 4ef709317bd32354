"""Cut a Hugging Face model into pipeline stages without copying it.

The model object itself becomes this rank's stage: layers of other stages turn into pass-throughs, so the names of what
stays are the Hub's names and the script's own object is the one that trains. What belongs where comes from the
backbone's own `base_model_pp_plan` (embedding, layers, final norm); what is outside the backbone is on the last stage.

    four layers, pp=2      embed_tokens   layers.0  layers.1  layers.2  layers.3   norm   lm_head
    stage 0                     x            x         x        exit       ->       ->      ->
    stage 1                     ->           ->       entry      x         x        x       x

The layer just before a later stage's own is its entry: it gives what the previous stage computed. So what the model
does between embedding and layers (scaling, positions, dropout) happens once, on the first stage. The layer just after
its own is its exit, where the forward ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_parallel.anatomy import Backbone, backbone_plan, input_embedding, text_config, text_part, token_readers
from hf_parallel.config import ParallelConfig, SpecError


class PassThrough(nn.Module):
    """Stands where another stage's module was: hands the hidden states on."""

    tuples = False  # do the layers it stands among return tuples?

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_layer(args[0] if args else next(iter(kwargs.values())))

    def _as_layer(self, hidden: Any) -> Any:
        return (hidden, None) if self.tuples else hidden


class Entry(PassThrough):
    """Stands where the previous stage's last layer was: gives that layer's output."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_layer(self.hidden)


class LeaveAtExit(BaseException):  # not an Exception: model code that catches errors must let it pass
    """Unwinds the model's forward on every stage but the last, carrying the activation for the next stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Exit(PassThrough):
    """Stands where the next stage's first layer was: what reaches it leaves for that stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise LeaveAtExit(args[0] if args else kwargs["hidden_states"])


class AddsNothing(nn.Module):
    """Stands where an embedding was whose output is added to the stream, such as that of positions."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(
            (), device=next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)).device
        )


def cut_into_stage(model: Any, config: ParallelConfig, index: int) -> tuple[list[nn.Module], Entry | None]:
    """Keep the modules of stage `index` in `model`, replace the others.

    Returns:
        The layers that stay, and where the activations of the previous stage enter (None on the first stage).

    Raises:
        SpecError: the model publishes no pipeline plan, or has fewer layers than stages.
    """
    backbone, plan = backbone_of(model), _plan(model, config.pp_size)
    layers: Any = backbone.get_submodule(plan.layers)
    first, last = layer_range(len(layers), config, index)
    for i in range(len(layers)):
        if not first <= i < last:
            layers[i] = Entry() if i == first - 1 else Exit() if i == last else PassThrough()
            layers[i].tuples = plan.tuples
    is_first, is_last = index == 0, index == config.pp_size - 1
    if not is_first:
        # A tied head keeps the embedding beside it: the shared parameter's home.
        kept = model.get_input_embeddings() if is_last and has_tied_embedding(model) else None
        _replace(backbone, [name for name in plan.before if kept is None or getattr(backbone, name) is not kept])
    if not is_last:
        _replace(backbone, plan.after)
        _replace(model, [name for name, child in model.named_children() if backbone not in child.modules()])
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
        module = getattr(parent, name, None)
        if isinstance(module, nn.Module):
            setattr(parent, name, AddsNothing() if isinstance(module, nn.Embedding) else PassThrough())


def hidden_size(model: Any) -> int:
    """Width of the activations that travel between stages."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return config.hidden_size


def boundary_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Dtype of the activations between stages: that of the residual stream, which follows the weights."""
    return next(p.dtype for layer in layers for p in layer.parameters() if p.is_floating_point())
