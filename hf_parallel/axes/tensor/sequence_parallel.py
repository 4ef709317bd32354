"""Megatron's sequence parallelism (Korthikanti et al., 2022): between regions each rank holds 1/tp of the sequence.

    embedding -> split -> | norm -> gather | attention | reduce-scatter + residual -> … -> norm | -> join -> head
                            s / tp             s             s / tp                        s / tp       s

Norms and the residual stream live on parts; regions (`region.py`) gather on entry and reduce-scatter on exit, which
moves the same bytes as the all-reduces they replace. A batch whose length tp does not divide is padded on the right
before the backbone, with tokens that nobody attends to, and cut back after it: head and loss never see them.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.dropout import OwnRandomNumbers
from hf_parallel.axes.tensor.infer import iterate_named_layers
from hf_parallel.axes.tensor.layers import PartialGradient, find_unsplit_modules, put_mixin_on
from hf_parallel.axes.tensor.region import READERS, Region
from hf_parallel.model.anatomy import (
    find_reader_of_stack,
    find_stacks,
    find_text_part,
    has_own_parameters,
    is_norm,
)
from hf_parallel.model.calls import bind_arguments_of, get_tokens_of, has_cache, hold_tokens
from hf_parallel.model.experts import iterate_experts
from hf_parallel.ranks import join_sequence, split_sequence

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


#: What ViLT, LayoutLM and VisualBERT are given beside tokens, and read as more of them.
_SEEN = {"pixel_values", "image", "visual_embeds"}


def find_sequence_obstacle(model: nn.Module, styles: dict[str, str]) -> str | None:
    """Return why this model cannot hold parts of the sequence between its regions, or None if it can."""
    part = find_text_part(model)
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(part.config, key, 0):
            return f"{key}={getattr(part.config, key)} skips layers at random, at which sequences are cut and joined"
    for stack in find_stacks(model):
        reader, owner = find_reader_of_stack(part, stack), part.get_submodule(stack.name.rpartition(".")[0])
        takes = () if reader is None else inspect.signature(reader.forward).parameters
        if "input_ids" not in takes:
            return f"what {type(owner).__name__} reads are no tokens, so rows cannot be padded"
        if not _SEEN.isdisjoint(takes) and not hasattr(reader.config, "vocabulary_map"):  # Chameleon sees tokens
            return f"{type(reader).__name__} puts what it sees behind its tokens, so rows cannot be padded"
        if any("deepstack" in name for name in inspect.signature(owner.forward).parameters):  # Qwen3-VL's
            return f"{type(owner).__name__} adds what it sees between its layers"
        if getattr(owner, "conv", None) is not None:  # DeBERTa's
            return f"{type(owner).__name__} has a convolution between its layers"
        if hasattr(owner, "get_attention_mask"):  # DeBERTa's: a masked query sees all keys alike
            return f"{type(owner).__name__} lets padding see the whole row, so rows cannot be padded"
    layers = list(iterate_named_layers(model))
    if not layers:
        return "its layers are not known"
    for name, layer in layers:
        inside = {key: style for key, style in styles.items() if key.startswith(f"{name}.")}
        if has_own_parameters(layer):
            return f"{name} has parameters of its own"
        entered = {key.rpartition(".")[0] for key, style in inside.items() if style in READERS}
        left = [key for key, style in inside.items() if style == "rowwise"]
        if not entered or len(entered) != len(left):
            return f"{name} is not made of parts that are entered and left as a whole"
        # Weights that work on the residual stream must treat each token by itself, as norms and routers do.
        mixtures = {key.rpartition(".")[0] for key, _ in iterate_experts(layer)}
        routers = tuple(f"{name}.{block}." if block else f"{name}." for block in mixtures)  # and all beside them
        for key, module in layer.named_modules(prefix=name):
            in_region = key in entered or any(owner != name and key.startswith(f"{owner}.") for owner in entered)
            apart = key.startswith(routers) or key in inside or in_region
            if not apart and has_own_parameters(module) and not is_norm(module):
                return f"{key} is not split"
    return None


def apply_sequence_parallel(model: nn.Module, group: dist.ProcessGroup, switch: SequenceParallelFlag) -> None:
    """Let norms work on parts, split before the first layer and join after the last. Before stages are cut."""
    for stack in find_stacks(model):
        for part in (*stack.layers, *([] if stack.norm is None else [stack.norm])):
            region = Region(part, group, switch)
            for module in find_unsplit_modules(part):
                put_mixin_on(module, GradientOfTokens, region)
        for layer in stack.layers:
            scope = OwnRandomNumbers(layer, group)
            layer.register_forward_pre_hook(functools.partial(_draw_apart, switch, scope))
            layer.register_forward_hook(scope.end, always_call=True)
        stack.layers[0].register_forward_pre_hook(functools.partial(_split_input, group, switch), with_kwargs=True)
        if any(True for layer in stack.layers for _ in iterate_experts(layer)):
            reader = find_reader_of_stack(find_text_part(model), stack)
            reader.register_forward_hook(functools.partial(_gather_router_logits, group, switch))
        (stack.norm or stack.layers[-1]).register_forward_hook(functools.partial(_join_output, group, switch))


class GradientOfTokens(PartialGradient):
    """A layer on the residual stream: its gradient is of this rank's tokens, unless a cache keeps sequences whole."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        if self.region.sequence_parallel:
            return super().forward(*args, **kwargs)
        return super(PartialGradient, self).forward(*args, **kwargs)


