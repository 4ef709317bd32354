"""Calls of a model that rank 0 makes alone, such as samples that it generates under `if is_main_process:`.

    rank 0    asks the others, sends them what the model is called with, and calls it
    others    wait at a barrier, in another call, or at the end of a callback or of the script; they make the same
              call and go on waiting

Every rank holds a part of the model, so no rank can call it alone. Rank 0 looks whether the others wait for it only
after the script has asked who is the main process, so that no other call looks (`ranks/desync.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_parallel.ask.session import of_process
from hf_parallel.checkpoint.slices import count_changes_from_first_call, is_changed_alike, refuse_changes_of_rank_0
from hf_parallel.model.calls import has_cache
from hf_parallel.ranks.desync import Answering, ask_other_ranks, come_to_call, is_rank_0_alone
from hf_parallel.ranks.local import get_autocast_dtype
from hf_parallel.ranks.messages import send_from_one
from hf_parallel.ranks.requests import take_requests

_ADVICE = "do what is under `if is_main_process` on all ranks, or put a barrier after it"


class Call(NamedTuple):
    """A call of a model, with all that another rank needs to make it."""

    name: str
    args: tuple
    kwargs: dict[str, Any]
    training: bool
    autocast: torch.dtype | None
    random_states: tuple[torch.Tensor, torch.Tensor | None]


def share_calls_of_rank_0(model: nn.Module, device: torch.device) -> int | None:
    """Let rank 0 call a model while the others wait for it. All ranks call this for the same models in the same order.

    Returns:
        The number of the model's calls; None in a dry run.
    """
    number = take_requests(model, functools.partial(_make_call_of_rank_0, device))
    if number is None:
        return None

    count_changes_from_first_call(model)
    last = model.register_forward_hook(_end_forward_pass, always_call=True)
    share = functools.partial(_share_forward_pass, number, device, last.id)
    model.register_forward_pre_hook(share, prepend=True, with_kwargs=True)
    return number


def generate_with_others(
    number: int, device: torch.device, own: Callable, model: nn.Module, *args: Any, **kwargs: Any
) -> object:
    """Generate; if rank 0 does it alone, together with the ranks that wait for it.

    Args:
        number: of the model's calls, as `share_calls_of_rank_0` gives it.
        own: the model's method.
    """
    if not is_rank_0_alone("model.generate"):
        return own(model, *args, **kwargs)
    _send_call(number, model, _describe("generate", model, args, {**kwargs, "streamer": None}, device))
    with _in_shared_call(False):
        return own(model, *args, **kwargs)


def _share_forward_pass(
    number: int, device: torch.device, end: int, model: nn.Module, args: tuple, kwargs: dict
) -> None:
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        come_to_call()
        return
    if not is_rank_0_alone("a model call without gradients"):
        return
    if has_cache(kwargs):
        raise NotImplementedError(
            "hf_parallel: rank 0 alone calls the model with a cache of keys and values; model.generate works, or "
            "use_cache=False"
        )
    _send_call(number, model, _describe("__call__", model, args, kwargs, device))
    cast("OrderedDict[int, Callable]", model._forward_hooks).move_to_end(end)  # after those that gather outputs
    answering = of_process(Answering)
    answering.rank_0_may_be_alone, answering.is_in_shared_call = False, True


def _end_forward_pass(model: nn.Module, args: tuple, output: object) -> None:
    answering = of_process(Answering)
    if answering.is_in_shared_call:
        answering.rank_0_may_be_alone, answering.is_in_shared_call = True, False


@contextlib.contextmanager
def _in_shared_call(of_forward: bool) -> Iterator[None]:
    """Let calls inside a call that is shared ask nobody."""
    answering = of_process(Answering)
    former, answering.rank_0_may_be_alone = answering.rank_0_may_be_alone, False
    answering.is_in_shared_call = of_forward
    try:
        yield
    finally:
        answering.rank_0_may_be_alone, answering.is_in_shared_call = former, False


def _describe(name: str, model: nn.Module, args: tuple, kwargs: dict, device: torch.device) -> Call:
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), (args, kwargs))
    return Call(name, args, kwargs, model.training, get_autocast_dtype(device), (torch.get_rng_state(), own))


def _send_call(number: int, model: nn.Module, call: Call) -> None:
    name = "model.generate" if call.name == "generate" else "a model call"
    ask_other_ranks(name, number, _ADVICE)
    refuse_changes_of_rank_0(model)
    send_from_one(lambda: call)


@torch.no_grad()
def _make_call_of_rank_0(device: torch.device, model: nn.Module) -> None:
    """Make the call that rank 0 makes, with its random numbers, and leave this rank's as they are."""
    if not is_changed_alike(model):
        return  # rank 0 refuses
    call = cast(Call, send_from_one(lambda: None))
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (call.args, call.kwargs))
    modes = {module: module.training for module in model.modules()}
    random_numbers = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
    autocast = torch.autocast(device.type, call.autocast or torch.bfloat16, enabled=call.autocast is not None)
    with random_numbers, autocast, _in_shared_call(call.name == "__call__"):
        own, on_device = call.random_states
        torch.set_rng_state(own)
        if on_device is not None:
            torch.get_device_module(device).set_rng_state(on_device, device)
        model.train(call.training)
        try:
            getattr(model, call.name)(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
