"""Optimizers of bitsandbytes, whose kernels take plain tensors: each rank's step runs on its local parts.

Their states are local too: codes of 8 bits and the largest magnitude of each block of 256 values (Dettmers et al.,
arXiv 2110.02861). Where cuts do not fall between blocks, rounding differs from one process as between two runs of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hf_parallel.axes.data.local_step import on_local_parts
from hf_parallel.hooks.patching import patch
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from bitsandbytes.optim.optimizer import Optimizer8bit


@patch("bitsandbytes.optim.optimizer:Optimizer8bit.step", "kernels take no DTensor")
def step(original: Callable, self: Optimizer8bit, closure: Callable | None = None) -> object:
    """A step on the local parts of all parameters."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not self.initialized:
        check(self)
        self.check_overrides()  # looks for the parameters themselves
    with torch.no_grad(), on_local_parts(self) as held:
        _step_without_values(self, held.former)
        original(self)
    return loss


def check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what compares norms of whole tensors, such as LAMB and LARS; of other libraries nothing is known here."""
    own = getattr(optimizer, "optimizer", optimizer)
    if getattr(getattr(own, "args", None), "max_unorm", 0) > 0:
        refuse(
            f"{type(own).__name__} of bitsandbytes",
            "compares norms of whole tensors, of which ranks hold parts",
            "adamw_8bit",
        )


def _step_without_values(optimizer: Optimizer8bit, former: list[list[torch.Tensor]]) -> None:
    """A rank without a row of a tensor has a state for it all the same: of no values, which kernels do not take."""
    for number, group in enumerate(optimizer.param_groups):
        for index, (parameter, part) in enumerate(zip(former[number], group["params"], strict=True)):
            if part is not parameter and part.grad is not None and not part.numel():
                part.grad = None
                if not optimizer.state[part]:
                    optimizer.init_state(group, part, number, index)
                optimizer.state[part]["step"] += 1
