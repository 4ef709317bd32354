"""PEFT: adapters that are computed from others (`add_weighted_adapter`, `convert_to_lora`) or are taken away again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.apply.weights import full_tensor
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.parameters import remove_late_parameters
from hf_parallel.axes.data.units import iterate_sharded_modules
from hf_parallel.axes.data.whole import forget_whole
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.peft.adapters import get_base_model_of, show_all_stages
from hf_parallel.hooks.peft.placing import AdapterState, hold_whole_adapter, place_in_base
from hf_parallel.hooks.peft.whole import has_whole_adapters, hold_whole_weights
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from peft import LoraModel, PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner


@patch("peft.tuners.lora.model:LoraModel.add_weighted_adapter", "combines shards, and leaves the result whole")
def add_weighted_adapter(
    original: Callable, self: LoraModel, adapters: list[str], *args: object, **kwargs: object
) -> None:
    """Combine whole adapters on each rank, alike on all of them, and split the result. Collective."""
    state = runtime.find_parallel_state(self.model)
    if state is None:
        original(self, adapters, *args, **kwargs)
        return
    given = bind_by_name(original, (self, adapters, *args), kwargs)
    name, kind = str(given["adapter_name"]), str(given.get("combination_type", "svd"))
    if name in self.peft_config:
        return
    what = f"add_weighted_adapter with combination_type={kind}"
    if has_whole_adapters(state):
        refuse(what, "of adapters that data ranks keep whole", do="combine them in one process")
    if any(getattr(config, "target_parameters", None) for config in self.peft_config.values()):
        refuse(what, "of adapters with target_parameters", do="combine them in one process")
    if "dare" in kind and state.mesh.size("pp") > 1:
        refuse(f"{what} under pp_size={state.mesh.size('pp')}", "each stage would draw for its own layers", "linear")
    for module in iterate_sharded_modules(state.root):
        module.reshard()  # what was gathered for a pass would hide what is stored
    layers = _list_lora_layers(self)
    with contextlib.ExitStack() as stack:
        for layer in layers:
            for adapter in adapters:
                stack.enter_context(hold_whole_adapter(layer, adapter))
            stack.enter_context(_show_whole_delta(layer))
        original(self, adapters, *args, **kwargs)
    for layer in layers:
        _send_factors(layer, name, state.mesh.device)
    place_in_base(self.model, state)


def _list_lora_layers(tuner: BaseTuner) -> list[LoraLayer]:
    """Return the layers with adapters that are stored here: those of other stages have no values."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in tuner.model.modules() if isinstance(module, LoraLayer)]
    return [layer for layer in layers if not any(p.is_meta for p in layer.get_base_layer().parameters())]


@contextlib.contextmanager
def _show_whole_delta(layer: LoraLayer) -> Iterator[None]:
    """Let `get_delta_weight` return the whole of s B A, for the singular values of all of it."""
    compute = layer.get_delta_weight

    def whole(*args: object) -> torch.Tensor:
        delta = compute(*args)
        return delta.full_tensor() if isinstance(delta, DTensor) else delta

    with replacing(layer, get_delta_weight=whole):
        yield


def _send_factors(layer: LoraLayer, adapter: str, device: torch.device) -> None:
    """Give all ranks the first one's factors, because devices may factorise in ways of their own; contiguous ones."""
    weight = getattr(layer.get_base_layer(), "weight", None)
    groups = weight.device_mesh.get_all_groups() if isinstance(weight, DTensor) else []
    for held in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
        if adapter in held:
            factor = getattr(held[adapter], "weight", held[adapter])
            factor.data = factor.data.to(device).contiguous()
            for group in groups:
                dist.broadcast(factor.data, group=group, group_src=0)


