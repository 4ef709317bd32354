"""What the tensors of a model become in a Hub folder: other names for some models, and other tensors for a few.

transformers converts checkpoints while loading, and back while saving. Its conversion back is given tensors that are
not read (`lazy_tensor.py`), and tells by what it makes of them which belong together: those are gathered together, all
experts of one layer, or q, k and v, and are then read from what was gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_parallel.checkpoint.lazy_tensor import LazyTensor
from hf_parallel.checkpoint.slices import Part, read_part
from hf_parallel.model.anatomy import StoredOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Entry:
    """One tensor: of the whole model with where it lies, or of the folder.

    Attributes: `stage`, the rank along pp that holds it; `cuts`, (mesh axis, dim) in the order of cutting.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0
    cuts: tuple[tuple[str, int], ...] = ()
    order: StoredOrder | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Size of the data, bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors of the model, and what they become in the folder.

    Attributes: `conversion`, from tensors by name to the values of `entries`; None for one tensor as it is.
    """

    own: tuple[Entry, ...]
    entries: tuple[Entry, ...]
    conversion: Callable[[dict[str, torch.Tensor]], Iterator[torch.Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the data in the folder, bytes."""
        return sum(entry.nbytes for entry in self.entries)

    def convert(self, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The values of `entries`, one after the other, from those of `own` by name."""
        return iter(tensors.values()) if self.conversion is None else self.conversion(tensors)


def hub_groups(model: PreTrainedModel, entries: Iterable[Entry], convert: bool = True) -> list[Group]:
    """The tensors of the model, grouped by what transformers makes of them when it saves, in their order.

    Raises:
        NotImplementedError: the model's conversion cannot be reverted.
    """
    by_name = {entry.name: entry for entry in entries}
    gathered: dict[str, torch.Tensor] = {}
    own = {name: _later(entry, gathered) for name, entry in by_name.items()}
    saved = _revert(model, own) if convert else own
    together = _joined({name: tensor.origins for name, tensor in saved.items()})
    groups: dict[str, Group] = {}
    for name in by_name:
        if name in together:  # else transformers leaves it out
            keys, names = together[name]
            members = tuple(by_name[key] for key in sorted(keys))  # on all ranks in one order
            groups.setdefault(names[0], _group(members, {n: saved[n] for n in names}, own, gathered))
    return list(groups.values())


def _group(
    members: tuple[Entry, ...],
    saved: dict[str, LazyTensor],
    own: dict[str, LazyTensor],
    gathered: dict[str, torch.Tensor],
) -> Group:
    entries = tuple(Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items())
    tensors = list(saved.values())
    if len(members) == len(tensors) == 1 and tensors[0].part is own[members[0].name].part:  # at most renamed
        return Group(members, entries)
    return Group(members, entries, functools.partial(_convert, tensors, gathered))


def _convert(
    saved: list[LazyTensor], gathered: dict[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    gathered.update(found)
    for tensor in saved:
        yield tensor.whole()
    gathered.clear()


def _later(entry: Entry, gathered: dict[str, torch.Tensor]) -> LazyTensor:
    """A tensor of the model, to be read once it is in `gathered`."""

    def part(wanted: Part) -> torch.Tensor:
        return read_part(gathered[entry.name], wanted)

    return LazyTensor(part, entry.shape, entry.dtype, origins=frozenset([entry.name]))


def _revert(model: nn.Module, own: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return revert_weight_conversion(model, own)
    except Exception as error:  # each model's conversion has its own ways to fail
        raise NotImplementedError(
            f"hf_parallel: {type(model).__name__} cannot be converted to the format of its checkpoint on the Hub "
            f"({type(error).__name__}: {error}); pass save_original_format=False to save it as it is"
        ) from error


def _joined(origins: dict[str, frozenset[str]]) -> dict[str, tuple[set[str], list[str]]]:
    """For each tensor of the model: all that are converted with it, and the names of what they become."""
    together: dict[str, tuple[set[str], list[str]]] = {}
    for name, keys in origins.items():
        parts = {id(together[key]): together[key] for key in sorted(keys) if key in together}.values()
        merged = (set(keys).union(*(part[0] for part in parts)), [n for part in parts for n in part[1]] + [name])
        together.update(dict.fromkeys(merged[0], merged))
    return together
