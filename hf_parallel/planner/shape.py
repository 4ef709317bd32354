"""The cost of a model, block by block: parameters, matrix products, attention; of a model, or of six numbers.

    shape = shape_of(AutoConfig.from_pretrained(...))                       # any architecture, built on `meta`
    shape = shape_of({"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256})

A matrix says how many weights it has and which share of the tokens meets it, so that experts need no special case:
parameters are the sum of sizes, forward FLOPs per token 2 x size x share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel.ask.spec import refuse
from hf_parallel.model.anatomy import (
    build_on_meta,
    find_input_embedding,
    find_stacks,
    get_text_config,
    list_tied_to_embedding,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Matrix:
    """`count` equal matrices [outputs, inputs]; a token meets `share` of them (1: all; top_k / experts).

    `split` is Megatron's way over tp: "column" by outputs, "row" by inputs, "whole" not at all; "expert": by whole
    experts over ep.
    """

    name: str
    inputs: int
    outputs: int
    split: str = "column"
    count: int = 1
    share: float = 1.0

    @property
    def parameters(self) -> int:
        """Weights of all `count` matrices."""
        return self.inputs * self.outputs * self.count

    @property
    def flops(self) -> float:
        """FLOPs of a forward, per token: a multiplication and an addition for each weight that the token meets."""
        return 2.0 * self.parameters * self.share


@dataclass(frozen=True)
class Attention:
    """An attention: its heads, their widths, and how far they look (`window`: tokens; None: the whole sequence)."""

    heads: int
    kv_heads: int
    qk_width: int
    v_width: int
    window: int | None = None
    causal: bool = True

    @property
    def key_numbers(self) -> int:
        """Numbers of a token's keys and values."""
        return self.kv_heads * (self.qk_width + self.v_width)

    def flops(self, length: int, full: bool = False) -> float:
        """Return FLOPs of scores and their product with values, forward, per token; `full`: nothing is masked."""
        return 2.0 * self.heads * (self.qk_width + self.v_width) * (length if full else self.keys(length))

    def keys(self, length: int) -> float:
        """Return how many keys a token sees on average."""
        window = min(self.window or length, length)
        return window * (1 - window / (2 * length)) if self.causal else window


