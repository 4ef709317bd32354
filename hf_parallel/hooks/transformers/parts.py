"""Scripts that read, write or pickle a part of a weight as if it were the whole.

torch's own answers are lost in silence: rows that are cut over ranks come as a copy, so what is written to them goes
nowhere, and each rank draws the random numbers of its part alone. Each function takes the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hf_parallel.ask.keys.sizes import SHARDS
from hf_parallel.checkpoint.slices import axes_and_dims, local_part, read
from hf_parallel.config import ParallelConfig
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.report import say
from hf_parallel.mesh import EXPERT_AXES, stored
from hf_parallel.whole import full_tensor, order_of

T = TypeVar("T")
Index: TypeAlias = torch.Tensor | int | slice | tuple | None
#: A weight, which of its rows, and these.
Place: TypeAlias = tuple[DTensor, Index, torch.Tensor]


class Rows(torch.Tensor):
    """Rows of a weight that is cut over ranks: what is written to them goes there. All ranks of it do the same."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        plain, named = tree_map(_plain, (args, kwargs or {}))  # rows in lists too: torch.stack([row, row])
        result, out = func(*plain, **named), (kwargs or {}).get("out")
        if isinstance(out, Rows):
            _write(*out.place)
            return out
        if not args or not isinstance(args[0], Rows):
            return result
        if _writes(func.__name__):
            _write(*args[0].place)
            return args[0]
        is_view = torch.is_tensor(result) and _storage(result) == _storage(plain[0])
        return _rows(result, args[0].place) if is_view else result


def _rows(tensor: torch.Tensor, place: Place) -> Rows:
    rows = tensor.as_subclass(Rows)
    rows.place = place
    return rows


def _plain(value: T) -> T | torch.Tensor:
    if isinstance(value, Rows):
        return value.as_subclass(torch.Tensor)
    return full_tensor(value) if isinstance(value, DTensor) else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _writes(name: str) -> bool:
    in_place = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
    return name == "__setitem__" or in_place or (name.endswith("_") and not name.endswith("__"))


@patch("torch.distributed.tensor:DTensor.__getitem__", "what is written to rows of a cut weight is lost")
def get_rows(original: Callable, self: DTensor, index: Index) -> object:
    """`weight.data[-1].zero_()` reaches the weight. What autograd follows stays torch's."""
    if not _is_cut(self) or (self.requires_grad and torch.is_grad_enabled()):
        return original(self, index)
    rows = full_tensor(self)[index]
    return _rows(rows, (self, index, rows))


@patch("torch.distributed.tensor:DTensor.__setitem__", "what is written to rows of a cut weight is lost")
def set_rows(original: Callable, self: DTensor, index: Index, value: torch.Tensor | float) -> None:
    """`weight.data[-1] = mean` reaches the weight."""
    if not _is_cut(self):
        original(self, index, value)
    else:
        _write(self, index, value)


@patch(
    "torch.distributed.tensor:DTensor.{normal,uniform,bernoulli,exponential,log_normal,cauchy,geometric,random}_",
    "each rank draws for its part alone",
)
def draw(original: Callable, self: DTensor, *args: object, **kwargs: object) -> object:
    """Every rank draws the whole tensor and keeps its part: the same numbers as in one process.

    Also of a replica, such as a weight that `weight_norm` computes: torch would draw with a state of its own.
    """
    if not _is_of_layout(self):
        return original(self, *args, **kwargs)
    whole = torch.empty(self.shape, dtype=self.dtype, device=stored(self).device)
    _keep(self, original(whole, *args, **kwargs))
    return self


def _is_cut(tensor: DTensor) -> bool:
    return bool(axes_and_dims(tensor)) and _is_of_layout(tensor)


def _is_of_layout(tensor: DTensor) -> bool:
    known = {axis.name for axis in ParallelConfig.mesh_axes}.union(EXPERT_AXES, (SHARDS,))
    return set(tensor.device_mesh.mesh_dim_names or ("",)) <= known


def _write(tensor: DTensor, index: Index, value: torch.Tensor | float) -> None:
    whole = full_tensor(tensor)
    whole[index] = _plain(value)
    _keep(tensor, whole)


def _keep(tensor: DTensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        stored(tensor).copy_(read(whole, local_part(tensor, order_of(tensor))))


# ---- pickling -----------------------------------------------------------------------------------------------------


@patch("torch:save", "pickles a part of the weights without a word")
def save(original: Callable, obj: object, *args: object, **kwargs: object) -> object:
    """One line where a script pickles parts: `torch.save(model.state_dict())` on rank 0."""
    if any(getattr(found, "is_part_of_model", False) or isinstance(found, DTensor) for found in _inside(obj)):
        _tell()
    return original(obj, *args, **kwargs)


@functools.cache
def _tell() -> None:
    say(
        "torch.save is given what this rank stores, a part of the weights; write hf_parallel.full_state_dict(model), "
        "called on all ranks, or model.save_pretrained (docs/idioms.md)"
    )


def _inside(obj: object, depth: int = 6) -> Iterator[object]:
    """An object and what it contains; of long lists, which hold data, only themselves."""
    yield obj
    values = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list | tuple) and len(obj) < 100 else ()
    for value in values if depth else ():
        yield from _inside(value, depth - 1)
