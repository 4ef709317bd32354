"""Megatron's sequence parallelism (Korthikanti et al., 2022): between regions each rank holds 1/tp of the sequence.

    embedding -> split -> | norm -> gather | attention | reduce-scatter + residual -> … -> norm | -> join -> head
                            s / tp             s             s / tp                        s / tp       s

Norms and the residual stream live on parts; regions (`tensor_parallel.py`) gather on entry and reduce-scatter on exit,
which moves the same bytes as the all-reduces they replace. A batch whose length tp does not divide is padded on the
right with tokens that have no target and that nobody attends to, and outputs are cut back.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_parallel.collectives import join_sequence, split_sequence
from hf_parallel.rewrite.tensor_parallel import Region, Switch, partial_gradient


def obstacle(model: Any, styles: dict[str, str]) -> str | None:
    """Why this model cannot hold parts of the sequence between its regions, or None if it can."""
    layers, final = _layers_and_final_norm(model)
    if layers is None or final is None:
        return "its layers are not known"
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for index, layer in enumerate(layers):
        if next(layer.parameters(recurse=False), None) is not None:
            return f"{prefix}.{index} has parameters of its own"
        for child_name, child in layer.named_children():
            inside = [style for name, style in styles.items() if name.startswith(f"{prefix}.{index}.{child_name}.")]
            if inside and not {"colwise", "rowwise"} <= set(inside):
                return f"{prefix}.{index}.{child_name} is not entered and left as a whole"
            if not inside and any(True for _ in child.children()) and any(True for _ in child.parameters()):
                return f"{prefix}.{index}.{child_name} is not split"
    return None


def sequence_parallel(
    model: Any, mesh: DeviceMesh, styles: dict[str, str], device: torch.device, switch: Switch
) -> None:
    """Let norms work on parts, split before the first layer and join after the final norm. Before stages are cut."""
    layers, final = _layers_and_final_norm(model)
    assert layers is not None
    assert final is not None
    group = mesh.get_group()
    regions = {name.rpartition(".")[0] for name in styles}
    names = {module: name for name, module in model.named_modules()}
    for layer in layers:
        for child in layer.children():
            if names[child] not in regions and any(True for _ in child.parameters()):
                partial_gradient(child, mesh, device, Region(layer, group, switch))
    partial_gradient(final, mesh, device, Region(model, group, switch))
    layers[0].register_forward_pre_hook(functools.partial(_split_input, group, switch), with_kwargs=True)
    final.register_forward_hook(lambda module, args, output: join_sequence(output, group) if switch.on else output)


def pad_sequences(model: Any, multiple: int, switch: Switch, caches: bool) -> None:
    """Pad to a multiple of tp around the model's forward: the outermost wrapper, around a pipeline too.

    Args:
        caches: whether the model may keep a key/value cache. Calls with one (generation) run with whole sequences:
            their steps are one token long. Under a pipeline there is none.
    """
    forward = model.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def padded(*args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is model else args  # accelerate rebinds what it wraps
        batch = {**dict(zip(names, args, strict=False)), **kwargs}
        cached = batch.get("use_cache", getattr(model.config, "use_cache", False)) and not torch.is_grad_enabled()
        if caches and (cached or batch.get("past_key_values") is not None):
            switch.on = False
            try:
                return forward(**batch)
            finally:
                switch.on = True
        rows_and_length = next(
            (batch[k].shape[:2] for k in ("input_ids", "inputs_embeds") if batch.get(k) is not None), None
        )
        if rows_and_length is None or rows_and_length[1] % multiple == 0:
            return forward(**batch)
        length = rows_and_length[1]
        extra = -length % multiple
        outputs = forward(**_padded_batch(model, batch, rows_and_length, extra))
        logits = dict.get(outputs, "logits") if isinstance(outputs, dict) else None
        if logits is not None and logits.dim() > 2 and logits.shape[1] == length + extra:
            outputs["logits"] = logits[:, :length]
        return outputs

    model.forward = padded


def _padded_batch(model: Any, batch: dict[str, Any], shape: torch.Size, extra: int) -> dict[str, Any]:
    token = getattr(model.config, "pad_token_id", None)
    if getattr(model, "loss_type", None) == "ForSequenceClassification" and (
        token is None or "input_ids" not in batch
    ):
        raise ValueError(
            f"hf_parallel: rows of {shape[1]} tokens need padding; the head finds each last token by pad_token_id: "
            "set it and pass input_ids, or use sequence_parallel=false"
        )
    fill = {"labels": -100, "shift_labels": -100, "input_ids": 0 if token is None else token}
    padded = {}
    for key, value in batch.items():
        fits = torch.is_tensor(value) and value.dim() >= 2 and value.shape[:2] == shape
        after = [0, 0] * (value.dim() - 2) if fits else []
        padded[key] = F.pad(value, [*after, 0, extra], value=fill.get(key, 0)) if fits else value
    last = batch.get("logits_to_keep", 0)
    if isinstance(last, int) and last > 0:  # counted from the end, which is padding now
        padded["logits_to_keep"] = torch.arange(shape[1] - last, shape[1], device=_device(padded))
    return padded


def _device(batch: dict[str, Any]) -> torch.device:
    return next(value.device for value in batch.values() if torch.is_tensor(value))


def _split_input(
    group: dist.ProcessGroup, switch: Switch, layer: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if not switch.on:
        return args, kwargs
    if args:
        return (split_sequence(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": split_sequence(kwargs["hidden_states"], group)}


def _layers_and_final_norm(model: Any) -> tuple[nn.ModuleList | None, nn.Module | None]:
    """The layers and what follows them, from the backbone's pipeline plan."""
    backbone = getattr(model, "base_model", model)
    plan = list(getattr(getattr(backbone, "config", None), "base_model_pp_plan", None) or {})
    lists = [name for name in plan if isinstance(getattr(backbone, name, None), nn.ModuleList)]
    if len(lists) != 1 or plan.index(lists[0]) != len(plan) - 2:
        return None, None
    return getattr(backbone, lists[0]), getattr(backbone, plan[-1])
