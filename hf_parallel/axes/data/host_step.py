"""Optimizers that step on the host, with states in its memory or in files (ZeRO-Offload, arXiv:2101.06840).

Around each `step` of an optimizer of torch, chunk by chunk of its parameters:

    parameters on a device     copied to the host with their gradients, the next chunk's while this one's are used
    states                     on the host; in files: read ahead for the next chunk, written back behind this one
    the optimizer's own step   on the chunk alone, by torch's fused kernel where it is an Adam
    parameters on a device     copied back

Then the step that the script has called finds no gradient to do anything with.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_parallel.ask.keys.data import offload_folder
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.files import StateFile, StatePart
from hf_parallel.axes.data.local_step import list_parameters_of, step_on_local_parts
from hf_parallel.axes.data.reach import is_elementwise
from hf_parallel.ranks.mesh import get_stored
from hf_parallel.ranks.steps import call_after_steps, call_before_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Bytes of parameters that are stepped together: what the host needs beside the states themselves.
CHUNK = 64 * 2**20
_HELD = "_hf_parallel_host_step"
_models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # -> its `offload`


def step_on_host(model: nn.Module, offload: str) -> None:
    """From here on the optimizers that have parameters of `model` step on the host."""
    _models[model] = offload
    step_on_local_parts()  # first: what is stepped here are the parts that a rank stores
    call_before_steps(_begin_host_step)
    call_after_steps(_end_host_step)


def check_host_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step cannot be made on the host, or in parts, or whose states a disk cannot hold."""
    mine = set(map(id, itertools.chain(*list_parameters_of(optimizer))))
    way = next((way for model, way in _models.items() if any(id(p) in mine for p in model.parameters())), None)
    if way is None or _HELD in vars(optimizer):
        return
    elementwise = is_elementwise(optimizer)
    if way != "cpu" and not elementwise:
        why = f"{type(optimizer).__name__} is none of torch's optimizers that step number by number"
        refuse(f"offload={way}", why, "AdamW (adamw_torch) or SGD, or offload=cpu,")
    vars(optimizer)[_HELD] = HostStep(optimizer, way) if elementwise else None


def _begin_host_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    own = vars(optimizer)
    if _HELD not in own:
        check_host_optimizer(optimizer)
    held = own.setdefault(_HELD, None)
    if held is None:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = None
    if closure is not None:  # once for all chunks
        with torch.enable_grad():
            loss = closure()
    held.step()
    return None if closure is None else ((args[0], lambda: loss), {})


def _end_host_step(optimizer: Optimizer, *_: object) -> None:
    """Show the gradients again, as the optimizer's own step would have left them."""
    held = vars(optimizer).get(_HELD)
    if held is not None:
        for parameter, gradient in held.hidden:
            parameter.grad = gradient
        held.hidden = []


