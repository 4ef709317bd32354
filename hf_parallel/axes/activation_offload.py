"""Rest what layers keep for the backward on the host: copied out after a layer's forward, back before its backward.

    forward     layer 1      layer 2      layer 3           backward     layer 3      layer 2      layer 1
    copies         out 1 ───────out 2 ───────out 3               in 3, in 2 ─────in 1 ──────

On a GPU copies run on a stream of their own, from and to pinned memory: out while the next layer computes, in while
the layer above computes its gradients. Of a checkpointed layer its input goes, and what ranks of cp keep of attention.
Small tensors, weights and what is no plain tensor stay.

The host enqueues a whole forward pass in milliseconds, long before the first copy is done. So the stream that
computes waits, at the end of layer k, for the copies of layer k - `AHEAD`, and only then the device's tensors of that
layer are dropped: memory in flight is that of `AHEAD` layers. Copies back go to memory of the stream that computes,
which is free in its order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from hf_parallel.ranks import observed

#: What autograd keeps: a tensor itself, or its copy with size and strides.
Packed: TypeAlias = "torch.Tensor | tuple[Copy, torch.Size, tuple[int, ...]]"
SMALL = 1 << 20  # bytes: a copy of less costs more than it frees
AHEAD = 2  # layers whose copies to the host may be on their way


def offload_activations(layers: Iterable[nn.Module], device: torch.device) -> None:
    """From here on the layers of this rank, in their order, keep nothing large on the device."""
    host = Host(device)
    for place, layer in enumerate(layers):
        parameters = [module._parameters for module in layer.modules()]
        layer.register_forward_pre_hook(_Begin(host, place, parameters))
        layer.register_forward_hook(lambda *_: host.end(), always_call=True)


class Host:
    """The stream that copies, and what the layer that runs has kept so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.open: list[tuple[Kept, contextlib.ExitStack]] = []
        self.last: Kept | None = None
        self.leaving: deque[Kept] = deque()  # whose tensors the device still holds
        self.coming: list[Copy] = []  # on their way back, and read by nobody yet
        self.on_copy: Callable[[torch.Tensor], object] | None = None  # is shown each copy on the host

    def begin(self, place: int, parameters: list[dict[str, nn.Parameter | None]]) -> None:
        """A layer starts."""
        if torch.is_grad_enabled():
            if place == 0 and self.coming:  # a graph that was dropped before its backward
                assert self.stream is not None
                torch.accelerator.current_stream().wait_stream(self.stream)
                self.coming.clear()
            self.last = Kept(self, None if place == 0 else self.last, parameters)
            hooks = contextlib.ExitStack()
            hooks.enter_context(saved_tensors_hooks(self.last.pack, self.last.unpack))
            hooks.enter_context(observed.note_attention_with(self.last.note))
            self.open.append((self.last, hooks))

    def end(self) -> None:
        """It is done."""
        if self.open:
            kept, hooks = self.open.pop()
            hooks.close()
            kept.copied.clear()
            if self.stream is not None:
                kept.sent = self.stream.record_event()
                self.leaving.append(kept)
                while len(self.leaving) > AHEAD:
                    self.drop(self.leaving.popleft())

    def drop(self, kept: Kept) -> None:
        """Give the device's memory back once the copies are done, in the order of the stream that computes."""
        assert kept.sent is not None
        torch.accelerator.current_stream().wait_event(kept.sent)
        for copy in kept.copies:
            copy.let_go()

    def __deepcopy__(self, memo: object) -> Host:
        return Host(self.device)


def watch_copies(layers: Iterable[nn.Module], on_copy: Callable[[torch.Tensor], object]) -> None:
    """Show each later copy on the host of these layers' tensors to `on_copy`."""
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _Begin):
                hook.host.on_copy = on_copy


@dataclass(eq=False)
class _Begin:
    """A forward pre-hook."""

    host: Host
    place: int
    parameters: list[dict[str, nn.Parameter | None]]

    def __call__(self, layer: nn.Module, args: tuple) -> None:
        self.host.begin(self.place, self.parameters)


