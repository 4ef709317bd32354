"""PEFT: LoRA adapters on a base that is parallel already, as after an unchanged `from_pretrained`.

    get_peft_model / PeftModel.from_pretrained
        inject_adapter        on every stage the names and random numbers of one process; adapters of full size
        _cast_adapter_dtype   the last step that replaces parameters: then A and B are split and given to FSDP2
    save_pretrained           whole adapters gathered, none of the base; rank 0 writes peft's own folder

Each patch takes the original. Without a parallel base they do what peft does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_parallel.checkpoint import current, full_state_dict
from hf_parallel.checkpoint.slices import local_part, read
from hf_parallel.config import SpecError
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerator import make_parallel
from hf_parallel.packed import stored_order
from hf_parallel.parallelize import ParallelState
from hf_parallel.pipeline.elsewhere import follow_wrappers
from hf_parallel.rewrite import lora
from hf_parallel.rewrite.layers import TensorParallelLayer, local
from hf_parallel.sharding import adopt_parameters

#: Settings of LoraConfig that any layout keeps. What is not named here must have its default.
_KEPT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "lora_bias", "fan_in_fan_out", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
}
#: What works instead of some of the others.
_WORKS = {
    "use_dora": "use_rslora",
    "init_lora_weights": 'True, False or "gaussian"',
    "modules_to_save": "naming the modules in target_modules",
    "bias": 'bias="none"',
    "target_parameters": "target_modules",
}

# ---- putting adapters in -----------------------------------------------------------------------------------------


def inject_adapter(original: Callable) -> Callable:
    """Match names and draw random numbers as in one process, whatever part of the model is here."""

    def replacement(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        _check(self, model, self.peft_config[adapter_name], kwargs.get("low_cpu_mem_usage", False))
        if runtime.parallel_state(model) is None:
            make_parallel(model)
        state: Any = runtime.parallel_state(model)
        for axis in ("dp_replicate", "dp_shard", "pp", "tp"):
            runtime.equalise_random_state(axis, 0)
        with whole(model, state):
            original(self, model, adapter_name, *args, **kwargs)
        if not hasattr(model, "_hf_parallel_unplaced"):
            model._hf_parallel_unplaced = model.register_forward_pre_hook(_refuse_unplaced)

    return replacement


def cast_adapter_dtype(original: Callable) -> Callable:
    """Split the adapters when peft is done with them."""

    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        state = runtime.parallel_state(self.model)
        if state is not None:
            place(self.model, state)

    return replacement


def in_out_features(original: Callable) -> Callable:
    """Full-size adapters: what peft reads off a shard is that shard's size."""

    def replacement(self: Any, module: Any) -> Any:
        is_linear = isinstance(module, nn.Linear) and hasattr(module, "in_features")
        return (module.in_features, module.out_features) if is_linear else original(self, module)

    return replacement


