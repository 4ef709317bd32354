"""PEFT: complete adapters split over tp, shown to the stages and sharded over data ranks; merged, and taken out."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_parallel.apply.parallelize import ParallelState, state_of
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.adapters import lora, lora_grid, lora_weights
from hf_parallel.axes.adapters.four_bit import FourBit
from hf_parallel.axes.data.parameters import add_late_parameters, remove_late_parameters
from hf_parallel.axes.data.units import iterate_sharded_modules
from hf_parallel.axes.data.zero import gather_around
from hf_parallel.axes.experts.layers import SharedOut
from hf_parallel.axes.pipeline.stages import follow_wrappers
from hf_parallel.axes.tensor.layers import TensorParallelLayer, get_local, hold_other_tensors
from hf_parallel.axes.tensor.tensor_parallel import SplitExperts, shard_parameter
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.peft.whole import has_whole_adapters, merge_into_whole_weights, unshard
from hf_parallel.model.anatomy import is_tie_broken
from hf_parallel.model.calls import bind_by_name

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import MultiheadAttention
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from transformers import PreTrainedModel

# ---- Switching adapters: a script does it on the last stage of a pipeline, and the other stages follow --------------


class AdapterState:
    """Reads and sets what `disable_adapter()` and `set_adapter()` change, but for what trains."""

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def read(self) -> tuple[bool, tuple[str, ...]] | None:
        """Return whether adapters are off, and which are active otherwise; None for a stage without any."""
        if not self.layers:
            return None
        return self.layers[0]._disable_adapters, tuple(self.layers[0].active_adapters)

    @contextlib.contextmanager
    def as_in(self, state: tuple[bool, tuple[str, ...]] | None) -> Iterator[None]:
        """Set adapters inside the `with` as `read` found them on another stage."""
        former = [(layer, layer._disable_adapters, layer._active_adapter) for layer in self.layers]
        if state is not None:
            for layer in self.layers:
                layer._disable_adapters, layer._active_adapter = state[0], list(state[1])
        try:
            yield
        finally:
            for layer, disabled, active in former:
                layer._disable_adapters, layer._active_adapter = disabled, active

    def set_in(self, root: nn.Module, state: tuple[bool, tuple[str, ...]] | None) -> None:
        """Set the adapters of a copy of another stage, as `read` found them there."""
        if state is not None:
            for layer in AdapterState(root).layers:
                layer._disable_adapters, layer._active_adapter = state[0], list(state[1])


def place_in_base(model: PreTrainedModel, state: ParallelState) -> None:
    """Split new adapters over tp, show them to the stages, and shard them over the data ranks."""
    from peft.utils.other import ModulesToSaveWrapper

    # Copies of sharded modules get parameters of their own, and are shown to the stages.
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    for trained in (one for wrapper in wrappers for one in wrapper.modules_to_save.values()):
        if state.mesh.config.sharing_size > 1 and not hasattr(trained, "_hf_parallel_placed"):
            for part in trained.modules():
                unshard(part, state)
        trained._hf_parallel_placed = True
    around = {id(wrapper.original_module): wrapper for wrapper in wrappers}
    for stage in () if state.pipeline is None else state.pipeline.stages:
        for i, part in enumerate(stage.parts):
            stage.parts[i] = around.get(id(part), part)
    shown: contextlib.AbstractContextManager = contextlib.nullcontext()
    if state.pipeline is not None and state.pipeline.mirror is not None:  # modules of another stage run here too
        shown = state.pipeline.remote_modules.shown(model)
    if state.mesh.size("tp") > 1 or state.mesh.size("ep") > 1:
        with shown:
            for name, module in list(model.named_modules()):
                # The module inside all wrappers: wrappers of several weights of one module nest.
                base = module.get_base_layer() if hasattr(module, "base_layer") else None
                if isinstance(base, TensorParallelLayer | SharedOut):
                    _split_adapter(name, module, base, state)
    for module in model.modules():
        base = module.get_base_layer() if getattr(module, "lora_magnitude_vector", None) else None
        if isinstance(base, nn.Embedding) and isinstance(base, FSDPModule):  # norms are read beside its own call
            gather_around(base, module)
    if state.pipeline is not None:
        follow_wrappers(state.pipeline.stages, model)
        state.pipeline.services.adapters = AdapterState(model)
    if state.mesh.config.sharing_size > 1:
        add_late_parameters(state.root)
    state.copy_adapters = copy_adapters
    waiting = model.__dict__.pop("_hf_parallel_unplaced", None)
    if waiting is not None:
        waiting.remove()


def copy_adapters(model: PreTrainedModel, other: PreTrainedModel, memo: dict) -> None:
    """Put adapters as those of a parallel model into another one, plain or parallel, without their values.

    Args:
        memo: of `copy.deepcopy`, which also copies what is around the model.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    if has_whole_adapters(model._hf_parallel):
        why = "a copy of a model with adapters that ranks keep whole; load it a second time"
        raise NotImplementedError(f"hf_parallel: {why}")
    configs = copy.deepcopy(model.peft_config, memo)
    with runtime.set_layout_aside() if state_of(other) is None else contextlib.nullcontext():
        for name, config in configs.items():
            with replacing(config, init_lora_weights=True):  # what starts from the base's weights would read them
                inject_adapter_in_model(config, other, name)
    other.peft_config, other._hf_peft_config_loaded = configs, model._hf_peft_config_loaded
    for own, new in (
        (one, other.get_submodule(name)) for name, one in model.named_modules() if isinstance(one, LoraLayer)
    ):
        for what in ("scaling", "merged_adapters", "_caches"):
            setattr(new, what, copy.deepcopy(getattr(own, what)))
    AdapterState(model).set_in(other, AdapterState(model).read())


