"""PEFT: adapters that are complete are split over tp, shown to the stages and sharded over the data ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.adapters import lora, lora_grid, lora_weights
from hf_parallel.axes.adapters import lora_weights as expert_weights
from hf_parallel.axes.data.parameters import add_late_parameters
from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.axes.pipeline.stages import follow_wrappers
from hf_parallel.axes.tensor.layers import TensorParallelLayer
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn
    from transformers import PreTrainedModel


# ---- Which adapters are on: a script switches them on the last stage of a pipeline, the other stages follow ---------


class AdapterState:
    """Reads and sets what `disable_adapter()` and `set_adapter()` change, but for what trains."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def read(self) -> tuple[bool, tuple[str, ...]] | None:
        """Whether adapters are off, and which are active otherwise; None for a stage without any."""
        if not self.layers:
            return None
        return self.layers[0]._disable_adapters, tuple(self.layers[0].active_adapters)

    @contextlib.contextmanager
    def as_in(self, state: tuple[bool, tuple[str, ...]] | None) -> Iterator[None]:
        """In here adapters are as `read` found them on another stage."""
        former = [(layer, layer._disable_adapters, layer._active_adapter) for layer in self.layers]
        if state is not None:
            for layer in self.layers:
                layer._disable_adapters, layer._active_adapter = state[0], list(state[1])
        try:
            yield
        finally:
            for layer, disabled, active in former:
                layer._disable_adapters, layer._active_adapter = disabled, active


def place_in_base(model: PreTrainedModel, state: ParallelState) -> None:
    """Split new adapters over tp, show them to the stages, and shard them over the data ranks."""
    place_copies(model, state)
    if state.mesh.size("tp") > 1 or state.mesh.size("ep") > 1:
        for name, module in list(model.named_modules()):
            base = _innermost(module)
            if isinstance(base, TensorParallelLayer | SharedOut):
                _split(name, module, base, state)
    if state.pipeline is not None:
        follow_wrappers(state.pipeline.stages, model)
        state.pipeline.services.adapters = AdapterState(model)
    if state.mesh.config.sharing_size > 1:
        add_late_parameters(state.root)
    waiting = model.__dict__.pop("_hf_parallel_unplaced", None)
    if waiting is not None:
        waiting.remove()


def place_copies(model: nn.Module, state: ParallelState) -> None:
    """Give copies of sharded modules parameters of their own, and show them to the stages."""
    from peft.utils.other import ModulesToSaveWrapper

    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    for copy in (copy for wrapper in wrappers for copy in wrapper.modules_to_save.values()):
        if state.mesh.config.sharing_size > 1 and not hasattr(copy, "_hf_parallel_placed"):
            for part in copy.modules():
                _unshard(part, state)
        copy._hf_parallel_placed = True
    if state.pipeline is not None:
        around = {id(wrapper.original_module): wrapper for wrapper in wrappers}
        for stage in state.pipeline.stages:
            parts = stage.parts
            for i, part in enumerate(parts):
                parts[i] = around.get(id(part), part)


def _unshard(module: nn.Module, state: ParallelState) -> None:
    """Parameters whole over the data ranks, and split over tp as they were. Collective over this stage."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            tp = [p for axis, p in zip(_axes(parameter), parameter.placements, strict=True) if axis == "tp"]
            whole_value = nn.Parameter(parameter.detach().full_tensor(), requires_grad=parameter.requires_grad)
            module._parameters[name] = whole_value
            if tp and isinstance(tp[0], Shard):
                shard_parameter(module, name, state.mesh["tp"], tp[0].dim, state.mesh.device)


def _axes(parameter: DTensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ("",)


def _innermost(wrapper: BaseTunerLayer) -> nn.Module | None:
    """What a wrapper is around; those of several weights of one module are around each other."""
    return wrapper.get_base_layer() if hasattr(wrapper, "base_layer") else None


def _split(name: str, wrapper: BaseTunerLayer, base: nn.Module, state: ParallelState) -> None:
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    mesh, device = state.mesh["tp"], state.mesh.device
    if isinstance(wrapper, ParamWrapper) and expert_weights.can_adapt(base, wrapper.parameter_name):
        expert_weights.adapt(wrapper)
        return
    if isinstance(wrapper, ParamWrapper):
        if not lora_weights.can_split(base, wrapper.parameter_name):
            named = f"{name}.{wrapper.parameter_name}"
            refuse("target_parameters", f"how adapters of {named} are split is not known", "tp_size=1")
        lora_weights.split_weight(wrapper, mesh, device)
        return
    if not isinstance(wrapper, Linear | Embedding) or not lora.can_split(base):
        refuse("target_modules", f"how adapters of {name} are split is not known", "tp_size=1")
    lora.adapt(wrapper)
    on_grid = lora_grid.is_on_grid(base)
    if on_grid and wrapper.lora_magnitude_vector:
        refuse("use_dora", f"magnitudes of {name} under tp_mesh={state.mesh.config.tp_mesh} are not known", "False")
    ways = lora_grid if on_grid else lora
    for adapter in wrapper.lora_A:
        if not isinstance(wrapper.lora_A[adapter], TensorParallelLayer):
            ways.split_linear(base, wrapper.lora_A[adapter], wrapper.lora_B[adapter], mesh, device)
            ways.split_dropout(base, wrapper.lora_dropout[adapter])
            if adapter in wrapper.lora_magnitude_vector:
                lora.split_magnitude(base, wrapper.lora_magnitude_vector[adapter], mesh, device)
    for adapter in wrapper.lora_embedding_A:
        if adapter in wrapper.lora_magnitude_vector:
            refuse("use_dora", f"magnitudes of a split embedding ({name}) are not known", do="other targets work")
        if not hasattr(wrapper.lora_embedding_A[adapter], "placements"):
            lora.split_embedding(wrapper.lora_embedding_A, adapter, mesh, device)
