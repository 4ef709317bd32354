"""Replacement of another library's functions: by name, once, with a reason, and undone on request."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn, TypeAlias, cast

from packaging.version import Version

from hf_parallel.ask.session import of_process, of_session
from hf_parallel.ask.spec import refuse, refuse_with
from hf_parallel.hooks.after_import import AfterImport

#: First and last minor version of each library that the patches were checked on.
CHECKED = {
    "transformers": ("5.16", "5.24"),
    "accelerate": ("1.12", "1.15"),
    "peft": ("0.21", "0.21"),
    "trl": ("0.24", "1.16"),
    "bitsandbytes": ("0.50", "0.50"),
    "sentence_transformers": ("6.2", "6.2"),
    "setfit": ("1.2", "1.2"),
    "swift": ("4.6", "4.6"),
    "torchmetrics": ("1.9", "1.9"),
    "unsloth": ("2026.10", "2026.10"),
    "opacus": ("1.6", "1.6"),
}
#: The same of torch. Of what is not public only versions before 2.15 are patched: a newer one may well work, and is
#: only told about.
TORCH = ("2.11", "2.15")
#: What GPUs have run is torch 2.13's NCCL backend; torch 2.15 takes another one, unless the environment says no.
FORMER_NCCL = "TORCH_DIST_USE_NCCL2"
#: Libraries that may be missing, and are patched when a script imports them: nobody else should wait for them.
OPTIONAL = {"peft", "trl", "bitsandbytes", "sentence_transformers", "setfit", "swift", "torchmetrics"}
OPTIONAL |= {"opacus", "unsloth"}
#: Set to 1 to go on with an older torch, at your own risk.
ALLOW_UNKNOWN = "HF_PARALLEL_ALLOW_UNKNOWN_VERSIONS"

_MISSING = object()
#: What was changed: the owner, the attribute, what it held itself; or what waits for an import, with what it has done.
Undo: TypeAlias = tuple[object, str, object]


@dataclass(frozen=True)
class Patch:
    """Replace `target` ("package.module:Class.attribute") by `make(original)`."""

    target: str
    make: Callable[[Any], Any]
    reason: str
    since: str | None = None  # version of the target's library that introduced it; None: all that are known
    before: str | None = None  # from this version of the library on, the original does what is wanted
    adds: bool = False  # instances have the attribute, the class does not yet
    copies: bool = False  # replace it in every module that has imported it, too, under whatever name
    without_layout: bool = False  # in place where no layout is active, and only there
    room: str = ""  # the module of the replacement

    @property
    def module(self) -> str:
        """The module of the target."""
        return self.target.partition(":")[0]

    @property
    def library(self) -> str:
        """The library of the target."""
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def late(self) -> bool:
        """Is it put in place when the script imports the module?"""
        return self.library in OPTIONAL or self.module.startswith("transformers.models.")

    def owner_and_name(self) -> tuple[object, str]:
        """Return the object that holds the attribute, and its name there."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(module)), name


@dataclass
class _Declared:
    """The replacements that the rooms have declared, in the order of their import."""

    patches: list[Patch] = field(default_factory=list)


def list_declared() -> list[Patch]:
    """Return the replacements that the rooms imported so far have declared."""
    return of_process(_Declared).patches


def patch(target: str, why: str, **options: object) -> Callable[[Callable], Callable]:
    """Call the decorated function where `target` is called, with the original before the arguments.

    Args:
        target: "package.module:Class.{one,another}": braces hold several.
        why: what the original does that would be wrong under a layout.
        options: the other fields of `Patch`.
    """

    def declare(function: Callable) -> Callable:
        replace(target, why, room=function.__module__, **options)(around(function))
        return function

    return declare


def replace(target: str, why: str, **options: Any) -> Callable[[Callable], Callable]:
    """Put what the decorated function makes of the original in its place: for classes, properties, values."""

    def declare(make: Callable) -> Callable:
        options.setdefault("room", make.__module__)
        before, brace, rest = target.partition("{")
        choices, _, after = rest.partition("}")
        targets = [f"{before}{choice}{after}" for choice in choices.split(",")] if brace else [target]
        list_declared().extend(Patch(one, make, why, **options) for one in targets)
        return make

    return declare