@patch(
    "peft.{peft_model:PeftModel,tuners.tuners_utils:BaseTuner}.__deepcopy__",
    "gives a copy of the model inside",
    adds=True,
)
def copy_around(original: object, self: nn.Module, memo: dict) -> nn.Module:
    """Return a copy as of any module: the attribute of the model inside, which PEFT hands on, copies that alone."""
    new = type(self).__new__(type(self))
    memo[id(self)] = new
    vars(new).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
    return new


def _split_adapter(name: str, wrapper: BaseTunerLayer, base: nn.Module, state: ParallelState) -> None:
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    mesh, device = state.mesh["tp"], state.mesh.device
    if isinstance(wrapper, ParamWrapper) and lora_weights.adapt_expert_weight(wrapper, base):
        return
    if isinstance(wrapper, ParamWrapper):
        if not lora_weights.split_weight(wrapper, base, mesh, device):
            named = f"{name}.{wrapper.parameter_name}"
            refuse("target_parameters", f"how adapters of {named} are split is not known", "tp_size=1")
        return
    if not isinstance(wrapper, Linear | Embedding) or not lora.can_split_adapter(base):
        refuse("target_modules", f"how adapters of {name} are split is not known", "tp_size=1")
    lora.adapt_linear(wrapper)
    on_grid = lora_grid.is_on_grid(base)
    if on_grid and wrapper.lora_magnitude_vector:
        refuse("use_dora", f"magnitudes of {name} under tp_mesh={state.mesh.config.tp_mesh} are not known", "False")
    split = lora_grid.split_adapter_on_grid if on_grid else lora.split_linear_adapter
    dropout = lora_grid.ColumnsDropout if on_grid else lora.SharedDropout
    for adapter in wrapper.lora_A:
        if not isinstance(wrapper.lora_A[adapter], TensorParallelLayer):
            split(base, wrapper.lora_A[adapter], wrapper.lora_B[adapter], mesh, device)
            lora.split_adapter_dropout(base, wrapper.lora_dropout[adapter], dropout)
            if adapter in wrapper.lora_magnitude_vector:
                lora.split_magnitude(base, wrapper.lora_magnitude_vector[adapter], mesh, device)
    for adapter in wrapper.lora_embedding_A:
        if adapter in wrapper.lora_magnitude_vector:
            refuse("use_dora", f"magnitudes of a split embedding ({name}) are not known", do="other targets work")
        if not hasattr(wrapper.lora_embedding_A[adapter], "placements"):
            shard_parameter(wrapper.lora_embedding_A, adapter, mesh, 1, device)  # A [r, V]; B stays whole


# ---- Adapters merged into the weights of a parallel base, each rank into the part it stores
# The added s B A is made whole from A and B, which are small, for one layer at a time. DoRA scales by the norms of
# whole rows: there the weight of one layer at a time is made whole too.


