"""Optimizer states of few bits: in checkpoints the values themselves, which know no layout and no blocks.

    bitsandbytes    state1 [numbers of the part], uint8    codes
                    qmap1 [256]                            code -> value from -1 to 1
                    absmax1 [blocks]                       what that is times, per block of the part's values in order
    torchao         exp_avg, of the part's shape           a tensor that holds `codes`, `qmap` and `scale` as those;
                                                           two codes of 4 bits to a byte

Blocks begin anew on each rank (Dettmers et al., arXiv 2110.02861, section 2): they are made again when they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_parallel.ranks.mesh import get_stored, place_as

Slots = dict[str, Any]  # of one parameter: tensors, numbers

_BLOCK = 256
#: The key in which bitsandbytes nests states where it writes them itself.
_NESTED = "__bnb_optimizer_quant_state__"


def decode_slots(slots: Slots, parameter: torch.Tensor | None = None) -> dict[str, object]:
    """Return the slots of one parameter as values, not codes; tensors of local values as parts of `parameter`."""
    slots = {**slots, **slots.get(_NESTED, {})}
    slots.pop(_NESTED, None)
    for name, value in slots.items():
        if torch.is_tensor(value) and holds_codes(value):
            values = get_stored(value).dequantize()
            slots[name] = place_as(parameter, values) if isinstance(parameter, DTensor) else values
    for name, number in (("state1", 1), ("state2", 2)):
        largest = slots.get(f"absmax{number}")
        if name in slots and (largest is None or largest.ndim == 1):  # AdEMAMix keeps two in one: no checkpoints
            values = slots[name]
            if largest is not None:
                factors = largest.repeat_interleave(_BLOCK)[: values.numel()]
                values = (slots[f"qmap{number}"][values.flatten().long()] * factors).view(values.shape)
            if isinstance(parameter, DTensor) and not isinstance(values, DTensor):
                values = place_as(parameter, values) if values.shape == get_stored(parameter).shape else values
            slots[name] = values
            slots = {key: value for key, value in slots.items() if key not in (f"absmax{number}", f"qmap{number}")}
    return slots


def pack_states(optimizer: Optimizer) -> None:
    """Turn values into codes again after loading, where the optimizer keeps codes."""
    if hasattr(optimizer, "name2qmap"):
        _pack_states_of_bitsandbytes(optimizer)
    elif type(optimizer).step.__module__.startswith("torchao.optim.") and hasattr(optimizer, "_new_buffer"):
        _pack_states_of_torchao(optimizer)


def holds_codes(tensor: torch.Tensor) -> bool:
    """Is the part of a tensor that this rank stores one of codes (torchao)?"""
    return type(get_stored(tensor)).__module__.startswith("torchao.optim.")


def _pack_states_of_torchao(optimizer: Any) -> None:
    for parameter, slots in optimizer.state.items():
        for name, value in slots.items():
            if not value.ndim:
                continue
            slots[name] = optimizer._new_buffer(parameter, name == "exp_avg")
            fresh: Any = get_stored(slots[name])
            values = get_stored(value)
            if not hasattr(fresh, "qmap"):  # in 32 bits, or in fp8, which rounds what it has rounded to the same
                fresh.copy_(values)
                continue
            codes, scale = _encode_values(values, fresh.qmap, fresh.block_size)
            if codes.numel() > fresh.codes.numel():
                codes = codes.flatten()[::2] << 4 | codes.flatten()[1::2]
            fresh.codes.copy_(codes.view(fresh.codes.shape))
            fresh.scale.copy_(scale)


def _pack_states_of_bitsandbytes(optimizer: Any) -> None:
    if not optimizer.initialized:
        optimizer.check_overrides()  # of embeddings, whose states stay in 32 bits
    lists = [group["params"] for group in optimizer.param_groups]
    numbered = [(number, *found) for number, parameters in enumerate(lists) for found in enumerate(parameters)]
    for number, index, parameter in numbered:
        slots = optimizer.state.get(parameter)
        if not slots:
            continue
        part = get_stored(parameter.detach())
        optimizer.init_state(optimizer.param_groups[number], part, number, index)
        fresh = optimizer.state.pop(part)
        for name, value in slots.items():
            if name not in ("state1", "state2"):
                fresh[name] = value
                continue
            local = get_stored(value).to(fresh[name].device)
            if fresh[name].dtype == torch.uint8:
                codes, fresh[f"absmax{name[-1]}"] = _encode_values(local, fresh[f"qmap{name[-1]}"])
                fresh[name].copy_(codes)
            else:
                fresh[name].copy_(local)
        optimizer.state[parameter] = fresh


def _encode_values(
    values: torch.Tensor, table: torch.Tensor, block: int = _BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes, and the largest magnitude of each block.

    A block whose extreme is negative ends at the table's lowest value, which is not -1: so codes that are read back
    are those that were written.
    """
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    highest, lowest = blocks.amax(1).clamp(min=0), blocks.amin(1).clamp(max=0)
    largest = highest / table[-1] if table[0] >= 0 else torch.maximum(highest / table[-1], lowest / table[0])
    scaled = (blocks / largest.clamp(min=torch.finfo(largest.dtype).tiny)[:, None]).flatten()[: flat.numel()]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).view(values.shape), largest
