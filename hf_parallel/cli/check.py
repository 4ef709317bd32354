"""`hf-parallel check`: what to run first on a new cluster.

hf-parallel check                                            # this machine: one rank per GPU, or four on CPU
torchrun --nnodes 2 --nproc-per-node 8 -m hf_parallel.cli check --parallel tp=8,dp_shard=-1
srun hf-parallel check --json check.json                     # one task per GPU
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import TYPE_CHECKING

from hf_parallel.ask import launched
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import refuse
from hf_parallel.cli.launch import count_accelerators

if TYPE_CHECKING:
    from hf_parallel.check.run import Wanted

_MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check`."""
    parser.description = (
        "Versions, devices, every process group, every collective with its speed beside what the planner expects, and "
        "tiny models against one process: one table, one line of verdict. Under torchrun or srun on their ranks; else "
        "it starts one rank per GPU of this machine. Exit code 1 if anything is wrong."
    )
    parser.add_argument("--parallel", metavar="SPEC", help="test this layout only; default: every axis, and a product")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start (default: one per GPU; 4 without GPUs)")
    measured = "instead measure this machine for the planner; write FILE, or the file that `plan` and `auto` read"
    parser.add_argument("--calibrate", nargs="?", const="", metavar="FILE", help=measured)
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--dtype", default="fp32", metavar="NAMES", help="of the compared models: fp32, bf16, or both")
    parser.add_argument("--no-parity", action="store_true", help="test links only, no models")
    parser.add_argument("--payload", type=float, metavar="MIB", help="size of the large tensor (64; 4 on CPUs)")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="seconds that a test may take (60)")
    parser.add_argument("--backend", metavar="NAME", help="nccl or gloo; default: the device's own")


def check_machines(args: argparse.Namespace) -> int:
    """Check, or start the ranks that do; 1 if anything is wrong, 2 for a command line that cannot work."""
    from hf_parallel.check import links

    try:
        wanted = _read_wanted(args)
        if launched.settle_launcher():
            count = int(os.environ["WORLD_SIZE"])
        else:
            sizes = ParallelConfig.parse(args.parallel).sizes.values() if args.parallel else (-1,)
            fitting = None if -1 in sizes else math.prod(sizes)
            count = links.count_ranks_to_start(args.nproc, fitting, count_accelerators())
        wanted.layout(count)
    except SpecError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    if count > 1 and "RANK" not in os.environ:
        # This command, for one of the ranks that it starts
        words = ["-m", "hf_parallel.cli", "check", "--dtype", args.dtype, "--limit", str(args.limit)]
        for option in ("parallel", "json", "payload", "backend", "calibrate"):
            value = getattr(args, option)
            words += [] if value is None else [f"--{option}={value}"]
        again = [*words, *(["--no-parity"] if args.no_parity else [])]
        return links.start_ranks(again, links.make_environments(count, count_accelerators(), args.backend)) and 1
    from hf_parallel.check.run import check, publish

    report = check(wanted)
    if int(os.environ.get("RANK") or 0) == 0:
        publish(report, wanted)
    return int(report.failed)


def _read_wanted(args: argparse.Namespace) -> Wanted:
    from hf_parallel.check.run import DTYPES, Wanted

    dtypes = tuple(args.dtype.split(","))
    for name in dtypes:
        if name not in DTYPES:
            refuse(f"--dtype {name}", f"not one of {', '.join(DTYPES)}", "--dtype fp32,bf16")
    if args.backend not in (None, "nccl", "gloo"):
        refuse(f"--backend {args.backend}", "not one of nccl, gloo", "--backend gloo")
    if args.limit <= 0:
        refuse(f"--limit {args.limit:g}", "is more than 0 seconds", "--limit 60")
    if args.payload is not None and args.payload <= 0:
        refuse(f"--payload {args.payload:g}", "is more than 0 MiB", "--payload 64")
    folder = os.path.dirname(os.path.abspath(args.json or ""))
    if not os.access(folder, os.W_OK):
        refuse(f"--json {args.json}", f"{folder} cannot be written to", "--json check.json")
    payload = None if args.payload is None else max(1, int(args.payload * _MIB))
    how = {"parity": not args.no_parity, "limit_s": args.limit, "payload": payload}
    if args.calibrate is not None and args.parallel:
        refuse(f"--calibrate with --parallel {args.parallel}", "it measures the machine", do="drop --parallel")
    return Wanted(args.parallel, dtypes, **how, backend=args.backend, json=args.json, calibrate=args.calibrate)
