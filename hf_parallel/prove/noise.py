"""Rounding on purpose: sums in another order, and weights off by one unit in the last place.

The tolerance of every comparison comes from a run in one process under both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: Units in the last place of the largest sum by which sums in another order differ.
_SUMS_ARE_OFF = 8
_SOFTMAX = {_aten._log_softmax.default, _aten._softmax.default}
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}


class SumsInAnotherOrder(TorchDispatchMode):
    """Compute each matrix product as two sums over halves of the inner dim, forward and backward; norms in thirds.

    Softmaxes sum over two halves as well: over 152,064 classes torch's own on a CPU is off by 2e-4 in fp32. Inputs of
    relu that rounding may move over 0 change their sign, because the gradient is another beyond it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.mm.default, _aten.bmm.default) and _is_plain(*args):
            return _multiply_in_halves(func, *args)
        if func is _aten.addmm.default and not kwargs and _is_plain(*args):
            bias, left, right = args
            return _multiply_in_halves(_aten.mm.default, left, right) + bias
        if func in _SOFTMAX and not kwargs and args[2] is False and _is_plain(args[0]) and args[0].shape[args[1]] > 1:
            first, second = (part.logsumexp(args[1], keepdim=True) for part in args[0].tensor_split(2, args[1]))
            result = args[0] - torch.logaddexp(first, second)
            return result.exp() if func is _aten._softmax.default else result
        if func is _aten.relu.default and _is_plain(*args) and args[0].numel():
            size = args[0].abs()
            is_zero = size <= _SUMS_ARE_OFF * torch.finfo(size.dtype).eps * size.amax()
            return func(torch.where(is_zero, -args[0], args[0]))
        if func in _NORMS and not kwargs and args[1:] in ((), (2,), (2.0,)):
            tensors = args[0] if func is _aten._foreach_norm.Scalar else [args[0]]
            if _is_plain(*tensors):
                parts = ([torch.linalg.vector_norm(part) for part in t.flatten().tensor_split(3)] for t in tensors)
                norms = [torch.linalg.vector_norm(torch.stack(of_parts)) for of_parts in parts]
                return norms if func is _aten._foreach_norm.Scalar else norms[0]
        return func(*args, **kwargs)


def _is_plain(*tensors: Any) -> bool:
    return all(type(tensor) is torch.Tensor and tensor.is_floating_point() for tensor in tensors)


def _multiply_in_halves(product: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    half = left.shape[-1] // 2
    if half == 0:
        return product(left, right)
    return product(left[..., :half], right[..., :half, :]) + product(left[..., half:], right[..., half:, :])


@torch.no_grad()
def disturb_weights(model: nn.Module, computes_in: torch.dtype, seed: int = 1) -> None:
    """Move every weight to the next number of its dtype, up or down at random.

    Args:
        computes_in: the dtype of products; if it is shorter, weights move by half a unit of that, as layouts round
            weights where one process rounds what it computes of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.device.type != "meta":
            up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
            unit = torch.finfo(computes_in).eps / 2
            if unit > torch.finfo(parameter.dtype).eps:
                parameter.mul_(torch.where(up, 1 + unit, 1 - unit))
            else:
                ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                parameter.copy_(torch.nextafter(parameter, ends))
