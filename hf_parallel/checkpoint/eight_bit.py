"""Optimizer states of 8 bits (bitsandbytes): in checkpoints the values themselves, which know no layout.

    state1 [numbers of the part], uint8    codes
    qmap1 [256]                            code -> value from -1 to 1
    absmax1 [blocks]                       what that is times, per block of the part's values in their order

(Dettmers et al., arXiv 2110.02861, section 2). Blocks begin anew on each rank: they are made again when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.mesh import placed_as, stored

if TYPE_CHECKING:
    from bitsandbytes.optim.optimizer import Optimizer8bit

Slots = dict[str, Any]  # of one parameter: tensors, numbers

_BLOCK = 256
#: What states are nested in where bitsandbytes writes them itself.
_NESTED = "__bnb_optimizer_quant_state__"


def plain_slots(slots: Slots, parameter: torch.Tensor | None = None) -> dict[str, object]:
    """The slots of one parameter without codes; tensors of local values as parts of `parameter`."""
    slots = {**slots, **slots.get(_NESTED, {})}
    slots.pop(_NESTED, None)
    for name, number in (("state1", 1), ("state2", 2)):
        largest = slots.get(f"absmax{number}")
        if name in slots and (largest is None or largest.ndim == 1):  # AdEMAMix keeps two in one: no checkpoints
            values = slots[name] if largest is None else _values(slots[name], slots[f"qmap{number}"], largest)
            slots[name] = _as_part_of(parameter, values)
            slots = {key: value for key, value in slots.items() if key not in (f"absmax{number}", f"qmap{number}")}
    return slots


def _values(codes: torch.Tensor, table: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    factors = largest.repeat_interleave(_BLOCK)[: codes.numel()]
    return (table[codes.flatten().long()] * factors).view(codes.shape)


def _as_part_of(parameter: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor) or local.shape != stored(parameter).shape:
        return local
    return placed_as(parameter, local)


def pack_states(optimizer: Any) -> None:
    """After loading: values become codes again where the optimizer keeps codes. For others nothing."""
    if not hasattr(optimizer, "name2qmap"):
        return
    for number, index, parameter in _parameters(optimizer):
        slots = optimizer.state.get(parameter)
        if not slots:
            continue
        part = stored(parameter.detach())
        optimizer.init_state(optimizer.param_groups[number], part, number, index)
        optimizer.state[parameter] = _filled(optimizer.state.pop(part), slots)


def _parameters(optimizer: Optimizer8bit) -> Iterator[tuple[int, int, torch.Tensor]]:
    if not optimizer.initialized:
        optimizer.check_overrides()  # of embeddings, whose states stay in 32 bits
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield number, index, parameter


def _filled(fresh: Slots, loaded: Slots) -> Slots:
    for name, value in loaded.items():
        if name not in ("state1", "state2"):
            fresh[name] = value
            continue
        local = stored(value).to(fresh[name].device)
        if fresh[name].dtype == torch.uint8:
            codes, fresh[f"absmax{name[-1]}"] = _codes(local, fresh[f"qmap{name[-1]}"])
            fresh[name].copy_(codes)
        else:
            fresh[name].copy_(local)
    return fresh


def _codes(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes, and the largest magnitude of each block.

    A block whose extreme is negative ends at the table's lowest value, which is not -1: so codes that are read back
    are those that were written.
    """
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    highest, lowest = blocks.amax(1).clamp(min=0), blocks.amin(1).clamp(max=0)
    largest = highest / table[-1] if table[0] >= 0 else torch.maximum(highest / table[-1], lowest / table[0])
    scaled = (blocks / largest.clamp(min=torch.finfo(largest.dtype).tiny)[:, None]).flatten()[: flat.numel()]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).view(values.shape), largest
