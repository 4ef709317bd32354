"""Count a Hugging Face model on the meta device: every matrix and attention of every block, by shapes and attributes.

No table of architectures: a parameter with two dimensions is a matrix, one with three is as many matrices as it has
experts, what is below a module whose class is called attention belongs to attention, everything else to the MLP.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel.model.anatomy import input_embedding, stacks, text_config, tied_to_embedding
from hf_parallel.model.build import build_on_meta
from hf_parallel.planner.shape import Attention, Block, Matrix, ModelShape
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def count_model(model: PreTrainedModel) -> ModelShape:
    """The shape of an HF model, or of the one that an HF config describes.

    Raises:
        SpecError: nothing that has layers.
    """
    model = model if isinstance(model, nn.Module) else build_on_meta(model)
    config, found = text_config(model), stacks(model)
    blocks: list[Block] = []
    seen: dict[tuple, Block] = {}
    for stack in found:
        for layer in stack.layers:
            parts = _count_layer(layer, config)
            blocks.append(seen.setdefault(parts, Block(*parts)))
    if not blocks:
        refuse(type(model).__name__, "no stack of layers was found", "a causal language model")
    return _with_ends(model, config, tuple(blocks))


def _with_ends(model: PreTrainedModel, config: PretrainedConfig, blocks: tuple[Block, ...]) -> ModelShape:
    distinct = {id(p): p.numel() for p in model.parameters()}
    embedding, head = input_embedding(model), _head(model)
    embedded = embedding.weight.numel() if isinstance(embedding, nn.Embedding) else 0
    weight: nn.Parameter | None = getattr(head, "weight", None)
    held = weight.numel() if weight is not None else 0
    tied = weight is not None and isinstance(embedding, nn.Embedding) and _is_tied(model, embedding, weight)
    separate = 0 if tied else held
    doubled = held if tied and weight is not getattr(embedding, "weight", None) else 0  # on the meta device
    others = sum(distinct.values()) - doubled - embedded - separate - sum(block.parameters for block in blocks)
    return ModelShape(
        name=type(model).__name__,
        hidden=hidden_size(config),
        vocab=getattr(embedding, "num_embeddings", 0),
        blocks=blocks,
        tied=tied,
        embedding_parameters=embedded,
        head_parameters=separate,
        other_parameters=others,
        head_outputs=weight.shape[0] if weight is not None else 0,
    )


def _head(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def _is_tied(model: PreTrainedModel, embedding: nn.Embedding, weight: nn.Parameter) -> bool:
    if weight is embedding.weight:
        return True
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {f"{name}.weight" for name in tied_to_embedding(model)}
    own = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    return any(tied.get(name) in sources or name in sources for name in own)


def hidden_size(config: PretrainedConfig) -> int:
    """Width of the residual stream under the names that configs use."""
    for key in ("hidden_size", "n_embd", "d_model"):
        if isinstance(getattr(config, key, None), int):
            return getattr(config, key)
    refuse(type(config).__name__, "names no hidden size")


# ---- a layer --------------------------------------------------------------------------------------------------------


def _count_layer(layer: nn.Module, config: PretrainedConfig) -> tuple:
    """The fields of its Block."""
    hidden, attentions = hidden_size(config), {n: m for n, m in layer.named_modules() if _is_attention(m)}
    innermost = [n for n in attentions if not any(other.startswith(f"{n}.") for other in attentions)]
    inside, (top_k, experts) = tuple(f"{name}." for name in attentions), _experts(layer, config)
    matrices = _matrices(layer, hidden, inside, top_k, experts)
    mlp = [m for m in matrices if not m.name.startswith(inside) and m.split != "whole"]
    inner = sum(m.inputs * m.count * m.share for m in mlp if _leads_back(m, hidden))
    into = sum(m.outputs * m.count * m.share for m in mlp if m.inputs == hidden and not _leads_back(m, hidden))
    return (
        tuple(matrices),
        tuple(_attention(name, attentions[name], config) for name in innermost),
        inner,
        into > 1.5 * inner,
        sum(parameter.numel() for parameter in layer.parameters()) - sum(m.parameters for m in matrices),
        top_k if any(m.split == "expert" for m in matrices) else 0,
    )


def _matrices(layer: nn.Module, hidden: int, attentions: tuple[str, ...], top_k: int, experts: int) -> list[Matrix]:
    """All matrices of a layer; experts kept as separate modules become one entry with their number."""
    found: dict[tuple, Matrix] = {}
    for name, module in layer.named_modules():
        for key, parameter in () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
            full = f"{name}.{key}".lstrip(".").removesuffix(".weight")
            m = _matrix(full, module, parameter, hidden, full.startswith(attentions), top_k, experts)
            if m:
                same = (m.name, m.inputs, m.outputs, m.split, m.share)
                count = m.count + (found[same].count if same in found else 0)
                found[same] = dataclasses.replace(m, count=count)
    return list(found.values())


def _leads_back(matrix: Matrix, hidden: int) -> bool:
    """The second half of an MLP; where it is square, its name tells."""
    return matrix.outputs == hidden and not (matrix.inputs == hidden and _leads_in(matrix.name))


def _leads_in(name: str) -> bool:
    return re.search(r"gate|up|w1|w3|fc1|in_proj|wi", name.rpartition(".")[2]) is not None


def _is_attention(module: nn.Module) -> bool:
    """The innermost module that is called attention and has matrices of its own."""
    called = "attention" in type(module).__name__.lower()
    below = [
        child for child in module.modules() if child is not module and "attention" in type(child).__name__.lower()
    ]
    with_matrices = [child for child in below if any(p.ndim > 1 for p in child.parameters())]
    own = any(p.ndim > 1 for child in module.children() if child not in below for p in child.parameters())
    return called and (own or (not with_matrices and any(p.ndim > 1 for p in module.parameters())))


def _experts(layer: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    """How many experts work for a token, and how many there are; modules know best, layers may differ."""
    found = {"top_k": getattr(config, "num_experts_per_tok", None), "num_experts": None}
    for part in layer.modules():
        found |= {key: vars(part)[key] for key in found if isinstance(vars(part).get(key), int)}
        if isinstance(vars(part).get("n_routed_experts"), int):
            found["num_experts"] = vars(part)["n_routed_experts"]
    lists = [
        len(part)
        for name, part in layer.named_modules()
        if name.endswith("experts") and isinstance(part, nn.ModuleList)
    ]
    return found["top_k"] or 1, found["num_experts"] or (lists[0] if lists else 0)


def _matrix(
    name: str, module: nn.Module, parameter: nn.Parameter, hidden: int, in_attention: bool, top_k: int, experts: int
) -> Matrix | None:
    is_expert = bool(experts) and "experts" in name.split(".") and "shared" not in name
    share = min(1.0, top_k / experts) if is_expert else 1.0
    if parameter.ndim == 3 and parameter.shape[0] == experts:
        outputs, inputs = parameter.shape[1:]
        into = _leads_in(name)
        if (into and outputs == hidden) or (not into and inputs == hidden and outputs != hidden):
            outputs, inputs = inputs, outputs
        return Matrix(name, inputs, outputs, "expert", experts, share)
    if parameter.ndim != 2 or not (
        isinstance(module, (nn.Linear, Conv1D)) or name.endswith("weight") or is_router(name)
    ):
        return None
    outputs, inputs = parameter.shape if not isinstance(module, Conv1D) else reversed(parameter.shape)
    if experts and outputs == experts and inputs == hidden:
        return Matrix(name, inputs, outputs, "whole")
    if is_expert:
        return Matrix(re.sub(r"\.\d+\.", ".*.", name), inputs, outputs, "expert", 1, share)
    return Matrix(name, inputs, outputs, _split_of(name, inputs, outputs, hidden, in_attention))


def is_router(name: str) -> bool:
    """Routers are often bare parameters of a module that is no Linear."""
    return name.rpartition(".")[2] in ("gate", "router")


def _split_of(name: str, inputs: int, outputs: int, hidden: int, in_attention: bool) -> str:
    """Row-parallel is what leads back into the residual stream: of two square matrices the one named after output."""
    if outputs != hidden:
        return "column"
    if not in_attention:
        return "row"
    is_output = (
        re.search(r"(^|[._])(o|out|output|dense|c|wo)(_?proj|_lin)?($|[._])", name.rpartition(".")[2]) is not None
    )
    return "row" if is_output or inputs != hidden else "column"


def _attention(name: str, module: nn.Module, config: PretrainedConfig) -> Attention:
    heads = _first(module, config, "num_heads", "num_attention_heads", "n_heads", "n_head")
    if heads is None:
        refuse(type(config).__name__, f"does not say how many heads {name} has", do="give its sizes as numbers")
    width = _first(module, None, "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
    width = width or getattr(config, "head_dim", None) or hidden_size(config) // heads
    query = _first(module, None, "qk_head_dim") or width
    value = _first(module, None, "v_head_dim") or width
    groups = _first(module, config, "num_key_value_heads", "num_kv_heads") or heads
    groups = heads if _first(module, None, "qk_head_dim") else min(groups, heads)
    crossing = re.search(r"cross|enc_?dec|encoder_attn", name, re.IGNORECASE) is not None
    causal = bool(getattr(module, "is_causal", getattr(module, "is_decoder", True))) and not crossing
    return Attention(heads, groups, query, value, _window(module, config), causal)


def _window(module: nn.Module, config: PretrainedConfig) -> int | None:
    """Of this layer; where all have one, some models (Mistral, Phi-3) say so in their config alone."""
    if hasattr(module, "sliding_window") or getattr(config, "layer_types", None):
        return _first(module, None, "sliding_window")
    return _first(None, config, "sliding_window") if getattr(config, "use_sliding_window", True) else None


def _first(module: nn.Module | None, config: PretrainedConfig | None, *names: str) -> int | None:
    for source in (module, config):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
