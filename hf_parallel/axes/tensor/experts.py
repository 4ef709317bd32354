"""Experts that are split inside: each rank has a part of the width of every one, and sees every token.

    style     weight placement                                 forward of a layer's experts, x and its routing entered
    experts   Shard along the width, [gate | up] as packed     y = leave(Σ over a token's experts of w_e f_local(x))

Routers stay whole: without sequence parallelism each rank routes all tokens, with it its own, and what they chose is
gathered with the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.layers import TensorParallelLayer, put_mixin_on
from hf_parallel.axes.tensor.region import Region
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.model.experts import ExpertFacts, read_expert_facts
from hf_parallel.ranks import (
    copy_to_group,
    copy_weight_to_group,
    gather_sequence,
    join_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
)
from hf_parallel.ranks.local import get_local, hold_other_tensors, with_added

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


class SplitExperts(TensorParallelLayer):
    """Mixin of a module that holds experts: tokens and their routing enter, the sum of what ranks compute leaves."""

    expert_facts: ExpertFacts

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        cut = self.region.sequence_parallel
        enter, leave = (gather_sequence, reduce_scatter_sequence) if cut else (copy_to_group, reduce_from_group)
        entered = self._run_by_expert(enter(self._run_by_token(hidden_states), group))
        own: dict[str, torch.Tensor] = {}
        weights: dict[str, Any] = self._parameters
        for name, dim in self.expert_facts.widths.items():
            if dim is not None:  # this rank's part
                own[name] = get_local(weights[name])
            else:  # what runs along no width is added once, by the first rank
                own[name] = copy_weight_to_group(weights[name], group) * float(group.rank() == 0)
        with hold_other_tensors(self, {name: with_added(self, name, weight) for name, weight in own.items()}):
            output = super().forward(entered, *(enter(tensor, group) for tensor in routing))
        return self._run_by_expert(leave(self._run_by_token(output), group))

    def _run_by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one row for each token, as it travels. Dense experts have their tokens one expert after another."""
        if not self.expert_facts.dense:
            return rows
        return rows.unflatten(0, (self.expert_facts.count, -1)).transpose(0, 1).flatten(1)

    def _run_by_expert(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.expert_facts.dense:
            return tokens
        return tokens.unflatten(1, (self.expert_facts.count, -1)).transpose(0, 1).flatten(0, 1)


def gather_router_logits(reader: nn.Module, group: dist.ProcessGroup, switch: SequenceParallelFlag) -> None:
    """Let a backbone return the router logits [rows * length, experts] of all tokens, not of this rank's."""

    def gathered(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
        logits = getattr(output, "router_logits", None)
        if not switch.on or not logits or output[0].dim() != 3:
            return output
        rows, length = output[0].shape[:2]
        whole = (join_sequence(layer.unflatten(0, (rows, -1)), group)[:, :length].flatten(0, 1) for layer in logits)
        output["router_logits"] = tuple(whole)
        return output

    reader.register_forward_hook(gathered)


def split_experts(
    model: PreTrainedModel,
    styles: dict[str, str],
    mesh: DeviceMesh,
    device: torch.device,
    switch: SequenceParallelFlag,
) -> None:
    """Split the experts that `styles` names over the one-axis `mesh`, in place; as `tensor_parallel` does linears."""
    for name in (name for name, style in styles.items() if style == "experts"):
        module = model.get_submodule(name)
        facts = read_expert_facts(module)
        for key, dim in facts.widths.items():
            if dim is not None:
                segments = [facts.width, facts.width] if key in facts.packed else None
                shard_parameter(module, key, mesh, dim, device, segments)
        put_mixin_on(module, SplitExperts, Region(module, mesh.get_group(), switch))
        module.expert_facts = facts
