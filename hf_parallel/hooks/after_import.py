"""Do something as soon as a script has imported a module. Imports nothing but Python's own."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


@dataclass(eq=False)
class AfterImport(importlib.abc.MetaPathFinder):
    """Waits among the finders for `module`, lets the others find it, and calls `then` once it has run."""

    module: str
    then: Callable[[], None]

    def wait(self) -> None:
        """Ask before all other finders."""
        sys.meta_path.insert(0, self)

    def leave(self) -> None:
        """Wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by `import`."""
        if fullname != self.module or self not in sys.meta_path:
            return None
        self.leave()
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute
                try:
                    execute(module)
                except BaseException:
                    self.wait()  # the script may try again
                    raise
                self.then()

            loader.exec_module = exec_module
        return spec


# ---- The script that runs, where its own text tells what a layout changes -------------------------------------------


#: How scripts ask how many processes there are.
_COUNTS = re.compile(r"\b(WORLD_SIZE|get_world_size)\b")


def list_process_warnings(processes: int, data_ranks: int) -> list[str]:
    """Return what to tell of a script that may divide its batch by the number of processes."""
    text = ""
    if data_ranks != processes and sys.argv[0].endswith(".py"):  # no notebook
        with contextlib.suppress(OSError), open(sys.argv[0], encoding="utf-8", errors="replace") as file:
            text = file.read()
    words = sorted(set(_COUNTS.findall(text)))
    if not words:
        return []
    name = os.path.basename(sys.argv[0])
    return [
        f"{name} reads {' and '.join(words)}, which is {processes} here, but the number of different batches is "
        f"{data_ranks}: divide gradient_accumulation_steps and the like by {data_ranks} at most (docs/idioms.md)"
    ]