class HostStep:
    """The steps of one optimizer; `offload` as in the spec."""

    def __init__(self, optimizer: Optimizer, offload: str) -> None:
        self._optimizer, self.offload = weakref.ref(optimizer), offload
        self.file = file = StateFile(offload, "optimizer states") if offload_folder(offload) else None
        if file is not None:
            file.reserve(_count_state_bytes(optimizer, file))
            optimizer.register_state_dict_pre_hook(lambda _: file.settle())
        self._parts: dict[int, StatePart] = {}  # by chunk
        self._kept: dict[tuple[int, str], torch.Tensor] = {}  # states in files, by place of the parameter
        self.hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self) -> None:
        """Step as the optimizer's own step would."""
        optimizer = self._optimizer()
        assert optimizer is not None
        former = [group["params"] for group in optimizer.param_groups]
        places = {parameter: place for place, parameter in enumerate(p for group in former for p in group)}
        chunks = list(_cut_into_chunks(parameter for parameter in places if parameter.grad is not None))
        if self.file is not None:
            self.file.settle()  # what was written is there to be read
        copies = _iterate_host_copies(chunks)
        try:
            for number, chunk in enumerate(chunks):
                if self.file is not None and number + 1 in self._parts:
                    self.file.fetch(self._parts[number + 1])
                self._step_chunk(optimizer, former, next(copies), chunk)
                self._keep(number, chunk, places, optimizer.state)
        finally:
            for group, parameters in zip(optimizer.param_groups, former, strict=True):
                group["params"] = parameters
        for parameter in places:
            if parameter.grad is not None:
                self.hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _step_chunk(
        self,
        optimizer: Optimizer,
        former: list[list],
        on_host: dict[torch.Tensor, torch.Tensor],
        chunk: list[torch.Tensor],
    ) -> None:
        state, chosen = optimizer.state, set(chunk)
        for group, parameters in zip(optimizer.param_groups, former, strict=True):
            group["params"] = [on_host.get(p, p) for p in parameters if p in chosen]
        for parameter, copy in on_host.items():
            if parameter in state:
                slots = state.pop(parameter).items()  # which may have been loaded onto the device
                state[copy] = {slot: value.cpu() if torch.is_tensor(value) else value for slot, value in slots}
        changed = []  # by torch's fused kernel, unless the script has chosen one
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            changed = [group for group in optimizer.param_groups if not group["foreach"] and group["fused"] is None]
        foreach = [group["foreach"] for group in changed]
        for group in changed:
            group.update(fused=True, foreach=None)
        try:
            plain_step: Any = type(optimizer).step
            plain_step.__wrapped__(optimizer)
        finally:
            for group, own in zip(changed, foreach, strict=True):
                group.update(fused=None, foreach=own)
            for parameter, copy in on_host.items():
                if copy in state:
                    state[parameter] = state.pop(copy)
        with torch.no_grad():
            for parameter, copy in on_host.items():
                parameter.copy_(copy, non_blocking=True)

    def _keep(self, number: int, chunk: list[torch.Tensor], places: dict[torch.Tensor, int], state: dict) -> None:
        """Put states that are new, or were loaded, into the file; and begin to write the chunk's part of it."""
        if self.file is None:
            return
        fresh = []
        for parameter in chunk:
            slots = state.get(parameter, {})
            for slot, value in slots.items():
                key = places[parameter], slot
                kept = self._kept.get(key)
                if not torch.is_tensor(value) or not value.ndim or not value.numel() or value is kept:
                    continue
                if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
                    slots[slot] = kept.copy_(value)  # loaded
                else:
                    fresh.append((key, slots, value))
        if fresh:
            part = self._parts[number] = self.file.part(StatePart.room_for(value.nbytes for *_, value in fresh))
            for key, slots, value in fresh:
                slots[key[1]] = self._kept[key] = part.keep(value)
            self.file.free()
        if number in self._parts:
            self.file.release(self._parts[number])


def _iterate_host_copies(chunks: list[list[torch.Tensor]]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Yield a chunk's parameters with their copies, gradients too, while those of the next chunk are under way.

    There are no copies of parameters that are on the host already.
    """
    ahead: tuple[dict[torch.Tensor, torch.Tensor], torch.Event | None] | None = None
    for chunk in (*chunks, []):
        copies = {parameter: _begin_copy(parameter) for parameter in chunk if parameter.device.type != "cpu"}
        arrived = None
        for parameter, copy in copies.items():
            assert parameter.grad is not None  # else it is in no chunk
            copy.grad = _begin_copy(parameter.grad)
        if copies:
            arrived = torch.Event(next(iter(copies)).device)
            arrived.record()
        if ahead is not None:
            if ahead[1] is not None:
                ahead[1].synchronize()
            yield ahead[0]
        ahead = copies, arrived


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


def _count_state_bytes(optimizer: Optimizer, file: StateFile) -> int:
    """Return the bytes of the optimizer's states in the file: chunks of parameters, each from a new page on."""
    kind = next(base for base in type(optimizer).__mro__ if "step" in vars(base))
    sizes: dict[torch.Tensor, int] = {}
    for group in optimizer.param_groups:
        widths: dict[torch.dtype, list[int]] = {}
        for part in (get_stored(parameter) for parameter in group["params"] if parameter.requires_grad):
            if part.dtype not in widths:  # the bytes that a step keeps for one number, in each of its states
                one = torch.zeros(1, dtype=part.dtype, requires_grad=True)
                one.grad = torch.zeros_like(one)
                alike = kind([{**group, "params": [one]}])
                alike.step()
                states = [value for value in alike.state[one].values() if torch.is_tensor(value)]
                widths[part.dtype] = [value.nbytes for value in states if value.ndim]
            sizes[part] = StatePart.room_for([part.numel() * width for width in widths[part.dtype]])
    return sum(file.room_of(sum(sizes[part] for part in chunk)) for chunk in _cut_into_chunks(sizes))


def _cut_into_chunks(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        chunk.append(parameter)
        size += parameter.nbytes
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
