"""`resize_token_embeddings` of a parallel model: embedding and head become whole, grow and are cut again.

transformers' own functions draw the new rows, from the weights and random numbers of one process on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.data.late_parameters import add_late_parameters, remove_late_parameters
from hf_parallel.axes.data.units import sharded_modules
from hf_parallel.axes.pipeline.stand_ins import StandIn
from hf_parallel.axes.tensor.layers import TensorParallelLayer
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.checkpoint import full_state_dict
from hf_parallel.collectives import assert_all_ranks
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model.anatomy import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """transformers' method, for a parallel model that has no optimizer yet. Collective where the size changes.

    Raises:
        NotImplementedError: a model whose embedding and head are of kinds that cannot be cut again.
    """
    embedding = model.get_input_embeddings()
    rows, step = embedding.weight.shape[0], pad_to_multiple_of or 1
    new_rows = -(-(rows if new_num_tokens is None else new_num_tokens) // step) * step
    if new_rows == rows:
        return embedding
    assert_all_ranks("resize_token_embeddings")
    names = _check(model, rows, new_rows)
    whole = _resized(model, names, new_rows, mean_resizing)
    _put(model, names, whole, new_rows)
    text_config(model).vocab_size = model.vocab_size = new_rows
    return model.get_input_embeddings()


def _check(model: PreTrainedModel, rows: int, new_rows: int) -> dict[str, str]:
    """The parameters that change, each with the one that it is tied to, or itself; the embedding's is the first."""
    modules = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {modules[id(end)]: end for end in (embedding, head) if end is not None}
    tied = dict(getattr(model, "_hf_parallel_tied_keys", None) or {})
    names = {f"{name}.{leaf}": f"{name}.{leaf}" for name, end in ends.items() for leaf in _leaves(end)}
    others = (set(tied) | set(tied.values())) - set(names)
    first = next(iter(names))
    plain = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear | None) and first not in tied
    adapted = any(getattr(end, "adapted", False) or hasattr(end, "base_layer") for end in ends.values())
    if not plain or adapted or others or getattr(model, "is_loaded_in_4bit", False):
        raise NotImplementedError(
            f"hf_parallel: resize_token_embeddings from {rows} to {new_rows} rows of a {type(model).__name__} is not "
            "part of this version; resize and save the model in one process first"
        )
    return {name: tied.get(name, name) for name in names}


def _leaves(end: nn.Module) -> list[str]:
    return [leaf for leaf in ("weight", "bias") if getattr(end, leaf, None) is not None]


def _resized(model: PreTrainedModel, names: dict[str, str], rows: int, mean: bool) -> dict[str, torch.Tensor]:
    """The new weights, whole, by name; those of rank 0."""
    whole = _everywhere(model, set(names.values()))
    (first, *others), mesh = names, model._hf_parallel.mesh
    embedding = nn.Embedding(1, 1, device="meta")
    embedding.num_embeddings, embedding.embedding_dim = whole[first].shape
    embedding.weight, embedding.padding_idx = nn.Parameter(whole[first]), model.get_input_embeddings().padding_idx
    found = {first: model._get_resized_embeddings(embedding, rows, None, mean).weight}
    if others:
        weight, *bias = others
        head = nn.Linear(1, 1, bias=bool(bias), device="meta")
        head.weight = embedding.weight if names[weight] == first else nn.Parameter(whole[weight])
        if bias:
            head.bias = nn.Parameter(whole[bias[0]])
        head.out_features, head.in_features = head.weight.shape
        resized = model._get_resized_lm_head(head, rows, mean_resizing=mean)
        found.update({name: getattr(resized, name.rpartition(".")[2]) for name in others if names[name] == name})
    old = whole[first].shape[0]
    for tensor in found.values():
        _same_rows(tensor.data, old, mesh)
    return {name: tensor.detach() for name, tensor in found.items()}


def _same_rows(tensor: torch.Tensor, old: int, mesh: ParallelMesh) -> None:
    """The new rows of rank 0, should ranks have drawn others."""
    if tensor.shape[0] > old:
        drawn = tensor[old:].contiguous()
        dist.broadcast(drawn, src=0)
        tensor[old:] = drawn


def _everywhere(model: PreTrainedModel, names: set[str]) -> dict[str, torch.Tensor]:
    mesh, found = model._hf_parallel.mesh, {}
    gathered = full_state_dict(model, mesh, wanted=names.__contains__)
    for name in sorted(names):
        described = model.get_parameter(name)
        empty = torch.empty(described.shape, dtype=described.dtype, device=mesh.device)
        found[name] = gathered[name].to(mesh.device) if mesh.rank == 0 else empty
        dist.broadcast(found[name], src=0)
    return found


def _put(model: PreTrainedModel, names: dict[str, str], whole: dict[str, torch.Tensor], rows: int) -> None:
    """Each rank's part, in the place of the former one."""
    state, ends = model._hf_parallel, (model.get_input_embeddings(), model.get_output_embeddings())
    local = [end for end in ends if end is not None and not isinstance(end, StandIn)]
    trained = {name: model.get_parameter(name).requires_grad for name in names}
    for module in sharded_modules(state.root):
        module.reshard()
    remove_late_parameters(state.root, local)
    for name, tensor in whole.items():
        _set(model, name, nn.Parameter(tensor, requires_grad=trained[name]), state.mesh)
    for name, source in names.items():
        owner, leaf = _owner(model, name)
        if name != source and not isinstance(owner, StandIn):
            owner._parameters[leaf] = model.get_parameter(source)
        elif name != source:
            owner.register_parameter(leaf, model.get_parameter(source))
    for end in ends:
        _describe(getattr(end, "real", end), rows)
    if state.mesh.config.sharing_size > 1:
        add_late_parameters(state.root)


def _set(model: PreTrainedModel, name: str, parameter: nn.Parameter, mesh: ParallelMesh) -> None:
    owner, leaf = _owner(model, name)
    if isinstance(owner, StandIn):
        owner.register_parameter(leaf, parameter)
        return
    owner._parameters[leaf] = parameter
    if isinstance(owner, TensorParallelLayer):
        shard_parameter(owner, leaf, mesh["tp"], 0, mesh.device)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _describe(end: nn.Embedding | nn.Linear | None, rows: int) -> None:
    if isinstance(end, nn.Embedding):
        end.num_embeddings = rows
        end.padding_idx = None if end.padding_idx is not None and end.padding_idx >= rows else end.padding_idx
    elif end is not None:
        end.out_features = rows