@patch("peft.tuners.tuners_utils:BaseTuner.delete_adapter", "leaves what is deleted to FSDP2")
def delete_adapter(original: Callable, self: BaseTuner, *args: object, **kwargs: object) -> object:
    """Delete an adapter, and let FSDP2 and the data ranks forget its parameters.

    Raises:
        NotImplementedError: LoRA that has copies of modules beside it.
    """
    state = runtime.find_parallel_state(self.model)
    if state is None:
        return original(self, *args, **kwargs)
    name, whole = bind_by_name(original, (self, *args), kwargs)["adapter_name"], has_whole_adapters(state)
    if getattr(self.peft_config.get(name), "modules_to_save", None) and not whole:
        raise NotImplementedError(
            f"hf_parallel: delete_adapter({name!r}) on a parallel model is not part of this version for "
            "modules_to_save; save the adapters, then delete it in one process"
        )
    for module in iterate_sharded_modules(state.root):
        module.reshard()
    former = list(self.model.parameters())
    result = original(self, *args, **kwargs)
    if whole:
        forget_whole(state.root, former, self.model.parameters())
    if state.pipeline is not None:
        state.pipeline.services.adapters = AdapterState(self.model)
    if state.mesh.config.sharing_size > 1:
        remove_late_parameters(state.root)
    return result


@patch("peft.tuners.lora.conversion:convert_to_lora", "converts shards, or the layers of one stage", copies=True)
def convert(original: Callable, model: PeftModel, *args: object, **kwargs: object) -> tuple[object, dict]:
    """Convert whole adapters to LoRA; refuse it under `pp`, where each stage would give its own layers. Collective."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = runtime.find_parallel_state(model.get_base_model() if hasattr(model, "get_base_model") else model)
    if state is None:
        return original(model, *args, **kwargs)
    if state.pipeline is not None:
        why = "each stage would convert its own layers alone"
        refuse(f"convert_to_lora under pp_size={state.mesh.size('pp')}", why, "pp_size=1")
    for module in iterate_sharded_modules(state.root):
        module.reshard()
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    name = str(bind_by_name(original, (model, *args), kwargs).get("adapter_name", "default"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_whole_weights(*(layer for layer in layers if not isinstance(layer, LoraLayer))))
        for layer in layers:
            if isinstance(layer, LoraLayer):
                stack.enter_context(hold_whole_adapter(layer, name))
        config, tensors = original(model, *args, **kwargs)
    return config, {key: full_tensor(value) for key, value in tensors.items()}


@patch("peft.tuners.lora.conversion:save_as_lora", "writes one folder on all ranks", copies=True)
def save_as_lora(original: Callable, path: str, model: PeftModel, *args: object, **kwargs: object) -> None:
    """Write what all ranks have converted on rank 0. Collective."""
    from peft import convert_to_lora

    state = runtime.find_parallel_state(model.get_base_model() if hasattr(model, "get_base_model") else model)
    if state is None or state.mesh.rank == 0:
        original(path, model, *args, **kwargs)
    else:
        convert_to_lora(model, *args, **kwargs)
    if state is not None:
        messages.gather_objects(None)  # until the folder is there


@patch("peft.utils.hotswap:hotswap_adapter_from_state_dict", "knows the layers of one stage", copies=True)
def hotswap(
    original: Callable, model: nn.Module, state_dict: dict[str, torch.Tensor], *args: object, **kwargs: object
) -> None:
    """Put the weights of another adapter into the layers of this stage; PEFT refuses those of layers that none has."""
    state = runtime.find_parallel_state(model)
    if state is not None and state.pipeline is not None:
        own = {name for name, _ in model.named_parameters()}
        with show_all_stages(get_base_model_of(cast("PeftModel", model)), state):
            elsewhere = {name for name, _ in model.named_parameters()} - own
        state_dict = {name: tensor for name, tensor in state_dict.items() if name not in elsewhere}
    original(model, state_dict, *args, **kwargs)


@patch("peft.utils.hotswap:prepare_model_for_compiled_hotswap", "makes layers that are whole", copies=True)
def prepare_hotswap(original: Callable, model: nn.Module, *args: object, **kwargs: object) -> None:
    """Refuse to widen adapters of a parallel model; `hotswap_adapter` takes those of smaller ranks without it."""
    rank = bind_by_name(original, (model, *args), kwargs).get("target_rank")
    if rank is not None and runtime.find_parallel_state(model) is not None:
        what = f"prepare_model_for_compiled_hotswap(target_rank={rank})"
        refuse(what, "wider layers would be whole on every rank", f"LoraConfig(r={rank}) for the first adapter")
    original(model, *args, **kwargs)
