"""Where things are in a Hugging Face model: text part, stacks of layers, what runs before and after them, heads.

What a model says of itself (plans, attribute maps) comes first; `families.py` declares the rest. `read_anatomy` sums
up what every axis needs to know.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_parallel.ask.session import of_process
from hf_parallel.ask.spec import get_first_line, refuse
from hf_parallel.model.calls import find_keywords_of_loss
from hf_parallel.model.families import BACKBONES, Backbone

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter: all its full names (tied ones have several), its shape, and bytes per element."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Anatomy:
    """The facts about a model, read once, before anything is changed.

    `facts`: what each axis that is on has read, by name.
    """

    name: str
    dtype: torch.dtype
    is_transformers: bool
    is_parallel: bool
    is_quantised: bool  # its layers are
    of_quantised: bool  # its checkpoint is
    replaced_forward: str | None  # a module whose object has a forward of its own
    on_meta: bool
    partly_on_meta: bool
    names: tuple[str, ...]  # of all parameters, in the model's order
    parameters: tuple[ParameterFacts, ...]
    heads: tuple[int, int] | None  # query, key/value
    sums_over_tokens: bool
    facts: Mapping[str, object] = field(default_factory=dict)


def read_anatomy(model: nn.Module) -> Anatomy:
    """Read what every axis needs to know of a model, which is not changed."""
    named, known = list(model.named_parameters(remove_duplicate=False)), hasattr(model, "base_model_prefix")
    places = {parameter.device.type for _, parameter in named}
    unique: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in named:
        unique.setdefault(id(parameter), (parameter, []))[1].append(name)
    first = next((parameter.dtype for _, parameter in named), torch.float32)
    replaced_forward = next((name for name, part in model.named_modules() if name and "forward" in vars(part)), None)
    if type(model).forward.__module__.startswith("liger_kernel."):
        replaced_forward = type(model).__name__
    return Anatomy(
        name=type(model).__name__,
        dtype=getattr(model, "dtype", first),
        is_transformers=known,
        is_parallel=hasattr(model, "_hf_parallel"),
        is_quantised=bool(getattr(model, "is_quantized", False)),
        of_quantised=getattr(getattr(model, "config", None), "quantization_config", None) is not None,
        replaced_forward=replaced_forward,
        on_meta="meta" in places,
        partly_on_meta=len({place == "meta" for place in places}) > 1,
        names=tuple(name for name, _ in named),
        parameters=tuple(
            ParameterFacts(tuple(names), tuple(p.shape), p.element_size()) for p, names in unique.values()
        ),
        heads=read_attention_heads(model) if hasattr(model, "config") else None,
        sums_over_tokens=is_loss_summed_over_tokens(model),
    )


@dataclass(frozen=True)
class Stack:
    """Layers that follow each other directly, and the norm right after them if it is known."""

    name: str
    layers: nn.ModuleList
    norm: nn.Module | None


def find_backbone_plan(backbone: nn.Module) -> Backbone | None:
    """Return the published pipeline plan of a backbone, else the known one, else None."""
    plan = list(getattr(getattr(backbone, "config", None), "base_model_pp_plan", None) or {})
    known = BACKBONES.get(type(backbone).__name__)
    if known is not None and known.tuples and known.layers in dict(backbone.named_children()):
        # GPT-J and CodeGen say so since Transformers 5.24; annotations of tuples are not always true.
        (first, *_), plain = getattr(backbone, known.layers), (torch.Tensor, "torch.Tensor")
        known = replace(known, tuples=inspect.signature(type(first).forward).return_annotation not in plain)
    lists = [name for name in plan if isinstance(getattr(backbone, name, None), nn.ModuleList)]
    if len(lists) == 1:
        place = plan.index(lists[0])
        tuples = known is not None and known.tuples  # of which plans say nothing
        return Backbone(tuple(plan[:place]), lists[0], tuple(plan[place + 1 :]), tuples)
    return known


def find_text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part that reads tokens: of a vision-language model its language model, else the whole backbone."""
    backbone = getattr(model, "base_model", model)
    config = getattr(model, "config", None)
    is_composite = any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))
    return model.get_decoder() if is_composite and hasattr(model, "get_decoder") else backbone


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the stacks of layers of the text part: one, or two of an encoder-decoder model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    part = find_text_part(model)
    published = find_backbone_plan(part)
    found = []
    for name, module in part.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        layers, owner = module, part.get_submodule(name.rpartition(".")[0])
        plan = published if owner is part else None if published else find_backbone_plan(owner)
        if plan is not None and getattr(owner, plan.layers, None) is module:
            after = getattr(owner, plan.after[0], None) if plan.after else None  # some of a family have none
            found.append(Stack(name, layers, after if isinstance(after, nn.Module) and is_norm(after) else None))
        elif published is None and plan is None and all(isinstance(x, GradientCheckpointingLayer) for x in module):
            found.append(Stack(name, layers, None))
    return found


