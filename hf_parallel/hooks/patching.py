"""How a function of another library is replaced: by name, once, with a reason, and undone on request."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from hf_parallel.config import SpecError

#: First and last minor version of each library that the patches were checked on.
CHECKED = {"transformers": ("5.20", "5.23"), "accelerate": ("1.12", "1.15"), "peft": ("0.21", "0.21")}
#: Libraries that may be missing.
OPTIONAL = {"peft"}
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

    def applies(self) -> bool:
        """Does the installed version have this target?"""
        package = self.target.partition(".")[0]
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
    check_versions()
    done: list[tuple[Any, str, Any]] = []
    for patch in filter(Patch.applies, patches):
        owner, name = patch.owner_and_name()
        if not hasattr(owner, name):
            undo(done)
            raise SpecError(f"{patch.target} does not exist in the installed version; install one of {_ranges()}")
        raw = inspect.getattr_static(owner, name)  # the descriptor itself, also if it is inherited
        original = raw.__func__ if isinstance(raw, classmethod) else raw
        replacement = patch.make(original)
        if inspect.isfunction(original) and inspect.isfunction(replacement):
            replacement = functools.wraps(original)(replacement)
        own = vars(owner).get(name, _MISSING)
        setattr(owner, name, classmethod(replacement) if isinstance(raw, classmethod) else replacement)
        done.append((owner, name, own))
    return done


def undo(done: list[tuple[Any, str, Any]]) -> None:
    """Put the originals back, newest first."""
    for owner, name, own in reversed(done):
        if own is _MISSING:
            delattr(owner, name)  # it was inherited
        else:
            setattr(owner, name, own)
    done.clear()


def check_versions() -> None:
    """Refuse versions whose internals nobody has looked at: a patch that misses its place would fail in silence."""
    if os.environ.get(ALLOW_UNKNOWN) == "1":
        return
    for package, (first, last) in CHECKED.items():
        if not _installed(package):
            continue
        found = Version(importlib.metadata.version(package))
        if not Version(first).release <= found.release[:2] <= Version(last).release:
            raise SpecError(
                f"{package} {found} is not known to this version of hf_parallel; {_ranges()} work "
                f"({ALLOW_UNKNOWN}=1 goes on regardless)"
            )


def _installed(package: str) -> bool:
    return package not in OPTIONAL or importlib.util.find_spec(package) is not None


def _ranges() -> str:
    return ", ".join(f"{package} {first} to {last}" for package, (first, last) in CHECKED.items())
