"""The auxiliary loss that balances experts (Fedus et al., 2022), over the rows of all data ranks: that of one process.

    aux = E Σ_e f_e P_e      f_e: share of tokens that chose expert e      P_e: mean probability of e

It is no mean over rows, so the ranks' own ones do not average to it: counts and sums of probabilities are added up
over the data ranks, 2 E + 1 numbers in one all-reduce. The model adds its own to its loss, which is put right here:

    loss + c (aux over all rows - aux over own rows)      whose second part takes back the model's, gradient and all
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.collectives import copy_to_group, reduce_from_group
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model.anatomy import backbone_of
from hf_parallel.model.experts import balance_coefficient, experts_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


#: Does this rank take part with rows that do not count? Hooks know.
is_absent: Callable[[], bool] = lambda: False  # noqa: E731


def balance_over_data_ranks(model: nn.Module, mesh: ParallelMesh) -> None:
    """From here on the auxiliary loss of `model`, and its part in the loss, are those of all data ranks' rows."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    top_k = experts_per_token(model)
    last: list[tuple[torch.Tensor, ...] | None] = [None]  # router logits of the call in progress, see `correct`

    def keep(module: nn.Module, args: tuple, output: ModelOutput) -> None:
        last[0] = getattr(output, "router_logits", None)

    def correct(module: nn.Module, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits, last[0] = getattr(output, "router_logits", None) or last[0], None  # TRL's fused head gives none on
        if not torch.is_tensor(getattr(output, "aux_loss", None)) or logits is None:
            return output
        exact = balance_loss(logits, top_k, given.get("attention_mask"), mesh.data_group)
        return with_exact(module, output, exact)

    if (backbone := backbone_of(model)) is not None:
        backbone.register_forward_hook(keep)
    model.register_forward_hook(correct, with_kwargs=True)


def with_exact(model: PreTrainedModel, output: ModelOutput, exact: torch.Tensor) -> ModelOutput:
    """The output of `model` with this auxiliary loss instead of its own, in its loss too."""
    if output.loss is not None:
        change = balance_coefficient(model) * (exact - output.aux_loss.to(exact.device))
        output["loss"] = output.loss + change.to(output.loss.device)
    output["aux_loss"] = exact
    return output


def balance_loss(
    router_logits: tuple[torch.Tensor, ...], top_k: int, mask: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The auxiliary loss of layers' logits [tokens, experts] over the ranks of a group.

    Args:
        mask: which tokens count, [rows, length]; None: all.
    """
    sums = torch.cat(balance_sums(router_logits, top_k, mask))
    if group is not None:
        sums = copy_to_group(reduce_from_group(sums, group), group)  # forward and backward a sum: each has all in it
    return loss_of_sums(sums)


def loss_of_sums(sums: torch.Tensor) -> torch.Tensor:
    """The auxiliary loss of what `balance_sums` counts, of which probabilities alone have a gradient."""
    experts = len(sums) // 2
    chosen, probable, tokens = sums.split([experts, experts, 1])
    return experts * torch.sum(chosen.detach() / tokens.detach() * probable / tokens.detach())


def balance_sums(logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """How often each expert was chosen, the sum of its probabilities, and the number of tokens, over all layers."""
    device = logits[0].device
    counted = logits[0].new_ones(len(logits[0]), dtype=torch.float32)
    if mask is not None:
        counted = mask.reshape(-1).to(device=device, dtype=torch.float32)
    if is_absent():
        counted = torch.zeros_like(counted)
    chosen = torch.zeros(logits[0].shape[-1], dtype=torch.float32, device=device)
    probable, tokens = torch.zeros_like(chosen), torch.zeros(1, dtype=torch.float32, device=device)
    for layer in logits:
        probabilities = layer.to(device).softmax(-1)
        best = probabilities.topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, best.flatten(), counted.repeat_interleave(top_k))
        probable = probable + (probabilities.float() * counted.unsqueeze(-1)).sum(0)
        tokens = tokens + counted.sum()
    return chosen, probable, tokens
