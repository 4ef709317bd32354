"""Optimizers of bitsandbytes, whose kernels take plain tensors: each rank's step runs on its local parts.

Their states are local too: codes of 8 bits and the largest magnitude of each block of 256 values (Dettmers et al.,
arXiv 2110.02861). Where cuts do not fall between blocks, rounding differs from one process as between two runs of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.config import SpecError


def step(original: Callable) -> Callable:
    """A step on the local parts of all parameters."""

    def replacement(self: Any, closure: Callable | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.initialized:
            check(self)
            self.check_overrides()  # looks for the parameters themselves
        with torch.no_grad(), on_local_parts(self):
            original(self)
        return loss

    return replacement


def check(optimizer: Any) -> None:
    """Refuse what compares norms of whole tensors, such as LAMB and LARS; of other libraries nothing is known here."""
    own = getattr(optimizer, "optimizer", optimizer)
    if getattr(getattr(own, "args", None), "max_unorm", 0) > 0:
        raise SpecError(
            f"{type(own).__name__} of bitsandbytes compares norms of whole tensors, of which ranks hold parts; "
            "adamw_8bit works"
        )


@contextlib.contextmanager
def on_local_parts(optimizer: Any) -> Iterator[None]:
    """In here an optimizer has plain tensors for DTensors, with their gradients and states."""
    former = [group["params"] for group in optimizer.param_groups]
    parts: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in itertools.chain(*former):
        if isinstance(parameter, DTensor):
            parts[parameter] = _local_part(parameter)
    _move_states(optimizer, parts)
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [parts.get(p, p) for p in former[number]]
            _step_without_values(optimizer, number, former[number])
        yield
    finally:
        _move_states(optimizer, {part: p for p, part in parts.items()})
        for group, parameters in zip(optimizer.param_groups, former, strict=True):
            group["params"] = parameters


def _local_part(parameter: Any) -> torch.Tensor:
    part = parameter.detach().to_local()
    if parameter.grad is not None and part.numel():  # kernels do not take empty ones
        part.grad = parameter.grad.to_local()
    return part


def _move_states(optimizer: Any, targets: dict[torch.Tensor, torch.Tensor]) -> None:
    for source, target in targets.items():
        if source in optimizer.state:
            optimizer.state[target] = optimizer.state.pop(source)


def _step_without_values(optimizer: Any, group: int, parameters: list[torch.Tensor]) -> None:
    """A rank that holds no row of a tensor has a state for it all the same: of no values."""
    for number, (parameter, part) in enumerate(zip(parameters, optimizer.param_groups[group]["params"], strict=True)):
        if part is not parameter and parameter.grad is not None and not part.numel():
            if not optimizer.state[part]:
                optimizer.init_state(optimizer.param_groups[group], part, group, number)
            optimizer.state[part]["step"] += 1