@patch(
    "peft.tuners.lora.layer:{Linear,Embedding,ParamWrapper,_ConvNd}.get_delta_weight", "adds whole to local weights"
)
def delta_weight(
    original: Callable, self: LoraLayer, *names: str, **named: str
) -> torch.Tensor:  # kinds of layers call it differently
    """Return this rank's part of s B A. Adapters have the order in which their weight is stored."""
    (adapter,) = (*names, *named.values())
    weight = self.get_param() if hasattr(self, "get_param") else self.get_base_layer().weight
    if not isinstance(weight, DTensor):  # also in a forward that adds it to a gathered weight
        return original(self, adapter)
    with hold_whole_adapter(self, adapter):
        delta = original(self, adapter).detach()
    if isinstance(delta, DTensor):  # a wrapper of a weight asks as a linear does
        return delta
    base, order = self.get_base_layer(), None
    if isinstance(base, SplitExperts):  # adapters of experts' weights are in the model's own order
        order = getattr(base, "stored_orders", {}).get(self.parameter_name)
    part = read_part(delta, find_local_part(weight, order)).contiguous()
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@patch(
    "peft.tuners.lora.layer:{Linear.merge,Linear.unmerge,_ConvNd.merge,_ConvNd.unmerge}",
    "takes norms of a shard's rows",
)
def merge_layer(original: Callable, self: LoraLayer, *args: object, **kwargs: object) -> None:
    """Merge DoRA into one layer, or take it out, with its whole weight, of which each rank keeps its part."""
    base = self.get_base_layer()
    weight = base.weight
    if not (self.lora_variant and isinstance(weight, DTensor)):
        original(self, *args, **kwargs)
        return
    with contextlib.ExitStack() as stack:
        for adapter in self.lora_A:
            stack.enter_context(hold_whole_adapter(self, adapter))
        stack.enter_context(_gather_parameter(base, "weight"))
        original(self, *args, **kwargs)
        changed = base.weight.detach()
    with torch.no_grad():
        get_local(weight).copy_(read_part(changed, find_local_part(weight)))


@patch(
    "peft.tuners.lora.layer:MultiheadAttention.{forward,_restore_weights}",
    "puts others in the place of gathered weights",
)
def attend(original: Callable, self: MultiheadAttention, *args: object, **kwargs: object) -> object:
    """Put the own weights of the base back: a forward pass, and any look at the modules, leaves equal ones there."""
    base = self.get_base_layer()
    places = {"in_proj_weight": base, "weight": base.out_proj.get_base_layer()}
    former = {name: module._parameters.get(name) for name, module in places.items()}
    try:
        return original(self, *args, **kwargs)
    finally:
        for name, parameter in former.items():
            if parameter is not None and name in places[name]._parameters:
                places[name]._parameters[name] = parameter


@contextlib.contextmanager
def hold_whole_adapter(layer: nn.Module, adapter: str) -> Iterator[None]:
    """Hold whole A and B of a layer, and DoRA's magnitudes, in the `with`. Collective over the ranks of its stage."""
    with contextlib.ExitStack() as stack:
        for name in ("lora_A", "lora_B", "lora_magnitude_vector"):
            if adapter in getattr(layer, name):
                stack.enter_context(_gather_parameter(getattr(layer, name)[adapter], "weight"))
        for name in ("lora_embedding_A", "lora_embedding_B"):
            if adapter in getattr(layer, name):
                stack.enter_context(_gather_parameter(getattr(layer, name), adapter))
        yield


def _gather_parameter(module: nn.Module, name: str) -> contextlib.AbstractContextManager:
    parameter = module._parameters[name]
    assert parameter is not None
    whole = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    return hold_other_tensors(module, {name: nn.Parameter(whole, requires_grad=False)})


@patch("peft.tuners.tuners_utils:BaseTuner.{merge,unmerge}_adapter", "changes gathered weights")
def merge(original: Callable, self: BaseTuner, *args: object, **kwargs: object) -> None:
    """Change the stored parts, not gathered weights, in `merge_adapter` and `unmerge_adapter`."""
    state = runtime.find_parallel_state(self.model)
    if state is not None:
        _check_merge(self.model, state, True, bool(bind_by_name(original, (self, *args), kwargs).get("safe_merge")))
        for module in iterate_sharded_modules(state.root):
            module.reshard()  # weights gathered for a pass would hide the change
    whole = state is not None and has_whole_adapters(state)
    with merge_into_whole_weights(self.model) if whole else contextlib.nullcontext():
        original(self, *args, **kwargs)


