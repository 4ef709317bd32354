"""A script that is proved writes into the folder of its run: files of the user stay as they are."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_parallel.ask.spec import refuse

#: Audit events -> which of their arguments are paths that are written to.
_WRITTEN = {
    **dict.fromkeys(("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"), (0,)),
    **dict.fromkeys(("os.rename", "shutil.move"), (0, 1)),
    **dict.fromkeys(("os.link", "os.symlink"), (1,)),
}
#: Those without the number of a folder that paths are relative to, as the last argument.
_WHOLE = ("os.truncate", "shutil.move")
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse_writes_outside(folder: Path) -> None:
    """From here on writing, renaming or removing files raises an error, but in `folder`, caches and temporary folders.

    It holds as long as the process.
    """
    home = os.path.expanduser("~")
    caches = (os.environ.get("HF_HOME"), os.environ.get("XDG_CACHE_HOME"), os.path.join(home, ".cache"))
    roots = (str(folder), tempfile.gettempdir(), "/dev", "/proc", *filter(None, caches))
    allowed = tuple(os.path.realpath(root) + os.sep for root in roots)

    def check(path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        if not (real + os.sep).startswith(allowed) and "__pycache__" not in real:
            refuse(f"prove: {real}", "is the user's, and a proof must not write there", do="save to another folder")

    def audit(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & _FLAGS):
                check(path)
        elif event in _WRITTEN and (event in _WHOLE or arguments[-1] in (None, -1)):  # else of a folder asked about
            for place in _WRITTEN[event]:
                check(arguments[place])

    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        check(filename)
        return original(tensors, filename, *args, **kwargs)

    sys.addaudithook(audit)
    import safetensors.torch as module  # whose writer opens files without Python

    original, module.serialize_file = module.serialize_file, serialize_file
