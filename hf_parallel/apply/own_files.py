"""Whole states in the place of the parts that a rank holds, for files that a script writes and reads by itself.

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, "checkpoint.pt")

Rank 0 finds the models and optimizers whose parts the object holds, and asks the other ranks for the rest of each.
They take part in the same call, or where they wait for rank 0 (`ranks/desync.py`). The file is that of one process.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.apply.weights import gather_whole_state
from hf_parallel.ask.session import of_session
from hf_parallel.checkpoint import gather_plain_state
from hf_parallel.checkpoint.hub_format import list_saved_parameters
from hf_parallel.checkpoint.slices import is_changed_alike, refuse_changes_of_rank_0
from hf_parallel.ranks.desync import meet_or_ask
from hf_parallel.ranks.mesh import ParallelMesh, get_stored
from hf_parallel.ranks.messages import send_from_one
from hf_parallel.ranks.requests import take_requests

_ADVICE = "put a barrier after it, or call it on all ranks (docs/idioms.md)"
#: How deep lists and dicts are searched; longer lists than this hold data.
_DEPTH, _LONG = 6, 1000


class Question(NamedTuple):
    """A model or an optimizer whose whole state rank 0 needs, by its number."""

    kind: str
    number: int


@dataclass
class KnownStates:
    """Models and optimizers of the session, numbered alike on all ranks."""

    models: list[tuple[weakref.ref[nn.Module], ParallelMesh]] = field(default_factory=list)
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    request: int | None = None

    def iterate_models(self) -> Iterator[tuple[int, nn.Module, ParallelMesh]]:
        """Yield number, model and mesh of each model that still exists."""
        found = ((number, ref(), mesh) for number, (ref, mesh) in enumerate(self.models))
        yield from ((number, model, mesh) for number, model, mesh in found if model is not None)

    def find_model_of(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, ParallelMesh] | None:
        """Return the parallel model whose parameters an optimizer has."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [(model, mesh) for _, model, mesh in self.iterate_models()]
        if not own:  # of a stage without a parameter that trains
            return models[0] if len(models) == 1 else None
        fitting = (one for one in models if own <= {id(p) for p in list_saved_parameters(one[0]).values()})
        return next(fitting, None)

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that train a parallel model, or nothing on this stage, the newest first.

        Some ranks may still have an older one, which others have forgotten, and optimizers that the layout tries.
        """
        parameters = {id(p) for _, model, _ in self.iterate_models() for p in list_saved_parameters(model).values()}
        found = (one for ref in reversed(self.optimizers) if (one := ref()) is not None)
        own = ((one, {id(p) for group in one.param_groups for p in group["params"]}) for one in found)
        return [one for one, held in own if not held or held & parameters]


def let_write_states(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let a script write the whole state of a model. All ranks call this for the same models in the same order."""
    known = of_session(KnownStates)
    if all(model is not one for _, one, _ in known.iterate_models()):
        known.models.append((weakref.ref(model), mesh))
    if known.request is None:
        known.request = take_requests(known, _answer_questions)


def note_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let a script write the state of an optimizer. All ranks make a model's optimizers in the same order."""
    of_session(KnownStates).optimizers.append(weakref.ref(optimizer))


def list_names_of_other_stages(model: nn.Module) -> set[str]:
    """Return the names of weights that other stages hold, as a parallel model or a module around it names them."""
    own, found = _list_names_of_state(model), set[str]()
    for prefix, module in model.named_modules():
        pipeline = getattr(vars(module).get("_hf_parallel"), "pipeline", None)
        if pipeline is not None:
            with pipeline.remote_modules.shown(module):
                found |= {f"{prefix}.{name}" if prefix else name for name in _list_names_of_state(module)}
    return found - own


