"""Tensor-parallel styles for models that publish none, from the structure of their layers.

A layer consists of parts, its attention and its MLP. In each part some linears read the residual stream (their input
is as wide as it) and one writes to it (its output is): readers are cut by columns, the writer by rows. Where both
sides are as wide, the one that is named after its output writes, or that registered last. A wrong guess cannot pass
unseen: the writer would get an input of the wrong width and stop the first forward.

What the structure cannot show is how one weight holds several, [q | k | v] or head by head: `PACKED` says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel.ask.spec import refuse
from hf_parallel.model.anatomy import find_stacks, get_text_config, has_own_parameters, is_norm
from hf_parallel.model.experts import is_experts, iterate_experts
from hf_parallel.model.families import PACKED, is_written_by_script

Styles = dict[str, str]

#: Linears whose subclass or kin computes the same function.
LINEARS = (nn.Linear, Conv1D)
#: Parameters that an attention keeps for its heads, one after the other.
OF_HEADS = ("sinks", "q_bias", "v_bias", "gate_bias")
#: What attentions call the linear that writes to the residual stream.
_OUTPUTS = {"o_proj", "out_proj", "c_proj", "wo"}
_LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_LATENT_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa"}


def infer_styles(model: nn.Module) -> Styles:
    """Return the styles of all layers of the text part, by full module name.

    Raises:
        SpecError: an attention whose linears cannot be told apart; no attention at all.
    """
    styles: Styles = {}
    hidden = getattr(get_text_config(model), "hidden_size", None)
    if not isinstance(hidden, int):
        refuse(f"the config of {type(model).__name__}", "has no one hidden_size")
    for layer_name, layer in iterate_named_layers(model):
        own: Styles = {}
        for name, child in layer.named_children():
            listed = child if isinstance(child, nn.ModuleList) else ()  # T5's layers are a list of their parts
            for key, part in [(f"{name}.{i}", part) for i, part in enumerate(listed)] or [(name, child)]:
                own.update({f"{layer_name}.{key}{end}": style for end, style in _infer_part(part, hidden).items()})
        entered = {name.rpartition(".")[0] for name, style in own.items() if style != "rowwise"}
        if len(entered) != list(own.values()).count("rowwise"):
            refuse(f"the linears of {type(layer).__name__}", "cannot be told apart")
        styles.update(own)
    if not styles:
        refuse(type(model).__name__, "has no layers of attention and MLP that could be split")
    return styles


def find_packed_weight_style(owner: nn.Module, name: str) -> str | None:
    """Return the style of a weight that holds several projections, or None if it is not known to."""
    known = PACKED.get(f"{type(owner).__name__}.{name}")
    # StarCoder's kin: with a key for every query the weight goes head by head.
    return "colwise" if known and getattr(owner, "multi_query", None) is False else known


def find_latent_attention(model: nn.Module) -> Styles:
    """Find multi-latent attention (DeepSeek-V2, section 2.1): layers that expand the latents are cut by heads."""
    styles: Styles = {}
    for layer_name, layer in iterate_named_layers(model):
        for name, module in layer.named_modules():
            names = [key for key, child in module.named_children() if isinstance(child, nn.Linear)]
            if "kv_b_proj" in names and set(names) <= set(_LATENT) | _LATENT_WHOLE:
                styles.update({f"{layer_name}.{name}.{key}": _LATENT[key] for key in names if key in _LATENT})
    return styles


def find_tensors_by_heads(model: nn.Module, split: set[str]) -> Styles:
    """Find small tensors with one entry per head: T5's relative bias, attention sinks, DeBERTa's biases.

    Args:
        split: modules whose linears are; an attention that a plan leaves out stays whole with all that it has.
    """
    styles: Styles = {}
    for layer_name, layer in iterate_named_layers(model):
        for name, module in layer.named_modules():
            if name.endswith("relative_attention_bias") and isinstance(module, nn.Embedding):
                styles[f"{layer_name}.{name}"] = "embedding_heads"
            for key in OF_HEADS:
                if isinstance(getattr(module, key, None), nn.Parameter) and f"{layer_name}.{name}" in split:
                    styles[f"{layer_name}.{name}.{key}"] = "heads"
    return styles


def find_shared_mlp_styles(model: nn.Module) -> Styles:
    """Find the MLPs beside a layer's experts, which every token meets; some plans leave them out."""
    styles: Styles = {}
    hidden = getattr(get_text_config(model), "hidden_size", None)
    for name, _ in iterate_experts(model):
        block = name.rpartition(".")[0]
        for child, part in model.get_submodule(block).named_children():
            if is_experts(part) or not isinstance(hidden, int) or "head" in child:
                continue
            own = _infer_part(part, hidden)
            if "rowwise" in own.values() and len(own) > 1:  # a gate of one column alone is no MLP
                styles.update({f"{block}.{child}{key}": style for key, style in own.items()})
    return styles


