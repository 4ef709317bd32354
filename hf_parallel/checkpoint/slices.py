"""Parts of a whole tensor: the indices that a rank stores, and reading only those.

A part is described by one list of indices per dimension, of the tensor as the model and the Hub know it:

    stored (4, 3), rows cut by tp=2 in the order 0 2 | 1 3          rank 1: [1, 3] x [0, 1, 2]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.model.anatomy import StoredOrder
from hf_parallel.ranks import AloneError, ask_other_ranks, assert_all_ranks
from hf_parallel.ranks.mesh import get_stored
from hf_parallel.ranks.messages import gather_objects
from hf_parallel.ranks.requests import take_requests


class Readable(Protocol):
    """A tensor of a safetensors file, of which is read what it is indexed with."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, wanted: Wanted) -> torch.Tensor: ...


Wanted: TypeAlias = "EllipsisType | slice | tuple[slice, ...]"
#: Per dimension, the indices that are wanted.
Part = tuple[torch.Tensor, ...]


def find_local_part(tensor: torch.Tensor, order: StoredOrder | None = None) -> Part:
    """Return the part of a tensor that this rank stores: everything if it is not a DTensor."""
    cuts = []
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        cuts = [(dim, mesh.size(axis), mesh.get_local_rank(axis)) for axis, dim in list_axes_and_dims(tensor)]
    return cut_part(tensor.shape, order, cuts)


