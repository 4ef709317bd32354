"""The kernels of attention by blocks, and the seam that they stand behind.

    kernel                        runs on                    of a block                windows          soft caps
    `Tiles` (`tiled.py`)          CPU; CUDA in fp32          tile by tile              a mask per band  in squares
    `TorchFlash` (`flash.py`)     CUDA of 8.0, 16 bits       one call per window       yes              no: `Tiles`
    `FlashAttention2`             the same, flash-attn       one call per window       yes              yes
    `FlashAttention3`             CUDA of 9.0, flash-attn-3  one call per window       yes              yes

Each gives the output and the log-sum-exp of its queries' scores, and builds no matrix of scores beyond a square of
soft caps. The backward pass takes the log-sum-exp over all keys instead of the part's, and the output over all keys:
its result is then the part's share of the gradients, and shares add up.

A kernel of torch is taken by what it computes with, those of packages only where `attention=` names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from hf_parallel.axes.context.layout import Ring

Part = TypeVar("Part")  # what a kernel computes in one call
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """The scaling of the products of queries and keys: by default times d^-1/2, and no soft cap."""

    scale: float | None = None
    cap: float | None = None


class Kernel(Protocol[Part]):
    """Attention of parts of queries and keys.

    `flat`: it takes tokens [t, h, d] and has log-sum-exps [t, h]; others take rows [b, h, n, d] and have [b, h, n].
    Keys and values have h / g heads.
    """

    flat: ClassVar[bool]

    def parts(self, ring: Ring, keys: int, scores: Scores, device: torch.device) -> Iterable[Part]:
        """Yield the parts that a rank computes with the keys of ring rank `keys`, as this kernel's calls want them."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, and log-sum-exp in fp32."""

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        part: Part,
        scores: Scores,
    ) -> Tensors:
        """Return the part's share of the gradients of q, k and v; `out` and `lse` are over all keys."""


def read_alignment(device: torch.device) -> int:
    """Return the number of which the width of a head has to be a multiple."""
    return 1 if device.type == "cpu" else 8


def repeat_per_query_head(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values [b, h / g, m, d], each as often as queries [b, h, n, d] read it."""
    groups = q.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, 1)
