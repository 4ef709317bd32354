"""Tensor parallelism (Shoeybi et al., 2019): parameters stored as DTensors, computed as local tensors.

A split layer keeps its class for `isinstance` and its parameter names: its class becomes a subclass that computes on
the local shard. The layers of one attention or one MLP form a region (`region.py`): its input enters once, whatever
the number of layers that read it, so there is one collective forward and one backward per region and direction.

    style                            weight placement   forward of the layer, x having entered the region
    colwise, falcon_qkv              Shard(0)           y_local = x W_localᵀ
    packed_qkv, packed_halves        Shard(0), in the order of `make_packed_order`: as colwise
    rowwise                          Shard(1)           y = leave(x_local W_localᵀ) + b
    colwise_shared_heads, shared_*   plain              y_local = x f(w)[rows of this rank's heads]ᵀ
    replicated_with_grad_allreduce   plain              y = layer(x) with weight f(w), whose gradient is a part
    embedding_heads, heads           plain, Shard(0)    one number per head: this rank's
    colwise_gather_output            Shard(0)           head and embedding over the vocabulary: vocab_parallel.py
    embedding_rowwise                Shard(0)
    whole_*                          plain              a layer of a script: whole_layers.py

On a grid of the ranks weights are cut along their other dim, too: `grid.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.grid import Grid, GridRegion, JoinedHeads
from hf_parallel.axes.tensor.infer import OF_HEADS, get_linear_sizes, iterate_named_layers
from hf_parallel.axes.tensor.layers import (
    ColumnParallel,
    HeadsEmbedding,
    LocalHeads,
    PartialGradient,
    RowParallel,
    SharedHeads,
    SplitNorm,
    TensorParallelLayer,
    find_unsplit_modules,
    put_mixin_on,
)
from hf_parallel.axes.tensor.region import READERS, Region, use_local_heads
from hf_parallel.axes.tensor.whole_layers import WHOLE_STYLES
from hf_parallel.model.anatomy import find_token_readers, is_norm, make_packed_order, read_attention_heads
from hf_parallel.model.experts import ExpertFacts, read_expert_facts
from hf_parallel.ranks import (
    copy_to_group,
    copy_weight_to_group,
    gather_sequence,
    join_last_dim,
    reduce_from_group,
    reduce_scatter_sequence,
)
from hf_parallel.ranks.local import get_local, hold_other_tensors, with_added

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers.utils import ModelOutput

_NEEDS_ALL_HEADS = "hf_parallel: output_attentions=True needs all heads on one rank; tp_size=1 works"


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: dict[str, str],
    device: torch.device,
    switch: SequenceParallelFlag,
    overlap: bool = False,
    grid: Grid | None = None,
) -> None:
    """Split the modules named in `styles` over the one-axis `mesh`, in place.

    Works on meta tensors (then nothing is allocated) and on values (then each rank keeps its slice; the values must be
    the same on all ranks). No communication.

    Args:
        grid: the same ranks by rows and columns, over which weights are cut along both dims (`grid.py`).
    """
    regions: dict[str, Region] = {}
    layers = {name for name, _ in iterate_named_layers(model)}
    split = {name: style for name, style in styles.items() if style in _STYLES}  # the rest: vocab_parallel.py
    # BERT's writers sit in modules of their own, which do not read the residual stream.
    readers = {name.rpartition(".")[0] for name, style in split.items() if style in READERS}
    for name in dict.fromkeys(name.rpartition(".")[0] for name in split):
        owner, at_owner = model.get_submodule(name), name in readers and name not in layers
        if grid is None:
            regions[name] = Region(owner, mesh.get_group(), switch, at_owner, overlap)
        else:
            regions[name] = GridRegion(owner, grid, mesh, switch, at_owner)
        regions[name].heads = read_attention_heads(model) or (0, 0)
        if at_owner:
            use_local_heads(model, owner, mesh)
    for name, style in split.items():
        region = regions[name.rpartition(".")[0]]
        _STYLES[style](region.owner if style == "heads" else model.get_submodule(name), mesh, device, region)
    for region in regions.values():
        if region.at_owner:
            region.owner.register_forward_pre_hook(region.enter_owner, with_kwargs=True)
        # Weights that no style names but that work inside the region see some heads only: their gradients are parts.
        for module in find_unsplit_modules(region.owner) if region.at_owner else ():
            if is_norm(module) and torch.is_tensor(getattr(module, "weight", None)):
                put_mixin_on(module, SplitNorm, region)
            else:
                put_mixin_on(module, PartialGradient, region)
        region.owner.register_forward_hook(region.close, always_call=True)
    whole: Any = model
    backbones = [] if whole.config.sub_configs else find_token_readers(model)
    decoder = whole.get_decoder() if whole.config.is_encoder_decoder else None
    for backbone in backbones:
        heads, _ = read_attention_heads(backbone) or (0, 0)
        if backbone is decoder:
            heads = getattr(whole.config, "decoder_attention_heads", heads)  # the others are the encoder's
        backbone.register_forward_hook(functools.partial(_join_scores, mesh.get_group(), heads))
    if not backbones:  # towers for images give scores that nobody joins
        model.register_forward_pre_hook(_refuse_scores, with_kwargs=True)


def _join_scores(
    group: dist.ProcessGroup, heads: int, backbone: nn.Module, args: tuple, outputs: ModelOutput
) -> ModelOutput:
    """Let the attention scores [rows, heads, queries, keys] that a call asks for be those of all heads."""

    def join(scores: object) -> object:
        if not torch.is_tensor(scores) or scores.dim() != 4 or scores.shape[1] == heads:
            return scores
        if scores.shape[1] * group.size() != heads:
            raise NotImplementedError(_NEEDS_ALL_HEADS)
        return join_last_dim(scores.movedim(1, -1), group).movedim(-1, 1)

    if isinstance(outputs, tuple):
        if any(
            torch.is_tensor(value) and value.dim() == 4
            for part in outputs
            if isinstance(part, tuple)
            for value in part
        ):
            raise NotImplementedError(f"{_NEEDS_ALL_HEADS}, and so does return_dict=True")
        return outputs
    for name in ("attentions", "cross_attentions"):
        if isinstance(outputs.get(name), tuple):
            outputs[name] = tuple(map(join, outputs[name]))
    return outputs


def _refuse_scores(model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    """Refuse scores of which each rank would have those of its heads."""
    if kwargs.get("output_attentions", model.config.output_attentions):
        raise NotImplementedError(_NEEDS_ALL_HEADS)


def retie(model: nn.Module, by_script: dict[str, str] | None = None) -> None:
    """Re-tie parameters; must precede `fully_shard`, which would keep, gather and pad a shard for each.

    `from_pretrained` ties only after it has loaded, and splitting over tp makes new parameters.

    Args:
        by_script: ties of which the model's config says nothing.
    """
    for target, source in {**(by_script or {}), **(getattr(model, "all_tied_weights_keys", None) or {})}.items():
        own, theirs = model.get_parameter(target), model.get_parameter(source)
        # BERT's head has its bias from a module that is not split: the split one is the one that lives on.
        lasting, changed = (
            (own, source) if isinstance(own, DTensor) and not isinstance(theirs, DTensor) else (theirs, target)
        )
        owner, _, name = changed.rpartition(".")
        model.get_submodule(owner)._parameters[name] = lasting


def shard_parameter(
    module: Any, name: str, mesh: DeviceMesh, dim: int, device: torch.device, segments: list[int] | None = None
) -> None:
    """Turn a parameter into a DTensor cut along `dim`; nothing if the module has none of that name.

    Args:
        mesh: of one axis; a matrix over a grid is cut along `dim` by its rows, along the other dim by its columns.
        segments: sizes along `dim` of what a packed weight holds; it is then kept in the order of `make_packed_order`.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    value = parameter.detach() if parameter.is_meta else parameter.detach().to(device)
    if segments is not None:
        order = make_packed_order(segments, mesh.size(), dim)
        module.stored_orders = {**getattr(module, "stored_orders", {}), name: order}
        value = value if value.is_meta else order.to_stored(value)
    # No source rank: all ranks hold the same values, so each cuts its own slice.
    shard = distribute_tensor(value, mesh, [Shard(dim), Shard(1 - dim)][: mesh.ndim], src_data_rank=None)
    module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)


