"""Activation checkpointing (Chen et al., 2016): run a layer's forward again in the backward rather than keep it all.

    full         each layer keeps its input
    every:N      so does every N-th layer, the others keep everything
    selective    each layer keeps its input and what is dear to compute or to send: the policy is in `selective.py`

A script's own `gradient_checkpointing=True` switches layers on too; what the spec says of them still holds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse, spell

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy

_EVERY = re.compile(r"every:(\d+)")
_WORDS = ("none", "selective", "full")


@dataclass(frozen=True)
class RecomputeKeys(Keys):
    activation_checkpointing: str = key(
        "none",
        "`full` recomputes each layer in the backward pass, `every:N` every N-th, `selective` all but products, "
        "attention and what ranks send",
    )
    activation_offload: bool = key(False, "what layers keep for the backward pass rests on the host")
    partition_activations: bool = key(
        False, "of a checkpointed layer's input each `tp` rank keeps a part, also without sequence parallelism"
    )


@dataclass(frozen=True)
class RecomputeFacts:
    """Can its layers be checkpointed at all, and each for itself?"""

    supported: bool
    by_layer: bool
    layers: int


class Recompute(Axis[RecomputeFacts, str]):
    """Transformers' own checkpointing of layers, told which and how."""

    name = "recompute"
    alone = True

    def check(self, config: ParallelConfig) -> None:
        """A known way; compiled layers are checkpointed inside of their graph."""
        way = config.activation_checkpointing
        if way not in _WORDS and not every(way):
            what = f"activation_checkpointing={way}"
            refuse(what, "not one of none, selective, full, every:N", "activation_checkpointing=every:2")
        if way == "selective" and config.compile != "none":
            why = f"compile={config.compile} decides for itself what a layer's graph keeps"
            refuse("activation_checkpointing=selective", why, "activation_checkpointing=full")
        if config.activation_offload and config.compile != "none":
            refuse("activation_offload=true", f"compile={config.compile} keeps what it likes", "compile=none")
        if config.partition_activations:
            _check_partition(config)

    def is_on(self, config: ParallelConfig) -> bool:
        return config.activation_checkpointing != "none" or config.activation_offload

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> RecomputeFacts:
        """Can the model's layers be recomputed?"""
        layers = _layers(model)
        by_layer = bool(layers) and all(hasattr(type(layer), "gradient_checkpointing") for layer in layers)
        supported = bool(getattr(model, "supports_gradient_checkpointing", False))
        return RecomputeFacts(supported, by_layer, len(layers))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: RecomputeFacts) -> str:
        """What is recomputed."""
        way = config.activation_checkpointing
        asked = f"activation_checkpointing={way}"
        if way == "none":
            return way
        if not facts.supported:
            refuse(asked, f"{anatomy.name} does not support it", "activation_checkpointing=none")
        if way != "full" and not facts.by_layer:
            refuse(asked, f"{anatomy.name} checkpoints its layers all alike", "activation_checkpointing=full")
        if config.partition_activations and not facts.by_layer:
            why = f"{anatomy.name} checkpoints its layers all alike"
            refuse("partition_activations=true", why, "partition_activations=false")
        if every(way) > facts.layers:
            refuse(
                asked, f"{anatomy.name} has {facts.layers} layers", f"activation_checkpointing=every:{facts.layers}"
            )
        return way

    def apply(self, model: PreTrainedModel, part: str, building: Building) -> None:
        """Switch it on; before transformers 5.23 by its former name."""
        if part == "none":
            return
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        for place, layer in enumerate(_layers(model)):
            if part == "selective":
                layer.register_forward_pre_hook(_keep_products)
            elif place % (every(part) or 1):
                layer.register_forward_pre_hook(_keep_everything)

    def finish(self, model: nn.Module, part: str, building: Building) -> None:
        """The layers of this rank, stage by stage."""
        flag = building.sequence_flag
        if building.mesh.config.partition_activations and (flag is None or not flag.on):
            from hf_parallel.axes.partitioned_input import partition_inputs

            for _, layers in building.roots:
                partition_inputs(layers, building.mesh.group("tp"))
        if building.mesh.config.activation_offload:
            from hf_parallel.axes.activation_offload import offload_activations

            for _, layers in building.roots:
                offload_activations(layers, building.mesh.device)


