"""Experts in lists of modules, of which each data rank calls those that its own tokens have chosen.

What no token of a rank has chosen has no gradient there, and FSDP2 reduces only the gradients that a rank has: ranks
with other ones would wait for each other, or add up what does not belong together. In the forward pass ranks tell each
other which modules they have called, one number per module in one all-reduce; what another rank has called is called
here with no tokens, for a gradient of zeros. What no rank has called has no gradient, as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ranks import all_reduce
from hf_parallel.ranks.local import put_in_front
from hf_parallel.ranks.mesh import ParallelMesh


def share_choices(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on lists of modules with a forward of their own call what any rank with other tokens has called."""
    groups = [mesh.data_group] if mesh.data_size > 1 else []
    if mesh.size("cp") > 1:
        groups.append(mesh["cp"].get_group())
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and "forward" in _list_own_names(type(module)):
            put_in_front(SharedChoices, module).follow(groups)


def _list_own_names(kind: type) -> set[str]:
    """The names that a class has beside those of torch."""
    return {name for base in kind.__mro__ if not base.__module__.startswith("torch.") for name in vars(base)}


class SharedChoices(nn.Module):
    """[…, features], this rank's tokens, and what says where they go -> […, features]."""

    groups: list[dist.ProcessGroup]
    called: set[nn.Module]

    def follow(self, groups: list[dist.ProcessGroup]) -> None:
        """Note which modules of the list are called."""
        self.groups, self.called = groups, set()
        for module in self.modules_of_list():
            module.register_forward_pre_hook(lambda module, args: self.called.add(module))

    def modules_of_list(self) -> list[nn.Module]:
        """Return the modules that have weights, in one order on all ranks."""
        return [module for module in self.children() if any(True for _ in module.parameters())]

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.called.clear()
        output = super().forward(tokens, *args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        modules = self.modules_of_list()
        called = torch.tensor([module in self.called for module in modules], dtype=torch.int32, device=output.device)
        elsewhere = called
        for group in self.groups:
            elsewhere = all_reduce(elsewhere, group, dist.ReduceOp.MAX)
        for index in (elsewhere > called).nonzero().flatten().tolist():
            output = output + modules[index](tokens.new_zeros(0, tokens.shape[-1])).sum().to(output.dtype)
        return output