@dataclass(frozen=True, eq=False)  # compared by identity: layers that are alike share one object
class Block:
    """A layer. `inner`: features between the halves of its MLPs that one token meets; `others`: norms, biases."""

    matrices: tuple[Matrix, ...]
    attentions: tuple[Attention, ...]
    inner: float
    gated: bool
    others: int = 0
    top_k: int = 0
    kept: tuple[tuple[str, float], ...] = ()  # bytes per token it keeps for its backward, by precision, if counted

    @functools.cached_property
    def parameters(self) -> int:
        """All weights of the layer."""
        return sum(matrix.parameters for matrix in self.matrices) + self.others

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Weights that expert parallelism spreads."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.split == "expert")

    def flops(self, length: int, full_attention: bool = False) -> float:
        """Return the FLOPs of a forward, per token of a sequence of `length`."""
        attention = sum(part.flops(length, full_attention) for part in self.attentions)
        return attention + sum(matrix.flops for matrix in self.matrices)


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A whole model: embedding, blocks in order, norm and head."""

    name: str
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    tied: bool
    embedding_parameters: int
    head_parameters: int  # 0 if tied or if there is none
    other_parameters: int = 0  # final norm, positions
    head_outputs: int = 0  # columns of the logits; 0: none

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @functools.cached_property
    def parameters(self) -> int:
        """All weights, tied ones once."""
        ends = self.embedding_parameters + self.head_parameters + self.other_parameters
        return ends + sum(block.parameters for block in self.blocks)

    @property
    def head_flops(self) -> float:
        """FLOPs of the logits, forward, per token."""
        return 2.0 * self.hidden * self.head_outputs

    def forward_flops(self, length: int, full_attention: bool = False) -> float:
        """Return FLOPs per token of a sequence of `length`. A backward costs twice that."""
        return self.head_flops + sum(block.flops(length, full_attention) for block in self.blocks)


# ---- from published numbers ---------------------------------------------------------------------------------------


def shape_from_numbers(given: Mapping) -> ModelShape:
    """Build from `layers, hidden, heads, kv_heads, ffn_hidden, vocab` and optional `gated_mlp, tied, experts, top_k`.

    What is missing or None gets the usual value: heads of 128, kv_heads = heads, ffn_hidden = 4 hidden, vocab 50257,
    top_k 2. `params`, if given, decides between what the numbers leave open: number of layers, gated or not, tied or
    not. Without it an MLP is gated unless ffn_hidden is 4 x hidden, and embeddings are tied where it is not gated.

    Raises:
        SpecError: no hidden size, or neither layers nor params.
    """
    known = {key: value for key, value in given.items() if value is not None}
    if "hidden" not in known or not ("layers" in known or "params" in known):
        missing = "hidden" if "hidden" not in known else "layers"
        refuse("model", f"{missing} is missing", "layers=32, hidden=4096, heads=32")
    has_groups = known.get("kv_heads", known.get("heads")) != known.get("heads")
    usual = has_groups or bool(known.get("experts")) or known.get("ffn_hidden", 0) not in (0, 4 * known["hidden"])
    usual = known.get("gated_mlp", usual)
    if "layers" not in known:
        one = _build({**known, "layers": 1}, usual, known.get("tied", not usual))
        known["layers"] = max(1, round((known["params"] - one.parameters) / one.blocks[0].parameters) + 1)
    gates, ties = ((bool(known[key]),) if key in known else (True, False) for key in ("gated_mlp", "tied"))
    choices = [(gated, tied) for gated in gates for tied in ties]
    if "params" in known and len(choices) > 1:
        shapes = [_build(known, gated, tied) for gated, tied in choices]
        return min(shapes, key=lambda shape: abs(shape.parameters - known["params"]))
    return _build(known, usual, known.get("tied", not usual))


def _build(known: Mapping, gated: bool, tied: bool) -> ModelShape:
    """Build a shape of equal layers; what is not known gets the usual value."""
    hidden, name = known["hidden"], str(known.get("model") or known.get("name") or "model")
    heads, inner = known.get("heads"), known.get("ffn_hidden") or 4 * hidden
    if not heads:  # those whose width is the multiple of 8 nearest to 128
        divisors = [count for count in range(1, hidden // 8 + 1) if hidden % count == 0]
        heads = min(divisors, key=lambda count: abs(hidden / count - 128))
    experts, top_k = known.get("experts") or 0, known.get("top_k") or 2
    layer = (hidden, heads, known.get("kv_heads"), inner, gated, experts, top_k, known.get("head_dim"))
    return _build_shape(name, known.get("vocab", 50257), known["layers"], tied, layer)


@functools.lru_cache(maxsize=1024)  # equal numbers are one shape, so that what is computed of it is found again
def _build_shape(name: str, vocab: int, layers: int, tied: bool, layer: tuple) -> ModelShape:
    block, hidden = make_dense_block(*layer), layer[0]
    head = 0 if tied else vocab * hidden
    return ModelShape(name, hidden, vocab, (block,) * layers, tied, vocab * hidden, head, hidden, head_outputs=vocab)


def make_dense_block(
    hidden: int,
    heads: int,
    kv_heads: int | None,
    ffn_hidden: int,
    gated: bool,
    experts: int = 0,
    top_k: int = 2,
    head_width: int | None = None,
) -> Block:
    """Make a decoder layer: grouped-query attention, and an MLP or `experts` of them with `top_k` at work."""
    width = head_width or hidden // heads
    kv_heads = kv_heads or heads
    copies: dict[str, Any] = {"count": experts, "share": top_k / experts} if experts else {}
    into, out = ("expert", "expert") if experts else ("column", "row")
    ups = ("gate", "up") if gated else ("up",)
    matrices = (
        Matrix("q", hidden, heads * width),
        Matrix("k", hidden, kv_heads * width),
        Matrix("v", hidden, kv_heads * width),
        Matrix("o", heads * width, hidden, "row"),
        *(Matrix(name, hidden, ffn_hidden, into, **copies) for name in ups),
        Matrix("down", ffn_hidden, hidden, out, **copies),
        *((Matrix("router", hidden, experts, "whole"),) if experts else ()),
    )
    attention = Attention(heads, kv_heads, width, width)
    return Block(
        matrices, (attention,), ffn_hidden * (top_k if experts else 1), gated, 2 * hidden, top_k * bool(experts)
    )


# ---- Count a Hugging Face model on the meta device: every matrix and attention of every block, by shapes and
# attributes
# No table of architectures: a parameter with two dimensions is a matrix, one with three is as many matrices as it has
# experts, what is below a module whose class is called attention belongs to attention, everything else to the MLP.


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Return the shape of an HF config, an HF model (on any device, also `meta`), or a mapping of published numbers.

    Raises:
        SpecError: nothing that has layers, or numbers that do not say enough.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return shape_from_numbers(model)
    model = model if isinstance(model, nn.Module) else build_on_meta(model)
    config, found = get_text_config(model), find_stacks(model)
    blocks: list[Block] = []
    seen: dict[tuple, Block] = {}
    for stack in found:
        for layer in stack.layers:
            parts = _count_layer(layer, config)
            blocks.append(seen.setdefault(parts, Block(*parts)))
    if not blocks:
        refuse(type(model).__name__, "no stack of layers was found", "a causal language model")
    distinct = {id(p): p.numel() for p in model.parameters()}
    embedding, head = find_input_embedding(model), None
    with contextlib.suppress(NotImplementedError, AttributeError):
        head = model.get_output_embeddings()
    embedded = embedding.weight.numel() if isinstance(embedding, nn.Embedding) else 0
    weight: nn.Parameter | None = getattr(head, "weight", None)
    held = weight.numel() if weight is not None else 0
    tied = weight is not None and isinstance(embedding, nn.Embedding) and _is_tied(model, embedding, weight)
    separate = 0 if tied else held
    doubled = held if tied and weight is not getattr(embedding, "weight", None) else 0  # on the meta device
    others = sum(distinct.values()) - doubled - embedded - separate - sum(block.parameters for block in blocks)
    return ModelShape(
        name=type(model).__name__,
        hidden=read_hidden_size(config),
        vocab=getattr(embedding, "num_embeddings", 0),
        blocks=tuple(blocks),
        tied=tied,
        embedding_parameters=embedded,
        head_parameters=separate,
        other_parameters=others,
        head_outputs=weight.shape[0] if weight is not None else 0,
    )


def _is_tied(model: PreTrainedModel, embedding: nn.Embedding, weight: nn.Parameter) -> bool:
    if weight is embedding.weight:
        return True
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {f"{name}.weight" for name in list_tied_to_embedding(model)}
    own = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    return any(tied.get(name) in sources or name in sources for name in own)


def read_hidden_size(config: PretrainedConfig) -> int:
    """Return the width of the residual stream under the names that configs use."""
    for key in ("hidden_size", "n_embd", "d_model"):
        if isinstance(getattr(config, key, None), int):
            return getattr(config, key)
    refuse(type(config).__name__, "names no hidden size")


# ---- a layer --------------------------------------------------------------------------------------------------------


def _count_layer(layer: nn.Module, config: PretrainedConfig) -> tuple:
    """Return the fields of its Block."""
    hidden, attentions = read_hidden_size(config), {n: m for n, m in layer.named_modules() if _is_attention(m)}
    innermost = [n for n in attentions if not any(other.startswith(f"{n}.") for other in attentions)]
    inside = tuple(f"{name}." for name in attentions)
    # Experts that work for a token, and how many there are: modules know best, layers may differ.
    numbers: dict[str, int | None] = {"top_k": getattr(config, "num_experts_per_tok", None), "num_experts": None}
    lists = []
    for name, part in layer.named_modules():
        numbers |= {key: vars(part)[key] for key in numbers if isinstance(vars(part).get(key), int)}
        if isinstance(vars(part).get("n_routed_experts"), int):
            numbers["num_experts"] = vars(part)["n_routed_experts"]
        if name.endswith("experts") and isinstance(part, nn.ModuleList):
            lists.append(len(part))
    top_k, experts = numbers["top_k"] or 1, numbers["num_experts"] or (lists[0] if lists else 0)
    found: dict[tuple, Matrix] = {}
    for name, module in layer.named_modules():
        for key, parameter in () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
            full = f"{name}.{key}".lstrip(".").removesuffix(".weight")
            m = _read_matrix(full, module, parameter, hidden, full.startswith(inside), top_k, experts)
            if m:  # experts kept as separate modules become one entry with their number
                same = (m.name, m.inputs, m.outputs, m.split, m.share)
                count = m.count + (found[same].count if same in found else 0)
                found[same] = dataclasses.replace(m, count=count)
    matrices = list(found.values())
    mlp = [m for m in matrices if not m.name.startswith(inside) and m.split != "whole"]
    # The second half of an MLP leads back; where it is square, its name tells.
    back = [m for m in mlp if m.outputs == hidden and not (m.inputs == hidden and _is_leading_in(m.name))]
    inner = sum(m.inputs * m.count * m.share for m in back)
    into = sum(m.outputs * m.count * m.share for m in mlp if m.inputs == hidden and m not in back)
    return (
        tuple(matrices),
        tuple(_read_attention(name, attentions[name], config) for name in innermost),
        inner,
        into > 1.5 * inner,
        sum(parameter.numel() for parameter in layer.parameters()) - sum(m.parameters for m in matrices),
        top_k if any(m.split == "expert" for m in matrices) else 0,
    )


def _is_leading_in(name: str) -> bool:
    return re.search(r"gate|up|w1|w3|fc1|in_proj|wi", name.rpartition(".")[2]) is not None


def _is_attention(module: nn.Module) -> bool:
    """Return whether it is the innermost module that is called attention and has matrices of its own."""
    called = "attention" in type(module).__name__.lower()
    below = [
        child for child in module.modules() if child is not module and "attention" in type(child).__name__.lower()
    ]
    with_matrices = [child for child in below if any(p.ndim > 1 for p in child.parameters())]
    own = any(p.ndim > 1 for child in module.children() if child not in below for p in child.parameters())
    return called and (own or (not with_matrices and any(p.ndim > 1 for p in module.parameters())))


def _read_matrix(
    name: str, module: nn.Module, parameter: nn.Parameter, hidden: int, in_attention: bool, top_k: int, experts: int
) -> Matrix | None:
    is_expert = bool(experts) and "experts" in name.split(".") and "shared" not in name
    share = min(1.0, top_k / experts) if is_expert else 1.0
    if parameter.ndim == 3 and parameter.shape[0] == experts:
        outputs, inputs = parameter.shape[1:]
        into = _is_leading_in(name)
        if (into and outputs == hidden) or (not into and inputs == hidden and outputs != hidden):
            outputs, inputs = inputs, outputs
        return Matrix(name, inputs, outputs, "expert", experts, share)
    last = name.rpartition(".")[2]
    is_router = last in ("gate", "router")  # often a bare parameter of a module that is no Linear
    if parameter.ndim != 2 or not (isinstance(module, (nn.Linear, Conv1D)) or name.endswith("weight") or is_router):
        return None
    outputs, inputs = parameter.shape if not isinstance(module, Conv1D) else reversed(parameter.shape)
    if experts and outputs == experts and inputs == hidden:
        return Matrix(name, inputs, outputs, "whole")
    if is_expert:
        return Matrix(re.sub(r"\.\d+\.", ".*.", name), inputs, outputs, "expert", 1, share)
    # Row-parallel is what leads back into the residual stream: of two square matrices the one named after output.
    is_output = re.search(r"(^|[._])(o|out|output|dense|c|wo)(_?proj|_lin)?($|[._])", last) is not None
    leads_back = outputs == hidden and (not in_attention or is_output or inputs != hidden)
    return Matrix(name, inputs, outputs, "row" if leads_back else "column")


def _read_attention(name: str, module: nn.Module, config: PretrainedConfig) -> Attention:
    heads = _read_first_window(module, config, "num_heads", "num_attention_heads", "n_heads", "n_head")
    if heads is None:
        refuse(type(config).__name__, f"does not say how many heads {name} has", do="give its sizes as numbers")
    width = _read_first_window(module, None, "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
    width = width or getattr(config, "head_dim", None) or read_hidden_size(config) // heads
    query = _read_first_window(module, None, "qk_head_dim") or width
    value = _read_first_window(module, None, "v_head_dim") or width
    groups = _read_first_window(module, config, "num_key_value_heads", "num_kv_heads") or heads
    groups = heads if _read_first_window(module, None, "qk_head_dim") else min(groups, heads)
    crossing = re.search(r"cross|enc_?dec|encoder_attn", name, re.IGNORECASE) is not None
    causal = bool(getattr(module, "is_causal", getattr(module, "is_decoder", True))) and not crossing
    window = None
    if hasattr(module, "sliding_window") or getattr(config, "layer_types", None):
        window = _read_first_window(module, None, "sliding_window")
    elif getattr(config, "use_sliding_window", True):  # where all have one, Mistral and Phi-3 say so in their config
        window = _read_first_window(None, config, "sliding_window")
    return Attention(heads, groups, query, value, window, causal)


def _read_first_window(module: nn.Module | None, config: PretrainedConfig | None, *names: str) -> int | None:
    for source in (module, config):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
