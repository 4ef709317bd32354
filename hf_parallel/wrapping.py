"""A module around parallel models, such as one that pools what an encoder gives and adds a layer behind it.

The models inside are parallel by themselves. What is the module's own is sharded over the data ranks beside them, and
whole and equal on tp ranks, whose models give whole outputs: all of them compute the same with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_parallel.axes.data.identical import make_identical
from hf_parallel.axes.data.zero import shard_data_parallel
from hf_parallel.checkpoint import current, full_state_dict
from hf_parallel.collectives import assert_all_ranks
from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.mesh import ParallelMesh


def models_inside(model: nn.Module, config: ParallelConfig) -> dict[str, Any]:
    """The models that `model` is around, outermost ones by name: the parallel ones, and under tp any of transformers'.

    Raises:
        SpecError: a layout or adapters that only a model by itself can have.
    """
    if hasattr(model, "base_model_prefix"):
        return {}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = hasattr(module, "_hf_parallel") or (config.tp_size > 1 and hasattr(module, "base_model_prefix"))
        if name and inside and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    kind = type(model).__name__
    if found and config.pp_size > 1:
        raise SpecError(f"pp_size={config.pp_size}: {kind} is a module around a model; pp_size=1 works")
    for part in found.values():
        if hasattr(part, "peft_config"):
            raise SpecError(
                f"adapters in a model inside {kind} are not part of this version; training its weights works"
            )
    return found


def share_own(model: nn.Module, parts: dict[str, Any], mesh: ParallelMesh) -> None:
    """Shard over data ranks what is in `model` and in none of `parts`; the same values on all ranks. Collective."""
    inside = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    own = nn.Module()
    for number, tensor in enumerate(t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside):
        tensor.data = tensor.data.to(mesh.device)
        own.register_buffer(str(number), tensor.data)  # shares the memory, so what is sent lands in the model
    make_identical(own, mesh.device)
    shard_data_parallel(model, model, [], mesh)


def tied_inside(parts: dict[str, Any]) -> dict[str, str]:
    """Names of tied weights -> names under which they are saved."""
    inner = {name: getattr(part, "_hf_parallel_tied_keys", {}) for name, part in parts.items()}
    return {f"{name}.{tied}": f"{name}.{kept}" for name, keys in inner.items() for tied, kept in keys.items()}


def save_whole(model: nn.Module, parts: dict[str, Any], mesh: ParallelMesh) -> None:
    """Let the module's own ways to save find whole weights: rank 0 writes, all take part."""
    for name in ("save", "save_pretrained"):
        method = getattr(model, name, None)
        if callable(method):
            setattr(model, name, functools.partial(_save, model, parts, mesh, method))


def _save(model: Any, parts: dict[str, Any], mesh: ParallelMesh, method: Callable, *args: Any, **kwargs: Any) -> None:
    if "_holds_whole" in model.__dict__:  # one way to save calls the other
        return method(*args, **kwargs)
    assert_all_ranks("save_pretrained")
    tensors = full_state_dict(model, mesh)
    with current(mesh) as saving:
        if mesh.rank == 0:
            with saving.noting(), _whole(model, parts, tensors):
                method(*args, **kwargs)


@contextlib.contextmanager
def _whole(model: Any, parts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """In here the parameters are whole plain tensors, and the models inside save as transformers does."""
    tied = model._hf_parallel_tied_keys
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    places = {name: model.get_submodule(name.rpartition(".")[0])._parameters for name in names}
    former = {name: places[name][name.rpartition(".")[2]] for name in names}
    methods = {part: part.__dict__.pop("save_pretrained", None) for part in parts.values()}
    whole = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items() if name in places}
    model.__dict__["_holds_whole"] = True
    try:
        for name in names:
            places[name][name.rpartition(".")[2]] = whole[tied.get(name, name)]
        yield
    finally:
        del model.__dict__["_holds_whole"]
        for name in names:
            places[name][name.rpartition(".")[2]] = former[name]
        for part, method in methods.items():
            if method is not None:
                part.save_pretrained = method
