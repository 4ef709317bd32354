"""What a model costs, block by block: parameters, matrix products, attention; of a model, or of six numbers.

    shape = shape_of(AutoConfig.from_pretrained(...))                       # any architecture, built on `meta`
    shape = shape_of({"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256})

A matrix says how many weights it has and which share of the tokens meets it, so that experts need no special case:
parameters are the sum of sizes, forward FLOPs per token 2 x size x share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        """Of a forward, per token: a multiplication and an addition for each weight that the token meets."""
        return 2.0 * self.parameters * self.share


@dataclass(frozen=True)
class Attention:
    """One attention: its heads, their widths, and how far they look (`window`: tokens; None: the whole sequence)."""

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
        """Scores and their product with the values, forward, per token; `full`: as if nothing was masked."""
        return 2.0 * self.heads * (self.qk_width + self.v_width) * (length if full else self.keys(length))

    def keys(self, length: int) -> float:
        """How many keys a token sees on average."""
        window = min(self.window or length, length)
        return window * (1 - window / (2 * length)) if self.causal else window


@dataclass(frozen=True, eq=False)  # compared by identity: layers that are alike share one object
class Block:
    """One layer. `inner`: features between the halves of its MLPs that one token meets; `others`: norms, biases."""

    matrices: tuple[Matrix, ...]
    attentions: tuple[Attention, ...]
    inner: float
    gated: bool
    others: int = 0
    top_k: int = 0
    kept: tuple[tuple[str, float], ...] = ()  # bytes per token it keeps for its backward, by precision, if counted

    @property
    def parameters(self) -> int:
        """All weights of the layer."""
        return sum(matrix.parameters for matrix in self.matrices) + self.others

    @property
    def expert_parameters(self) -> int:
        """Weights that expert parallelism spreads."""
        return sum(matrix.parameters for matrix in self.matrices if matrix.split == "expert")

    def flops(self, length: int, full_attention: bool = False) -> float:
        """Of a forward, per token of a sequence of `length`."""
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
        """How many blocks."""
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """All weights, tied ones once."""
        ends = self.embedding_parameters + self.head_parameters + self.other_parameters
        return ends + sum(block.parameters for block in self.blocks)

    @property
    def head_flops(self) -> float:
        """Of the logits, forward, per token."""
        return 2.0 * self.hidden * self.head_outputs

    def forward_flops(self, length: int, full_attention: bool = False) -> float:
        """Per token of a sequence of `length`. A backward costs twice that."""
        return self.head_flops + sum(block.flops(length, full_attention) for block in self.blocks)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of an HF config, an HF model (on any device, also `meta`), or a mapping of published numbers."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return shape_from_numbers(model)
    from hf_parallel.planner.count import count_model

    return count_model(model)


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
    if "layers" not in known:
        known["layers"] = _layers_from_parameters(known)
    choices = [(gated, tied) for gated in _open(known, "gated_mlp") for tied in _open(known, "tied")]
    if "params" in known and len(choices) > 1:
        shapes = [_build(known, gated, tied) for gated, tied in choices]
        return min(shapes, key=lambda shape: abs(shape.parameters - known["params"]))
    gated = known.get("gated_mlp", _usually_gated(known))
    return _build(known, gated, known.get("tied", not gated))


def _open(known: Mapping, key: str) -> tuple[bool, ...]:
    return (bool(known[key]),) if key in known else (True, False)


def _usually_gated(known: Mapping) -> bool:
    has_groups = known.get("kv_heads", known.get("heads")) != known.get("heads")
    return has_groups or bool(known.get("experts")) or known.get("ffn_hidden", 0) not in (0, 4 * known["hidden"])


def _layers_from_parameters(known: Mapping) -> int:
    gated = known.get("gated_mlp", _usually_gated(known))
    one = _build({**known, "layers": 1}, gated, known.get("tied", not gated))
    return max(1, round((known["params"] - one.parameters) / one.blocks[0].parameters) + 1)


def _build(known: Mapping, gated: bool, tied: bool) -> ModelShape:
    """A shape of equal layers; what is not known gets the usual value."""
    hidden, name = known["hidden"], str(known.get("model") or known.get("name") or "model")
    heads, inner = known.get("heads") or usual_heads(hidden), known.get("ffn_hidden") or 4 * hidden
    experts, top_k = known.get("experts") or 0, known.get("top_k") or 2
    layer = (hidden, heads, known.get("kv_heads"), inner, gated, experts, top_k, known.get("head_dim"))
    return _built(name, known.get("vocab", 50257), known["layers"], tied, layer)


@functools.lru_cache(maxsize=1024)  # equal numbers are one shape, so that what is computed of it is found again
def _built(name: str, vocab: int, layers: int, tied: bool, layer: tuple) -> ModelShape:
    block, hidden = dense_block(*layer), layer[0]
    head = 0 if tied else vocab * hidden
    return ModelShape(name, hidden, vocab, (block,) * layers, tied, vocab * hidden, head, hidden, head_outputs=vocab)


def usual_heads(hidden: int) -> int:
    """As many heads as make their width the multiple of 8 nearest to 128."""
    divisors = [count for count in range(1, hidden // 8 + 1) if hidden % count == 0]
    return min(divisors, key=lambda count: abs(hidden / count - 128))


def dense_block(
    hidden: int,
    heads: int,
    kv_heads: int | None,
    ffn_hidden: int,
    gated: bool,
    experts: int = 0,
    top_k: int = 2,
    head_width: int | None = None,
) -> Block:
    """A decoder layer: grouped-query attention, and an MLP or `experts` of them with `top_k` at work."""
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


def distinct(blocks: Iterable[Block]) -> dict[Block, int]:
    """How often each different block occurs."""
    counts: dict[Block, int] = {}
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1
    return counts
