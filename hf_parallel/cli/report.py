"""`hf-parallel report`: one page about a training, made of what is in its output folder.

hf-parallel report out
hf-parallel report out --out run.html
"""

from __future__ import annotations

import argparse
import sys

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.waiting import waiting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.description = "Write one HTML page about a run: loss, speed, waits, memory, hangs, what to change."
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="the output folder of a run under a layout")
    parser.add_argument("--out", metavar="FILE.html", help="the page (OUTPUT_DIR/report.html)")


def run_report(args: argparse.Namespace) -> int:
    """Write the page; 2 if there is nothing to tell, or it cannot be written."""
    try:
        with waiting("writing the page"):
            from hf_parallel.monitor.report import write

            path = write(args.folder, args.out)
        print(path)
    except (SpecError, OSError) as error:
        print(f"hf_parallel: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
