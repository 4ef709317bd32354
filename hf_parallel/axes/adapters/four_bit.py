"""Frozen linears in 4 bits (Dettmers et al., 2023, QLoRA): one packed parameter per layer, cut over tp, then sharded.

    weight [out, in]  ->  codes of 4 bits, row after row: out · in / 2 bytes
                          the largest value of each block of 64 weights, in fp32: out · in / 16 bytes

Blocks run along rows, so a part of whole rows, or of columns in whole blocks, has the codes that the whole weight has
there: each rank packs its own part. To FSDP2 the bytes are a parameter like any other. A product unpacks the weight
for as long as it takes, and once more in the backward: bitsandbytes does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.axes.tensor.layers import (
    ColumnParallel,
    PartialGradient,
    RowParallel,
    SharedHeads,
    TensorParallelLayer,
    get_local,
    get_rows_on,
    sum_with_adapters,
)
from hf_parallel.ranks import copy_weight_to_group
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import make_class

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState


BLOCK = 64


@dataclass(frozen=True)
class Packing:
    """The way in which a weight was packed. `source` is on the meta device for the part that this rank has in full."""

    source: torch.Tensor
    quant_type: str  # nf4 or fp4
    double: bool  # the largest values were rounded to 8 bits
    compute_dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[out, in] of this rank's part."""
        return (self.source._local_tensor if isinstance(self.source, DTensor) else self.source).shape

    @property
    def nbytes(self) -> int:
        """Bytes of the packed part."""
        return self.shape.numel() // 2 + self.shape.numel() // BLOCK * 4

    def opened(self, packed: torch.Tensor) -> tuple[torch.Tensor, QuantState]:
        """Codes and bitsandbytes' description of them."""
        from bitsandbytes import functional

        codes, largest = packed.split([self.shape.numel() // 2, self.nbytes - self.shape.numel() // 2])
        state = functional.QuantState(
            absmax=largest.view(torch.float32),
            shape=self.shape,
            code=functional.get_4bit_type(self.quant_type, device=packed.device),
            blocksize=BLOCK,
            quant_type=self.quant_type,
            dtype=self.source.dtype,
        )
        return codes.unsqueeze(1), state


class _Product(torch.autograd.Function):
    """x […, in] -> […, out]; only the packed weight is kept for the backward."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, packed: torch.Tensor, packing: Packing) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        ctx.save_for_backward(packed)
        ctx.packing = packing
        codes, state = packing.opened(packed)
        return matmul_4bit(x, codes, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        (packed,) = ctx.saved_tensors
        return gradient @ dequantize_4bit(*ctx.packing.opened(packed)).to(gradient.dtype), None, None


class FourBit(nn.Module):
    """Mixin for a linear whose weight is packed."""

    packing: Packing
    weight: torch.Tensor
    bias: torch.Tensor | None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x […, in] times the weight of this rank, in `compute_dtype` whatever x has, as bitsandbytes does."""
        return _Product.apply(x.to(self.packing.compute_dtype), get_local(self.weight), self.packing).to(x.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _add_bias(self.product(input), self.bias)


class FourBitColumn(FourBit, ColumnParallel):
    """In front of a column-parallel linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _add_bias(self.product(self.region.enter(input)), get_local(self.bias))


class FourBitRow(FourBit, RowParallel):
    """In front of a row-parallel linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with sum_with_adapters(self):
            output = self.product(input)
        return output if self.adapted else self.leave(output)


class FourBitShared(FourBit, SharedHeads):
    """In front of a linear to heads that ranks share."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.product(self.region.enter(input))
        bias = None if self.bias is None else copy_weight_to_group(self.bias, self.region.group)
        return _add_bias(output, bias)[..., get_rows_on(self, input.device)]


class FourBitPartial(FourBit, TensorParallelLayer):
    """In front of a whole linear inside a region."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _add_bias(
            self.product(input), None if self.bias is None else copy_weight_to_group(self.bias, self.region.group)
        )


def _add_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output + bias.to(output.dtype)


_MIXINS: dict[type, type[FourBit]] = {
    ColumnParallel: FourBitColumn,
    RowParallel: FourBitRow,
    SharedHeads: FourBitShared,
}
_MIXINS |= {PartialGradient: FourBitPartial, nn.Linear: FourBit}


def pack_linear(
    module: nn.Linear | TensorParallelLayer, quant_type: str, double: bool, compute_dtype: torch.dtype
) -> None:
    """Let a linear that is split already, and on the meta device, expect and use a packed weight of whole blocks."""
    packing = Packing(module.weight.detach(), quant_type, double, compute_dtype)
    if isinstance(module, ColumnParallel | SharedHeads):
        module.region.lowers = False  # it computes in its own dtype, and gives that of its input
    if isinstance(module, ColumnParallel):
        del module.region.columns[module]
    mixin = next(mixin for kind, mixin in _MIXINS.items() if isinstance(module, kind))
    module._parameters["weight"] = nn.Parameter(
        torch.empty(packing.nbytes, dtype=torch.uint8, device="meta"), requires_grad=False
    )
    front: type = mixin
    behind: type = type(module)
    module.__class__ = make_class(f"{front.__name__}{behind.__name__}", behind.__module__, front, behind)
    assert isinstance(module, FourBit)
    module.packing = packing