def around(function: Callable) -> Callable[[Callable], Callable]:
    """Return a maker of replacements that call `function(original, …)`, which take what it takes but for the first."""
    signature = inspect.signature(function)
    taken = signature.replace(parameters=list(signature.parameters.values())[1:])

    def make(original: Callable) -> Callable:
        def replacement(*args: object, **kwargs: object) -> object:
            return function(original, *args, **kwargs)

        replacement.__signature__ = taken  # type: ignore[attr-defined]
        return replacement

    return make


def with_first(first: object, target: str, function: Callable, why: str) -> Patch:
    """Return a patch by a function that takes an object of its own before the original."""
    bound = functools.partial(function, first)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Patch(target, around(bound), why)


class Unusable(dict[str, str]):
    """Modules whose functions are not where they were known to be -> why they must not be used."""


def apply_patches(patches: list[Patch]) -> list[Undo]:
    """Put all patches in place, those of optional libraries when they are imported; returns what `undo` needs.

    Raises:
        SpecError: a target of a library that every script uses is gone or has changed.
    """
    done: list[Undo] = []
    waiting: dict[str, list[Patch]] = {}
    ready: list[Patch] = []
    for patch in patches:
        if patch.late and patch.module not in sys.modules:
            waiting.setdefault(patch.module, []).append(patch)
        else:
            ready.append(patch)
    _put_patches_in_place(ready, done)
    done.extend(apply_when_imported(module, late) for module, late in waiting.items())
    return done


def apply_when_imported(module: str, patches: Iterable[Patch]) -> Undo:
    """Put patches in place now if `module` is imported, else right after its import; returns what `undo` needs."""
    done: list[Undo] = []
    finder = AfterImport(module, functools.partial(_put_patches_in_place, patches, done))
    if module in sys.modules:
        finder.then()
    else:
        finder.wait()
    return finder, "leave", done


def refuse_unpatched(*modules: str) -> None:
    """Before something of these modules is used.

    Raises:
        SpecError: one of them could not be patched.
    """
    unusable = of_session(Unusable)
    for module in modules:
        if module in unusable:
            refuse_with(unusable[module])


def _put_patches_in_place(patches: Iterable[Patch], done: list[Undo]) -> None:
    wanted = [p for p in patches if p.before is None or read_library_version(p.library) < Version(p.before)]
    places = find_names_of(raw for patch in wanted if patch.copies and (raw := _find_target(patch)) is not _MISSING)
    for patch in wanted:
        raw = _find_target(patch)
        if raw is _MISSING:
            if patch.since is None or read_library_version(patch.library) >= Version(patch.since):
                _refuse_patch(patch, "does not exist", done)
            continue
        owner, name = patch.owner_and_name()
        original = raw.__func__ if isinstance(raw, classmethod) else raw
        replacement = patch.make(original)
        if inspect.isfunction(original) and inspect.isfunction(replacement):
            changed = find_mismatch(original, replacement)
            if changed is not None:
                _refuse_patch(patch, changed, done)
                continue
            if getattr(original, "_hf_parallel_maker", None) is patch.make:
                continue  # imported from a module that is patched
            vars(replacement).pop("__signature__", None)  # scripts are shown the original's
            replacement = functools.wraps(original)(replacement)
            replacement._hf_parallel_maker = patch.make  # type: ignore[attr-defined]
        replacement = classmethod(replacement) if isinstance(raw, classmethod) else replacement
        _set_attribute(owner, name, replacement, done)
        if patch.copies:  # what another patch has put there is not among the places that were looked for
            copies = places[id(original)] if id(original) in places else find_names_of([original])[id(original)]
            for module, known_as in copies:
                if vars(module).get(known_as) is original:
                    _set_attribute(module, known_as, replacement, done)


def _find_target(patch: Patch) -> Any:
    """Return the target as its owner holds or inherits it, a descriptor itself; None if the patch adds it."""
    try:
        owner, name = patch.owner_and_name()
    except (AttributeError, ModuleNotFoundError):
        return _MISSING
    return inspect.getattr_static(owner, name, None if patch.adds else _MISSING)


def find_names_of(functions: Iterable[Callable]) -> dict[int, list[tuple[ModuleType, str]]]:
    """By the id of each function: the modules that have imported it so far, and the name that it has there."""
    found: dict[int, list[tuple[ModuleType, str]]] = {id(function): [] for function in functions}
    for module in list(sys.modules.values()) if found else []:
        names = getattr(module, "__dict__", {})
        if not found.keys().isdisjoint(map(id, names.values())):  # most modules have none of them
            for name, value in list(names.items()):
                if id(value) in found:
                    found[id(value)].append((module, name))
    return found