def _draw_apart(switch: SequenceParallelFlag, scope: OwnRandomNumbers, *_: object) -> None:
    if switch.on:
        scope.begin()


def _gather_router_logits(
    group: dist.ProcessGroup, switch: SequenceParallelFlag, reader: nn.Module, args: tuple, output: ModelOutput
) -> ModelOutput:
    """Let a backbone return the router logits [rows * length, experts] of all tokens, not of this rank's."""
    logits = getattr(output, "router_logits", None)
    if not switch.on or not logits or output[0].dim() != 3:
        return output
    rows, length = output[0].shape[:2]
    whole = (join_sequence(layer.unflatten(0, (rows, -1)), group)[:, :length].flatten(0, 1) for layer in logits)
    output["router_logits"] = tuple(whole)
    return output


def _split_input(
    group: dist.ProcessGroup, switch: SequenceParallelFlag, layer: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if not switch.on:
        return args, kwargs
    if args:
        return (split_sequence(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": split_sequence(kwargs["hidden_states"], group)}


def _join_output(
    group: dist.ProcessGroup,
    switch: SequenceParallelFlag,
    module: nn.Module,
    args: tuple,
    output: tuple | torch.Tensor,
) -> object:
    if not switch.on:
        return output
    if isinstance(output, tuple):
        return (join_sequence(output[0], group), *output[1:])
    return join_sequence(output, group)


# ---- lengths that tp does not divide ----------------------------------------------------------------------------


def pad_sequences_of_reader(
    reader: nn.Module, group: dist.ProcessGroup, switch: SequenceParallelFlag, caches: bool
) -> None:
    """Pad to a multiple of tp around the forward of a module that reads tokens: before the pipeline is attached.

    Hidden states that a call asks for are joined there: those between layers are of a rank's tokens.

    Args:
        caches: whether the model may keep a key/value cache. Calls with one (generation) run with whole sequences:
            their steps are one token long, and padding would stay in it. Under a pipeline there is none.
    """
    forward, multiple = reader.forward, group.size()
    names = list(inspect.signature(forward).parameters)
    bidirectional = any(getattr(module, "is_causal", True) is False for module in reader.modules())

    @functools.wraps(forward)
    def padded(*args: object, **kwargs: object) -> object:
        batch = bind_arguments_of(names, args, kwargs, reader)
        if caches and _keeps_cache(reader, batch, multiple):
            switch.on = False
            try:
                return forward(**batch)
            finally:
                switch.on = True
        tokens = next((batch[k] for k in ("input_ids", "inputs_embeds") if batch.get(k) is not None), None)
        switch.padding = (0, 0)
        if tokens is None:
            return forward(**batch)
        if tokens.shape[1] % multiple == 0:
            return _cut_padding(_join_states(forward(**batch), tokens.shape[1], group), tokens.shape[1], 0)
        shape, extra = tokens.shape[:2], -tokens.shape[1] % multiple
        switch.padding = shape[1], extra
        with hold_tokens(shape, lambda whole: F.pad(whole, (0, 0, 0, extra))):
            outputs = forward(**_pad_batch(batch, shape, extra, bidirectional))
        return _cut_padding(_join_states(outputs, shape[1], group), shape[1], extra)

    reader.forward = padded


def _keeps_cache(reader: nn.Module, batch: dict[str, object], multiple: int) -> bool:
    """Return whether a call reads a key/value cache, or leaves one that must have no padding in it."""
    given, asked = has_cache(batch), batch.get("use_cache", getattr(reader.config, "use_cache", False))
    if not torch.is_grad_enabled():
        return given or bool(asked)
    unlike = get_tokens_of(batch).shape[1] % multiple if batch.get("use_cache") is True else 0
    # Layers that run again in the backward pass keep no cache.
    return bool(given or unlike) and not (
        reader.training and any(getattr(layer, "gradient_checkpointing", False) for layer in reader.modules())
    )


def _pad_batch(batch: dict[str, object], shape: torch.Size, extra: int, bidirectional: bool) -> dict[str, object]:
    """Give `extra` more entries to what has one per token; encoder outputs beside it keep their length."""
    padded = dict(batch)
    for key, value in batch.items():
        if key == "attention_mask" and (isinstance(value, dict) or (torch.is_tensor(value) and value.dim() > 2)):
            masks = value if isinstance(value, dict) else {key: value}
            filled = {name: _pad_mask(mask, shape[1], extra) for name, mask in masks.items()}
            padded[key] = filled if isinstance(value, dict) else filled[key]
            continue
        if not torch.is_tensor(value) or key.startswith("encoder_"):
            continue
        if key == "position_ids":  # [s], [b, s] or one of these per rotary section
            padded[key] = F.pad(value, (0, extra))
        elif value.dim() >= 2 and value.shape[:2] == shape:
            padded[key] = F.pad(value, [*([0, 0] * (value.dim() - 2)), 0, extra])
    if bidirectional and batch.get("attention_mask") is None:  # nobody may look at the padding
        device = next(value.device for value in batch.values() if torch.is_tensor(value))
        padded["attention_mask"] = F.pad(torch.ones(shape, dtype=torch.long, device=device), (0, extra))
    return padded


def _pad_mask(mask: object, length: int, extra: int) -> torch.Tensor | None:
    """Pad a mask […, queries, keys] so that no token looks at the padding, which looks everywhere."""
    if mask is None:
        return None
    if not torch.is_tensor(mask) or mask.shape[-2:] != (length, length):
        raise ValueError(
            f"hf_parallel: rows of {length} tokens need padding, which this attention_mask cannot get; pad the rows, "
            "or use sequence_parallel=false"
        )
    closed, open = (torch.finfo(mask.dtype).min, 0.0) if mask.is_floating_point() else (0, 1)
    return F.pad(F.pad(mask, (0, extra), value=closed), (0, 0, 0, extra), value=open)


def _join_states(outputs: ModelOutput, length: int, group: dist.ProcessGroup) -> ModelOutput:
    """Let hidden states [rows, tokens, width] of each layer be those of all `length` tokens.

    They and attention scores [rows, heads, queries, keys] are given without padding; keys of another stack have none.
    """

    def join(state: object) -> object:
        if not torch.is_tensor(state) or state.dim() != 3:
            return state
        whole = join_sequence(state, group) if state.shape[1] * group.size() == padded else state
        return whole[:, :length] if whole.shape[1] == padded else whole

    padded = length + -length % group.size()
    if isinstance(outputs, tuple):
        return tuple(tuple(map(join, part)) if isinstance(part, tuple) else part for part in outputs)
    if isinstance(outputs.get("hidden_states"), tuple):
        outputs["hidden_states"] = tuple(map(join, outputs["hidden_states"]))
    for name, keys in (("attentions", length), ("cross_attentions", None)):
        if isinstance(outputs.get(name), tuple):
            outputs[name] = tuple(part if part is None else part[:, :, :length, :keys] for part in outputs[name])
    return outputs


def _cut_padding(outputs: ModelOutput, length: int, extra: int) -> object:
    """Leave out the padding; make a new tensor where there is none, too.

    Else FSDP2's hooks of the last layer and of the model would be those of one tensor, and run in another order than
    on a data rank whose batch has padding.
    """
    hidden = outputs[0]
    if torch.is_tensor(hidden) and hidden.dim() == 3 and hidden.shape[1] == length + extra:
        if isinstance(outputs, tuple):
            return (hidden[:, :length], *outputs[1:])
        outputs[next(iter(outputs))] = hidden[:, :length]
    return outputs
