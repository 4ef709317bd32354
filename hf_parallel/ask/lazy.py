"""Packages whose names are imported when somebody asks for them."""

from __future__ import annotations

import importlib
import sys
import types


def export_lazily(package: str, home: dict[str, str]) -> None:
    """Let a package have names that live in modules which are imported when a name is first asked for.

    A module that is called like one of the names, and is imported, does not hide it.

    Args:
        package: its full name; it is being imported.
        home: the full name of the module of each name.
    """

    class LazyPackage(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if name not in home:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return getattr(importlib.import_module(home[name]), name)

        def __setattr__(self, name: str, value: object) -> None:
            if name not in home:
                super().__setattr__(name, value)

    sys.modules[package].__class__ = LazyPackage
