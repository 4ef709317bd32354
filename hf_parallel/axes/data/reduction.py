"""When data ranks reduce gradients, and how long they keep gathered weights: ZeRO's stages over micro-batches.

of m micro-batches      reduces       gathers             whole on each rank between them
    zero_stage=0        once          never               weights, gradients, optimizer states
    zero_stage=1        once          once                weights, gradients
    zero_stage=2        m times       once                weights
    zero_stage=3        m times       2 m times           nothing

`gradient_reduction=step` reduces once at stages 2 and 3 too, and holds whole gradients in between. A pipeline gathers
once per run of its schedule; at stages 2 and 3 it reduces per run, too, else once per step: held_gradients.py.

Gradients of 16-bit weights are summed over micro-batches in fp32 and rounded once, after the last backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_parallel.axes.data.lowered import keep_copies
from hf_parallel.axes.data.units import parameter_groups, sharded_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_parallel.axes.data.held_gradients import HeldGradients
    from hf_parallel.config import ParallelConfig

HELD = "_hf_parallel_held_gradients"
_MORE = "_hf_parallel_more_micro_batches"
_WIDENED = "_hf_parallel_widened"


@contextlib.contextmanager
def before_the_last(root: nn.Module, config: ParallelConfig) -> Iterator[None]:
    """In here run the micro-batches of a step but the last; of a pipeline runs of its schedule."""
    try:
        with _reducing_later(root, config):
            yield
    finally:
        keep_copies()


@contextlib.contextmanager
def _reducing_later(root: nn.Module, config: ParallelConfig) -> Iterator[None]:
    unit = next(sharded_modules(root), None)
    if unit is None or config.pp_size > 1:
        with _held(root, config):
            yield
        return
    unit.set_requires_gradient_sync(config.reduces_each_micro_batch)
    unit.set_reshard_after_backward(config.zero_stage == 3)
    setattr(unit, _MORE, True)
    try:
        yield
    finally:
        setattr(unit, _MORE, False)
        unit.set_requires_gradient_sync(True)
        unit.set_reshard_after_backward(True)


@contextlib.contextmanager
def _held(root: nn.Module, config: ParallelConfig) -> Iterator[None]:
    """Gradients of a pipeline's runs in here are held, unless it reduces in each."""
    held: HeldGradients | None = None if config.reduces_each_run else getattr(root, HELD, None)
    if held is not None:
        held.more = True
    try:
        yield
    finally:
        if held is not None:
            held.more = False


def round_after_backward(root: nn.Module) -> None:
    """Give 16-bit weights of `root` gradients of their own dtype once the last micro-batch has added to them."""

    def follow(module: nn.Module, args: tuple, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        if getattr(module, _MORE, False):
            _widen(module)
        elif getattr(module, _WIDENED, None):
            # FSDP2's hook on the same tensors came first: its last reductions are queued before the rounding.
            for tensor in tree_leaves(output):
                if torch.is_tensor(tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: _queue(lambda: _narrow(module)))

    root.register_forward_hook(follow)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def at_rest(roots: list[nn.Module], parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that gradients end in: FSDP2 registers gathered ones in their place until a backward pass."""
    groups = (group for root in roots for group in parameter_groups(root))
    kept = {
        id(p._unsharded_param): p.sharded_param
        for g in groups
        for p in g.fsdp_params
        if hasattr(p, "_unsharded_param")
    }
    return [kept.get(id(parameter), parameter) for parameter in parameters]


def _widen(root: nn.Module) -> None:
    """Gradients stay in the dtype in which they were reduced; torch would round what each micro-batch adds."""
    if getattr(root, _WIDENED, None):
        return
    widened = []
    for group in (group for group in parameter_groups(root) if group.reduce_grads):
        held = [p for p in group.fsdp_params if p.sharded_param.dtype in (torch.bfloat16, torch.float16)]
        if held and group._orig_dtype != torch.float32:
            widened.append((group, group._orig_dtype, [p.sharded_param for p in held]))
            group._orig_dtype = torch.float32
            for parameter in widened[-1][2]:
                parameter.grad_dtype = torch.float32
    setattr(root, _WIDENED, widened)


def _narrow(root: nn.Module) -> None:
    for group, dtype, parameters in getattr(root, _WIDENED) or ():  # each output of the model may ask for it
        group._orig_dtype = dtype
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    setattr(root, _WIDENED, None)