@patch("peft.tuners.tuners_utils:BaseTuner.{merge_and_unload,unload}", "leaves split layers without a way out")
def take_adapters_out(original: Callable, self: BaseTuner, *args: object, **kwargs: object) -> object:
    """Let layers communicate by themselves again, and FSDP2 forget the adapters, added to a rank's part or not."""
    state = runtime.find_parallel_state(self.model)
    if state is None:
        return original(self, *args, **kwargs)
    safe_merge = bool(bind_by_name(original, (self, *args), kwargs).get("safe_merge"))
    _check_merge(self.model, state, original.__name__ == "merge_and_unload", safe_merge)
    for sharded in iterate_sharded_modules(state.root):
        sharded.reshard()
    wrappers = [module for module in self.model.modules() if _get_wrapped(module) is not None]
    names = {id(module): name for name, module in self.model.named_modules()}
    with merge_into_whole_weights(self.model) if has_whole_adapters(state) else contextlib.nullcontext():
        result = original(self, *args, **kwargs)
    for wrapper in wrappers:
        inner = _get_wrapped(wrapper)
        if isinstance(inner, TensorParallelLayer):
            inner.adapted = False
        has_moved = has_whole_adapters(state) or bool(getattr(wrapper, "lora_magnitude_vector", None))
        if isinstance(inner, FSDPModule) and has_moved:
            gather_around(inner, inner)
    # The stages hold the modules that now stand in the place of the wrappers.
    replaced = {id(wrapper): names[id(wrapper)] for wrapper in wrappers}
    for stage in () if state.pipeline is None else state.pipeline.stages:
        for i, part in enumerate(stage.parts):
            if id(part) in replaced:
                stage.parts[i] = self.model.get_submodule(replaced[id(part)])
    if state.pipeline is not None:
        state.pipeline.services.adapters = None
    state.copy_adapters = None
    if state.mesh.config.sharing_size > 1:
        remove_late_parameters(state.root)
    if original.__name__ == "merge_and_unload":
        _untie_config(self.model)
    return result


def _untie_config(model: PreTrainedModel) -> None:
    """Note in the config that embedding and head have come apart, which peft looks for in the memory of a tensor."""
    held, ties = dict(model.named_parameters(remove_duplicate=False)), getattr(model, "_hf_parallel_tied_keys", {})
    if any(is_tie_broken(held, *pair) for pair in ties.items()):
        model.config.tie_word_embeddings = False


def _get_wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of PEFT; None for any other module."""
    children = getattr(module, "_modules", {})
    return children.get("base_layer", children.get("original_module"))


def _check_merge(model: PreTrainedModel, state: ParallelState, merge: bool, safe_merge: bool) -> None:
    from peft.tuners.lora.layer import MultiheadAttention

    if has_whole_adapters(state):  # PEFT's own layers merge them into whole weights
        return
    if safe_merge:
        raise NotImplementedError("hf_parallel: safe_merge=True on a parallel model is not part of this version")
    is_tied, ends = bool(getattr(model, "_hf_parallel_tied_keys", {})), list[nn.Module]()
    with contextlib.nullcontext() if state.pipeline is None else state.pipeline.remote_modules.shown(model):
        modules = list(model.modules())
        if state.pipeline is not None and is_tied:
            ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(isinstance(module, MultiheadAttention) for module in modules):
        raise NotImplementedError(
            "hf_parallel: merging, or taking out, adapters of a MultiheadAttention on a parallel model is not part of "
            "this version; save the adapter, then load and merge it in one process"
        )
    if merge and any(_get_wrapped(end) is not None for end in ends):
        raise NotImplementedError(
            f"hf_parallel: merging adapters of a tied embedding or head under pp_size={state.mesh.size('pp')}, where "
            "two stages hold the weight, is not part of this version; pp_size=1 works, or save the adapter, then load "
            "and merge it in one process"
        )
    variants = {type(v) for module in modules for v in (getattr(module, "lora_variant", None) or {}).values()}
    if merge and any(
        re.fullmatch(r"Dora(Linear|Conv[123]d)Variant", variant.__name__) is None for variant in variants
    ):
        raise NotImplementedError(
            "hf_parallel: merging DoRA of embeddings into shards is not part of this version; save the adapter, then "
            "load and merge it in one process"
        )
    if merge and any(isinstance(module, FourBit) for module in modules):
        raise NotImplementedError(
            "hf_parallel: merging into a base of 4 bits is not part of this version; save the adapter, then load and "
            "merge it in one process"
        )