def find_token_readers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that take tokens (ids or embeddings) and run a stack: a backbone, or encoder and decoder."""
    part = find_text_part(model)
    readers = [find_reader_of_stack(part, stack) for stack in find_stacks(model)]
    return list({id(reader): reader for reader in readers if reader is not None}.values())


def find_reader_of_stack(part: nn.Module, stack: Stack) -> Any:
    """Return the innermost module around a stack of `part` that takes tokens, or None."""
    name = f"{stack.name}."
    while name:
        name = name.rpartition(".")[0]
        reader = part.get_submodule(name)
        if "inputs_embeds" in inspect.signature(reader.forward).parameters:
            return reader
    return None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is LayerNorm, RMSNorm or a model's own version."""
    return "norm" in type(module).__name__.lower()


def has_own_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters outside the modules in it."""
    return next(module.parameters(recurse=False), None) is not None


def get_text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the config of the text part, or of a model of images alone, such as CLIP's with a head."""
    config = model.config
    # Nothing inside names itself the base: the config may be of more than is there.
    if find_text_part(model) is model:
        config = next((child.config for child in model.children() if hasattr(child, "config")), config)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def read_attention_heads(model: nn.Module) -> tuple[int, int] | None:
    """Return the number of query heads and of key/value heads, or None for a model without attention."""
    config = get_text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon-7B, StarCoder
    return heads, kv_heads


def read_head_width_of(config: PretrainedConfig) -> int | None:
    """Return `head_dim` of a config, where layers differ (Gemma 4) the widest; None if it has none."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max((getattr(layer, "head_dim", None) or 0 for layer in layers), default=0) or None


def find_input_embedding(model: PreTrainedModel) -> nn.Module | None:
    """Return the model's input embedding, or None: some models that read images name none, not even None."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def list_tied_to_embedding(model: nn.Module) -> list[str]:
    """Return the full names of all token embeddings: the one the model names, and those that share its weight."""
    embedding = find_input_embedding(model)
    if not isinstance(embedding, nn.Embedding):
        return []
    named = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    own = {key for key, module in named.items() if module is embedding or module.weight is embedding.weight}
    sources = own | {tied[key] for key in own if key in tied}
    shared = {key for key in named if tied.get(key) in sources}
    return sorted(key.removesuffix(".weight") for key in own | (sources & set(named)) | shared)


def has_tied_embedding(model: PreTrainedModel) -> bool:
    """Return whether the embedding and the head share their weight."""
    embedding, head = find_input_embedding(model), model.get_output_embeddings()
    weight, head_weight = getattr(embedding, "weight", None), getattr(head, "weight", None)
    if weight is None or head_weight is None:
        return False
    # While a model is loaded on the meta device the two are tied by name only.
    names = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    by_name = any(names.get(target) is head_weight and names.get(source) is weight for target, source in tied.items())
    return weight is head_weight or by_name


def is_tie_broken(held: Mapping[str, nn.Parameter], one: str, other: str) -> bool:
    """Return whether two names that a config ties are those of two parameters.

    Args:
        held: parameters by all their names.
    """
    return one in held and other in held and held[one] is not held[other]


def get_backbone_of(model: nn.Module) -> Any:
    """Return the part that embeds tokens and runs the layers; the head is outside."""
    readers = find_token_readers(model)
    return readers[0] if len(readers) == 1 and readers[0] is not model else None


