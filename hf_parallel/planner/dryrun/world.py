"""A process group of any size in one process, and a model's weights as fake tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn import functional

from hf_parallel.ask.spec import refuse


def materialise_weights(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Make memory for meta weights, fake in a dry run; modules that shared a parameter share one again."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = model.get_parameter(first)


@contextlib.contextmanager
def pretend_world(rank: int, size: int) -> Iterator[None]:
    """Let this process be one of `size`, with collectives that leave tensors as they are.

    Raises:
        SpecError: it is part of a real world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        refuse("dry run", "this process has a process group", do="run it in one that has none")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors_pass_as_real() -> Iterator[None]:
    """Let Transformers treat fake tensors as real ones.

    It takes fake tensors for a traced graph and makes masks there that a training step does not need. And torch knows
    the shapes of grouped products in bf16 only: experts in fp32 take Transformers' own operation, which keeps as much.
    """
    from transformers.integrations import moe
    from transformers.utils import import_utils

    is_fake, can_group = import_utils.is_fake_tensor, moe._can_use_grouped_mm
    attend = functional.scaled_dot_product_attention
    import_utils.is_fake_tensor = lambda tensor: False
    functional.scaled_dot_product_attention = functools.partial(_attend_as_a_gpu, attend)
    moe._can_use_grouped_mm = lambda tokens, weight, ends: weight.dtype == torch.bfloat16
    try:
        yield
    finally:
        import_utils.is_fake_tensor, moe._can_use_grouped_mm = is_fake, can_group
        functional.scaled_dot_product_attention = attend


def _attend_as_a_gpu(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend with the kernel that a GPU has for keys and values of unlike widths; else let torch choose.

    The CPU's flash kernel takes equal widths only, so that torch would compute all scores there. The memory-efficient
    kernel keeps queries, keys, values, outputs and a sum per query.
    """
    grouped, boolean = query.shape[1] != key.shape[1], attn_mask is not None and attn_mask.dtype == torch.bool
    if query.is_cuda or query.dim() != 4 or key.shape[-1] == value.shape[-1] or grouped or boolean:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


# ---- torch's fake tensors, at a third of the cost: a dry run asks them for shapes some ten thousand times
# A view costs its meta kernel and no more; what else an operation makes is looked up by the shapes, strides and
# numbers it was given before. Whatever is not plain here (a value that is known, a storage that two tensors share,
# an operation of another library) goes the way of torch, and nothing is remembered of it.


aten = torch.ops.aten
#: Their meta kernels are C++, and return a tensor of the first argument's storage.
_VIEWS = frozenset(
    {
        *(aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.t.default),
        *(aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.as_strided.default),
    }
)
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_Made = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class _NotPlain(Exception):
    """Torch must be asked."""


class Shapes(FakeTensorMode):
    """`FakeTensorMode` that remembers the shapes of results."""

    #: Operation and what it was given -> what it made: the tensors; None: its first argument; False: not to remember.
    _known: dict[Any, Any] = {}

    def dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what `func` returns, in tensors that have shapes only."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") != "aten" or not _VALUES.isdisjoint(func.tags):
            return super().dispatch(func, types, args, kwargs)
        try:
            if func in _VIEWS:
                self._plain(args[0])
                with in_kernel_invocation_manager(self):
                    seen = func(*args, **kwargs)
                return FakeTensor(self, seen, args[0].fake_device)
            key = (func, self._described(tuple(args)), self._described(tuple(kwargs.items())))
        except _NotPlain:
            return super().dispatch(func, types, args, kwargs)
        made = self._known.get(key, self)
        if made is self or made is False:
            result = super().dispatch(func, types, args, kwargs)
            if made is self:
                self._known[key] = _choose_what_to_remember(result, args, kwargs)
            return result
        if made is None:
            return args[0]
        fresh = []
        for shape, stride, dtype, device in [made] if type(made) is tuple else made:
            with in_kernel_invocation_manager(self):
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            fresh.append(FakeTensor(self, empty, device))
        return fresh[0] if type(made) is tuple else fresh

    def _plain(self, value: Any) -> None:
        if type(value) is not FakeTensor or value.constant is not None or value.fake_mode is not self:
            raise _NotPlain

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._plain(value)
            assert isinstance(value, FakeTensor)
            return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        if isinstance(value, (list, tuple)):
            return tuple([self._described(one) for one in value])
        if not isinstance(
            value, (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
        ):
            raise _NotPlain
        return type(value), value  # of numbers that are equal the kind decides over the result's dtype


def _choose_what_to_remember(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what to remember of an operation; False: nothing."""
    if args and result is args[0]:
        return None
    tensors = result if isinstance(result, (list, tuple)) else [result]
    given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)}
    for x in tensors:
        if type(x) is not FakeTensor or x.constant is not None:
            return False
        # A new tensor of this shape would have another storage.
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        elements = last + 1 if x.numel() else 0
        if x.storage_offset() != 0 or x.untyped_storage().nbytes() != elements * x.element_size():
            return False
    storages = {x.untyped_storage()._cdata for x in tensors}
    if len(storages) < len(tensors) or not storages.isdisjoint(given):
        return False
    made = [(x.shape, x.stride(), x.dtype, x.fake_device) for x in tensors]
    return made if isinstance(result, (list, tuple)) else made[0]
