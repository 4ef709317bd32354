"""What other stages hold of a model, for code that must see the whole of it.

Whoever matches names of modules and draws random numbers for them, as adapters do, must find on every stage what it
would find in one process. The modules of other stages are kept aside on the meta device, without values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RemoteModules:
    """The modules of other stages, by name."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules

    @contextlib.contextmanager
    def shown(self, model: PreTrainedModel) -> Iterator[None]:
        """In here `model` has all modules. What those of other stages turn into stays aside for the next time."""
        places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in self.modules
        }
        here = {name: owner._modules[leaf] for name, (owner, leaf) in places.items()}
        for name, (owner, leaf) in places.items():
            owner._modules[leaf] = self.modules[name]
        try:
            yield
        finally:
            for name, (owner, leaf) in places.items():
                self.modules[name], owner._modules[leaf] = owner._modules[leaf], here[name]

    @contextlib.contextmanager
    def counted(self, model: PreTrainedModel) -> Iterator[None]:
        """The same, and both ends of a tie are one parameter, where one of them is another stage's: to count them."""
        former = []
        with self.shown(model):
            for target, source in model._hf_parallel_tied_keys.items():
                owner, _, leaf = target.rpartition(".")
                with contextlib.suppress(AttributeError):  # an adapter around it changes its name
                    former.append((model.get_submodule(owner), leaf, model.get_parameter(target)))
                    former[-1][0]._parameters[leaf] = model.get_parameter(source)
            try:
                yield
            finally:
                for module, leaf, parameter in former:
                    module._parameters[leaf] = parameter


def follow_wrappers(stages: nn.ModuleList, model: nn.Module) -> None:
    """Let the stages hold wrappers that have been put around their parts in `model`, in the place of these."""
    around = {id(module.base_layer): module for module in model.modules() if hasattr(module, "base_layer")}
    for stage in stages:
        parts: Any = stage.parts
        for i, part in enumerate(parts):
            parts[i] = around.get(id(part), part)


def without_values(module: nn.Module) -> nn.Module:
    """The same module with parameters and buffers on the meta device; others may go on to hold the former ones."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to("meta")
    return module
