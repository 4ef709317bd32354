"""A module around parallel models, such as one that pools what an encoder gives and adds a layer behind it.

The models inside are parallel by themselves. What is the module's own is sharded over the data ranks beside them, and
whole and equal on tp ranks, whose models give whole outputs: all of them compute the same with it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_parallel.axes.data.identical import make_identical
from hf_parallel.axes.data.zero import forget_root, shard_data_parallel
from hf_parallel.checkpoint import current, full_state_dict
from hf_parallel.checkpoint.load import copy_part
from hf_parallel.collectives import assert_all_ranks
from hf_parallel.config import ParallelConfig
from hf_parallel.mesh import ParallelMesh
from hf_parallel.model_methods import bind
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def models_inside(model: nn.Module, config: ParallelConfig) -> dict[str, PreTrainedModel]:
    """The models that `model` is around, outermost ones by name: the parallel ones, and under tp any of transformers'.

    Raises:
        SpecError: a layout or adapters that only a model by itself can have.
    """
    if hasattr(model, "base_model_prefix"):
        return {}
    found: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = hasattr(module, "_hf_parallel") or (config.tp_size > 1 and hasattr(module, "base_model_prefix"))
        if name and inside and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    kind = type(model).__name__
    if found and config.pp_size > 1:
        refuse(f"pp_size={config.pp_size}", f"{kind} is a module around a model", "pp_size=1")
    for part in found.values():
        if hasattr(part, "peft_config"):
            refuse(f"adapters in a model inside {kind}", "not part of this version", "training its weights")
    return found


def share_own(model: nn.Module, parts: Mapping[str, PreTrainedModel], mesh: ParallelMesh) -> None:
    """Shard over data ranks what is in `model` and in none of `parts`; the same values on all ranks. Collective."""
    inside = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    own = nn.Module()
    for number, tensor in enumerate(t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside):
        tensor.data = tensor.data.to(mesh.device)
        own.register_buffer(str(number), tensor.data)  # shares the memory, so what is sent lands in the model
    make_identical(own, mesh.device)
    for part in parts.values():
        forget_root(part)
    shard_data_parallel(model, model, [], mesh)


def tied_inside(parts: Mapping[str, PreTrainedModel]) -> dict[str, str]:
    """Names of tied weights -> names under which they are saved."""
    inner = {name: getattr(part, "_hf_parallel_tied_keys", {}) for name, part in parts.items()}
    return {f"{name}.{tied}": f"{name}.{kept}" for name, keys in inner.items() for tied, kept in keys.items()}


def replace_methods_around(model: nn.Module, parts: Mapping[str, PreTrainedModel], mesh: ParallelMesh) -> None:
    """Let the module's own ways to save find whole weights (rank 0 writes, all take part), and take whole ones."""
    for name in ("save", "save_pretrained"):
        method = getattr(model, name, None)
        if callable(method):
            bind(model, name, functools.partial(_save, parts, mesh, method))
    bind(model, "load_state_dict", _load_state_dict)


def _save(
    parts: Mapping[str, PreTrainedModel],
    mesh: ParallelMesh,
    method: Callable,
    model: nn.Module,
    *args: object,
    **kwargs: object,
) -> None:
    if "_holds_whole" in model.__dict__:  # one way to save calls the other
        return method(*args, **kwargs)
    assert_all_ranks("save_pretrained")
    tensors = full_state_dict(model, mesh)
    with current(mesh) as saving:
        if mesh.rank == 0:
            with saving.noting(), _as_in_one_process(model, parts, tensors):
                method(*args, **kwargs)


@contextlib.contextmanager
def _as_in_one_process(
    model: nn.Module, parts: Mapping[str, PreTrainedModel], tensors: dict[str, torch.Tensor]
) -> Iterator[None]:
    """In here this rank has a module of whole weights that runs by itself, as for the examples of a model card."""
    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in parts}
    with contextlib.ExitStack() as stack:
        _put(stack, model.__dict__, "_holds_whole", True)
        _put(stack, model.__dict__, "_forward_pre_hooks", OrderedDict())
        _put(stack, model.__dict__, "_forward_hooks", OrderedDict())
        for table, key, tensor in list(_own_tensors(model, parts, tensors)):
            _put(stack, table, key, tensor)
        for name, (parent, child) in places.items():
            _put(stack, parent._modules, child, _plain(parts[name], _below(tensors, f"{name}.")))
        yield


def _put(stack: contextlib.ExitStack, table: dict, key: str, value: object) -> None:
    """Until the stack is closed."""
    if key in table:
        stack.callback(table.__setitem__, key, table[key])
    else:
        stack.callback(table.__delitem__, key)
    table[key] = value


def _own_tensors(
    model: nn.Module, parts: Mapping[str, PreTrainedModel], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[dict[str, object], str, torch.Tensor]]:
    """Where the parameters and buffers of none of the parts are registered, and what they are as a whole."""
    inside = {id(module) for part in parts.values() for module in part.modules()}
    for place, module in model.named_modules():
        if id(module) in inside:
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                whole = tensors.get(f"{place}.{key}" if place else key)
                whole = tensor.detach().cpu() if whole is None else whole  # a buffer that is not saved
                is_parameter = isinstance(tensor, nn.Parameter)
                table = module._parameters if is_parameter else module._buffers
                yield table, key, nn.Parameter(whole, requires_grad=False) if is_parameter else whole


def _plain(part: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """What transformers would load of these weights, with the modules that `part` has."""
    with torch.device("meta"):
        model = type(part)(copy.deepcopy(part.config))
    for name, module in part.named_modules():
        kept = module._modules
        new = model.get_submodule(name)
        new._modules.update({key: None for key in new._modules if kept.get(key) is None})
    model.load_state_dict(tensors, strict=False, assign=True)
    for name, buffer in part.named_buffers():
        if name not in tensors:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer.detach().cpu()
    model.tie_weights()
    return model.eval()


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _load_state_dict(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """Of values that are whole each rank takes its part; those of another parallel model are in parts already."""
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(f"{type(model).__name__}.load_state_dict: missing {missing}, unexpected {unexpected}")
    for name in own.keys() & state_dict.keys():
        copy_part(model, name, own[name], state_dict[name])
    return _IncompatibleKeys(missing, unexpected)
