"""`hf-parallel bisect`: the first module, pass and step in which two recorded runs part.

Exit codes: 0 if the recorded steps agree; 1 if they part; 2 if a folder has no trace.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_parallel.ask.spec import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-parallel bisect`."""
    parser.description = "Find the first number in which two runs with monitor=trace:N differ."
    parser.add_argument("runs", metavar="OUTPUT_DIR", nargs=2, help="the folders of the runs, in any order")


def bisect(args: argparse.Namespace) -> int:
    """Compare two runs and print where they part."""
    from hf_parallel.prove.bisect import Bisection, Recorded

    try:
        runs = sorted((Recorded(Path(folder)) for folder in args.runs), key=lambda run: len(run.ranks))
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    bisection = Bisection(*runs)
    parted = bisection.find_first()
    if parted is None:
        what = f"{bisection.steps} steps, {bisection.compared} outputs of modules and gradients"
        print(f"AGREE: {runs[0].spec} and {runs[1].spec} in {what}")
        return 0
    print(parted)
    return 1
