"""Optimizer states of few bits: in checkpoints the values themselves, which know no layout and no blocks.

    bitsandbytes    state1 [numbers of the part], uint8    codes
                    qmap1 [256]                            code -> value from -1 to 1
                    absmax1 [blocks]                       what that is times, per block of the part's values in order
    torchao         exp_avg, of the part's shape           a tensor that holds `codes`, `qmap` and `scale` as those;
                                                           two codes of 4 bits to a byte

AdEMAMix keeps two means in `state1`, [2, numbers of the part]: `state1.0` and `state1.1` here.
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
#: Smaller tensors have states in 32 bits.
_FEWEST = 4096
#: The key in which bitsandbytes nests states where it writes them itself.
_NESTED = "__bnb_optimizer_quant_state__"
#: States of bitsandbytes, as it keeps them and as checkpoints do.
_STATES = {"state1", "state1.0", "state1.1", "state2"}


def decode_slots(slots: Slots, parameter: torch.Tensor | None = None) -> dict[str, object]:
    """Return the slots of one parameter as values, not codes; tensors of local values as parts of `parameter`."""
    slots = {**slots, **slots.get(_NESTED, {})}
    slots.pop(_NESTED, None)
    for name, value in slots.items():
        if torch.is_tensor(value) and holds_codes(value):
            values = get_stored(value).dequantize()
            slots[name] = place_as(parameter, values) if isinstance(parameter, DTensor) else values
    if torch.is_tensor(slots.get("state1")):
        slots = _decode_slots_of_bitsandbytes(slots)
        for name in sorted(_STATES & slots.keys()):
            values = slots[name]
            if isinstance(parameter, DTensor) and not isinstance(values, DTensor):
                slots[name] = place_as(parameter, values) if values.shape == get_stored(parameter).shape else values
    return slots


def _decode_slots_of_bitsandbytes(slots: Slots) -> Slots:
    found = {name: value for name, value in slots.items() if name.rstrip("12") not in ("state", "absmax", "qmap")}
    for name in sorted(_STATES & slots.keys()):
        states, largest = slots[name], slots.get(f"absmax{name[-1]}")
        if name == "state1" and "state2" in slots and states.ndim > slots["state2"].ndim:
            parts = {f"{name}.{n}": (states[n], None if largest is None else largest[n]) for n in range(2)}
        else:
            parts = {name: (states, largest)}
        for own, (values, factors) in parts.items():
            if factors is not None:
                factors = factors.repeat_interleave(_BLOCK)[: values.numel()]
                values = (slots[f"qmap{name[-1]}"][values.flatten().long()] * factors).view(values.shape)
            found[own] = values
    return found


def keep_precision_of_states(optimizer: Any) -> None:
    """Let an optimizer of bitsandbytes load states as they are, not in its parameters' precision."""
    if hasattr(optimizer, "non_castable_tensor_keys"):
        optimizer.non_castable_tensor_keys |= _STATES


def pack_states(optimizer: Optimizer) -> None:
    """Turn values into codes again after loading, where the optimizer keeps codes."""
    if hasattr(optimizer, "name2qmap"):
        _pack_states_of_bitsandbytes(optimizer)
    elif type(optimizer).step.__module__.startswith("torchao.optim.") and hasattr(optimizer, "_new_buffer"):
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


def count_unlike_blocks(optimizer: Any) -> int:
    """Return of how many parameters this rank's part has other blocks of states than the whole has in one process."""
    of_bitsandbytes = hasattr(optimizer, "name2qmap") and optimizer.args.optim_bits == 8
    if not of_bitsandbytes and not hasattr(optimizer, "_new_buffer"):
        return 0
    block, unlike = getattr(optimizer, "block_size", _BLOCK), 0
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        numbers, whole = get_stored(parameter).numel(), parameter.numel()
        by_rows = all(placement.is_replicate() or placement.is_shard(0) for placement in parameter.placements)
        alike = numbers == whole or by_rows and numbers >= _FEWEST and numbers % block == 0
        unlike += whole >= _FEWEST and not alike
    return unlike


def holds_codes(tensor: torch.Tensor) -> bool:
    """Return whether the part of a tensor that this rank stores consists of codes (torchao)."""
    return type(get_stored(tensor)).__module__.startswith("torchao.optim.")


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
            own, _, place = name.partition(".")
            if name not in _STATES:
                fresh[name] = value
                continue
            kept, largest = fresh[own], fresh.get(f"absmax{own[-1]}")
            if place:
                kept, largest = kept[int(place)], None if largest is None else largest[int(place)]
            values = get_stored(value).to(kept.device)
            if largest is not None:
                values, factors = _encode_values(values, fresh[f"qmap{own[-1]}"])
                largest.copy_(factors)
            kept.copy_(values)
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
