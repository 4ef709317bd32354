"""Flash attention of many sequences in one call: torch's own kernel, and those of flash-attn 2 and 3.

    tokens [t, h, d], [m, h / g, d]      log-sum-exp [h, t] in fp32      windows from the ends of queries and keys

All are the same algorithm with arguments of other names. They take grouped keys as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
from packaging.version import Version

from hf_parallel.axes.context.kernels import Scores, Tensors
from hf_parallel.axes.context.layout import Ring
from hf_parallel.axes.context.packs import Call

_aten = torch.ops.aten
_FLASH_ATTN, _FLASH_ATTN_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
WIDEST = 256
#: The gradient of the output, then q, k, v, the output and the log-sum-exp over all keys.
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def can_take_queries(q: torch.Tensor) -> bool:
    """Do the kernels take queries of this kind?"""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8:
        return False
    return q.shape[-1] <= compute_widest_head(torch.cuda.get_device_capability(q.device))


def compute_widest_head(capability: tuple[int, int]) -> int:
    """Return the widest head of which the kernel computes gradients; there is no kernel before 8.0."""
    return WIDEST if capability >= (8, 0) else 0


def find_reason_of_age(name: str) -> str | None:
    """Return why an installed package is too old to be called; None if it is not."""
    if name != "flash_attention_2":
        return None
    try:
        found = version("flash-attn")
    except PackageNotFoundError:  # said where packages are looked for
        return None
    return f"flash-attn {found} is older than 2.7" if Version(found) < Version("2.7") else None


class Flash:
    """The base of the flash kernels."""

    flat: ClassVar[bool] = True
    #: What each package calls its kernels: of q, k and v, the call, the scale of scores and their cap, 0 without.
    _forward: Callable[[Tensors, Call, float, float], tuple[torch.Tensor, torch.Tensor]]
    _backward: Callable[[Given, Call, float, float], Tensors]

    def parts(self, ring: Ring, keys: int, scores: Scores, device: torch.device) -> Iterable[Call]:
        """Return a call for each window."""
        return ring.layout.calls(ring.rank, keys, ring.low, ring.high, device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Call, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [t, h, d] and the log-sum-exp [t, h] in fp32."""
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        out, lse = self._forward((q, k, v), part, scale, scores.cap or 0.0)
        return out, lse.T

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: Call,
        scores: Scores,
    ) -> Tensors:
        """Return the call's share of the gradients of q, k and v."""
        given = gradient.contiguous(), q, k, v, out.contiguous(), lse.T.contiguous()
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        return self._backward(given, part, scale, scores.cap or 0.0)


class TorchFlash(Flash):
    """torch's own, which has no soft cap."""

    def _forward(self, given: Tensors, call: Call, scale: float, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        return _aten._flash_attention_forward(
            *(*given, *call.ends, *call.longest, 0.0, call.causal, False), scale=scale, **_make_side_arguments(call)
        )[:2]

    def _backward(self, given: Given, call: Call, scale: float, cap: float) -> Tensors:
        lse = given[-1]
        random = lse.new_empty(2, dtype=torch.uint64), lse.new_empty((), dtype=torch.uint64)  # of dropout: never read
        return _aten._flash_attention_backward(
            *(*given, *call.ends, *call.longest, 0.0, call.causal, *random), scale=scale, **_make_side_arguments(call)
        )


class FlashAttention2(Flash):
    """The kernels of the package flash-attn, since 2.7."""

    def _forward(self, given: Tensors, call: Call, scale: float, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        forward = importlib.import_module(_FLASH_ATTN)._flash_attn_varlen_forward
        told = {"dropout_p": 0.0, "softmax_scale": scale, "causal": call.causal, "softcap": cap}
        return forward(*given, *call.ends, *call.longest, **told, **_make_side_arguments(call))[:2]

    def _backward(self, given: Given, call: Call, scale: float, cap: float) -> Tensors:
        _, q, k, v, _, _ = given
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        importlib.import_module(_FLASH_ATTN)._flash_attn_varlen_backward(
            *(*given, *found, *call.ends, *call.longest),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            softcap=cap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_make_side_arguments(call),
        )
        return found


class FlashAttention3(Flash):
    """The kernels of the package flash-attn-3: the operators that its module registers, as torch calls them."""

    def _forward(self, given: Tensors, call: Call, scale: float, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        importlib.import_module(_FLASH_ATTN_3)  # registers the operators
        forward = torch.ops.flash_attn_3.fwd
        return forward(*given, softmax_scale=scale, softcap=cap, **_describe_call(call))[:2]

    def _backward(self, given: Given, call: Call, scale: float, cap: float) -> Tensors:
        _, q, k, v, _, _ = given
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        importlib.import_module(_FLASH_ATTN_3)
        torch.ops.flash_attn_3.bwd(
            *(*given, *found),
            softmax_scale=scale,
            softcap=cap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_describe_call(call),
        )
        return found


def _make_side_arguments(call: Call) -> dict[str, int]:
    return {"window_size_left": call.window[0], "window_size_right": call.window[1]}


def _describe_call(call: Call) -> dict[str, Any]:
    """Return lengths and window as flash-attn 3 calls them."""
    (of_q, of_k), (longest_q, longest_k) = call.ends, call.longest
    lengths = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    return {**lengths, "is_causal": call.causal, **_make_side_arguments(call)}


TORCH = TorchFlash()
#: By what `attention=` calls them.
PACKAGES: dict[str, Flash] = {"flash_attention_2": FlashAttention2(), "flash_attention_3": FlashAttention3()}