def iterate_named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer of every stack of the text part, by full name."""
    names = {id(module): name for name, module in model.named_modules()}
    for stack in find_stacks(model):
        for layer in stack.layers:
            yield names[id(layer)], layer


def is_attention(module: nn.Module) -> bool:
    """Return whether the module counts heads, as attentions of all libraries do."""
    return any("head" in key and isinstance(value, int) for key, value in vars(module).items())


def get_linear_sizes(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return input and output width; a Conv1D keeps its weight the other way round."""
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def list_linears(part: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the sizes of the linears in `part` by name. A script's layer around one, such as LoRA, stands for it."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in part.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found if outer):
            continue
        if isinstance(module, LINEARS):
            found[name] = get_linear_sizes(module)
        elif name and is_written_by_script(type(module)):
            sizes = [get_linear_sizes(inner) for inner in module.modules() if isinstance(inner, LINEARS)]
            sizes.sort(key=lambda one: one[0] * one[1])
            # Of low rank are those beside it; an attention of the script's own has several as large.
            if sizes and math.prod(sizes[-1]) > sum(map(math.prod, sizes[:-1])):
                found[name] = sizes[-1]
    return found


def _infer_part(part: nn.Module, hidden: int) -> Styles:
    """Return styles by name inside the part (with its dot): none if it is no MLP, an error if an attention is odd."""
    linears = list_linears(part)
    attention = any(is_attention(module) for module in part.modules())
    roles = _assign_roles(linears, hidden)
    if not attention:
        # Of an MLP only linears and norms hold parameters, so nothing mixes tokens.
        inside = tuple(f"{name}." for name in linears if name)
        named = [item for item in part.named_modules() if has_own_parameters(item[1])]
        owners = [module for name, module in named if name not in linears and not name.startswith(inside)]
        if roles is None or not all(isinstance(module, LINEARS) or is_norm(module) for module in owners):
            return {}
    if roles is None:
        refuse(f"the linears of {type(part).__name__}", "cannot be told apart")
    readers = [name for name, role in roles.items() if role == "colwise"]
    if len({name.rpartition(".")[0] for name in readers}) > 1:  # an attention and an MLP of its own, say
        refuse(f"the linears of {type(part).__name__}", "cannot be told apart")
    writer = next((name for name, role in roles.items() if role == "rowwise"), None)
    halves = 0 if writer is None else 2 * linears[writer][0]
    as_wide = any(linears[name][1] == halves for name in readers)
    for name in readers:
        owner = part.get_submodule(name.rpartition(".")[0])
        known = find_packed_weight_style(owner, name.rpartition(".")[2])
        if known is None and (len(readers) < 3 if attention else as_wide):  # several in one, probably
            refuse(f"{type(owner).__name__}.{name}", "how it holds several projections is not known")
        roles[name] = known or "colwise"
    return {f".{name}" if name else "": role for name, role in roles.items()}


def _assign_roles(sizes: dict[str, tuple[int, int]], hidden: int) -> Styles | None:
    """Return colwise for readers and rowwise for the writer; None if that leaves a layer unexplained."""
    if len(sizes) == 1:  # BERT and OPT: the two halves of the MLP are parts of their own
        ((name, (wide_in, wide_out)),) = sizes.items()
        if wide_in == wide_out:
            return None
        return {name: "colwise"} if wide_in == hidden else {name: "rowwise"} if wide_out == hidden else None
    squares = [name for name, (wide_in, wide_out) in sizes.items() if wide_in == wide_out == hidden]
    named = [name for name in squares if name.rpartition(".")[2] in _OUTPUTS]  # AFMoE registers a gate behind it
    last = named if len(named) == 1 else squares[-1:]
    writers = [name for name, (wide_in, wide_out) in sizes.items() if wide_out == hidden != wide_in] or last
    if len(writers) != 1 or any(wide_in != hidden for name, (wide_in, _) in sizes.items() if name not in writers):
        return None
    return {name: "rowwise" if name in writers else "colwise" for name in sizes}
