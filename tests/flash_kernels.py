"""The flash kernels of a GPU in arithmetic, behind the very signatures that torch and the packages give them.

    with standing_in():                              # torch's operators on the CPU, flash_attn, flash_attn_interface
        aten._flash_attention_forward(…)             # the dispatcher checks names, kinds and the number of arguments

What these check besides: layouts, dtypes, boundaries, who has to be contiguous. Of a window that is as large as the
longest keys, or open on one side, they make what the real ones make. A query that sees no key has a log-sum-exp of
+inf, as there.
"""

import contextlib
import sys
import types
from unittest import mock

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.context import attention, flash, kernels
from hf_parallel.plans.resolve import read_model, resolve
from tests import models

_FA3 = """(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None,
Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,
Tensor? cu_seqlens_k_new = None,
Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,
Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None,
Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None,
Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False,
Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0)
-> (Tensor(out!), Tensor, Tensor, Tensor)"""
_FA3_BACKWARD = """(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None,
Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,
Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,
float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1,
float softcap = 0.0, bool deterministic = False, int sm_margin = 0)
-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"""


def check(q, k, v, ends_q, ends_k, longest_q, longest_k, scale):
    """What the kernels refuse."""
    assert q.dim() == k.dim() == 3
    assert all((k.shape == v.shape, q.shape[2] == k.shape[2]))
    assert all((q.shape[1] % k.shape[1] == 0, q.shape[2] % 8 == 0, q.shape[2] <= 256))
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert isinstance(scale, float)
    for ends, tensor, longest in ((ends_q, q, longest_q), (ends_k, k, longest_k)):
        assert all((ends.dtype == torch.int32, ends.is_contiguous()))
        assert all((ends[0] == 0, ends[-1] == len(tensor), (ends.diff() > 0).all()))
        assert all((type(longest) is int, longest >= ends.diff().max()))


def seen(ends_q, ends_k, longest_k, causal, left, right):
    """[queries, keys]: who sees whom, as `set_params_fprop` and the masks of flash attention have it."""
    right = 0 if causal else right
    left, right = (-1 if side >= longest_k else side for side in (left, right))
    if left < 0 <= right:
        left = longest_k
    elif right < 0 <= left:
        right = longest_k
    found = torch.zeros(int(ends_q[-1]), int(ends_k[-1]), dtype=torch.bool)
    for i in range(len(ends_q) - 1):
        q, k = (slice(int(ends[i]), int(ends[i + 1])) for ends in (ends_q, ends_k))
        n, m = q.stop - q.start, k.stop - k.start
        after = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
        found[q, k] = ((right < 0) | (after <= right)) & ((left < 0) | (after >= -left))
    return found


