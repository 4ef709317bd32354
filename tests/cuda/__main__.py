"""Train layouts on pretended CUDA devices and print the table: `python -m tests.cuda [--list] [NAME OR GROUP …]`.

    layout    equal to one process    waits per step (one process)    NaN    faults of streams

With `--serve` names come as lines of JSON and rows go out as lines of JSON, for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys

for _name, _value in {
    **{"PRETENDED_CUDA": "1", "PRETENDED_CUDA_BACKEND": "cpu:gloo,cuda:nccl", "OMP_NUM_THREADS": "1"},
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import tests.cuda.device  # noqa: E402, F401
from tests.cuda.layouts import ALL, GROUPS, Layout  # noqa: E402
from tests.cuda.training import Row, compare  # noqa: E402


def main() -> int:
    """Print a line per layout; returns how many are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of layouts, or of groups: " + ", ".join(GROUPS))
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--lines", action="store_true", help="print the lines that wait, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return _serve()
    names = [name for one in given.names or GROUPS for name in _names(one)]
    if given.list:
        print("\n".join(names))
        return 0
    heads = ["layout", "gap", "waits per step (one process)", "NaN", "stream faults", "launches (one process)"]
    heads += ["bytes sent", "processor s"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)
    references: dict = {}
    wrong = 0
    for name in names:
        began = _measure_processor_s()
        row = compare(ALL[name], references)
        print(_line(name, row, _measure_processor_s() - began), flush=True)
        if given.lines:
            print("\n".join(row.lines))
        if row.wrong:
            wrong += 1
            print("    " + "\n    ".join(row.wrong), flush=True)
    print(f"\n{len(names)} layouts, {wrong} wrong, {_measure_processor_s():.0f} s of processor time")
    return wrong


def _measure_processor_s() -> float:
    """Return seconds of this process and of ranks that have ended. The clock says how busy a machine is."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _names(given: str) -> list[str]:
    return [layout.name for layout in GROUPS[given]] if given in GROUPS else [given]


def _line(name: str, row: Row, seconds: float) -> str:
    if row.error:
        return f"| {name} | failed | | | | | | {seconds:.1f} |"
    cells = [name, f"{row.gap:.0e}", f"{row.waits} ({row.alone})", "yes" if row.nan else "0", str(len(row.faults))]
    return (
        "| " + " | ".join([*cells, f"{row.launches[0]} ({row.launches[1]})", str(row.sent), f"{seconds:.1f}"]) + " |"
    )


def _serve() -> int:
    references: dict = {}
    for line in sys.stdin:
        asked = json.loads(line)
        row = compare(ALL.get(asked["name"]) or Layout(asked["name"]), references, asked.get("planted"))
        found = {"faults": row.faults, "nan": row.nan, "gap": row.gap, "failed": bool(row.error)}
        print("\n" + json.dumps({"row": {"wrong": row.wrong, **found}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
