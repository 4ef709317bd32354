"""PEFT: adapters merged into the weights of a parallel base, each rank into the part it stores.

What is added, s B A, is made whole from A and B, which are small, for one layer at a time. DoRA scales by the norms of
whole rows: there the weight of one layer at a time is made whole too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.axes.adapters.four_bit import FourBit
from hf_parallel.axes.data.parameters import remove_late_parameters
from hf_parallel.axes.data.units import sharded_modules
from hf_parallel.axes.tensor.experts import SplitExperts
from hf_parallel.axes.tensor.layers import TensorParallelLayer, holding, local
from hf_parallel.checkpoint.slices import local_part, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.model.anatomy import StoredOrder
from hf_parallel.model.calls import by_name

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer


@patch("peft.tuners.lora.layer:{Linear,Embedding,ParamWrapper}.get_delta_weight", "adds whole to local weights")
def delta_weight(
    original: Callable, self: LoraLayer, *names: str, **named: str
) -> torch.Tensor:  # kinds of layers call it differently
    """This rank's part of s B A. Weights that are stored in another order have adapters in the same one."""
    (adapter,) = (*names, *named.values())
    weight = self.get_param() if hasattr(self, "get_param") else self.get_base_layer().weight
    if not isinstance(weight, DTensor):  # also in a forward that adds it to a gathered weight
        return original(self, adapter)
    with _whole(self, adapter):
        delta = original(self, adapter).detach()
    if isinstance(delta, DTensor):  # a wrapper of a weight asks as a linear does
        return delta
    part = read_part(delta, local_part(weight, _order_of_experts(self))).contiguous()
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _order_of_experts(wrapper: BaseTunerLayer) -> StoredOrder | None:
    """Adapters of experts are in the model's own order, in whichever their weight is stored."""
    base = wrapper.get_base_layer()
    return getattr(base, "stored_orders", {}).get(wrapper.parameter_name) if isinstance(base, SplitExperts) else None


@patch("peft.tuners.lora.layer:Linear.{merge,unmerge}", "takes norms of a shard's rows for DoRA")
def merge_layer(original: Callable, self: LoraLayer, *args: object, **kwargs: object) -> None:
    """DoRA in and out of one layer: with its whole weight, of which each rank keeps its part."""
    base = self.get_base_layer()
    weight = base.weight
    if not (self.lora_variant and isinstance(weight, DTensor)):
        original(self, *args, **kwargs)
        return
    with contextlib.ExitStack() as stack:
        for adapter in self.lora_A:
            stack.enter_context(_whole(self, adapter))
        stack.enter_context(_gathered(base, "weight"))
        original(self, *args, **kwargs)
        changed = base.weight.detach()
    with torch.no_grad():
        local(weight).copy_(read_part(changed, local_part(weight)))


@contextlib.contextmanager
def _whole(layer: nn.Module, adapter: str) -> Iterator[None]:
    """In here A and B of a layer, and DoRA's magnitudes, are whole. Collective over the ranks of its stage."""
    with contextlib.ExitStack() as stack:
        for name in ("lora_A", "lora_B", "lora_magnitude_vector"):
            if adapter in getattr(layer, name):
                stack.enter_context(_gathered(getattr(layer, name)[adapter], "weight"))
        for name in ("lora_embedding_A", "lora_embedding_B"):
            if adapter in getattr(layer, name):
                stack.enter_context(_gathered(getattr(layer, name), adapter))
        yield


def _gathered(module: nn.Module, name: str) -> contextlib.AbstractContextManager:
    parameter = module._parameters[name]
    assert parameter is not None
    whole = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    return holding(module, {name: nn.Parameter(whole, requires_grad=False)})


@patch("peft.tuners.tuners_utils:BaseTuner.{merge,unmerge}_adapter", "changes gathered weights")
def merge(original: Callable, self: BaseTuner, *args: object, **kwargs: object) -> None:
    """`merge_adapter` and `unmerge_adapter`: the stored parts are changed, not gathered weights."""
    state = runtime.parallel_state(self.model)
    if state is not None:
        _check(self.model, True, bool(by_name(original, (self, *args), kwargs).get("safe_merge")))
        _reshard(state)
    original(self, *args, **kwargs)


@patch("peft.tuners.tuners_utils:BaseTuner.merge_and_unload", "leaves split layers without a way out")
def merge_and_unload(
    original: Callable,
    self: BaseTuner,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> object:
    """Adapters are added to what is stored of the weights, and taken out."""
    if runtime.parallel_state(self.model) is None:
        return original(self, progressbar, safe_merge, adapter_names)
    _check(self.model, True, safe_merge)
    return _taken_out(self, functools.partial(original, self, progressbar, safe_merge, adapter_names))


@patch("peft.tuners.tuners_utils:BaseTuner.unload", "leaves split layers without a way out")
def unload(original: Callable, self: BaseTuner) -> object:
    """Adapters are taken out."""
    if runtime.parallel_state(self.model) is None:
        return original(self)
    _check(self.model, False, False)
    return _taken_out(self, functools.partial(original, self))


def _taken_out(self: BaseTuner, take_out: Callable[[], object]) -> object:
    """Layers communicate by themselves again, and FSDP2 forgets the adapters."""
    state = runtime.parallel_state(self.model)
    assert state is not None
    _reshard(state)
    wrappers = [module for module in self.model.modules() if _wrapped(module) is not None]
    names = {id(module): name for name, module in self.model.named_modules()}
    result = take_out()
    for wrapper in wrappers:
        inner = _wrapped(wrapper)
        if isinstance(inner, TensorParallelLayer):
            inner.adapted = False
    if state.pipeline is not None:
        _follow(self.model, state, {id(wrapper): names[id(wrapper)] for wrapper in wrappers})
    if state.mesh.config.sharing_size > 1:
        remove_late_parameters(state.root)
    return result


def _wrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper of PEFT is around; None for any other module."""
    children = getattr(module, "_modules", {})
    return children.get("base_layer", children.get("original_module"))


def _follow(model: nn.Module, state: ParallelState, names: dict[int, str]) -> None:
    """Let the stages hold what stands in the place of the wrappers now."""
    pipeline = state.pipeline
    assert pipeline is not None
    for stage in pipeline.stages:
        for i, part in enumerate(stage.parts):
            if id(part) in names:
                stage.parts[i] = model.get_submodule(names[id(part)])
    pipeline.services.adapters = None


def _reshard(state: ParallelState) -> None:
    """What has been gathered for a pass is let go: it would hide the change."""
    for module in sharded_modules(state.root):
        module.reshard()


def _check(model: nn.Module, merge: bool, safe_merge: bool) -> None:
    if safe_merge:
        raise NotImplementedError("hf_parallel: safe_merge=True on a parallel model is not part of this version")
    variants = {type(v) for module in model.modules() for v in (getattr(module, "lora_variant", None) or {}).values()}
    if merge and any(variant.__name__ != "DoraLinearVariant" for variant in variants):
        raise NotImplementedError(
            "hf_parallel: merging DoRA of embeddings into shards is not part of this version; save the adapter, then "
            "load and merge it in one process"
        )
    if merge and any(isinstance(module, FourBit) for module in model.modules()):
        raise NotImplementedError(
            "hf_parallel: merging into a base of 4 bits is not part of this version; save the adapter, then load and "
            "merge it in one process"
        )
