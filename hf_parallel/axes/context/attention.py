"""Attention over cp ranks, registered in transformers' two registries: of kernels and of masks.

While a batch is cut (`current` is its layout) an attention runs over the ranks and no mask is made: who sees whom
follows from the layout, and what each layer says of itself (causal or not, its window) as for flash attention. At any
other time, as in `generate`, both do what the model's own kernel would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionMaskInterface

from hf_parallel.axes.context.kernels import Scores, read_alignment, repeat_per_query_head
from hf_parallel.axes.context.layout import Layout, Ring
from hf_parallel.axes.context.packs import upload
from hf_parallel.axes.context.ring import RingAttention
from hf_parallel.axes.context.ulysses import to_heads, to_tokens
from hf_parallel.ranks import reduce_from_group, scale_gradient, start_all_gather
from hf_parallel.ranks.differentiable import with_gradient

# ---- From whole sequences to a rank's tokens and back, with gradients that are averaged over cp ranks afterwards
# Cp ranks hold the same parameters and other tokens, and FSDP2 averages gradients over them as over data ranks. What
# is computed of some tokens is therefore counted `cp` times on the way back, what all ranks compute alike once:
#
#     join             tokens of each rank -> all of them, which all ranks use alike     backward: own tokens, times cp
#     sum_over_ranks   a sum over each rank's tokens -> over all                         backward: times cp
#     take_part        tokens that all ranks have -> a rank's own                        backward: all of them, by cp


@with_gradient(lambda gradient, layout, group: take(gradient, layout, group.rank()) * group.size())
def join(tensor: torch.Tensor, layout: Layout, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, n, …] of each rank's tokens -> [b, s, …] in the original order; all ranks must go on to compute the same."""
    gathered = start_all_gather(tensor.contiguous(), group).wait()  # [cp, b, n, …]
    inverse = layout.on(tensor.device)[1]
    rows = torch.arange(len(inverse), device=tensor.device)[:, None]
    return gathered.transpose(0, 1).flatten(1, 2)[rows, inverse]


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over all ranks what each has summed over its tokens."""
    return reduce_from_group(scale_gradient(tensor, group.size()), group)


@with_gradient(lambda gradient, layout, group: join(gradient, layout, group) / group.size())
def take_part(tensor: torch.Tensor, layout: Layout, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, …] of all ranks alike -> [b, n, …], the tokens of each; the gradient of all is whole on every rank."""
    return take(tensor, layout, group.rank())


def take(tensor: torch.Tensor, layout: Layout, rank: int, fill: float = 0) -> torch.Tensor:
    """[b, s, …] -> [b, n, …]: the tokens of a rank, `fill` where it holds none. Of a tensor without memory another."""
    if tensor.dim() > 2 and tensor.stride(1) == 0:
        return tensor[:, :1].expand(-1, layout.local, *tensor.shape[2:])
    own = layout.on(tensor.device)[0][:, rank]
    rows = torch.arange(len(own), device=tensor.device)[:, None]
    held = tensor[rows, own.clamp(min=0)]
    none = (own < 0).view(*own.shape, *(1,) * (tensor.dim() - 2))
    return held.masked_fill(none, fill)


#: The name of the attention in transformers' registries.
NAME = "hf_parallel_context"
_EVERYTHING = float("inf")


@dataclass(frozen=True)
class Exchanged:
    """The way attention runs over the ranks: a ring of groups of Ulysses, or one of them; and its kernel."""

    ring: dist.ProcessGroup | None
    heads: dist.ProcessGroup | None
    gathered: bool
    kernel: str = "auto"


@dataclass(frozen=True, eq=False)
class Cut:
    """A batch over the ranks. It goes to the attentions in the place of a mask, so a recomputed layer has it too."""

    layout: Layout
    exchanged: Exchanged


class Current:
    """The batch that is being computed, if it is cut."""

    cut: Cut | None = None


current = Current()


def make_context_mask(*args: object, **kwargs: object) -> object:
    """The cut while a batch is; else what scaled-dot-product attention takes."""
    if current.cut is not None:
        return current.cut
    return AttentionMaskInterface()["sdpa"](*args, **kwargs)