def add_adapter(original: Callable) -> Callable:
    """Prompt learning adds no layers, so nothing else would notice it."""

    def replacement(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if peft_config.is_prompt_learning:
            raise SpecError(f"peft_type={peft_config.peft_type.value} is not part of this version; LoRA works")
        original(self, adapter_name, peft_config, *args, **kwargs)

    return replacement


@contextlib.contextmanager
def whole(model: Any, state: ParallelState) -> Iterator[None]:
    """In here the base model shows the modules of all stages."""
    if state.pipeline is None:
        yield
        return
    with state.pipeline.elsewhere.shown(model):
        yield


def place(model: Any, state: ParallelState) -> None:
    """Split new adapters over tp, show them to the stages, and shard them over the data ranks."""
    if state.mesh.size("tp") > 1:
        for name, module in list(model.named_modules()):
            if isinstance(getattr(module, "base_layer", None), TensorParallelLayer):
                _split(name, module, state)
    if state.pipeline is not None:
        follow_wrappers(state.pipeline.stages, model)
    if state.mesh.data_size > 1:
        adopt_parameters(state.root)
    waiting = model.__dict__.pop("_hf_parallel_unplaced", None)
    if waiting is not None:
        waiting.remove()


def _split(name: str, wrapper: Any, state: ParallelState) -> None:
    from peft.tuners.lora.layer import Embedding, Linear

    base, mesh, device = wrapper.base_layer, state.mesh["tp"], state.mesh.device
    if not isinstance(wrapper, Linear | Embedding) or not lora.can_split(base):
        raise SpecError(f"target_modules: how adapters of {name} are split is not known; tp_size=1 works")
    lora.adapt(wrapper)
    for adapter in wrapper.lora_A:
        if not isinstance(wrapper.lora_A[adapter], TensorParallelLayer):
            lora.split_linear(base, wrapper.lora_A[adapter], wrapper.lora_B[adapter], mesh, device)
            lora.split_dropout(base, wrapper.lora_dropout[adapter])
    for adapter in wrapper.lora_embedding_A:
        if not hasattr(wrapper.lora_embedding_A[adapter], "placements"):
            lora.split_embedding(wrapper.lora_embedding_A, adapter, mesh, device)


def _refuse_unplaced(model: Any, args: Any) -> None:
    raise NotImplementedError(
        "hf_parallel: adapters that were not put in by get_peft_model or PeftModel are whole on every rank; "
        "get_peft_model(model, config) works"
    )


# ---- what is not part of this version ------------------------------------------------------------------------------


def _check(tuner: Any, model: Any, config: Any, low_cpu_mem_usage: bool) -> None:
    from peft import LoraModel, PeftType

    if type(tuner) is not LoraModel or config.peft_type != PeftType.LORA:
        raise SpecError(f"peft_type={config.peft_type.value} is not part of this version; LoRA works")
    if low_cpu_mem_usage:
        raise SpecError("low_cpu_mem_usage=True: adapters need values to be split; False works")
    if not hasattr(model, "base_model_prefix"):
        raise SpecError(
            f"adapters on a {type(model).__name__} are not part of this version; a transformers model works"
        )
    default = type(config)()
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        if setting.name in _KEPT or value == getattr(default, setting.name):
            continue
        if setting.name == "init_lora_weights" and value in (False, "gaussian"):
            continue
        _refuse(setting.name, value)


def _refuse(name: str, value: Any) -> None:
    works = _WORKS.get(name, "its default")
    raise SpecError(f"LoraConfig({name}={value!r}) is not part of this version of hf_parallel; {works} works")


def refuse_merge(name: str) -> Callable:
    """Merging writes into the base's weights, which are shards here."""

    def make(original: Callable) -> Callable:
        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            if runtime.parallel_state(self.model) is None:
                return original(self, *args, **kwargs)
            raise NotImplementedError(
                f"hf_parallel: {name} on a parallel model is not part of this version; save the adapter, "
                "then load and merge it in one process"
            )

        return replacement

    return make


# ---- saving and loading -------------------------------------------------------------------------------------------


def save_pretrained(original: Callable) -> Callable:
    """peft's own folder, written by rank 0 from whole adapters. Collective."""

    def replacement(self: Any, save_directory: str, *args: Any, **kwargs: Any) -> None:
        state = runtime.parallel_state(self)
        if state is None:
            original(self, save_directory, *args, **kwargs)
            return
        base = self.get_base_model()
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = full_state_dict(self, state.mesh, _is_saved(self, base, state))
        with current(state.mesh) as saving:  # at its end all ranks wait
            if state.mesh.rank == 0:
                with saving.noting(), whole(base, state):
                    original(self, save_directory, *args, **kwargs)

    return replacement


def _is_saved(model: Any, base: Any, state: ParallelState) -> Callable[[str], bool]:
    """Adapters; and embedding and head where they have adapters, since peft saves those of the base too."""
    with whole(base, state):
        ends = [base.get_input_embeddings(), base.get_output_embeddings()]
        names = {name for name, module in model.named_modules() if module in ends and hasattr(module, "base_layer")}
    return lambda name: "lora_" in name or name.startswith(tuple(f"{end}." for end in names))


def reshard_for_load(original: Callable) -> Callable:
    """This rank's part of every tensor of an adapter's file, in the order in which it is stored."""

    def replacement(model: Any, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if runtime.parallel_state(model) is None:
            return original(model, state_dict)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for key, tensor in state_dict.items():
            own = parameters.get(key)
            if own is None:
                continue
            part = read(tensor, local_part(own, stored_order(model, key)))
            with torch.no_grad():
                local(own).copy_(part)
            state_dict[key] = own.detach()
        return state_dict

    return replacement


def load_adapter_weights(model: Any, directory: str) -> None:
    """Read the active adapter from a checkpoint of this model."""
    from peft import load_peft_weights, set_peft_model_state_dict

    adapter = model.active_adapter
    where = directory if adapter == "default" else f"{directory}/{adapter}"
    set_peft_model_state_dict(model, load_peft_weights(where, device="cpu"), adapter_name=adapter)
