"""`resize_token_embeddings` of a parallel model: embedding and head become whole, grow and are cut again.

transformers' own functions draw the new rows, from the weights and random numbers of one process on every rank.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.apply.whole import order_of, parallel_models
from hf_parallel.ask.keys.data import offload_folder, parameters_rest
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.parameters import (
    Held,
    add_late_parameters,
    assign,
    gathered,
    held_at,
    held_by,
    remove_late_parameters,
)
from hf_parallel.axes.data.units import parameter_groups, sharded_modules
from hf_parallel.axes.pipeline.stages import StandIn
from hf_parallel.axes.tensor.layers import TensorParallelLayer
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.checkpoint import full_state_dict
from hf_parallel.checkpoint.slices import local_part, read_part
from hf_parallel.model.anatomy import text_config
from hf_parallel.ranks import assert_all_ranks
from hf_parallel.ranks.mesh import ParallelMesh, placed_as, stored

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle
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
    names = _check_resized(model, rows, new_rows)
    whole = _resized(model, names, new_rows, mean_resizing)
    _put(model, names, whole, new_rows)
    text_config(model).vocab_size = model.vocab_size = new_rows
    return model.get_input_embeddings()


def _check_resized(model: PreTrainedModel, rows: int, new_rows: int) -> dict[str, str]:
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
        _set_size(model, name, nn.Parameter(tensor, requires_grad=trained[name]), state.mesh)
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


def _set_size(model: PreTrainedModel, name: str, parameter: nn.Parameter, mesh: ParallelMesh) -> None:
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


# ---- New values in the place of a weight that ranks hold parts of: `p.data = x`, `module.weight = nn.Parameter(x)`
# Each rank stores its part of x. Of torch alone it is lost in silence: FSDP2 puts the parameter that it knows back
# into its module at the next gather. So a parallel model keeps its parameter, which an optimizer may know, and takes
# values.


_installed: list[RemovableHandle] = []
#: Parameters whose values were taken, and the lines that gave them.
_taken: Any = WeakIdKeyDictionary()
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@torch.no_grad()
def store(parameter: DTensor, value: torch.Tensor, what: str = "p.data = x") -> None:
    """Let each rank store its part of `value`, which lies as the parameter does, lies elsewhere, or is whole.

    Args:
        what: the script's line, for a refusal.
    """
    found = held_by(parameter, parallel_models())
    own = _contiguous(_as_stored(parameter, value, what))
    _check(found, parameter, own, what)
    assign(parameter, own, found)


def _as_stored(parameter: DTensor, value: torch.Tensor, what: str) -> DTensor:
    """What this rank stores of a value."""
    if value.shape != parameter.shape:
        why = f"a tensor of {tuple(value.shape)} for one of {tuple(parameter.shape)}, of which ranks hold parts"
        refuse(what, why, do="give it one of the same shape, or let one process change the model")
    if not isinstance(value, DTensor):
        own = stored(parameter)
        part = read_part(value, local_part(parameter, order_of(parameter)))
        return placed_as(parameter, part.to(own.device, copy=True))  # a view would keep the whole
    if value.device_mesh != parameter.device_mesh:
        why = "it lies on another mesh"
        refuse(what, why, do="give it what was made of the same parameter, or a whole tensor")
    if value.placements == parameter.placements:
        return value
    return value.redistribute(placements=parameter.placements)


def _check(found: Held | None, parameter: DTensor, value: DTensor, what: str) -> None:
    """Before anything is changed."""
    if found is None:
        return
    advice = "p.data.copy_(x)"
    if offload_folder(found.offload) and parameters_rest(found.offload):
        refuse(what, f"with offload={found.offload} parameters lie in a file", advice)
    if type(parameter._local_tensor) is not torch.Tensor:
        refuse(what, f"of a {type(parameter._local_tensor).__name__}, whose memory is its own", advice)
    if found.group._reset_sharded_params and parameter._local_tensor.dtype != value.dtype:
        why = f"from {parameter._local_tensor.dtype} to {value.dtype} after a forward pass of a sharded model"
        refuse(what, why, do="give the model another dtype before it runs")


def _contiguous(value: DTensor) -> DTensor:
    local: Any = value._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    if local is value._local_tensor and local.is_contiguous():
        return value
    return placed_as(value, local.contiguous())


def take_exchanged() -> None:
    """From here on parallel models take the values of parameters set in them. A second call changes nothing."""
    if not _installed:
        _installed.append(register_module_parameter_registration_hook(_set))  # type: ignore[arg-type]
        _installed.append(register_optimizer_step_pre_hook(_check_optimizer))


def _set(module: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter | None:
    """`module.name = new`: what the module has afterwards, if not `new`."""
    former = module._parameters.get(name)
    if former is None or former is new or former.is_meta or new.is_meta:
        return None
    models = [model for model in parallel_models() if any(inner is module for inner in model.modules())]
    found = held_at(module, name, models) if models else None
    if found is not None and found.knows(new):
        return None
    gathers = found is not None and found.group._reset_sharded_params  # before, loading has put its own there
    parameter = found.held.sharded_param if found is not None and gathers else former
    if not models or not isinstance(parameter, DTensor):
        return None
    path = _named(module, name, models)
    if _are_tied(path, new, models[0]):
        return None
    what = f"{path} = nn.Parameter(x)"
    _refuse_tying(new, models, what)
    if found is not None:
        found.group.reshard()  # where rows have an order of their own, it is found by the parameter in the module
    store(parameter, new.detach(), what)
    _taken[new] = what
    parameter.requires_grad_(new.requires_grad)
    return cast(nn.Parameter, parameter)


def _named(module: nn.Module, name: str, models: list[nn.Module]) -> str:
    return next(f"{path}.{name}".lstrip(".") for path, inner in models[0].named_modules() if inner is module)


def _are_tied(path: str, new: nn.Parameter, model: nn.Module) -> bool:
    """Is `new` the weight that the config ties to this one? transformers ties them again when it has loaded both."""
    pairs = getattr(model, "_hf_parallel_tied_keys", {}).items()
    others = {one if path == other else other for one, other in pairs if path in (one, other)}
    return any(name in others and held is new for name, held in model.named_parameters(remove_duplicate=False))


def _refuse_tying(new: nn.Parameter, models: list[nn.Module], what: str) -> None:
    if held_by(new, models) or any(new is parameter for model in models for parameter in model.parameters()):
        why = "it is another weight of the model: ranks hold parts, which cannot be tied afterwards"
        refuse(what, why, do="set tie_word_embeddings of the config before the model is loaded, or give it a copy")


def _check_optimizer(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """At its first step: one that was given what a model does not train would do nothing."""
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    given = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in given.values() if _taken else ():
        if parameter in _taken:
            why = "the model has taken its values, and trains the parameter it has"
            refuse(f"an optimizer of the x in {_taken[parameter]}", why, do="give it model.parameters()")
    if any(id(parameter) in given for model in parallel_models() for parameter in gathered(model)):
        why = "it was made after a forward pass with gradients, and has copies of weights that ranks hold parts of"
        refuse(type(optimizer).__name__, why, do="make it before the model runs, or after loss.backward()")


def refuse_exchanged(model: nn.Module, args: tuple) -> None:
    """Before its weights are gathered anew, which would undo it: parameters put into a table of a module itself."""
    for group in parameter_groups(model):
        for held in group.fsdp_params if group._reset_sharded_params else ():
            module, name = held._module_info.module, held._module_info.param_name
            there = module._parameters.get(name)
            if there is None or not Held(group, held, "").knows(there):
                why = "it was put there past the module, and the next gather would undo it"
                refuse(
                    f"another parameter for {_named(module, name, [model])}",
                    why,
                    do="module.weight.data = x, or copy_ into it",
                )