def find_ties_of_script(model: nn.Module) -> dict[str, str]:
    """Return the names of weights that another module has, too, where no config says so: each with its first name."""
    named = getattr(model, "all_tied_weights_keys", None) or {}
    of_config = {*named, *named.values()}
    later = find_later_names(model, of_shared_modules=False)
    return {name: first for name, first in later.items() if not {name, first} <= of_config}


def find_later_names(model: nn.Module, of_shared_modules: bool = True) -> dict[str, str]:
    """Return every name of a parameter but its first, each with that one.

    Args:
        of_shared_modules: also the names that it has because its module is in several places.
    """
    first: dict[nn.Parameter, str] = {}
    found = {}
    for place, module in model.named_modules(remove_duplicate=not of_shared_modules):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{place}.{key}" if place else key
            if first.setdefault(parameter, name) != name:
                found[name] = first[parameter]
    return found


def list_transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, which FSDP2 gathers one at a time: inner lists first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    lists = [blocks for blocks in lists if not any(isinstance(block, nn.ModuleList) for block in blocks)]
    blocks = [block for blocks in reversed(lists) for block in blocks if type(block).__name__ in names]
    if blocks or not lists:
        return blocks
    return list(max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters())))


def find_checkpoint_settings(layer: nn.Module) -> Mapping[str, Any] | None:
    """Return what torch's checkpoint around a layer is called with; None where the script put its own function there.

    Also None where no checkpoint has been switched on.
    """
    function: Any = vars(layer).get("_gradient_checkpointing_func")
    settings: Mapping[str, Any] = {}
    if isinstance(function, functools.partial):
        function, settings = function.func, function.keywords
    # Transformers' own goes around torch's, where it moves what is kept to the host.
    is_known = function is checkpoint or getattr(function, "__module__", None) == "transformers.modeling_utils"
    return settings if is_known else None


def is_loss_summed_over_tokens(model: nn.Module) -> bool:
    """Return whether the loss is a token sum divided by `num_items_in_batch`, so that micro-batch losses add up."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if hasattr(model, "_loss_function") or getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return False
    # transformers takes the causal loss for types it does not know, such as that of GPT2LMHeadModel.
    causal = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is ForCausalLMLoss
    # A causal loss that is handed the count reads it. BERT's heads do not hand it on. A forward that cannot be
    # rehearsed counts as one of those: the way that is exact for any loss.
    return causal and "num_items_in_batch" in find_keywords_of_loss(model, num_items_in_batch=1)


# ---- Packed projections: one weight that holds several, such as [q | k | v] or [gate | up] --------------------------
# Cutting such a weight into contiguous parts would give one rank queries and another keys. So it is stored in another
# order of rows: rank by rank, and within a rank segment by segment. The stored DTensor is then an ordinary `Shard`,
# about which FSDP2 and the optimizer need not know; whoever reads or writes whole tensors translates, here.
#
#     model's own   q0 q1 q2 q3 | k0 k1 | v0 v1            stored (tp=2)   q0 q1 k0 v0 | q2 q3 k1 v1


@dataclass(frozen=True)
class StoredOrder:
    """Along `dim`, index i of the stored tensor is index `rows[i]` of the model's own."""

    dim: int
    rows: torch.Tensor

    def to_stored(self, own: torch.Tensor) -> torch.Tensor:
        """Put the model's own tensor into stored order."""
        return own.index_select(self.dim, self.rows.to(own.device))

    def to_own(self, stored: torch.Tensor) -> torch.Tensor:
        """Undo `to_stored`: the Hub, the optimizer's checkpoints and people expect the model's own order."""
        return stored.index_select(self.dim, self.rows.argsort().to(stored.device))


