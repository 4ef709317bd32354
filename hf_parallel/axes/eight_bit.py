"""Linears that multiply in 8 bits while their weights, outputs and gradients keep their own dtype: torchao's recipes.

Operands are scaled, rounded to 8 bits and multiplied; the product is scaled back. A scale is the largest number of a
whole operand, or of each of its rows along the dim that a product sums over:

    product        operands           sums over    a tp rank lacks part of what its scales are made of
    output         x [tokens, in]     in           x and the weight of a row-parallel layer
                   w [out, in]
    grad input     g [tokens, out]    out          g and the weight of a column-parallel layer
                   w [out, in]
    grad weight    g [tokens, out]    tokens       neither
                   x [tokens, in]

There ranks agree on the largest number first (`Split`), so that all round as one process would; with one scale for a
whole operand that holds for whatever operand is cut. Casts, scales and products themselves are torchao's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ranks import all_reduce
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import cast_as_autocast, switch_autocast_off

if TYPE_CHECKING:
    from torchao.float8.config import CastConfig
    from torchao.float8.float8_training_tensor import Float8TrainingTensor


class GatheredInput(Protocol):
    """An input that was gathered from parts of tp ranks, of which the backward pass gathers it again."""

    def read_by(self, reader: Context, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Return the part, [tokens / tp, in], in the dtype of the product, and what gathers it again."""


#: Dims of the three operands.
X, W, G = ("tokens", "in"), ("out", "in"), ("tokens", "out")
#: What torch's scaled products want sizes to be multiples of.
ALIGNED = 16
#: Of the two operands of a product, where others use them again.
Scales = tuple[torch.Tensor | None, torch.Tensor | None]


class Split(NamedTuple):
    """The dim of which the ranks of a group hold parts."""

    dim: str | None = None
    group: dist.ProcessGroup | None = None

    def agree(self, largest: torch.Tensor, over: tuple[str, ...]) -> torch.Tensor:
        """Return the largest numbers over these dims, if a rank sees a part of one only."""
        if self.group is None or self.dim not in over:
            return largest
        return all_reduce(largest.float(), self.group, dist.ReduceOp.MAX).to(largest.dtype)


WHOLE = Split()