def _split_column(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region, packed: str | None = None
) -> None:
    """Split a linear by its outputs.

    Args:
        packed: what these hold: "halves" of one width, or "qkv", all query heads, then all keys', then all values'.
    """
    segments = None
    if packed == "halves":
        segments = [get_linear_sizes(module)[1] // 2] * 2
    elif packed == "qkv":
        heads, kv_heads = region.heads
        width = get_linear_sizes(module)[1] // (heads + 2 * kv_heads)
        segments = [heads * width, kv_heads * width, kv_heads * width]
    out = 1 if isinstance(module, Conv1D) else 0
    of_matrices = region.grid.mesh if isinstance(region, GridRegion) else mesh
    shard_parameter(module, "weight", of_matrices, out, device, segments)
    shard_parameter(module, "bias", mesh, 0, device, segments)
    put_mixin_on(module, ColumnParallel, region)


def _split_row(module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    of_matrices = region.grid.mesh if isinstance(region, GridRegion) else mesh
    shard_parameter(module, "weight", of_matrices, 0 if isinstance(module, Conv1D) else 1, device)
    put_mixin_on(module, RowParallel, region)


def _split_shared_heads(module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    width = get_linear_sizes(module)[1] // region.heads[1]  # of values it may be another than of keys
    first = region.group.rank() * region.heads[1] // region.group.size() * width
    rows = torch.arange(first, first + width)
    if isinstance(region, GridRegion):
        shard_parameter(module, "weight", region.grid.mesh, 0, device)
        put_mixin_on(module, JoinedHeads, region).rows = rows
    else:
        put_mixin_on(module, SharedHeads, region).rows = rows
    # All query heads of a rank share its one key/value head.
    region.owner.num_key_value_groups = region.heads[0] // region.group.size()


def _split_shared_packed(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region, by_groups: bool = False
) -> None:
    """A packed weight with fewer keys than ranks: this rank's queries and the one key and value they share.

    Args:
        by_groups: the weight holds Falcon's groups [q … q k v], or its one group [q | k | v]; else [q | k | v].
    """
    (heads, kv_heads), (rank, size) = region.heads, (region.group.rank(), region.group.size())
    shared, per_group, own = rank * kv_heads // size, heads // kv_heads, heads // size
    queries, key, value = list(range(own * rank, own * (rank + 1))), heads + shared, heads + shared + kv_heads
    if by_groups:
        queries = [query + 2 * shared for query in queries]
        key = shared * (per_group + 2) + per_group
        value = key + 1
    width = get_linear_sizes(module)[1] // (heads + 2 * kv_heads)
    rows = torch.tensor([*queries, key, value]).unsqueeze(1) * width + torch.arange(width)
    put_mixin_on(module, SharedHeads, region).rows = rows.flatten()
    region.owner.num_key_value_groups = own  # as in `_split_shared_heads`


def _split_heads(owner: nn.Module, mesh: DeviceMesh, device: torch.device, region: Region) -> None:
    if not isinstance(owner, LocalHeads):
        for name in OF_HEADS:
            shard_parameter(owner, name, mesh, 0, device)
        put_mixin_on(owner, LocalHeads, region)


#: Subclasses of Linear, and its kin, that compute what it does.
SAME_AS_LINEAR = {"FalconLinear"}
_STYLES: dict[str, Callable[..., object]] = {
    "colwise": _split_column,
    "rowwise": _split_row,
    "packed_halves": functools.partial(_split_column, packed="halves"),
    "packed_qkv": functools.partial(_split_column, packed="qkv"),
    "falcon_qkv": _split_column,
    "colwise_shared_heads": _split_shared_heads,
    "shared_qkv": _split_shared_packed,
    "shared_groups": functools.partial(_split_shared_packed, by_groups=True),
    "embedding_heads": lambda module, mesh, device, region: put_mixin_on(module, HeadsEmbedding, region),
    "heads": _split_heads,
    "replicated_with_grad_allreduce": lambda module, mesh, device, region: put_mixin_on(
        module, PartialGradient, region
    ),
}
#: Styles of linears alone.
FOR_LINEARS = set(_STYLES) - {"embedding_heads", "heads", "replicated_with_grad_allreduce"}
_STYLES |= WHOLE_STYLES


# ---- Experts that are split inside: each rank has a part of the width of every one, and sees every token
#     style     weight placement                                forward of a layer's experts, x and its routing entered
#     experts   Shard along the width, [gate | up] as packed    y = leave(Σ over a token's experts of w_e f_local(x))
#
# Routers stay whole: without sequence parallelism each rank routes all tokens, with it its own, and what they chose is
# gathered with the tokens.


class SplitExperts(TensorParallelLayer):
    """Mixin of a module that holds experts: tokens and their routing enter, the sum of what ranks compute leaves."""

    expert_facts: ExpertFacts

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        group = self.region.group
        cut = self.region.sequence_parallel
        enter, leave = (gather_sequence, reduce_scatter_sequence) if cut else (copy_to_group, reduce_from_group)
        entered = self._arrange_rows(enter(self._arrange_rows(hidden_states, by_token=True), group), by_token=False)
        own: dict[str, torch.Tensor] = {}
        weights: dict[str, Any] = self._parameters
        for name, dim in self.expert_facts.widths.items():
            if dim is not None:  # this rank's part
                own[name] = get_local(weights[name])
            else:  # what runs along no width is added once, by the first rank
                own[name] = copy_weight_to_group(weights[name], group) * float(group.rank() == 0)
        with hold_other_tensors(self, {name: with_added(self, name, weight) for name, weight in own.items()}):
            output = super().forward(entered, *(enter(tensor, group) for tensor in routing))
        return self._arrange_rows(leave(self._arrange_rows(output, by_token=True), group), by_token=False)

    def _arrange_rows(self, rows: torch.Tensor, by_token: bool) -> torch.Tensor:
        """Return one row for each token, as it travels, or one expert's tokens after another, as dense experts do."""
        if not self.expert_facts.dense:
            return rows
        moved = rows.unflatten(0 if by_token else 1, (self.expert_facts.count, -1)).transpose(0, 1)
        return moved.flatten(1) if by_token else moved.flatten(0, 1)


def split_experts(
    model: nn.Module,
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
        put_mixin_on(module, SplitExperts, Region(module, mesh.get_group(), switch)).expert_facts = facts