def make_packed_order(segments: list[int], tp_size: int, dim: int) -> StoredOrder:
    """Return the stored order of consecutive segments of these sizes, each cut into `tp_size` equal parts.

    Raises:
        ValueError: a segment does not divide.
    """
    if any(size % tp_size for size in segments):
        raise ValueError(f"tp_size={tp_size} does not divide segments of {segments}")
    starts = [sum(segments[:i]) for i in range(len(segments))]
    parts = [
        torch.arange(start + size // tp_size * rank, start + size // tp_size * (rank + 1))
        for rank in range(tp_size)
        for start, size in zip(starts, segments, strict=True)
    ]
    return StoredOrder(dim, torch.cat(parts))


def get_stored_order(model: nn.Module, key: str) -> StoredOrder | None:
    """Return the order in which the tensor of this full name is stored, or None if it is the model's own.

    A module around a model may name the model's tensors as the model itself does, as TRL's value heads do.
    """
    owner, _, name = key.rpartition(".")
    for part in (model, *model.children()):
        with contextlib.suppress(AttributeError):
            return getattr(part.get_submodule(owner), "stored_orders", {}).get(name)
    raise LookupError(f"{type(model).__name__} has no {key}")


# ---- Models without memory for weights ------------------------------------------------------------------------------

_WORKS = "a folder with a config.json works, or that file"


def read_config(source: str, others: str | None = None) -> PretrainedConfig:
    """Return the config of a folder, a config.json or a Hub id.

    Args:
        others: what else the caller takes.

    Raises:
        SpecError: there is no such model, or it is made by code of its own.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not os.path.exists(source):
            why = "no file or folder here, nor to be had from the Hub (wrong name, no access, or offline)"
            refuse(source, why, do=_WORKS if others is None else f"{_WORKS}, or {others}", cause=error)
        refuse(source, get_first_line(error), cause=error)


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model of a config on the meta device: of the class it names, else of the one that fits its kind.

    Raises:
        SpecError: Transformers has no model for it.
    """
    import transformers

    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    kinds = [transformers.AutoModelForSeq2SeqLM] if getattr(config, "is_encoder_decoder", False) else []
    kinds += [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel]
    with torch.device("meta"):
        if named is not None:
            return move_to_meta(named._from_config(config))
        for kind in kinds:
            if type(config) in kind._model_mapping:
                return move_to_meta(kind.from_config(config))
    refuse(type(config).__name__, "Transformers has no model for it", "a config of a language model")


def move_to_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Move the parameters to the meta device that `__init__` made elsewhere; return the model.

    `torch.Tensor(n)` takes memory in a context of the meta device too. Transformers puts the checkpoint's values, or
    new ones, in the place of every parameter, wherever it was made.
    """
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            if parameter not in moved:
                moved[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            module._parameters[name] = moved[parameter]
    return model


# ---- Modules that draw random numbers while they train: dropout, and noise on what routers read ---------------------


class _Changes:
    """The number of times that layers which draw have come into a model."""

    count = 0


#: Numbers above zero by such names say how much a module drops, or how large its noise is.
_NAMES = ("drop", "jitter", "noise")
#: NEFTune's noise is none of these: it is drawn for whole examples, by the same numbers on all ranks.
_DRAWN_TOGETHER = "neftune_noise_alpha"


@dataclass(eq=False)
class Draws:
    """A question whether a module draws random numbers in training: answered once, and again after layers came in."""

    module: nn.Module
    _changes: _Changes = field(default_factory=lambda: of_process(_Changes))
    _known: tuple[int, bool] | None = None

    def __bool__(self) -> bool:
        if not self.module.training:
            return False
        if self._known is None or self._known[0] != self._changes.count:
            self._known = self._changes.count, does_draw_random_numbers(self.module)
        return self._known[1]


def look_again() -> None:
    """Let every `Draws` look again, because layers that draw have come into a model."""
    of_process(_Changes).count += 1


def does_draw_random_numbers(module: nn.Module) -> bool:
    """Return whether a dropout probability or noise size in the module is above zero, in a Dropout or as a number."""
    for child in module.modules():
        if (isinstance(child, nn.Dropout) and child.p > 0) or list_numbers_of_draws(child):
            return True
    return False


def list_numbers_of_draws(module: nn.Module) -> list[str]:
    """Return the attributes of a module that say how much it drops, or how large its noise is, and are above zero."""
    above = [key for key, value in vars(module).items() if isinstance(value, float) and value > 0]
    return [key for key in above if key != _DRAWN_TOGETHER and any(name in key for name in _NAMES)]