@torch.compiler.disable  # which sends: a compiled layer is one graph before it, and one after
def run_context_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Cut | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """[b, h, n, d] queries, [b, h / g, n, d] keys and values of this rank's tokens -> [b, n, h, d]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not isinstance(attention_mask, Cut):
        if current.cut is not None:
            raise NotImplementedError(
                f"hf_parallel: {type(module).__name__} makes its mask in a way of its own, which cannot be cut along "
                "the sequence; cp_size=1 works"
            )
        out = attend_in_one_process(query, key, value, attention_mask, dropout, scaling, softcap, s_aux, causal)
        return out.transpose(1, 2).contiguous(), None
    layout, how = attention_mask.layout, attention_mask.exchanged
    width, scaling = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = pad_to_one_width(query, key, value)
    low, high = compute_limits(causal, sliding_window, layout)
    if how.heads is not None:
        query, key, value = to_heads(query, key, value, how.heads)
        s_aux = None if s_aux is None else s_aux.chunk(how.heads.size())[how.heads.rank()]
    if dropout:
        assert how.heads is not None  # dropout is refused of a ring in `choose.py`
        hidden = ~_make_visibility_mask(layout, low, high, query.device)
        out = to_tokens(_attend_densely(query, key, value, hidden, dropout, scaling, softcap, s_aux), how.heads)
    else:
        ring = Ring(layout, how.ring, low, high, how.gathered, how.heads, how.kernel)
        out = RingAttention.apply(query, key, value, s_aux, Scores(scaling, softcap), ring)
    return out[..., :width].transpose(1, 2).contiguous(), None


def pad_to_one_width(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All of one width that kernels take, by zeros, as latent attention has narrower values. Scores stay the same."""
    widest = max(q.shape[-1], v.shape[-1])
    widest += -widest % read_alignment(q.device)
    q, k, v = (t if t.shape[-1] == widest else F.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    return q, k, v


def compute_limits(causal: bool, window: int | None, layout: Layout) -> tuple[float, float]:
    """Return how many tokens before a query its keys lie: at least and at most."""
    if window is None or window >= layout.length:
        return (0 if causal else -_EVERYTHING), _EVERYTHING
    if not all(row.whole for row in layout.rows):  # tokens of a document are not as far apart as in the row
        raise ValueError(
            f"hf_parallel: a padding mask with holes under a sliding window of {window} tokens cannot be cut along "
            "the sequence; padding at the ends of rows, or cp_size=1, works"
        )
    return (0 if causal else 1 - window), window - 1


def _make_visibility_mask(layout: Layout, low: float, high: float, device: torch.device) -> torch.Tensor:
    """[b, 1, n, n]: which keys each query sees, where one rank has all tokens."""
    count = layout.local * layout.shape.heads
    seen = torch.zeros(len(layout.rows), 1, count, count, dtype=torch.bool)
    for tile in layout.tiles(0, 0, low, high):
        rows = slice(None) if tile.row is None else tile.row
        behind, least, most = tile.band if tile.kind == "band" else (0, -_EVERYTHING, _EVERYTHING)
        least = 0 if tile.kind == "causal" else least
        shape = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
        distance = torch.arange(shape[0])[:, None] + behind - torch.arange(shape[1])
        seen[rows, :, tile.q, tile.k] |= (distance >= least) & (distance <= most)
    return upload(seen, device)


def attend_in_one_process(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """A batch that is not cut: generation, one token or the whole row."""
    if softcap is None and sinks is None:
        several = q.shape[2] > 1 and mask is None
        k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal and several, scale=scale)
    if mask is None:
        lengths = q.shape[2], k.shape[2]
        mask = torch.ones(lengths, dtype=torch.bool, device=q.device)
        mask = mask.tril(lengths[1] - lengths[0]) if causal else mask
    return _attend_densely(q, k, v, ~mask, dropout, scale, softcap, sinks)


def _attend_densely(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """With a matrix of scores, as transformers' eager attention, for what no fused kernel does."""
    k, v = repeat_per_query_head(k, q), repeat_per_query_head(v, q)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(shares, dropout) @ v
