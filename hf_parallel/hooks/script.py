"""The script that runs, where its own text tells what a layout changes."""

from __future__ import annotations

import os
import re
import sys

#: How scripts ask how many processes there are.
_COUNTS = re.compile(r"\b(WORLD_SIZE|get_world_size)\b")


def counted(processes: int, data_ranks: int) -> list[str]:
    """What to tell of a script that may divide its batch by the number of processes."""
    words = sorted(set(_COUNTS.findall(_text()))) if data_ranks != processes else []
    if not words:
        return []
    name = os.path.basename(sys.argv[0])
    return [
        f"{name} reads {' and '.join(words)}: {processes} processes, of which {data_ranks} read "
        "batches of their own; gradient_accumulation_steps and the like are not to be divided by more than that "
        "(docs/idioms.md)"
    ]


def _text() -> str:
    """Of a script or a module that is run; of a notebook nothing."""
    try:
        with open(sys.argv[0], encoding="utf-8", errors="replace") as file:
            return file.read() if sys.argv[0].endswith(".py") else ""
    except OSError:
        return ""