def find_mismatch(original: Callable, replacement: Callable) -> str | None:
    """Return what a replacement relies on that the original has not, or what it does not take."""
    theirs, ours = (
        [
            (p.name, p.kind, p.default is not inspect.Parameter.empty)
            for p in inspect.signature(function, follow_wrapped=follow).parameters.values()
        ]
        for function, follow in ((original, True), (replacement, False))
    )
    if {kind for _, kind, _ in theirs} == set(_VARIABLE):
        return None  # somebody else's wrapper
    names = [name for name, kind, _ in theirs if kind not in _VARIABLE]
    taken = {name for name, _, _ in ours}
    takes_more = any(kind in _VARIABLE for _, kind, _ in ours)
    for place, (name, kind, optional) in enumerate(ours):
        if kind in _VARIABLE or (name not in names and optional and kind is inspect.Parameter.KEYWORD_ONLY):
            continue
        if name not in names or (kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and names.index(name) != place):
            return f"takes ({', '.join(names)}), without {name} where it is expected"
    new = next((name for name in names if name not in taken and not takes_more), None)
    return None if new is None else f"takes {new}, which is not known"


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refuse_patch(patch: Patch, why: str, done: list[Undo]) -> None:
    """Refuse a patch of a core library. Of others, what would run unpatched refuses when it is used."""
    library, (first, last) = patch.library, {**CHECKED, "torch": TORCH}[patch.library]
    found = read_library_version(library)
    known = last if first == last or Version(first) <= found <= Version(last) else f"{first} to {last}"
    text = f"{library} {found}: {patch.target} {why}; {library} {known} works"
    if patch.library not in OPTIONAL:
        undo(done)
        refuse_with(text)

    def refuses(*args: object, **kwargs: object) -> NoReturn:
        refuse_with(text)

    with contextlib.suppress(AttributeError, ModuleNotFoundError):
        owner, name = patch.owner_and_name()
        if hasattr(owner, name) or inspect.isclass(owner):
            _set_attribute(owner, name if hasattr(owner, name) else "__init__", refuses, done)
        if hasattr(owner, name):
            return
    of_session(Unusable)[patch.module] = text  # a subclass need not call the class's own __init__


def _set_attribute(owner: object, name: str, value: object, done: list[Undo]) -> None:
    done.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def undo(done: list[Undo]) -> None:
    """Put the originals back, newest first."""
    for owner, name, own in reversed(done):
        if isinstance(owner, AfterImport):  # wait no more, or undo what followed the import
            owner.leave()
            undo(cast("list[Undo]", own))
        elif own is _MISSING:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, own)
    done.clear()
    of_session(Unusable).clear()


def list_newer_libraries() -> list[str]:
    """Return lines about libraries that every script uses, in newer versions than the patches were checked on."""
    return [
        f"{library} {read_library_version(library)} is newer than those "
        f"this version was checked on ({first} to {last})"
        for library, (first, last) in CHECKED.items()
        if library not in OPTIONAL and read_library_version(library).release[:2] > Version(last).release
    ]


def check_torch() -> list[str]:
    """Return a line about a torch, or about its NCCL backend, that nobody has looked at yet, or none.

    Raises:
        SpecError: it is too old.
    """
    found, (first, last) = Version(importlib.metadata.version("torch")), TORCH
    if found.release < Version(first).release and os.environ.get(ALLOW_UNKNOWN) != "1":
        refuse(f"torch {found}", "too old", do=f"torch {first} to {last} work ({ALLOW_UNKNOWN}=1 goes on regardless)")
    if found.release[:2] > Version(last).release:
        return [f"torch {found} is newer than those this version was checked on ({first} to {last})"]
    import torch
    import torch.distributed as dist

    # torch 2.14 has both backends, too, and takes the former one.
    takes_new = hasattr(dist.distributed_c10d, "_register_builtin_nccl_as_legacy")
    if takes_new and torch.cuda.is_available() and os.environ.get(FORMER_NCCL) != "0":
        return [
            f"torch {found} has a new NCCL backend, on which no layout has run; {FORMER_NCCL}=0 takes the former one"
        ]
    return []


def read_library_version(library: str) -> Version:
    """Return the installed one."""
    return Version(importlib.metadata.version({"swift": "ms-swift"}.get(library, library)))


@contextlib.contextmanager
def replacing(owner: object, **attributes: object) -> Iterator[None]:
    """Give an object attributes of its own, before those of its class."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            delattr(owner, name)
        vars(owner).update(own)
