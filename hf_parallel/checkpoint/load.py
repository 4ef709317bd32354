"""Read a Hub folder into a parallel model: each rank reads only its slices."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def load_weights(model: nn.Module, directory: str) -> None:
    """Copy the weights of `directory` into `model`, which has the same architecture. No communication.

    Raises:
        FileNotFoundError: no safetensors in the folder.
        KeyError: a weight of the model is not in the folder.
    """
    where = _weight_map(directory)
    tied = set(getattr(model, "_hf_parallel_tied_keys", None) or getattr(model, "all_tied_weights_keys", None) or ())
    files: dict[str, Any] = {}
    for key, tensor in model.state_dict().items():
        if key not in where:
            if key in tied:
                continue
            raise KeyError(f"{directory} has no {key}")
        path = os.path.join(directory, where[key])
        if path not in files:
            files[path] = safe_open(path, framework="pt").__enter__()
        _copy_slice(tensor, files[path].get_slice(key))
    for file in files.values():
        file.__exit__(None, None, None)


def _weight_map(directory: str) -> dict[str, str]:
    index = os.path.join(directory, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            return json.load(file)["weight_map"]
    single = os.path.join(directory, "model.safetensors")
    if not os.path.isfile(single):
        raise FileNotFoundError(f"{directory} holds no model.safetensors")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _copy_slice(target: torch.Tensor, source: Any) -> None:
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(source[...])
            return
        shape, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        slices = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
        target.to_local().copy_(source[slices])
