"""Files that a script writes and reads itself, as in one process.

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)    whole states, from rank 0
    model.load_state_dict(torch.load(path)["model"])                                        each rank takes its part

Each function takes the original.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.apply.methods import load_own_parts
from hf_parallel.apply.own_files import KnownStates, list_names_of_other_stages, make_whole
from hf_parallel.apply.weights import full_tensor
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.checkpoint import set_plain_state
from hf_parallel.checkpoint.slices import list_axes_and_dims
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.report import say
from hf_parallel.ranks import assert_all_ranks
from hf_parallel.ranks.mesh import get_stored
from hf_parallel.ranks.messages import gather_objects

if TYPE_CHECKING:
    from torch.optim import Optimizer


# ---- writing --------------------------------------------------------------------------------------------------------


@patch("torch:save", "pickles a part of the weights without a word")
def save(original: Callable, obj: object, f: Any, *args: object, **kwargs: object) -> object:
    """Write whole states. Where each rank names a file of its own, each writes its part, and a line says so."""
    return _write("torch.save", obj, f, lambda whole: original(whole, f, *args, **kwargs))


@patch("safetensors.torch:save_file", "writes a stage as if it were the model, and no DTensor", copies=True)
def save_file(
    original: Callable, tensors: dict[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any
) -> object:
    """Write whole tensors."""
    return _write("safetensors.torch.save_file", tensors, filename, lambda it: original(it, filename, *args, **kwargs))


@patch("safetensors.torch:save_model", "writes a stage as if it were the model, and no DTensor", copies=True)
def save_model(original: Callable, model: nn.Module, filename: Any, *args: object, **kwargs: object) -> object:
    """Write a whole model; tied weights once, as in one process."""
    if not _is_parallel(model):
        return original(model, filename, *args, **kwargs)
    return _write(
        "safetensors.torch.save_model",
        model.state_dict(),
        filename,
        lambda whole: original(SimpleNamespace(state_dict=lambda: whole), filename, *args, **kwargs),
    )


@patch("accelerate.utils.other:save", "writes on rank 0 what it has alone", copies=True)
def save_on_main_process(original: Callable, obj: object, *args: Any, **kwargs: Any) -> object:
    """Write whole states; all ranks come here, and the first one writes."""
    return original(make_whole("accelerator.save", obj)[0], *args, **kwargs)


def _write(call: str, obj: object, file: object, write: Callable[[Any], object]) -> object:
    if any(isinstance(found, nn.Module) and _is_parallel(found) for found in _iterate_inside(obj)):
        refuse(f"{call} of a model", "it holds this rank's part; a state is made whole", "model.state_dict()")
    whole, together = make_whole(call, obj)
    if together:
        names = gather_objects(os.path.abspath(file) if isinstance(file, str | os.PathLike) else None)
        if len(set(names)) == 1 and names[0] is not None:
            made = write(whole) if torch.distributed.get_rank() == 0 else None
            torch.distributed.barrier()  # the script may read the file at once
            return made
        whole = obj
    left = _iterate_inside(whole)
    if any(getattr(found, "is_part_of_model", False) or isinstance(found, DTensor) for found in left):
        _tell_of_parts(call)
    return write(whole)


@functools.cache
def _tell_of_parts(call: str) -> None:
    say(
        f"{call} is given what this rank stores, a part of the weights; write hf_parallel.full_state_dict(model), "
        "called on all ranks, or model.save_pretrained (docs/idioms.md)"
    )


def _iterate_inside(obj: object, depth: int = 6) -> Iterator[object]:
    """An object and what it contains; of long lists, which hold data, only themselves."""
    yield obj
    values = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list | tuple) and len(obj) < 100 else ()
    for value in values if depth else ():
        yield from _iterate_inside(value, depth - 1)


# ---- reading --------------------------------------------------------------------------------------------------------


@patch("torch.nn.modules.module:Module.load_state_dict", "copies neither parts into whole weights nor the reverse")
def load_state_dict(
    original: Callable, self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> object:
    """Load whole weights into a parallel model, and a parallel model's into one that is made in code.

    The second is collective over the ranks that hold parts.
    """
    if _is_parallel(self) or any(isinstance(p, DTensor) for p in self.parameters()):
        others, own = list_names_of_other_stages(self), self.state_dict()
        is_whole = any(_is_whole_of(state_dict[name], value) for name, value in own.items() if name in state_dict)
        if is_whole or others & {*state_dict}:
            return load_own_parts(self, state_dict, strict, assign, others)
        return original(self, state_dict, strict, assign)
    parts = {name: value for name, value in state_dict.items() if isinstance(value, DTensor)}
    if getattr(state_dict, "is_part_of_model", False):
        what = f"{type(self).__name__}.load_state_dict of a model under pp_size={runtime.mesh().size('pp')}"
        refuse(what, "its state has the weights of one stage", do="copy.deepcopy(model) or pp_size=1 works")
    if not parts:
        return original(self, state_dict, strict, assign)
    whole: Any = copy.copy(state_dict)  # with what torch notes on it
    whole.update((name, full_tensor(value)) for name, value in parts.items())
    return original(self, whole, strict, assign)


@patch(
    "safetensors.torch:load_model",
    "looks for tied weights by their memory, which a DTensor does not show",
    copies=True,
)
def load_model(original: Callable, model: nn.Module, *args: object, **kwargs: object) -> object:
    """Load a whole model; each rank takes its part."""
    if not _is_parallel(model):
        return original(model, *args, **kwargs)
    stored = {name: get_stored(tensor) for name, tensor in model.state_dict().items()}

    def load(state_dict: dict[str, torch.Tensor], strict: bool) -> object:
        # The file has one name of a tied weight, and a stage may have the other.
        for prefix, module in model.named_modules():
            for pair in (getattr(module, "_hf_parallel_tied_keys", None) or {}).items():
                one, other = (f"{prefix}.{name}" if prefix else name for name in pair)
                for here, there in ((one, other), (other, one)):
                    if here in state_dict and there in stored and here not in stored:
                        state_dict = {**state_dict, there: state_dict[here]}
        return model.load_state_dict(state_dict, strict=strict)

    return original(SimpleNamespace(state_dict=lambda: stored, load_state_dict=load), *args, **kwargs)


@patch("torch.optim.optimizer:Optimizer.load_state_dict", "takes whole states for a rank's part")
def load_optimizer_state_dict(original: Callable, self: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the state that one process has, or a file that `torch.save` wrote under a layout."""
    found = of_session(KnownStates).find_model_of(self)
    if found is None or not _holds_whole_states(self, state_dict):
        return original(self, state_dict)
    model, mesh = found
    if mesh.size("pp") > 1:
        assert_all_ranks("optimizer.load_state_dict")
    set_plain_state(model, self, state_dict, mesh)


def _is_parallel(model: nn.Module) -> bool:
    return any("_hf_parallel" in vars(module) for module in model.modules())


def _is_whole_of(value: object, own: object) -> bool:
    """Return whether a value is a whole tensor where the model holds a part."""
    return isinstance(own, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _holds_whole_states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> bool:
    own, given = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in own] != [
        len(group["params"]) for group in given
    ]:  # of one stage, and of all
        return True
    numbers = [number for group in given for number in group["params"]]
    parameters = [p for group in own for p in group["params"]]
    pairs = ((p, state_dict["state"].get(number, {})) for p, number in zip(parameters, numbers, strict=True))
    return any(
        _is_whole_of(value, p) and bool(list_axes_and_dims(p)) and value.shape == p.shape
        for p, slots in pairs
        for value in slots.values()
    )
