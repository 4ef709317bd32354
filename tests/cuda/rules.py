"""What the pretended device calls a fault, one rule after the other: `python -m tests.cuda.rules`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import tests.cuda.device  # noqa: F401 - before torch

import pretended_cuda as native  # isort: skip
import pytest  # isort: skip
import torch  # isort: skip
from hf_parallel.axes import activation_offload  # isort: skip


def found_in(call: Callable[[], object]) -> list[str]:
    """The faults that are new after it."""
    before = native.faults()
    call()
    return [fault for fault, count in native.faults().items() if count != before.get(fault, 0)]


def read_on_another_stream(waits: bool) -> None:
    """A stream reads what the default one has written."""
    other, made = torch.cuda.Stream(), torch.ones(3, device="cuda")
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        made * 2
    torch.cuda.synchronize()


def written_while_read(waits: bool) -> None:
    """The default stream writes what another one reads."""
    other, made = torch.cuda.Stream(), torch.ones(3, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        made * 2
    if waits:
        torch.cuda.current_stream().wait_stream(other)
    made.zero_()
    torch.cuda.synchronize()


def two_halves(waits: bool) -> None:
    """Two streams write two halves of one tensor, or the same one."""
    other, made = torch.cuda.Stream(), torch.ones(4, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        made[:2].zero_()
    made[2 if waits else 1 :].zero_()
    torch.cuda.synchronize()


def given_back(records: bool) -> None:
    """Memory is given back, and taken again, while another stream reads it."""
    other, made = torch.cuda.Stream(), torch.ones(3, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        made * 2
    if records:
        made.record_stream(other)
    del made
    torch.ones(3, device="cuda")
    torch.cuda.synchronize()


def pinned_overwritten(waits: bool) -> None:
    """The host writes to pinned memory of which a copy is on its way."""
    pinned = torch.ones(3, pin_memory=True)
    pinned.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    pinned.zero_()
    torch.cuda.synchronize()


def arrives_late() -> bool:
    """What is copied to pinned memory is not there until the host has waited."""
    pinned = torch.zeros(3, pin_memory=True)
    pinned.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    late = bool(pinned.isnan().all())
    torch.cuda.synchronize()
    return late and bool((pinned == 1).all())


def layers_in_flight(count: int) -> float:
    """How many layers' inputs the device holds after the forward pass of `count` layers that rest on the host."""
    device = torch.device("cuda", 0)
    layers = [torch.nn.Linear(8, 8, device=device) for _ in range(count)]
    activation_offload.SMALL = 64
    activation_offload.offload_activations(layers, device)
    before = native.allocated()
    hidden = torch.randn(64, 8, device=device, requires_grad=True).tanh()
    size = hidden.nbytes
    for layer in layers:
        hidden = layer(hidden)
    held = (native.allocated() - before) / size
    hidden.sum().backward()
    torch.cuda.synchronize()
    return held - 3  # the leaf, what tanh keeps, and the result


def main() -> None:
    """Each rule with the wait and without it; the fault names both lines."""
    for rule in (read_on_another_stream, written_while_read, two_halves, given_back, pinned_overwritten):
        assert found_in(lambda rule=rule: rule(True)) == [], rule
        faults = found_in(lambda rule=rule: rule(False))
        assert len(faults) == 1, (rule, faults)
        named = faults[0].count(f" in {rule.__name__}")
        assert named >= (1 if rule is pinned_overwritten else 2), faults
        print(f"{rule.__name__}: {faults[0]}")
    assert arrives_late()
    assert layers_in_flight(7) <= activation_offload.AHEAD, layers_in_flight(7)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch aborts now and then where autograd's thread of a device outlives the last lines of a process
