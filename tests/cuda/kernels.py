"""Kernels that CUDA has and the CPU lacks, with CUDA's own conditions: computed on the host in fp64.

Registered as torch's operators when this is imported. They wait for nothing: `native.touch` tells the clocks of
streams what they read, `native.to_device` what they make.
"""

from __future__ import annotations

import pretended_cuda as native
import torch

_library = torch.library.Library("aten", "IMPL")
_OPEN = (-1, -1)


def _on_host(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Views of the same memory on the host; all must lie on one device."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, found {devices}")
    for t in tensors:
        if t is not None:
            native.touch(t, False)
    return [None if t is None else native.host_view(t) for t in tensors]


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Of whole numbers too."""
    (values,) = _on_host(x)
    return native.to_device(torch.histc(values.float(), bins, min, max).to(x.dtype))


def _scores(q, k, bias, causal, scale, window=_OPEN, from_the_end=False):
    scores = q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if causal or window != _OPEN:
        queries, keys = scores.shape[-2:]
        distance = torch.arange(queries)[:, None] + (keys - queries if from_the_end else 0) - torch.arange(keys)
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if window[0] >= 0:
            hidden |= distance > window[0]
        if window[1] >= 0:
            hidden |= distance < -window[1]
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _attend(q, k, v, *rest):
    scores = _scores(q, k, *rest)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num(0) @ v.double(), lse


def _attend_backward(gradient, q, k, v, out, lse, bias, causal, scale, *rest):
    scores = _scores(q, k, bias, causal, scale, *rest)
    weights = (scores - lse.double()[..., None]).exp().nan_to_num(0, 0, 0)
    gradient, scale = gradient.double(), q.shape[-1] ** -0.5 if scale is None else scale
    inner = gradient @ v.double().transpose(-1, -2) - (gradient * out.double()).sum(-1, keepdim=True)
    of_scores = weights * inner
    of_q, of_k = of_scores @ k.double() * scale, of_scores.transpose(-1, -2) @ q.double() * scale
    return of_q, of_k, weights.transpose(-1, -2) @ gradient


def efficient(q, k, v, bias, compute, dropout=0.0, causal=False, *, scale=None):
    """The log-sum-exp is padded to 32, the padding is not filled; a bias is expanded and its rows are aligned."""
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]), "attn_bias must be expanded"
        assert bias.dtype == q.dtype, "attn_bias has another dtype"
        assert bias.stride(2) % (4 if q.dtype == torch.float32 else 8) == 0, "attn_bias is not aligned"
    out, lse = _attend(*_on_host(q, k, v, bias), causal, scale)
    lse = torch.nn.functional.pad(lse.float(), (0, -q.shape[2] % 32), value=float("nan"))
    made = native.to_device(out.to(q.dtype).transpose(1, 2)).transpose(1, 2)
    seed = torch.empty((), dtype=torch.long, device=q.device)
    return made, native.to_device(lse), seed, torch.empty_like(seed)


def efficient_backward(gradient, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    """Takes the log-sum-exp as it was given."""
    assert lse.shape[2] % 32 == 0, "log-sum-exp is not padded"
    assert lse.is_contiguous(), "log-sum-exp is not contiguous"
    gradient, q, k, v, out, lse, bias = _on_host(gradient, q, k, v, out, lse, bias)
    found = _attend_backward(gradient, q, k, v, out, lse[..., : q.shape[2]], bias, causal, scale)
    return (*(native.to_device(x.to(q.dtype)) for x in found), None)


def _check_flash(q, k, v, ends_q, ends_k):
    assert q.dtype in (torch.float16, torch.bfloat16), "flash attention takes fp16 and bf16"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous"
    assert q.shape[-1] % 8 == 0, "the width of heads is no multiple of 8"
    assert q.shape[-1] <= 256, "heads are wider than 256"
    assert ends_q.dtype == ends_k.dtype == torch.int32, "ends of sequences are int32"


def _sequences(ends_q, ends_k, longest_q, longest_k):
    assert int(ends_q.diff().max()) <= longest_q, "a sequence has more queries than it is said"
    assert int(ends_k.diff().max()) <= longest_k, "a sequence has more keys than it is said"
    pairs = zip(ends_q.tolist(), ends_q.tolist()[1:], ends_k.tolist(), ends_k.tolist()[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a and d > c]


def _sides(left, right):
    return -1 if left is None else left, -1 if right is None else right


def _turned(x, part, groups=1):
    return x[part].transpose(0, 1).repeat_interleave(groups, 0)


def flash(
    *given, scale=None, window_size_left=None, window_size_right=None, **more
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences behind each other, grouped keys, windows from the ends of both."""
    q, k, v, ends_q, ends_k, longest_q, longest_k, _, causal, _ = given
    _check_flash(q, k, v, ends_q, ends_k)
    dtype, device = q.dtype, q.device
    q, k, v, ends_q, ends_k = _on_host(q, k, v, ends_q, ends_k)
    out, lse = torch.zeros(*q.shape[:2], v.shape[-1]), torch.full((q.shape[1], q.shape[0]), float("inf"))
    groups, window = q.shape[1] // k.shape[1], _sides(window_size_left, window_size_right)
    for own, keys in _sequences(ends_q, ends_k, longest_q, longest_k):
        parts = _turned(q, own), _turned(k, keys, groups), _turned(v, keys, groups)
        one, sums = _attend(*parts, None, causal, scale, window, True)
        out[own] = one.transpose(0, 1).float()
        lse[:, own] = sums.float().masked_fill(sums == float("-inf"), float("inf"))
    seed = torch.empty(2, dtype=torch.uint64, device=device)
    return native.to_device(out.to(dtype)), native.to_device(lse), seed, seed[0], torch.empty(0, device=device)


def flash_backward(
    *given, scale=None, window_size_left=None, window_size_right=None, **more
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its gradients."""
    gradient, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, _, causal, *_ = given
    _check_flash(q, k, v, ends_q, ends_k)
    assert lse.shape == (q.shape[1], q.shape[0]), "the log-sum-exp is not [heads, tokens]"
    assert lse.dtype == torch.float32, "the log-sum-exp is not in fp32"
    gradient, q, k, v, out, lse, ends_q, ends_k = _on_host(gradient, q, k, v, out, lse, ends_q, ends_k)
    of_q, of_k, of_v = (torch.zeros(x.shape, dtype=torch.double) for x in (q, k, v))
    groups, window = q.shape[1] // k.shape[1], _sides(window_size_left, window_size_right)
    for own, keys in _sequences(ends_q, ends_k, longest_q, longest_k):
        parts = _turned(q, own), _turned(k, keys, groups), _turned(v, keys, groups), _turned(out, own)
        one = _attend_backward(_turned(gradient, own), *parts, lse[:, own], None, causal, scale, window, True)
        of_q[own] += one[0].transpose(0, 1)
        of_k[keys] += one[1].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
        of_v[keys] += one[2].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(native.to_device(x.to(q.dtype)) for x in (of_q, of_k, of_v))


for _name, _kernel in {
    "histc": histc,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}.items():
    _library.impl(_name, _kernel, "CUDA")