def cut_part(shape: tuple[int, ...], order: StoredOrder | None, cuts: Iterable[tuple[int, int, int]]) -> Part:
    """Apply cuts of (dim, count, index), one after the other, and return the part that is left."""
    part = list(make_whole_part(shape))
    if order is not None:
        part[order.dim] = order.rows
    for dim, count, index in cuts:
        size = -(-len(part[dim]) // count)  # as torch.chunk, with empty chunks at the end where it would give fewer
        part[dim] = part[dim][index * size : (index + 1) * size]
    return tuple(part)


def make_whole_part(shape: tuple[int, ...]) -> Part:
    """Return every index of every dimension."""
    return tuple(torch.arange(size) for size in shape)


def read_part(source: torch.Tensor | Readable, part: Part, _ranges: tuple[slice, ...] = ()) -> torch.Tensor:
    """Read the part of a tensor or of a safetensors slice. Only these ranges of a file are read."""
    dim = len(_ranges)
    if dim == len(part):
        return source[_ranges] if _ranges else source[...]
    pieces = [read_part(source, part, (*_ranges, run)) for run in find_runs(part[dim])]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def write_part(target: torch.Tensor, part: Part, source: torch.Tensor, _ranges: tuple[slice, ...] = ()) -> None:
    """Put a part's values into the whole tensor: the inverse of `read_part`."""
    dim, start = len(_ranges), 0
    if dim == len(part):
        target[_ranges or ...].copy_(source)
        return
    for run in find_runs(part[dim]):
        count = run.stop - run.start
        write_part(target, part, source.narrow(dim, start, count), (*_ranges, run))
        start += count


def view_rows_of(target: torch.Tensor, part: Part) -> torch.Tensor | None:
    """Return the part as a view of contiguous memory, or None if it is not a range of rows."""
    if not part or any(len(indices) != size for indices, size in zip(part[1:], target.shape[1:], strict=True)):
        return None
    ranges = [find_runs(indices) for indices in part]
    return target[ranges[0][0]] if all(len(found) == 1 for found in ranges) else None


def list_axes_and_dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (mesh axis, dim) of each cut, in the order of cutting: FSDP2 (strided) cuts what tp has left."""
    if not isinstance(tensor, DTensor):
        return []
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    ordered = [cut for cut in cuts if cut not in strided] + strided[::-1]
    return [(axis, placement.dim) for axis, placement in ordered]


def find_runs(indices: torch.Tensor) -> list[slice]:
    """Return the maximal ranges of consecutive indices; one empty range if there are none."""
    if not len(indices):
        return [slice(0, 0)]
    ends = (indices.diff() != 1).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    stops = [*ends, len(indices) - 1]
    return [slice(int(indices[a]), int(indices[b]) + 1) for a, b in zip(starts, stops, strict=True)]


# ---- Parts of a model that rank 0 saves by itself, as if they were the whole ----------------------------------------
#     state = trainer.model.state_dict()                                        on all ranks
#     if trainer.args.should_save:
#         trainer._save(folder, state_dict={k: v.cpu() for k, v in state.items()})
#
# What rank 0 has then are the model's own values, of this rank. So it asks the others for theirs. So it does for a
# save under `if is_main_process:` that ends a script.

M = TypeVar("M", bound=nn.Module)

_ADVICE = "call trainer.save_model(), or model.save_pretrained without state_dict, on all ranks (docs/idioms.md)"
_OTHERWISE = "save what hf_parallel.full_state_dict(model) gives, called on all ranks (docs/idioms.md)"


@dataclass
class _Asked:
    """The number of a model's request, and how its whole tensors are gathered now."""

    number: int
    gather: Callable[[Any], object]


_asked: weakref.WeakKeyDictionary[nn.Module, _Asked] = weakref.WeakKeyDictionary()


def let_ask(model: M, gather: Callable[[M], object]) -> None:
    """Let rank 0 ask for the whole tensors of a model. All ranks call this for the same models in the same order.

    Args:
        gather: returns them on rank 0, in the place of what an earlier call has given for the model. Collective.
    """
    if model in _asked:
        _asked[model].gather = gather
        return

    def answer(model: M) -> None:
        if is_changed_alike(model):
            _asked[model].gather(model)

    number = take_requests(model, answer)
    if number is not None:
        _asked[model] = _Asked(number, gather)


def is_alone(call: str, model: nn.Module) -> bool:
    """Return True on rank 0 if the others wait for it elsewhere; else return when all are in this call.

    Raises:
        AloneError: they cannot be asked where they are.
    """
    number = _asked[model].number if model in _asked else 0
    try:
        assert_all_ranks(f"{call} of model {number + 1}" if number else call, is_served=True)
    except AloneError as error:
        if not error.is_served or model not in _asked:
            raise
        return True
    return False


def gather_asked(model: M, gather: Callable[[M], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gather whole tensors with the help of the other ranks, who are not in this call. Rank 0 alone calls it.

    Raises:
        AloneError: they are not where they can be asked.
    """
    ask_other_ranks("save_pretrained", _asked[model].number, _ADVICE)
    refuse_changes_of_rank_0(model)
    return gather(model)


# Rank 0 alone may write to its parts, as where an average is swapped in, and the others' stay as they are. torch
# counts what is written to a tensor, and ranks with the same parameters count alike unless one has done more.

#: Counts of a model's parameters at its first call; loading may have written to parts of some ranks alone.
_first_counts: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


def count_changes_from_first_call(model: nn.Module) -> None:
    """Remember how often each parameter has been written to before the first call of the model."""

    def count_changes_from_now(model: nn.Module, args: tuple) -> None:
        first.remove()
        _first_counts[model] = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}

    first = model.register_forward_pre_hook(count_changes_from_now)


def is_changed_alike(model: nn.Module) -> bool:
    """Return whether all ranks that hold the same parameters have written to them equally often. Collective."""
    model = getattr(model, "get_base_model", lambda: model)()  # which has called its adapters, too
    state = getattr(model, "_hf_parallel", None)
    current = dict(model.named_parameters())
    known = {name: count for name, count in _first_counts.get(model, {}).items() if name in current}
    own = sum(current[name]._version - count for name, count in known.items())
    found = gather_objects((0 if state is None else state.mesh.index("pp"), own))
    return all(count == found[0][1] for stage, count in found if stage == found[0][0])


def refuse_changes_of_rank_0(model: nn.Module) -> None:
    """Rank 0: take part in `is_changed_alike` of the others.

    Raises:
        NotImplementedError: this rank has written to weights, and the others have not.
    """
    if not is_changed_alike(model):
        raise NotImplementedError(
            "hf_parallel: rank 0 alone has written to weights, of which the other ranks hold the rest; change them on "
            "all ranks (docs/saving.md)"
        )


def are_own_parts(model: nn.Module, given: Mapping[str, torch.Tensor], names: Iterable[str]) -> bool:
    """Return whether a state dict holds what this rank stores, and no more.

    Args:
        names: of all that is saved of the model, other stages' too.
    """
    own = model.state_dict()
    here, elsewhere = ([name for name in names if (name in own) == held] for held in (True, False))
    of_one_stage = any(name in given for name in here) and elsewhere and not any(name in given for name in elsewhere)
    return bool(of_one_stage) or any(isinstance(x, DTensor) and list_axes_and_dims(x) for x in given.values())


def make_whole_tensors(
    model: M, given: Mapping[str, torch.Tensor], names: Iterable[str], gather: Callable[[M], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the whole tensors rank 0 is to save where it was given parts, in their dtype. Rank 0 alone calls it.

    Raises:
        AloneError: the other ranks are not where they can be asked.
        NotImplementedError: what is given is not what the model holds.
    """
    own, wrong = model.state_dict(), []
    for name, value in given.items():  # equal values, whatever dtype and device they have
        here, there = (get_stored(held).detach() for held in (own.get(name, value), value))
        equal = here.shape == there.shape and torch.equal(here.to(there.dtype).cpu(), there.cpu())
        wrong += [] if name in own and equal else [name]
    if wrong := wrong + [name for name in names if name in own and name not in given]:
        raise NotImplementedError(
            "hf_parallel: save_pretrained on one rank is given a part of the model that is not as it is now, first at "
            f"{wrong[0]}; {_OTHERWISE}"
        )
    whole = gather_asked(model, gather)
    dtypes = {value.dtype for value in given.values() if value.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in whole.items()}