def _check_partition(config: ParallelConfig) -> None:
    """Only inputs of checkpointed layers, where tp ranks have the same, and they stay on the device."""
    what, without = "partition_activations=true", "partition_activations=false"
    if config.tp_size == 1:
        refuse(what, "tp_size=1 has no rank to keep a part", "tp_size=2")
    if config.activation_checkpointing == "none":
        refuse(what, "activation_checkpointing=none keeps more than inputs", "activation_checkpointing=full")
    if config.sequence_parallel:
        refuse(what, "sequence_parallel=true has cut them already", without)
    for name, value in (("activation_offload", False), ("compile", "none")):
        if getattr(config, name) != value:
            refuse(what, f"{name}={spell(getattr(config, name))} keeps them another way", without)


def every(way: str) -> int:
    """N of `every:N`, else 0."""
    found = _EVERY.fullmatch(way)
    return int(found[1]) if found else 0


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those of the whole model, in order: a pipeline has not cut it yet."""
    from hf_parallel.model.anatomy import transformer_blocks

    return transformer_blocks(model)


def _keep_everything(layer: GradientCheckpointingLayer, args: object) -> None:
    """In each pass: a Trainer switches all layers on once more."""
    layer.gradient_checkpointing = False


def _keep_products(layer: GradientCheckpointingLayer, args: object) -> None:
    """The same; a Trainer or a script has given the layer a function of its own, whose settings stay."""
    from torch.utils.checkpoint import checkpoint

    from hf_parallel.axes.selective import contexts

    known = vars(layer).get("_gradient_checkpointing_func")
    settings = getattr(known, "keywords", {})
    if known is None or settings.get("context_fn") is contexts:
        return
    own = getattr(settings.get("context_fn"), "__module__", "").startswith(__name__.partition(".")[0])  # cp keeps so
    check_selective({**settings, "context_fn": None} if own else settings)
    if getattr(known, "func", checkpoint) is not checkpoint:
        why = "the script has given layers a checkpointing function of its own"
        refuse("activation_checkpointing=selective", why, "activation_checkpointing=none")
    kept = {**settings, "use_reentrant": False, "context_fn": contexts}
    layer._gradient_checkpointing_func = functools.partial(checkpoint, **kept)


def check_layers(way: str, settings: Mapping[str, object]) -> None:
    """Refuse a script's own choice of layers beside another one of the spec's, neither of which would hold.

    Args:
        settings: `gradient_checkpointing_kwargs`.
    """
    own = settings.get("every_n_layers", 1)
    if own not in (1, every(way)):
        what = f"gradient_checkpointing_kwargs every_n_layers={own}"
        refuse(what, f"activation_checkpointing={way} names the layers", f"activation_checkpointing=every:{own} alone")


def check_selective(settings: Mapping[str, object]) -> None:
    """Refuse what a script says of torch's checkpoint that a policy of what is kept cannot go with.

    Args:
        settings: `gradient_checkpointing_kwargs`.
    """
    if settings.get("use_reentrant"):
        why = "activation_checkpointing=selective keeps outputs by a policy, which reentrant checkpoints have none of"
        refuse("gradient_checkpointing_kwargs use_reentrant=True", why, "use_reentrant=False")
    if settings.get("context_fn") is not None:
        why = "activation_checkpointing=selective has a policy of its own"
        refuse("gradient_checkpointing_kwargs context_fn", why, "activation_checkpointing=full")
    if settings.get("offload"):
        why = "not with activation_checkpointing=selective"
        refuse("gradient_checkpointing_kwargs offload=True", why, "activation_offload=true")


RECOMPUTE = RecomputeKeys.axis = Recompute()
