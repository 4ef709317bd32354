"""Tensors of a model as a Hub folder holds them: some have other names, a few are converted.

transformers converts checkpoints while loading, and back while saving. Its conversion back is given tensors that are
not read (`lazy_tensor.py`), and tells by what it makes of them which belong together: those are gathered together, all
experts of one layer, or q, k and v, and are then read from what was gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.lazy_tensor import LazyTensor
from hf_parallel.checkpoint.slices import list_axes_and_dims, read_part
from hf_parallel.model.anatomy import StoredOrder, get_stored_order, is_tie_broken
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Entry:
    """A tensor of the whole model and where it lies; or a tensor of the folder.

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
        """Return the size of the data, bytes."""
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
        """Yield the values of `entries` from the values of `own` by name."""
        return iter(tensors.values()) if self.conversion is None else self.conversion(tensors)


def make_hub_groups(model: PreTrainedModel, entries: Iterable[Entry], convert: bool = True) -> list[Group]:
    """Group the tensors of the model by what transformers makes of them when it saves, in their order.

    Raises:
        NotImplementedError: the model's conversion cannot be reverted.
    """
    by_name = {entry.name: entry for entry in entries}
    gathered: dict[str, torch.Tensor] = {}
    own = saved = {name: _read_later(entry, gathered) for name, entry in by_name.items()}
    if convert:
        from transformers.core_model_loading import revert_weight_conversion

        try:
            saved = revert_weight_conversion(model, own)
        except Exception as error:  # each model's conversion has its own ways to fail
            raise NotImplementedError(
                f"hf_parallel: {type(model).__name__} cannot be converted to the format of its checkpoint on the Hub "
                f"({type(error).__name__}: {error}); pass save_original_format=False to save it as it is"
            ) from error
    # By tensor of the model: all that are converted with it, and the names of what they become.
    together: dict[str, tuple[frozenset[str], list[str]]] = {}
    for name, tensor in saved.items():
        parts = {id(together[key]): together[key] for key in sorted(tensor.origins) if key in together}.values()
        merged = tensor.origins.union(*(part[0] for part in parts)), [n for part in parts for n in part[1]] + [name]
        together.update(dict.fromkeys(merged[0], merged))
    groups: dict[str, Group] = {}
    for name in by_name:
        if name in together:  # else transformers leaves it out
            keys, names = together[name]
            members = tuple(by_name[key] for key in sorted(keys))  # on all ranks in one order
            tensors = [saved[n] for n in names]
            described = tuple(Entry(n, tuple(saved[n].shape), saved[n].dtype) for n in names)
            same = len(members) == len(tensors) == 1 and tensors[0].part is own[members[0].name].part
            conversion = None if same else functools.partial(_convert, tensors, gathered)  # same: at most renamed
            groups.setdefault(names[0], Group(members, described, conversion))
    return list(groups.values())


def _convert(
    saved: list[LazyTensor], gathered: dict[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    gathered.update(found)
    for tensor in saved:
        yield tensor.whole()
    gathered.clear()


def _read_later(entry: Entry, gathered: dict[str, torch.Tensor]) -> LazyTensor:
    """Return a tensor of the model that is read once it is in `gathered`."""
    origins = frozenset([entry.name])
    return LazyTensor(lambda part: read_part(gathered[entry.name], part), entry.shape, entry.dtype, origins=origins)


def gather_entries_of(model: nn.Module, mesh: ParallelMesh, tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """Return the tensors of all stages; if several hold one, that of the first that computes with it. Collective.

    What a script has put into another stage's layers is here, too, and trains there alone.
    """
    pipeline = getattr(getattr(model, "_hf_parallel", None), "pipeline", None)
    elsewhere = () if pipeline is None else tuple(f"{name}." for name in pipeline.remote_modules.modules)
    own = []
    for name, tensor in tensors.items():
        names = (tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None) or ()
        cuts = tuple((names[axis], dim) for axis, dim in list_axes_and_dims(tensor))
        parameter, _, slot = name.partition("/")
        order = get_stored_order(model, parameter)
        if slot and order is not None and tensor.shape != model.get_parameter(parameter).shape:
            order = None  # a slot of an optimizer lies as the parameter does, or is whole
        entry = Entry(name, tuple(tensor.shape), tensor.dtype, mesh.index("pp"), cuts, order)
        own.append((entry, not name.startswith(elsewhere)))
    entries: dict[str, tuple[Entry, bool]] = {}
    for theirs in gather_from_stages(own, mesh):
        for entry, computes in theirs:
            if entry.name not in entries or (computes and not entries[entry.name][1]):
                entries[entry.name] = entry, computes
    return [entry for entry, _ in entries.values()]


# ---- Parameters by name, where stages hold parts of a model and one parameter may have two names --------------------

Said = TypeVar("Said")


def list_saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return this rank's parameters; a tied one has the name under which it is saved.

    A parameter that the script has tied has its first name, as `named_parameters()` gives it.
    """
    tied = find_tied_parameters(model)
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:
            found.setdefault(tied.get(name, name), parameter)
        seen.add(id(parameter))
    return found


def list_names_in_order(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    """Return the names of all stages' parameters, in the order of the whole model. Collective over stages."""
    tied = find_tied_parameters(model)
    places: dict[str, tuple] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        # A parameter's place in the tree: stages replace modules in place, so all agree on the order.
        *path, last = name.split(".")
        place: list[tuple[int, int]] = []
        module = model
        for child in path:
            place.append((1, list(module._modules).index(child)))
            module = module.get_submodule(child)
        places.setdefault(tied.get(name, name), (*place, (0, list(module._parameters).index(last))))
    for other in gather_from_stages(places, mesh):
        for name, theirs in other.items():
            places[name] = min(theirs, places.get(name, theirs))
    return sorted(places, key=lambda name: places[name])


def list_tied_names(model: nn.Module) -> set[str]:
    """Return the names under which tied weights are not saved, of all stages."""
    return set(find_tied_parameters(model))


def find_tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return the names of weights that a config ties, and the name under which each is saved.

    Without those that are two parameters by now: a script, or PEFT's merging, has given the head a weight of its own.
    """
    keys = getattr(model, "_hf_parallel_tied_keys", None) or getattr(model, "all_tied_weights_keys", None)
    if not isinstance(keys, dict) or not keys:
        return {}
    held = dict(model.named_parameters(remove_duplicate=False))
    return {one: other for one, other in keys.items() if not is_tie_broken(held, one, other)}


def gather_from_stages(own: Said, mesh: ParallelMesh) -> list[Said]:
    """Gather a value from every stage, in the order of stages' ranks. Collective over stages."""
    return [own] if mesh.size("pp") == 1 else messages.gather_objects(own, mesh.group("pp"))