def _list_names_of_state(model: nn.Module) -> set[str]:
    """Return the keys of `model.state_dict()`, which itself would free gathered weights during a call."""
    found = {name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        names = module._buffers.keys() - module._non_persistent_buffers_set
        found |= {f"{prefix}.{name}" if prefix else name for name in names}
    return found


# ---- writing --------------------------------------------------------------------------------------------------------


def make_whole(call: str, obj: object) -> tuple[object, bool]:
    """Return an object with whole states in the place of parts, on rank 0; and whether all ranks are in this call.

    Args:
        call: what the script calls, by the name it has there.

    Raises:
        AloneError: the other ranks are not where they can be asked.
        NotImplementedError: the rest of what the object holds cannot be known.
    """
    known = of_session(KnownStates)
    if not _may_hold_parts(obj, any(mesh.size("pp") > 1 for _, _, mesh in known.iterate_models())):
        return obj, False
    parts = _Parts()
    parts.replace(obj)
    if not parts.answers:
        return obj, False
    alone = meet_or_ask(call, known.request, _ADVICE)
    if not alone and torch.distributed.get_rank() != 0:
        _answer_questions(known)
        return obj, True
    send_from_one(lambda: alone)
    for question in parts.answers:
        send_from_one(functools.partial(Question, *question))
        if alone:
            for _, model, _ in known.iterate_models():
                refuse_changes_of_rank_0(model)
        parts.answers[question] = _gather(known, question)
    made: list[object] = []
    send_from_one(lambda: made.append(parts.replace(obj)))  # an error is raised on all ranks
    return made[0], not alone


def _may_hold_parts(obj: object, of_stages: bool, depth: int = _DEPTH) -> bool:
    """Return False for most of what is saved: pickle saves each tensor by itself, in each message between ranks.

    Args:
        of_stages: there is a pipeline, whose parts are plain tensors.
    """
    if isinstance(obj, torch.Tensor):
        return of_stages or isinstance(obj, DTensor)
    if isinstance(obj, dict):
        is_optimizer = "param_groups" in obj and "state" in obj
        return is_optimizer or any(_may_hold_parts(value, of_stages, depth - 1) for value in obj.values() if depth)
    if isinstance(obj, list | tuple) and len(obj) < _LONG and depth:
        return any(_may_hold_parts(value, of_stages, depth - 1) for value in obj)
    return False


def _answer_questions(known: KnownStates) -> None:
    """Take part in what rank 0 gathers, until it has everything that it writes."""
    alone = send_from_one(bool)
    while (question := send_from_one(lambda: None)) is not None:
        if alone and not all(is_changed_alike(model) for _, model, _ in known.iterate_models()):
            return  # rank 0 raises
        _gather(known, question)


def _gather(known: KnownStates, question: Question) -> dict[str, Any]:
    if question.kind == "model":
        ref, mesh = known.models[question.number]
        model: Any = ref()
        return gather_whole_state(model, mesh)
    optimizer = known.list_optimizers()[question.number]
    found = known.find_model_of(optimizer)
    if found is None:
        raise NotImplementedError(
            f"hf_parallel: {type(optimizer).__name__} has parameters of several models, or of none that is parallel; "
            "one optimizer for each model, or accelerator.save_state, works"
        )
    return gather_plain_state(found[0], optimizer, found[1])


@dataclass
class _Names:
    """Names of a state as the script has them, and as the model has them: key -> name."""

    found: dict[str, str]

    def __post_init__(self) -> None:
        pairs = ((key, name) for key, name in self.found.items() if key.endswith(name) or name.endswith(key))
        key, name = next(pairs, ("", ""))
        # A module around the model adds to its names; of a module inside it the script leaves some out.
        self.added = key.removesuffix(name) if key.endswith(name) else ""
        self.removed = name.removesuffix(key) if name.endswith(key) else ""

    def to_script(self, name: str) -> str | None:
        """Return the script's name for a weight of the model, or None if the script does not have it."""
        return f"{self.added}{name.removeprefix(self.removed)}" if name.startswith(self.removed) else None


class _Parts:
    """The parts that an object holds, and the whole states that take their place.

    Attributes:
        answers: by question the whole state; None while it is not known: parts stay until then.
        own: the parts of each model on this rank, by name.
        elsewhere: the names of each model's weights that other stages hold.
    """

    def __init__(self) -> None:
        known = of_session(KnownStates)
        self.answers: dict[Question, dict[str, Any] | None] = {}
        self.models = {number: (model, mesh) for number, model, mesh in known.iterate_models()}
        self.optimizers = dict(enumerate(known.list_optimizers()))
        self.places: dict[tuple[int, torch.Size], tuple[int, str]] = {}
        self.own: dict[int, dict[str, torch.Tensor]] = {}
        self.elsewhere = {number: list_names_of_other_stages(model) for number, (model, _) in self.models.items()}
        for number, (model, mesh) in self.models.items():
            named = (*nn.Module.named_parameters(model, remove_duplicate=False), *model.named_buffers())
            self.own[number] = {name: tensor for name, tensor in named if self._is_part(tensor, mesh)}
            for name, tensor in self.own[number].items():
                if get_stored(tensor).numel():
                    self.places.setdefault((get_stored(tensor).data_ptr(), tensor.shape), (number, name))

    @staticmethod
    def _is_part(tensor: torch.Tensor, mesh: ParallelMesh) -> bool:
        return isinstance(tensor, DTensor) or mesh.size("pp") > 1

    def replace(self, obj: Any, depth: int = _DEPTH) -> Any:
        """Return the object, with whole states as far as they are known."""
        if not depth:
            return obj
        if isinstance(obj, torch.Tensor):
            place = self._find_place("", obj)
            return obj if place is None or not isinstance(obj, DTensor) else self._take(*place, obj)
        if isinstance(obj, list | tuple) and len(obj) < _LONG:
            made = [self.replace(value, depth - 1) for value in obj]
            changed = any(new is not old for new, old in zip(made, obj, strict=True))
            return obj if not changed else type(obj)(*made) if hasattr(obj, "_fields") else type(obj)(made)
        if not isinstance(obj, dict):
            return obj
        number = self._find_optimizer(obj)
        if number is None:
            return self._replace_in_dict(obj, depth)
        states = self.answers.setdefault(Question("optimizer", number), None)
        return obj if states is None else {**obj, **states}

    def _replace_in_dict(self, obj: dict, depth: int) -> dict:
        found: dict[Any, tuple[int, str]] = {}
        for key, value in obj.items():
            if torch.is_tensor(value) and (place := self._find_place(str(key), value)) is not None:
                found[key] = place
        of_models: dict[int, _Names] = {}
        for number in dict.fromkeys(number for number, _ in found.values()):
            names = _Names({str(key): name for key, (one, name) in found.items() if one == number})
            if {names.to_script(name) for name in self.elsewhere[number]} & {*obj}:  # it is whole
                found = {key: place for key, place in found.items() if place[0] != number}
            else:
                of_models[number] = names
        made = {key: value if key in found else self.replace(value, depth - 1) for key, value in obj.items()}
        made |= {key: self._take(*place, obj[key]) for key, place in found.items()}
        for number, names in of_models.items():
            made |= self._take_from_other_stages(number, names, obj)
        if all(made[key] is value for key, value in obj.items()):
            return obj
        whole = copy.copy(obj)  # with what torch notes on it
        whole.clear()
        whole.update(made)
        getattr(whole, "__dict__", {}).pop("is_part_of_model", None)
        return whole

    def _take(self, number: int, name: str, part: torch.Tensor) -> torch.Tensor:
        whole = self.answers.setdefault(Question("model", number), None)
        return part if whole is None else self._copy_as(part, self.own[number][name], whole[name])

    @staticmethod
    def _copy_as(part: torch.Tensor, own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return the whole in the dtype of a script's tensor, with memory of its own if the script has copied it."""
        if whole.is_floating_point() and part.dtype != own.dtype:
            return whole.to(part.dtype)
        return whole if get_stored(part).data_ptr() == get_stored(own).data_ptr() else whole.clone()

    def _find_place(self, key: str, value: torch.Tensor) -> tuple[int, str] | None:
        """Return number of the model and name there of a part: by its memory, else by its name and values."""
        stored, is_part = get_stored(value), isinstance(value, DTensor)
        place = self.places.get((stored.data_ptr(), value.shape)) if stored.numel() else None
        if place is not None and (is_part or self.elsewhere[place[0]]):
            other = self.own[place[0]].get(key)  # a tied weight has several names
            same = other is not None and get_stored(other).data_ptr() == stored.data_ptr()
            return (place[0], key) if same else place
        for number, own in self.own.items():
            if not (is_part or self.elsewhere[number]):
                continue
            for name, tensor in own.items():
                alike = key and f".{key}".endswith(f".{name}") or key and f".{name}".endswith(f".{key}")
                if alike and tensor.shape == value.shape and get_stored(tensor).shape == stored.shape:
                    same = torch.equal(get_stored(tensor).detach().to(stored.dtype).cpu(), stored.detach().cpu())
                    if same:
                        return number, name
        return None

    def _take_from_other_stages(
        self, number: int, names: _Names, obj: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what other stages have of a state, under the names that the script gives and in its dtype.

        Raises:
            NotImplementedError: the script has chosen some of this stage's weights, which does not tell which of the
                other stages' to take.
        """
        whole, others = self.answers[Question("model", number)], self.elsewhere[number]
        if whole is None or not others:
            return {}
        wanted = (names.to_script(name) for name in self.models[number][0].state_dict())
        left_out = [name for name in wanted if name is not None and name not in obj]
        if left_out:
            raise NotImplementedError(
                f"hf_parallel: pp_size={self.models[number][1].size('pp')}: a file with some weights and without "
                f"{left_out[0]} would have those of one stage; choose from hf_parallel.full_state_dict(model), which "
                "all ranks call"
            )
        key, name = next(iter(names.found.items()))
        rest = ((names.to_script(other), whole[other]) for other in whole if other in others)
        own = self.own[number][name]
        return {other: self._copy_as(obj[key], own, value) for other, value in rest if other is not None}

    def _find_optimizer(self, obj: dict) -> int | None:
        """Return the number of the optimizer whose `state_dict` this is, if it holds parts."""
        slots, groups = obj.get("state"), obj.get("param_groups")
        if not isinstance(slots, dict) or not isinstance(groups, list):
            return None
        held = {id(t) for own in slots.values() if isinstance(own, dict) for t in own.values() if torch.is_tensor(t)}
        parts = {id(tensor) for own in self.own.values() for tensor in own.values()}
        for number, optimizer in self.optimizers.items():
            if not any(id(p) in parts for group in optimizer.param_groups for p in group["params"]):
                continue
            mine = {id(t) for own in optimizer.state.values() for t in own.values() if torch.is_tensor(t)}
            if mine & held or not held and not mine and groups == optimizer.state_dict()["param_groups"]:
                return number
        return None
