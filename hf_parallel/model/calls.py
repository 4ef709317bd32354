"""Calls of a forward: the arguments by name, the tokens among them, and the part of them that a rank holds."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hf_parallel.ask.session import of_session

if TYPE_CHECKING:
    from torch import nn

#: The arguments of a model call, by name.
Batch = dict[str, Any]


def bind_arguments_of(names: Iterable[str], args: tuple, kwargs: dict, owner: object) -> dict:
    """Return the arguments of a call of the owner's forward, which accelerate may lead with the owner."""
    args = args[1:] if args and args[0] is owner else args
    return {**dict(zip(names, args, strict=False)), **kwargs}


#: Names of a key/value cache among a call's arguments. transformers 5.24 calls it `cache`.
CACHES = ("cache", "past_key_values", "cache_params", "past_key_value", "layer_past")


def has_cache(batch: Mapping) -> bool:
    """Return whether a call is given a key/value cache, under any of its names."""
    return any(batch.get(name) is not None for name in CACHES)


def get_tokens_of(batch: Mapping) -> torch.Tensor:
    """Return the tokens that a backbone reads: [sequences, length] or [sequences, length, width]."""
    found = next((batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None), None)
    if found is None:
        raise ValueError("hf_parallel: a model needs input_ids or inputs_embeds in the batch")
    return found


@dataclass(frozen=True)
class HeldTokens:
    """The part of a script's tokens that a rank computes with.

    Attributes:
        shape: rows and length of the script's batch.
        part: gives what this rank holds of a tensor [rows, length, …].
    """

    shape: tuple[int, int]
    part: Callable[[torch.Tensor], torch.Tensor]


_held: ContextVar[HeldTokens | None] = ContextVar("held_tokens", default=None)


def get_held_tokens() -> HeldTokens | None:
    """Return the tokens of the backbone that runs now; None where it reads the script's batch as it is."""
    return _held.get()


@contextlib.contextmanager
def hold_tokens(shape: tuple[int, int], part: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let a backbone read `part` of tokens [sequences, length], which may themselves be a part of a batch."""
    around = _held.get()
    held = HeldTokens(shape, part) if around is None else HeldTokens(around.shape, lambda x: part(around.part(x)))
    token = _held.set(held)
    try:
        yield
    finally:
        _held.reset(token)


# ---- The targets of transformers' causal loss, and the count over which it takes the mean ---------------------------


def compute_targets_of(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """Return the target of each token [b, s]: the next one's label, unless they are given shifted already."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def count_items(targets: torch.Tensor, given: torch.Tensor | int | None, ignore_index: int) -> torch.Tensor | int:
    """Return `num_items_in_batch` as given, on the targets' device, or else how many of the targets count."""
    if given is None:
        return (targets != ignore_index).sum()
    return given.to(targets.device) if torch.is_tensor(given) else given


# ---- Will anybody but a model's own loss read the logits of the call in progress? Who calls the model may know
# A Trainer takes the loss alone from a model that computes it, a pipeline frees what else a micro-batch gives. Nobody
# can miss logits there; of a loop written by hand nothing is known.


class _Call:
    """The call in progress."""

    unread = False


@contextlib.contextmanager
def note_unread_logits(unread: bool = True) -> Iterator[None]:
    """Note inside the `with` whether models are called for their loss alone."""
    call = of_session(_Call)
    former, call.unread = call.unread, unread
    try:
        yield
    finally:
        call.unread = former


def are_logits_unread() -> bool:
    """Return whether nobody reads what the call in progress returns beside its loss."""
    return of_session(_Call).unread


# ---- Run a function on stand-ins, to see what it would do: no weights, no memory, no data ---------------------------
# A stand-in takes any operation, attribute or call and answers with a stand-in, so that a model's forward runs from
# its first line to the call that is looked for. Where it cannot, nothing is known of it.

#: Operations after which a function that is still running is given up.
_LIMIT = 2_000
_OPERATIONS = (
    *("call", "getitem", "neg", "invert", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "matmul"),
    *(f"{side}{name}" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")),
)


class StandIn:
    """A stand-in: any operation on it gives another one; it is false, empty, and has the attributes it is given."""

    _left: list[int]

    def __init__(self, left: list[int], **known: object) -> None:
        vars(self).update(known, _left=left)

    def _another(self, *args: object, **kwargs: object) -> StandIn:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise RecursionError("it does not end on stand-ins")
        return StandIn(self._left)

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._another()

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> object:
        return iter(())

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> StandIn:
        return StandIn([_LIMIT])


for _name in _OPERATIONS:
    setattr(StandIn, f"__{_name}__", StandIn._another)


class _Reached(Exception):
    """The call that was looked for."""


def find_keywords_of_loss(model: nn.Module, **given: object) -> set[str]:
    """Return the keywords of a forward's call of `self.loss_function` if it is given labels and these."""
    found: set[str] = set()

    def loss_function(*args: object, **kwargs: object) -> None:
        found.update(kwargs)
        raise _Reached

    forward, left = inspect.unwrap(type(model).forward), [_LIMIT]
    config = copy.deepcopy(getattr(model, "config", None))  # heads of BERT's kind write in it what their loss is
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            inputs = {name: StandIn(left) for name in (*needed, "input_ids", "labels")}
            forward(StandIn(left, config=config, loss_function=loss_function), **inputs, **given)
    except Exception:  # also by what stand-ins cannot do
        return found
    return found


# ---- The arguments of a call, whether given by name or by position --------------------------------------------------


def bind_by_name(
    function: Callable | inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by the names in the function's signature; without defaults."""
    if isinstance(function, inspect.Signature):
        signature = function
    else:
        signature = _known(function) if isinstance(function, types.FunctionType) else inspect.signature(function)
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}


#: For functions alone: a method that is remembered would keep its model.
_known = functools.cache(inspect.signature)
