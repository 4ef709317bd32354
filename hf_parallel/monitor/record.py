"""OUTPUT_DIR/_hf_parallel_metrics.jsonl: what was measured, one JSON object per line, written by rank 0.

    {"kind": "run", "time": …, "spec": …, "axes": …, "hosts"…, "device": …, "plan": {…} or null, "why_no_plan": …}
    {"kind": "metrics", "time": …, "step": 20, "perf": {"perf/step_time_s": …}, "ranks": [{"step": …, "data": …}, …]}
    {"kind": "note", "time": …, "step": 20, "about": "straggler", "text": …, …}

A training that goes on appends another `run`. docs/monitoring.md has every field.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from hf_parallel.spec import refuse

FILE = "_hf_parallel_metrics.jsonl"


class Record:
    """The file of one run; a folder that takes no more loses lines, never the training."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, FILE)
        self.failed: str | None = None

    def write(self, kind: str, **values: object) -> str | None:
        """Append a line; why it could not be written, the first time it could not."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        except OSError as error:
            first, self.failed = self.failed is None, str(error)
            return f"{self.path} is not written: {error}; training goes on" if first else None
        return None


def read(folder: str) -> list[dict]:
    """All lines of a folder's file; one that was cut off while it was written is left out.

    Raises:
        SpecError: there is none.
    """
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        refuse(folder, f"holds no {FILE}, which training writes at each logging", do="give the folder of a training")
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]
