"""The command: which parts, where their results go, in which environment."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

#: In this order: what comes last is left out where the time is over.
PARTS = ("links", "speed", "memory", "syncs", "context", "layouts", "parity", "checkpoints")
#: Seconds that a part needs to say anything.
_SHORTEST_S = 30.0
ROOT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run the parts one after the other and write their page; 1 if one of them found something wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What only a GPU can show.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", default="outputs/gpu", metavar="FOLDER", help="for PART.json (outputs/gpu)")
    parser.add_argument("--wheels", metavar="FOLDER", help="install packages from here, into a new environment")
    parser.add_argument("--small", action="store_true", help="the sizes of the CPU part on a GPU too")
    parser.add_argument("--limit", type=float, default=480, metavar="SECONDS", help="of each part (480)")
    parser.add_argument("--minutes", type=float, default=45, metavar="N", help="of all parts together (45)")
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: not one of {', '.join(PARTS)}")
    if args.wheels:
        from benchmarks.gpu import wheels

        return wheels.run_in_environment(args.wheels, _words(args))
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return _run_parts(args.parts or PARTS, args)


def _run_parts(parts: Sequence[str], args: argparse.Namespace) -> int:
    """Run parts while there is time, then write what all have found on one page."""
    from benchmarks.gpu.page import write_page

    until, codes, not_run = time.monotonic() + 60 * args.minutes, [], {}
    for part in parts:
        left = until - time.monotonic()
        if left < _SHORTEST_S:
            not_run[part] = f"the {args.minutes:g} minutes of --minutes were over"
            continue
        codes.append(run_part(part, args.out, args.small, min(args.limit, left)))
    os.makedirs(args.out, exist_ok=True)
    print(f"gpu: {write_page(args.out, parts, not_run)} has all figures", flush=True)
    return max([*codes, int(bool(not_run))])


def _words(args: argparse.Namespace) -> list[str]:
    """This command again, without the folder of wheels."""
    limits = ["--limit", str(args.limit), "--minutes", str(args.minutes)]
    return [*args.parts, "--out", args.out, *limits, *(["--small"] if args.small else [])]


def run_part(part: str, out: str, small: bool, limit_s: float = 480) -> int:
    """One part: its table, its file, its exit code."""
    from benchmarks.gpu.setting import Setting
    from hf_parallel.check.report import FAILED, Report, Row

    module, setting, began = (
        importlib.import_module(f"benchmarks.gpu.{part}"),
        Setting.here(small, limit_s),
        time.monotonic(),
    )
    report = Report(setting.devices or 1, name=f"gpu {part}", counts="GPU" if setting.devices else "CPU part")
    report.rows.extend(setting.rows())
    os.makedirs(out, exist_ok=True)
    try:
        for row in module.rows(setting):
            report.rows.append(row)
            report.write(os.path.join(out, f"{part}.json"))  # what is known stays if the part is killed
    except Exception as error:
        traceback.print_exc()
        said = " ".join([f"{type(error).__name__}:", *str(error).split()])[-200:]
        report.rows.append(Row(part, "its end", said, status=FAILED))
    report.not_run = () if setting.devices else module.NEEDS_GPU
    report.rows.append(Row(part, "time", f"{time.monotonic() - began:.0f} s", status=""))
    report.write(os.path.join(out, f"{part}.json"))
    print(report.render() + "\n", flush=True)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