def find_largest_number(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the largest number of a tensor, or of each row along `dim`."""
    if not tensor.numel():  # a rank without rows
        return tensor.new_zeros(() if dim is None else [1 if d == dim % 2 else n for d, n in enumerate(tensor.shape)])
    return tensor.abs().max() if dim is None else tensor.abs().amax(dim, keepdim=True)


@functools.cache
def _import_torchao() -> None:
    """Import torchao without its warnings of files for other GPUs and Pythons, which no recipe here calls."""
    log = logging.getLogger("torchao")
    former = log.level
    log.setLevel(logging.ERROR)
    try:
        import torchao  # noqa: F401
    finally:
        log.setLevel(former)


class Float8:
    """Products of fp8 numbers: torchao's Float8LinearConfig of the same name.

    Args:
        scaling: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`.
        emulated: multiply the rounded numbers in fp32, where there are no fp8 products.
    """

    def __init__(self, scaling: str, emulated: bool) -> None:
        _import_torchao()
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

        self.config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulated)
        self.tensorwise = scaling == "tensorwise"
        self._roles = {X: GemmInputRole.INPUT, W: GemmInputRole.WEIGHT, G: GemmInputRole.GRAD_OUTPUT}
        kinds = [self.config.gemm_config_output, self.config.gemm_config_grad_input]
        sure = [ScaledMMConfig(emulated, kind.use_fast_accum, False, False) for kind in kinds]
        fast = self.config.gemm_config_grad_weight.use_fast_accum
        #: By whether the number of tokens, which a weight's gradient sums over, has to be filled up.
        self._products = [LinearMMConfig(*sure, ScaledMMConfig(emulated, fast, False, padded)) for padded in (0, 1)]

    def compiled(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a linear that torch.compile can take apart: torchao's own."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        config = dataclasses.replace(self.config, pad_inner_dim=not self.config.emulate)
        mm = [part._replace(pad_inner_dim=not self.config.emulate) for part in self._products[0]]
        output = matmul_with_hp_or_float8_args.apply(x, weight.t(), type(self._products[0])(*mm), config)
        return output if bias is None else output + bias.to(output.dtype)

    def output(self, x: torch.Tensor, weight: torch.Tensor, split: Split) -> tuple[torch.Tensor, Scales]:
        """x Wᵀ, and the scales that its gradients use again."""
        c = self.config
        rows = self.cast(x, X, "in", c.cast_config_input, split)
        columns = self.cast(weight, W, "in", c.cast_config_weight, split)
        return torch.mm(rows, columns.t()), (rows._scale, columns._scale) if self.tensorwise else (None, None)

    def grad_input(
        self, gradient: torch.Tensor, weight: torch.Tensor, split: Split, scales: Scales
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """g W, and what `grad_weight` may use of g in the place of g."""
        c = self.config
        rounded = self.cast(gradient, G, "out", c.cast_config_grad_output, split)
        weight = self.cast(weight, W, "out", c.cast_config_weight_for_grad_input, split, scales[1])
        return torch.mm(rounded, weight), rounded if self.tensorwise else gradient

    def grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, split: Split, scales: Scales) -> torch.Tensor:
        """gᵀ x."""
        c = self.config
        gradient = self.cast(gradient, G, "tokens", c.cast_config_grad_output_for_grad_weight, split)
        x = self.cast(x, X, "tokens", c.cast_config_input_for_grad_weight, split, scales[0])
        return torch.mm(gradient.t(), x)

    def cast(
        self,
        tensor: torch.Tensor,
        dims: tuple[str, str],
        over: str,
        how: CastConfig,
        split: Split,
        scale: torch.Tensor | None = None,
    ) -> Float8TrainingTensor:
        """Return an operand with these dims in fp8, scaled as `how` says; its product sums over the dim `over`."""
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        if isinstance(tensor, Float8TrainingTensor) or how.scaling_type is ScalingType.DISABLED:
            return tensor
        whole = how.scaling_granularity is ScalingGranularity.TENSORWISE
        dim = None if whole else 0 if dims[0] == over else -1
        if scale is None:
            largest = split.agree(find_largest_number(tensor, dim), dims if whole else (over,))
            scale = amax_to_scale(largest, how.target_dtype, self.config.round_scales_to_power_of_2)
        products = self._products[dims != W and tensor.shape[0] % ALIGNED != 0]
        return hp_tensor_and_scale_to_float8(tensor, scale, how.target_dtype, products, self._roles[dims], dim)

    def of_codes(
        self, codes: torch.Tensor, scale: torch.Tensor, dims: tuple[str, str], dtype: torch.dtype
    ) -> Float8TrainingTensor:
        """Return the operand that `cast` would make of numbers in `dtype`."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor

        products = self._products[dims != W and codes.shape[0] % ALIGNED != 0]
        return Float8TrainingTensor(codes, scale, dtype, products, self._roles[dims])


class Int8:
    """Products of int8 numbers, scaled by row: torchao's Int8MixedPrecisionTrainingConfig.

    Args:
        scaling: `rowwise`, or `rowwise_with_gw_hp`, which leaves gradients of weights as they are.
    """

    def __init__(self, scaling: str) -> None:
        _import_torchao()
        self.rounds_grad_weight = scaling != "rowwise_with_gw_hp"

    def compiled(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a linear that torch.compile can take apart: torchao's own."""
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision

        config = Int8MixedPrecisionTrainingConfig(grad_weight=self.rounds_grad_weight)
        return int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction.apply(x, weight, bias, config)

    def output(self, x: torch.Tensor, weight: torch.Tensor, split: Split) -> tuple[torch.Tensor, Scales]:
        """x Wᵀ."""
        return self._multiply_codes(x, weight.to(x.dtype), "in", split), (None, None)

    def grad_input(
        self, gradient: torch.Tensor, weight: torch.Tensor, split: Split, _: Scales
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """g W, and g for `grad_weight`."""
        weight = weight.to(gradient.dtype)
        return self._multiply_codes(gradient, weight.t(), "out", split), gradient

    def grad_weight(self, gradient: torch.Tensor, x: torch.Tensor, split: Split, _: Scales) -> torch.Tensor:
        """gᵀ x."""
        if not self.rounds_grad_weight:
            return gradient.t() @ x
        return self._multiply_codes(x.t(), gradient.t(), "tokens", split).t()

    def _multiply_codes(self, a: torch.Tensor, b: torch.Tensor, over: str, split: Split) -> torch.Tensor:
        """a bᵀ, of which the dim summed over is the last one."""
        from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

        codes, scales = [], []
        for rows in (a, b):  # as torchao's `quantize_int8_rowwise` makes codes and scales, of rows that may be cut
            scale = split.agree(find_largest_number(rows, -1), (over,)) / 127
            rounded = (rows.float() * (1.0 / scale.float().clip(1e-12))).round().clip(-128, 127).to(torch.int8)
            codes.append(rounded.contiguous())
            scales.append(scale.flatten().contiguous())
        return scaled_int8_mm(codes[0], codes[1].t(), *scales)


Recipe: TypeAlias = Float8 | Int8


class EightBit(nn.Module):
    """Mixin for a linear that multiplies in 8 bits; a split one does so in its own forward (`axes/tensor`)."""

    recipe: Recipe
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.recipe)


def recipe_of(module: nn.Module) -> Recipe | None:
    """Return how a module multiplies in 8 bits, or None."""
    return module.recipe if isinstance(module, EightBit) else None


def tensorwise(module: nn.Module) -> Float8 | None:
    """Return how a module multiplies in 8 bits with one scale for a whole operand, or None."""
    recipe = recipe_of(module)
    return recipe if isinstance(recipe, Float8) and recipe.tensorwise else None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    split: Split = WHOLE,
    codes: Float8TrainingTensor | None = None,
    origin: GatheredInput | None = None,
) -> torch.Tensor:
    """`F.linear` of local tensors by a recipe.

    Args:
        codes: what stands for `x` in the product, as [tokens, in].
        origin: what to keep in the place of `x`, as `gather_recompute.py` has it.
    """
    x = cast_as_autocast(x)
    if torch.compiler.is_compiling() and split is WHOLE:
        return recipe.compiled(x, weight, bias)
    output = _Linear.apply(x, weight, recipe, split, codes, origin)
    return output if bias is None else output + bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    """x […, in], weight [out, in] -> […, out]."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        recipe: Recipe,
        split: Split,
        codes: Float8TrainingTensor | None,
        origin: GatheredInput | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.split, ctx.dtype = recipe, split, x.dtype
        with switch_autocast_off(x.device.type):
            output, ctx.scales = recipe.output(x.flatten(0, -2) if codes is None else codes, weight, split)
        kept, ctx.gathered_again = x, None
        if origin is not None:
            kept, ctx.gathered_again = origin.read_by(ctx, x.dtype if codes is None else torch.uint8)
        ctx.coded = None if codes is None else codes._data.dtype
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        ctx.save_for_backward(kept if weight_wanted else None, weight if x_wanted else None)
        return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], output.shape[-1]))  # no view, which models change

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        if ctx.gathered_again is not None:
            ctx.gathered_again.begin(ctx, kept)
        rows, of_x, of_weight = gradient.flatten(0, -2), None, None
        with switch_autocast_off(gradient.device.type):
            if x_wanted:
                of_x, rows = ctx.recipe.grad_input(rows, weight, ctx.split, ctx.scales)
                of_x = of_x.view(*gradient.shape[:-1], of_x.shape[-1])
            if weight_wanted:
                x = kept.flatten(0, -2) if ctx.gathered_again is None else ctx.gathered_again.take(ctx)
                if ctx.coded is not None:
                    x = ctx.recipe.of_codes(x.view(ctx.coded), ctx.scales[0], X, ctx.dtype)
                of_weight = ctx.recipe.grad_weight(rows, x, ctx.split, ctx.scales)
        return of_x, of_weight, None, None, None, None
