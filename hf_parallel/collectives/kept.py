"""What a checkpoint keeps of its first run, for its second one to take rather than to compute or to send again.

Who computes something expensive asks for it through `kept_or`; a checkpoint around it says which kinds it keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

Result = TypeVar("Result")
#: Kinds of results: what attention over ranks gives, and what ranks have sent each other.
ATTENTION, COLLECTIVE = "attention", "collective"


class Store:
    """What one checkpoint has kept, in order. A layer may be recomputed several times."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.results: list[object] = []
        self.used: int | None = None  # how many of them a second run has taken; None in the first
        self.computing = 0  # how many results are being computed, one for another
        self.summed: int | None = None  # which result is made of what is computed now, and kept in its place


class Within:
    """In here results go to a store, or come from it."""

    def __init__(self, store: Store, recomputing: bool) -> None:
        self.store, self.recomputing = store, recomputing

    def __enter__(self) -> None:
        self.store.used = 0 if self.recomputing else None
        _stores.append(self.store)

    def __exit__(self, *error: object) -> None:
        _stores.remove(self.store)


_stores: list[Store] = []


def keeps(kind: str) -> bool:
    """Is there a checkpoint around this that keeps results of this kind?"""
    return bool(_stores) and kind in _stores[-1].kinds


def kept_or(compute: Callable[[], Result], kind: str) -> Result:
    """The result that the checkpoint around this has kept, or else what `compute` gives, which it then keeps."""
    if not keeps(kind) or _stores[-1].computing:
        return compute()
    store = _stores[-1]
    if store.used is not None:
        store.used += 1
        note = store.results[store.used - 1]
        if unchanged(note):
            return given_back(note)
    store.computing += 1
    try:
        result = compute()
    finally:
        store.computing -= 1
    if store.used is None:
        store.results.append(noted(result))
    return result


@contextlib.contextmanager
def summed_next() -> Iterator[None]:
    """What is computed in here nothing reads but the next result that is kept: a second run needs no value of it."""
    store = _stores[-1] if keeps(COLLECTIVE) else None
    if store is not None:
        store.summed = len(store.results)
    try:
        yield
    finally:
        if store is not None:
            store.summed = None


@dataclass(frozen=True)
class Kept:
    """The memory of a tensor without its graph, and whether it has been changed in place since."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """In the middle of an operation too, where a plain alias would count its own changes."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return cls(tensor.detach(), tensor._version)

    @property
    def unchanged(self) -> bool:
        """Models may add to what a layer gives in place."""
        return self.tensor._version == self.version

    def again(self) -> torch.Tensor:
        """The tensor; no view, which autograd would guard."""
        return torch.ops.aten._unsafe_view(self.tensor, self.tensor.shape)


@dataclass(frozen=True)
class Summed:
    """A part of a sum that is kept: zeros without memory stand for it, as long as that sum is as it was."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    store: Store
    place: int

    @property
    def unchanged(self) -> bool:
        """Will the sum be given back, rather than be made again of this?"""
        return unchanged(self.store.results[self.place])

    def again(self) -> torch.Tensor:
        """A stand-in."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def noted(result: object, store: Store | None = None) -> object:
    """A result, with tensors as what is kept of them.

    Args:
        store: of the checkpoint that is told which results nobody reads again.
    """
    if store is None or store.summed is None:
        return tree_map(lambda one: Kept.of(one) if torch.is_tensor(one) else one, result)
    place = store.summed
    return tree_map(
        lambda one: Summed(one.shape, one.dtype, one.device, store, place) if torch.is_tensor(one) else one, result
    )


def unchanged(note: object) -> bool:
    """Is everything in it as it was?"""
    return all(one.unchanged for one in tree_leaves(note) if isinstance(one, Kept | Summed))


def given_back(note: object) -> Any:
    """The result."""
    return tree_map(lambda one: one.again() if isinstance(one, Kept | Summed) else one, note)
