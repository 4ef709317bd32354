"""Parameters by name, where stages hold parts of a model and one parameter may have two names."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hf_parallel.collectives import objects
from hf_parallel.mesh import ParallelMesh

Said = TypeVar("Said")


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters; a tied one has the name under which it is saved."""
    tied = _tied(model)
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(tied.get(name, name), parameter)
    return found


def names_in_order(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    """The names of all stages' parameters, in the order of the whole model. Collective over stages."""
    tied = _tied(model)
    places: dict[str, tuple] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        places.setdefault(tied.get(name, name), _place(model, name))
    for other in of_stages(places, mesh):
        for name, place in other.items():
            places[name] = min(place, places.get(name, place))
    return sorted(places, key=lambda name: places[name])


def tied_names(model: nn.Module) -> set[str]:
    """The names under which tied weights are not saved, of all stages."""
    return set(getattr(model, "_hf_parallel_tied_keys", None) or getattr(model, "all_tied_weights_keys", None) or ())


def _tied(model: nn.Module) -> dict[str, str]:
    keys = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_hf_parallel_tied_keys", None)
    return dict(keys) if isinstance(keys, dict) else {}


def _place(model: nn.Module, name: str) -> tuple[tuple[int, int], ...]:
    """Where a parameter is met: stages replace modules by others at the same place, so all agree on the order."""
    *path, last = name.split(".")
    place: list[tuple[int, int]] = []
    module = model
    for child in path:
        place.append((1, list(module._modules).index(child)))
        module = module.get_submodule(child)
    return (*place, (0, list(module._parameters).index(last)))


def of_stages(own: Said, mesh: ParallelMesh) -> list[Said]:
    """What each stage says, in the order of stages' ranks. Collective over stages."""
    return [own] if mesh.size("pp") == 1 else objects.gather(own, mesh.group("pp"))