@dataclass(eq=False)
class Kept:
    """The tensors that a run of one layer has kept. `before`: those of the layer before it."""

    host: Host
    before: Kept | None
    parameters: list[dict[str, nn.Parameter | None]]
    copies: list[Copy] = field(default_factory=list)
    #: Until the layer is done the originals live, or another tensor could come to lie in the same place.
    copied: dict[tuple, tuple[Copy, torch.Tensor]] = field(default_factory=dict)
    sent: torch.Event | None = None  # when all copies are on the host

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return the object that autograd keeps for the tensor: a copy of what is large, dense and no parameter."""
        if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.device.type != self.host.device.type:
            return tensor
        if not tensor.is_floating_point() or tensor.nbytes < SMALL or not _is_dense(tensor):
            return tensor
        memory = tensor.untyped_storage()._cdata
        held = (getattr(p, "_local_tensor", p) for group in self.parameters for p in group.values() if p is not None)
        if any(parameter.untyped_storage()._cdata == memory for parameter in held):
            return tensor
        key = memory, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version
        if key not in self.copied:
            copy = Copy(self.host, tensor)
            self.copies.append(copy)
            self.copied[key] = copy, tensor.detach()
        copy = self.copied[key][0]
        copy.readers += 1
        return copy, tensor.size(), tensor.stride()

    def unpack(self, kept: Packed) -> torch.Tensor:
        """Return the tensor again; the first of a layer sets off the copies of the layer before it."""
        if isinstance(kept, torch.Tensor):
            return kept
        copy, size, stride = kept
        if self in self.host.leaving:
            self.host.leaving.remove(self)
            self.host.drop(self)
        if self.before is not None:
            for one in self.before.copies:
                one.fetch()
            self.before = None
        return copy.take().as_strided(size, stride)

    def note(self, tensor: torch.Tensor) -> observed.Noted:
        """Return what a checkpoint keeps of a tensor that attention gave."""
        packed = self.pack(tensor)
        return observed.Kept.of(tensor) if isinstance(packed, torch.Tensor) else Away(self, packed)


@dataclass(frozen=True)
class Away(observed.Noted):
    """A tensor that a checkpoint keeps on the host."""

    kept: Kept
    packed: tuple[Copy, torch.Size, tuple[int, ...]]

    @property
    def unchanged(self) -> bool:
        """Return whether nothing wrote into the tensor before its copy was done."""
        return self.packed[0].is_whole

    def again(self) -> torch.Tensor:
        """Return it on the device."""
        return self.kept.unpack(self.packed).detach()


class Copy:
    """A tensor on the host, as a row of numbers; on the device while it is about to be read."""

    def __init__(self, host: Host, tensor: torch.Tensor) -> None:
        self.host, self.readers, self.read = host, 0, 0
        row, stream = tensor.detach().as_strided((tensor.numel(),), (1,)), host.stream
        self.back: torch.Tensor | None = None
        self.arrived: torch.Event | None = None
        self.leaving: torch.Tensor | None = None  # kept until the copy is done
        self.version, self.is_torn = tensor._version, False
        self.row = (
            row.clone() if stream is None else torch.empty(row.shape, dtype=row.dtype, device="cpu", pin_memory=True)
        )
        if host.on_copy is not None:
            host.on_copy(self.row)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                self.row.copy_(row, non_blocking=True)
            self.leaving = row

    @property
    def is_whole(self) -> bool:
        """Return whether nothing has written into the tensor while it was copied."""
        return not self.is_torn and (self.leaving is None or self.leaving._version == self.version)

    def let_go(self) -> None:
        """Give the tensor's memory on the device back, once the copy is done."""
        self.is_torn, self.leaving = not self.is_whole, None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self.back is not None:
            return
        stream = self.host.stream
        if stream is None:
            self.back = self.row.clone()
            return
        self.back = torch.empty_like(self.row, device=self.host.device, pin_memory=False)
        stream.wait_stream(torch.accelerator.current_stream())  # which may still read what was in this memory
        with stream:
            self.back.copy_(self.row, non_blocking=True)
        self.arrived = stream.record_event()
        self.host.coming.append(self)

    def take(self) -> torch.Tensor:
        """Return the numbers on the device, for one reader; schedules that take a backward apart read twice."""
        self.fetch()
        back = self.back
        assert back is not None
        if self.arrived is not None:
            torch.accelerator.current_stream().wait_event(self.arrived)
            self.arrived = None
            self.host.coming.remove(self)
        self.read += 1
        if self.read % self.readers == 0:
            self.back = None
        return back


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do its numbers lie side by side, in whatever order?"""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
