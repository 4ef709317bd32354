"""How a function of another library is replaced: by name, once, with a reason, and undone on request."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from hf_parallel.config import SpecError

#: First and last minor version of each library that the patches were checked on.
CHECKED = {
    "transformers": ("5.20", "5.23"),
    "accelerate": ("1.12", "1.15"),
    "peft": ("0.21", "0.21"),
    "trl": ("1.16", "1.16"),
    "bitsandbytes": ("0.50", "0.50"),
}
#: The same of torch, of which only public functions are patched: a newer one may well work, and is only told about.
TORCH = ("2.11", "2.13")
#: Libraries that may be missing.
OPTIONAL = {"peft", "trl", "bitsandbytes"}
#: Set to 1 to go on with other versions, at your own risk.
ALLOW_UNKNOWN = "HF_PARALLEL_ALLOW_UNKNOWN_VERSIONS"

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Replace `target` ("package.module:Class.attribute") by `make(original)`."""

    target: str
    make: Callable[[Any], Any]
    reason: str
    since: str | None = None  # version of the target's library that introduced it; None: all that are known
    late: bool = False  # put in place when the script imports the module: nobody else should wait for the library
    adds: bool = False  # instances have the attribute, the class does not yet

    @property
    def module(self) -> str:
        """The module of the target."""
        return self.target.partition(":")[0]

    def applies(self) -> bool:
        """Does the installed version have this target?"""
        package = _package(self)
        if not _installed(package):
            return False
        return self.since is None or Version(importlib.metadata.version(package)) >= Version(self.since)

    def owner_and_name(self) -> tuple[Any, str]:
        """The object that holds the attribute, and its name there."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        return functools.reduce(getattr, parents, importlib.import_module(module)), name


def apply(patches: list[Patch]) -> list[tuple[Any, str, Any]]:
    """Put all patches in place; returns what `undo` needs.

    Raises:
        SpecError: a library's version is not one the patches were checked on, or a target is gone.
    """
    check_versions([package for package in CHECKED if not any(p.late and _package(p) == package for p in patches)])
    done: list[tuple[Any, str, Any]] = []
    waiting: dict[str, list[Patch]] = {}
    for patch in filter(Patch.applies, patches):
        if patch.late and patch.module not in sys.modules:
            waiting.setdefault(patch.module, []).append(patch)
        else:
            done.append(_apply(patch, done))
    done.extend(apply_when_imported(module, late) for module, late in waiting.items())
    return done


def apply_when_imported(module: str, patches: Iterable[Patch]) -> tuple[Any, str, Any]:
    """Put patches in place now if `module` is imported, else right after its import; returns what `undo` needs."""
    finder = _WhenImported(module, patches)
    if module in sys.modules:
        finder.apply()
    else:
        sys.meta_path.insert(0, finder)
    return finder, "cancel", _MISSING


def _apply(patch: Patch, done: list[tuple[Any, str, Any]]) -> tuple[Any, str, Any]:
    if patch.late:
        check_versions([_package(patch)])
    owner, name = patch.owner_and_name()
    if not (hasattr(owner, name) or patch.adds):
        undo(done)
        raise SpecError(f"{patch.target} does not exist in the installed version; install one of {_ranges()}")
    raw = inspect.getattr_static(owner, name, None)  # the descriptor itself, also if it is inherited
    original = raw.__func__ if isinstance(raw, classmethod) else raw
    replacement = patch.make(original)
    if inspect.isfunction(original) and inspect.isfunction(replacement):
        replacement = functools.wraps(original)(replacement)
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, classmethod(replacement) if isinstance(raw, classmethod) else replacement)
    return owner, name, own


class _WhenImported(importlib.abc.MetaPathFinder):
    """Puts patches in place as soon as the script has imported a module."""

    def __init__(self, module: str, patches: Iterable[Patch]) -> None:
        self.module, self.patches = module, patches
        self.done: list[tuple[Any, str, Any]] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Called by `import`; the finders behind this one do the work."""
        if fullname != self.module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.apply()

            loader.exec_module = exec_module
        return spec

    def apply(self) -> None:
        """The module is there."""
        for patch in self.patches:
            self.done.append(_apply(patch, self.done))

    def cancel(self) -> None:
        """Undo, or wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        undo(self.done)


def undo(done: list[tuple[Any, str, Any]]) -> None:
    """Put the originals back, newest first."""
    for owner, name, own in reversed(done):
        if isinstance(owner, _WhenImported):
            owner.cancel()
        elif own is _MISSING:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, own)
    done.clear()


def _package(patch: Patch) -> str:
    return patch.module.partition(".")[0]


def check_versions(packages: list[str] | None = None) -> None:
    """Refuse versions whose internals nobody has looked at: a patch that misses its place would fail in silence."""
    if os.environ.get(ALLOW_UNKNOWN) == "1":
        return
    for package in CHECKED if packages is None else packages:
        if not _installed(package):
            continue
        first, last = CHECKED[package]
        found = Version(importlib.metadata.version(package))
        if not Version(first).release <= found.release[:2] <= Version(last).release:
            raise SpecError(
                f"{package} {found} is not known to this version of hf_parallel; {_ranges()} work "
                f"({ALLOW_UNKNOWN}=1 goes on regardless)"
            )


def check_torch() -> str | None:
    """A line about a torch that nobody has looked at yet, or None.

    Raises:
        SpecError: it is too old.
    """
    found, (first, last) = Version(importlib.metadata.version("torch")), TORCH
    if found.release < Version(first).release and os.environ.get(ALLOW_UNKNOWN) != "1":
        raise SpecError(
            f"torch {found} is too old; torch {first} to {last} work ({ALLOW_UNKNOWN}=1 goes on regardless)"
        )
    if found.release[:2] > Version(last).release:
        return f"torch {found} is newer than those this version was checked on ({first} to {last})"
    return None


def _installed(package: str) -> bool:
    return package not in OPTIONAL or importlib.util.find_spec(package) is not None


def _ranges() -> str:
    return ", ".join(f"{package} {first} to {last}" for package, (first, last) in CHECKED.items())
