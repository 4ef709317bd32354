"""`torch_flash`: flash attention by torch's own kernels, in transformers' two registries.

Instead of a matrix a mask is the documents of the batch. They are read off the function by which transformers says
who sees whom: a document begins where a token does not see the one before it. What each layer says of itself does
the rest: causal or not, its window, its sinks.

    rows of one document each, no window, no sinks    scaled-dot-product attention, which is flash attention there
    CUDA, 16 bits                                     one call of the variable-length kernel (`_Varlen`)
    else                                              document by document, by the kernels of context parallelism

Calls with a key/value cache, attention to another sequence and masks of queries by keys are computed as by `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hf_parallel.ask.keys.layers import REGISTERED_FLASH as NAME
from hf_parallel.axes.context.attention import attend_in_one_process, compute_limits, pad_to_one_width
from hf_parallel.axes.context.flash import TORCH, can_take_queries
from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.layout import Layout, Ring, Shape
from hf_parallel.axes.context.packs import Call, Row, Window, find, make_unpacked_rows, read_numbered_rows, upload
from hf_parallel.axes.context.ring import RingAttention
from hf_parallel.model.known_masks import is_hiding_nothing
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import cast_as_autocast

# ---- Several documents in one call of torch's flash kernel on CUDA, each seeing itself alone ------------------------
#     tokens       a a a a a b b b c c c c        [tokens, heads, width], rows and documents one behind the other
#     boundaries   0         5     8       12     on the device; the longest document on the host
#
# Sinks are a further score per head whose value is nothing. They change the log-sum-exp and scale the output; the
# backward kernel is given both as they are then, and so returns the right share of every gradient.


@dataclass(frozen=True, eq=False)
class Pack:
    """The documents of a batch as the kernel wants them.

    Attributes:
        boundaries: [documents + 1], int32.
        longest: document, in tokens.
        tokens: where they lie in the flattened rows, less padding; None: all of them, in order.
    """

    boundaries: torch.Tensor
    longest: int
    tokens: torch.Tensor | None

    def call(self, window: Window) -> Call:
        """Each document of itself, as the kernel is called."""
        return Call(slice(None), slice(None), (self.boundaries,) * 2, (self.longest,) * 2, window)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: tuple[int, int],
    packed: Pack,
) -> torch.Tensor:
    """[b, h, n, d], [b, h / g, n, d] twice -> [b, h, n, d]; `window`: tokens seen before and after, -1: all."""
    b, h, n, d = q.shape
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    if packed.tokens is not None:
        flat = [t[packed.tokens] for t in flat]
    out = _Varlen.apply(*(t.contiguous() for t in flat), sinks, scale, window, packed)
    if packed.tokens is not None:
        out = out.new_zeros(b * n, h, d).index_copy(0, packed.tokens, out)
    return out.view(b, n, h, d).transpose(1, 2)


class _Varlen(torch.autograd.Function):
    """q [t, h, d], k and v [t, h / g, d] -> [t, h, d]."""

    @staticmethod
    def forward(
        ctx: Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        window: tuple[int, int],
        packed: Pack,
    ) -> torch.Tensor:
        ctx.scores, ctx.call = Scores(scale), packed.call(window)
        out, lse = TORCH.forward(q, k, v, ctx.call, ctx.scores)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))  # [t, h]
            out, lse = (out * (lse - total).exp()[..., None]).to(q.dtype), total
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradient, of_sinks = gradient.contiguous(), None
        if sinks is not None:
            share = (sinks.to(lse.dtype) - lse).exp()
            of_sinks = -(share * (gradient * out).to(lse.dtype).sum(-1)).sum(0).to(sinks.dtype)
        given = TORCH.backward(gradient, q, k, v, out, lse, ctx.call, ctx.scores)
        return *given, of_sinks, None, None, None


# ---- a trial -----------------------------------------------------------------------------------------------------


def measure_gap(device: str, dtype: torch.dtype, width: int) -> float | str:
    """Return the largest relative difference to a matrix of scores, in output and gradients, or the error.

    Takes milliseconds.
    """
    try:
        generator, lengths = torch.Generator().manual_seed(0), (5, 20, 8)
        shapes = [(1, 4, 33, width), (1, 2, 33, width), (1, 2, 33, width), (4,)]
        drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
        distance = torch.arange(33, device=device)[:, None] - torch.arange(33, device=device)
        seen = (number[:, None] == number) & (distance >= 0) & (distance < 7)
        ends = torch.tensor([0, 5, 25, 33], dtype=torch.int32, device=device)
        inputs = [t.clone().requires_grad_() for t in drawn]
        ours = attend(inputs[0], inputs[1], inputs[2], inputs[3], None, (6, 0), Pack(ends, 20, None))
        expected_inputs = [t.float().requires_grad_() for t in drawn]
        q, k, v, sinks = expected_inputs
        expected = attend_in_one_process(q, k, v, seen[None, None], 0.0, None, None, sinks, True)
        ours.backward(torch.ones_like(ours))
        expected.backward(torch.ones_like(expected))
        pairs = [(ours, expected), *((a.grad, b.grad) for a, b in zip(inputs, expected_inputs, strict=True))]
        found = [(a.detach().float(), b.detach()) for a, b in pairs if a is not None and b is not None]
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in found)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return str(error).strip().splitlines()[0]


_ONE = Shape(1, 1)


@dataclass(eq=False)
class Documents:
    """Who sees whom in a batch, in the place of a mask; made once for all layers, and there for a recomputed one."""

    layout: Layout
    _packs: dict[torch.device, Pack] = field(default_factory=dict)
    _given: tuple[torch.Tensor, Documents] | None = None

    @classmethod
    def of(cls, rows: list[Row]) -> Documents:
        """Make documents of these rows."""
        return cls(Layout(rows, _ONE, rows[0].length))

    def pack(self, device: torch.device) -> Pack:
        """Return the documents as the variable-length kernel wants them; made once per batch."""
        if device not in self._packs:
            rows, tokens = self.layout.rows, None
            lengths = torch.tensor([length for row in rows for length in row.lengths])
            boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            if any(row.order is not None for row in rows):  # documents do not stand in the order of their rows
                orders = [torch.arange(row.length) if row.order is None else row.order for row in rows]
                both = enumerate(zip(rows, orders, strict=True))
                inside = [order[: sum(row.lengths)] + i * row.length for i, (row, order) in both]
                tokens = upload(torch.cat(inside), device)
            self._packs[device] = Pack(upload(boundaries, device), int(lengths.max()), tokens)
        return self._packs[device]

    def within(self, boundaries: torch.Tensor | None) -> Documents:
        """Return these documents, or where nothing told any, the ones that `cu_seq_lens_q` gives."""
        row, *others = self.layout.rows
        if boundaries is None or others or row.lengths != (row.length,):
            return self
        if self._given is None or self._given[0] is not boundaries:
            self._given = boundaries, Documents.of(find((1, self.layout.length), None, None, boundaries))
        return self._given[1]


def register_torch_flash() -> None:
    """Put both into the registries; a second time changes nothing."""
    AttentionInterface.register(NAME, run_flash_attention)
    AttentionMaskInterface.register(NAME, make_flash_mask)


# ---- who sees whom -----------------------------------------------------------------------------------------------


def make_flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> object:
    """Return the documents of a batch; of calls with a cache, what scaled-dot-product attention takes."""
    if kwargs.get("use_vmap"):
        _refuse_call("a mask that the model or script made itself")
    if q_length != kv_length or not (isinstance(q_offset, int) and q_offset == kv_offset == 0):
        if mask_function is not None:
            kwargs["mask_function"] = mask_function
        return AttentionMaskInterface()["sdpa"](
            *(batch_size, q_length, kv_length, q_offset, kv_offset), attention_mask=attention_mask, **kwargs
        )
    if attention_mask is not None and is_hiding_nothing(attention_mask):
        attention_mask = None
    causal = "allow_is_bidirectional_skip" not in kwargs
    if causal and mask_function is not None and not kwargs.get("allow_is_causal_skip", True):
        # The document of each token [rows, length], on the host: a new one where it does not see the token before.
        row = torch.arange(batch_size, device=kwargs["device"])[:, None]
        later, head = torch.arange(1, q_length, device=kwargs["device"])[None], torch.zeros_like(row)
        pairs = mask_function(row, head, later, later - 1), mask_function(row, head, later - 1, later)
        sees_before, sees_later = torch.stack([seen.expand(batch_size, q_length - 1) for seen in pairs]).cpu()
        if bool(sees_later.any()):
            _refuse_call("tokens that see later ones, such as those of an image,")
        numbers = F.pad((~sees_before).cumsum(-1), (1, 0))
        if attention_mask is not None:
            numbers = numbers.masked_fill(~attention_mask.bool().cpu(), -1)
        return Documents.of(read_numbered_rows(numbers))
    shape = batch_size, q_length
    return Documents.of(make_unpacked_rows(*shape) if attention_mask is None else find(shape, attention_mask, None))


def _refuse_call(what: str) -> None:
    raise NotImplementedError(
        f"hf_parallel: attention=torch_flash: {what} no flash kernel knows; attention=sdpa works"
    )


# ---- the attention -----------------------------------------------------------------------------------------------


@torch.compiler.disable
def run_flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Documents | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """[b, h, n, d] queries, [b, h / g, n, d] keys and values -> [b, n, h, d]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = cast_as_autocast(query), cast_as_autocast(key), cast_as_autocast(value)
    if isinstance(attention_mask, Documents):
        documents = attention_mask
    elif attention_mask is None and query.shape[2] == key.shape[2] > 1:  # no mask: rows of one document
        documents = Documents.of(make_unpacked_rows(query.shape[0], query.shape[2]))
    else:
        out = attend_in_one_process(query, key, value, attention_mask, dropout, scaling, softcap, s_aux, causal)
        return out.transpose(1, 2).contiguous(), None
    documents = documents.within(cu_seq_lens_q)
    low, high = compute_limits(causal, sliding_window, documents.layout)
    separate = all(row.lengths == (row.length,) for row in documents.layout.rows)
    if separate and s_aux is None and softcap is None and high == float("inf"):
        out = attend_in_one_process(query, key, value, None, dropout, scaling, None, None, causal)
        return out.transpose(1, 2).contiguous(), None
    if dropout or softcap is not None:
        _refuse_call("dropout or a soft cap of scores")
    width, scale = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = pad_to_one_width(query, key, value)
    if can_take_queries(q):
        # Tokens before and after a query that it sees; -1 for all.
        window = (-1 if high == float("inf") else int(high), -1 if low == -float("inf") else int(-low))
        out = attend(q, k, v, s_aux, scale, window, documents.pack(q.device))
        return out[..., :width].transpose(1, 2).contiguous(), None
    ring = Ring(documents.layout, None, low, high)
    if all(row.order is None for row in documents.layout.rows):  # documents stand in the order of their rows
        out = RingAttention.apply(q, k, v, s_aux, Scores(scale), ring)
        return out[..., :width].transpose(1, 2).contiguous(), None
    table, inverse = ring.layout.on(q.device)
    row = torch.arange(len(table), device=q.device)[:, None]
    q, k, v = (t.transpose(1, 2)[row, table.flatten(1)].transpose(1, 2) for t in (q, k, v))
    out = RingAttention.apply(q, k, v, s_aux, Scores(scale), ring).transpose(1, 2)[row, inverse]
    return out[..., :width].contiguous(), None
