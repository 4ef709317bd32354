"""PEFT and the layers of all stages of a pipeline: adapters by row, and what it tells of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from torch import nn

from hf_parallel.axes.pipeline.stage_runner import pipelines_of
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.peft.adapters import get_base_model_of, show_all_stages

if TYPE_CHECKING:
    from peft.peft_model import PeftModel, TunerLayerStatus


@patch("peft.tuners.lora.model:_adapter_names_pre_forward_hook", "names those of all rows to a micro-batch")
def name_adapters_of_rows(
    original: Callable, target: nn.Module, args: tuple, kwargs: dict, adapter_names: list
) -> object:
    """Give a layer of a stage the names for the rows of its micro-batch."""
    engines = [] if runtime.current() is None else pipelines_of(runtime.mesh()).engines
    rows = next((engine.rows for one in engines if (engine := one()) is not None and engine.rows is not None), None)
    return original(target, args, kwargs, adapter_names if rows is None else adapter_names[rows])


@patch("peft.peft_model:get_layer_status", "lists the layers of one stage", copies=True)
def list_layers(original: Callable, model: nn.Module) -> list[TunerLayerStatus]:
    """List the layers of all stages: adapters of other stages are on, merged and trained where those of this one are.

    A stage without a layer tells what the others' began with.
    """
    state = runtime.find_parallel_state(model)
    if state is None or state.pipeline is None:
        return original(model)
    with show_all_stages(get_base_model_of(cast("PeftModel", model)), state):
        layers = original(model)
    away = {device for layer in layers for kinds in layer.devices.values() for device in kinds} == {"meta"}
    own = [] if away else original(model)
    known: dict[str, TunerLayerStatus] = {layer.name: layer for layer in own}
    return [known.get(layer.name) or _describe_remote_layer(layer, own, state.mesh.device.type) for layer in layers]


def _describe_remote_layer(layer: TunerLayerStatus, own: list[TunerLayerStatus], device: str) -> TunerLayerStatus:
    there = dataclasses.replace(layer, devices={name: [device] for name in layer.devices})
    if own:
        there.requires_grad = {**layer.requires_grad, **own[0].requires_grad}
        there.enabled, there.active_adapters = own[0].enabled, own[0].active_adapters
        there.merged_adapters = own[0].merged_adapters
    return there