def scores(q, k, ends_q, ends_k, longest_k, scale, causal, left, right, cap):
    """[h, queries, keys], -inf where nobody looks; and the slope of the soft cap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    found = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    slope = torch.full_like(found, scale)
    if cap:
        slope, found = (1 - (found / cap).tanh().square()) * scale, (found / cap).tanh() * cap
    return found.masked_fill(~seen(ends_q, ends_k, longest_k, causal, left, right), -torch.inf), slope


def forward(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, causal, left, right, cap):
    """Output [t, h, d] and log-sum-exp [h, t]."""
    check(q, k, v, ends_q, ends_k, longest_q, longest_k, scale)
    dtype, (q, k, v) = q.dtype, (t.float() for t in (q, k, v))
    found, _ = scores(q, k, ends_q, ends_k, longest_k, scale, causal, left, right, cap)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
    out, lse = found.softmax(-1).nan_to_num() @ values, found.logsumexp(-1).float()
    return out.transpose(0, 1).to(dtype).contiguous(), lse.masked_fill(lse == -torch.inf, torch.inf)


def backward(gradient, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, scale, causal, left, right, cap):
    """By the log-sum-exp and output that are given, as flash attention does."""
    check(q, k, v, ends_q, ends_k, longest_q, longest_k, scale)
    assert all((gradient.shape == out.shape == q.shape, gradient.is_contiguous(), out.stride(-1) == 1))
    assert gradient.dtype == out.dtype == q.dtype
    assert all((lse.shape == (q.shape[1], q.shape[0]), lse.is_contiguous(), lse.dtype == torch.float32))
    dtype, (gradient, q, k, v, out) = q.dtype, (t.float() for t in (gradient, q, k, v, out))
    found, slope = scores(q, k, ends_q, ends_k, longest_k, scale, causal, left, right, cap)
    groups = q.shape[1] // k.shape[1]
    shares = (found - lse[..., None]).exp()
    gradient, out = gradient.transpose(0, 1), out.transpose(0, 1)
    values = v.repeat_interleave(groups, 1).transpose(0, 1)
    of_scores = shares * (gradient @ values.transpose(1, 2) - (gradient * out).sum(-1, keepdim=True)) * slope
    of_q = of_scores @ k.repeat_interleave(groups, 1).transpose(0, 1)
    of_k, of_v = of_scores.transpose(1, 2) @ q.transpose(0, 1), shares.transpose(1, 2) @ gradient
    of_k, of_v = (t.unflatten(0, (-1, groups)).sum(1) for t in (of_k, of_v))
    return tuple(t.transpose(0, 1).to(dtype).contiguous() for t in (of_q, of_k, of_v))


# ---- torch ---------------------------------------------------------------------------------------------------------


def _torch_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    assert all((dropout_p == 0, not return_debug_mask))
    ends = cum_seq_q, cum_seq_k, max_q, max_k
    out, lse = forward(query, key, value, *ends, scale, is_causal, window_size_left, window_size_right, 0.0)
    state = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, *state, torch.empty(0, dtype=query.dtype)


def _torch_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert all((dropout_p == 0, rng_state.dtype == unused.dtype == torch.uint64, rng_state.shape == (2,)))
    given = grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k
    return backward(*given, scale, is_causal, window_size_left, window_size_right, 0.0)


# ---- flash-attn 2.7 and later -------------------------------------------------------------------------------------


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert dropout_p == 0
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    out, lse = forward(q, k, v, *given, window_size_left, window_size_right, softcap)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert all((dropout_p == 0, alibi_slopes is None, isinstance(deterministic, bool)))
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    found = backward(dout, q, k, v, out, softmax_lse, *given, window_size_left, window_size_right, softcap)
    for place, value in zip((dq, dk, dv), found, strict=True):
        place.copy_(value)
    return torch.empty(0)


# ---- flash-attn 3 --------------------------------------------------------------------------------------------------


def _fwd(
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0,
):  # fmt: skip
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal
    found = forward(q, k, v, *given, window_size_left, window_size_right, softcap)
    return (*found, torch.empty(0), torch.empty(0))


def _bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, softmax_scale, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    deterministic=False,
):  # fmt: skip
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal
    found = backward(dout, q, k, v, out, softmax_lse, *given, window_size_left, window_size_right, softcap)
    for place, value in zip((dq, dk, dv), found, strict=True):
        place.copy_(value)
    return (dq, dk, dv, *(torch.empty(0) for _ in range(5)))


def _library(name, kind, functions):
    made = torch.library.Library(name, kind)
    for operator, (schema, function) in functions.items():
        if schema:
            made.define(operator + " ".join(schema.split()))
        made.impl(operator, function, "CPU")
    return made


@contextlib.contextmanager
def standing_in(width=8):
    """All of them, on a CPU and in any dtype; `width`: what a head has to be a multiple of."""
    torchs = {"_flash_attention_forward": ("", _torch_forward), "_flash_attention_backward": ("", _torch_backward)}
    threes = {"fwd": (_FA3, _fwd), "bwd": (_FA3_BACKWARD, _bwd)}
    libraries = [_library("aten", "IMPL", torchs), _library("flash_attn_3", "DEF", threes)]
    two = types.ModuleType("flash_attn.flash_attn_interface")
    two._flash_attn_varlen_forward, two._flash_attn_varlen_backward = (
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    )
    modules = {two.__name__: two, "flash_attn": types.ModuleType("flash_attn")}
    modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
    patches = [mock.patch.dict(sys.modules, modules), mock.patch.object(flash, "can_take_queries", return_value=True)]
    patches += [mock.patch.object(module, "read_alignment", return_value=width) for module in (attention, kernels)]
    with contextlib.ExitStack() as stack:
        for library in libraries:
            stack.callback(library._destroy)
        for patch in patches:
            stack.enter_context(patch)
        yield


# ---- who may have them ---------------------------------------------------------------------------------------------


def plan(name, spec, **changes):
    """What is planned for a tiny model."""
    config = ParallelConfig.parse(spec)
    return resolve(config, read_model(models.build(name, **changes), config))


def check_refused(name, spec, words, **changes):
    """Fail unless the kernel of this spec is refused for the model, by its key and in these words."""
    with pytest.raises(SpecError) as caught:
        plan(name, spec, **changes)
    assert str(caught.value).startswith(f"attention={spec.partition('attention=')[2]}: ")
    assert all(word in str(caught.value) for word in words), caught.value
