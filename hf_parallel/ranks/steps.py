"""Hooks around the steps of optimizers, called once per step of the script.

torch calls its own hooks also for a step that is part of another one, as `super().step()` is once the process has
made an optimizer of the base class. What exchanges parameters, or counts steps, must not hear of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.compiler.config
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[..., Any]
_APART = "_hf_parallel_apart"  # an optimizer whose own step is called without hooks


@functools.cache
def call_before_steps(hook: Hook) -> None:
    """Call `hook(optimizer, args, kwargs)` before each step of every optimizer. A second call changes nothing."""
    register_optimizer_step_pre_hook(skip_inner_steps(hook))


@functools.cache
def call_after_steps(hook: Hook) -> None:
    """Call `hook(optimizer, args, kwargs)` after each step of every optimizer. A second call changes nothing."""
    register_optimizer_step_post_hook(skip_inner_steps(hook))


def skip_inner_steps(hook: Hook) -> Hook:
    """Return a hook of steps that leaves out those within another step of the same optimizer."""

    @functools.wraps(hook)
    def call(optimizer: Optimizer, *rest: Any) -> Any:
        return None if _is_within_step(optimizer) else hook(optimizer, *rest)

    return call


def step_without_hooks(optimizer: Any) -> None:
    """Call an optimizer's own step, of which hooks of layouts and schedules of learning rates hear nothing."""
    vars(optimizer)[_APART] = True
    try:
        type(optimizer).step.__wrapped__(optimizer)
    finally:
        del vars(optimizer)[_APART]


def _is_within_step(optimizer: Optimizer) -> bool:
    kind: Any = type(optimizer)
    if _APART in vars(optimizer):
        return True
    if not _inherits_a_step(kind):
        return False
    steps, frame = 0, sys._getframe(1)
    while frame is not None:
        known = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        steps += known and (frame.f_locals.get("args") or (None,))[0] is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


@functools.cache
def _inherits_a_step(kind: Any) -> bool:
    """Return whether this class and a base of it each have a step. The one of `Optimizer` itself does nothing."""
    return len({inspect.unwrap(vars(base)["step"]) for base in kind.__mro__ if "step" in vars(base)}) > 2


# ---- Steps that are compiled ----------------------------------------------------------------------------------------

_GRAPHS = "_hf_parallel_graphs"  # what keeps the graphs of the step that an optimizer is in


def keep_compiled_steps_apart() -> None:
    """Keep the graphs that torchao compiles for its steps by rank and optimizer. A second call changes nothing.

    torch 2.13 keeps them on disk by the shape of a whole DTensor: a rank would load the graph of another one whose
    parts are larger, or of states of another number of bits, and fail.
    """
    call_before_steps(_begin_compiled_step)
    call_after_steps(_end_compiled_step)


def _begin_compiled_step(optimizer: Optimizer, *_: object) -> None:
    if dist.is_initialized() and type(optimizer).step.__module__.startswith("torchao."):
        _end_compiled_step(optimizer)  # one that has failed
        tag = f"rank {dist.get_rank()} of {dist.get_world_size()}, {type(optimizer).__name__}"
        tag += f", blocks of {getattr(optimizer, 'block_size', None)}"
        vars(optimizer)[_GRAPHS] = patched = cast(Any, torch.compiler.config).patch(cache_key_tag=tag)
        patched.__enter__()


def _end_compiled_step(optimizer: Optimizer, *_: object) -> None:
    patched = vars(optimizer).pop(_GRAPHS, None)
    if patched is not None:
        patched.__exit__(None, None, None)
