"""`hf-parallel prove`: run the user's own script small, in one process and under a layout, and compare.

Exit codes: 0 if every number is one process's; 1 if one differs; 2 if the script cannot be proved, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.ask.config import AUTO, ParallelConfig, SpecError, choose_spec
from hf_parallel.ask.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.hooks.proving import Sizes
    from hf_parallel.prove.compare import Compared
    from hf_parallel.prove.locate import Place
    from hf_parallel.prove.processes import ForkedRun
    from hf_parallel.prove.record import Record

#: What the three runs are called, in the order in which they are started.
ALONE, DISTURBED, TOGETHER = "one process", "one process, rounded otherwise", "layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hf-parallel prove`."""
    parser.description = "Run a training script small, in one process and under a layout, and compare every number."
    parser.add_argument("--parallel", metavar="SPEC", help="key=value,… such as tp=2,pp=2, or a YAML file")
    parser.add_argument("--num_processes", "--nproc", type=int, metavar="N", help="which a size of -1 needs")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps (4; 3 or more)")
    parser.add_argument("--dtype", choices=("fp32", "own"), default="fp32", help="fp32, or what the script asks for")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of each run (600)")
    parser.add_argument("--out", default="prove.json", metavar="FILE", help="the certificate (prove.json)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the runs write")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")


def prove(args: argparse.Namespace) -> int:
    """Prove a script under a layout, print the verdict, and write the certificate."""
    try:
        config = _layout_asked_for(args)
        if not args.module and not os.path.isfile(args.script):
            refuse(args.script, "no such script", do="give the path of a training script")
        if args.steps < 3:
            refuse(f"--steps {args.steps}", "needs an epoch with a full and a ragged step, and one more", "--steps 4")
        if any(argument.partition("=")[0] == "--parallel" for argument in args.arguments):
            refuse("--parallel", "stands among the script's arguments", do="give it before the script")
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    if args.keep:
        os.makedirs(args.keep, exist_ok=True)
        return _prove_in(Path(args.keep).resolve(), config, args)
    with tempfile.TemporaryDirectory(prefix="hf_parallel-prove-") as folder:
        return _prove_in(Path(folder), config, args)


def _layout_asked_for(args: argparse.Namespace) -> ParallelConfig:
    chosen = choose_spec(args.parallel, "prove's --parallel")
    if chosen is None:
        refuse("prove", "needs a layout", "--parallel tp=2")
    if chosen[0] == AUTO:
        refuse("--parallel auto", "chooses by the machine of the real run", do="prove the layout that its start names")
    config = ParallelConfig.parse(chosen[0])
    return config.resolve(args.num_processes or abs(config.world_size))


def _prove_in(folder: Path, config: ParallelConfig, args: argparse.Namespace) -> int:
    from hf_parallel.prove import certificate
    from hf_parallel.prove.compare import Comparison
    from hf_parallel.prove.locate import first_place, suspected

    began = time.monotonic()
    _prepare_process()
    from hf_parallel.hooks.proving import Sizes

    sizes = Sizes.of_layout(config, args.steps, args.dtype == "own")
    runs, failed = _run_all(folder, config, sizes, args)
    if failed:
        return 2
    alone, disturbed = (_records(runs[name])[0] for name in (ALONE, DISTURBED))
    ranks = _records(runs[TOGETHER])
    compared = Comparison(ranks, alone, disturbed).compare(
        tuple(runs[name].folder / "output" for name in (TOGETHER, ALONE, DISTURBED))  # type: ignore[arg-type]
    )
    place = first_place(ranks, alone, disturbed, compared) if compared.differences else None
    cause = suspected(compared, ranks, alone, sizes.data_ranks)
    seconds = time.monotonic() - began
    print(_verdict(config.to_spec(), compared, place, cause, alone, seconds))
    facts = {"proved": not compared.differences, "model": alone.facts, "notes": alone.notes, **compared.to_dict()}
    certificate.write(Path(args.out), args.script, config.to_spec(), {**facts, "seconds": round(seconds, 1)})
    return 1 if compared.differences else 0


def _prepare_process() -> None:
    """Import once, with one thread, what all forked processes need: a pool of threads does not survive a fork."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    import torch

    torch.set_num_threads(1)
    import hf_parallel.hooks.patches
    import hf_parallel.hooks.proving  # noqa: F401


def _run_all(
    folder: Path, config: ParallelConfig, sizes: Sizes, args: argparse.Namespace
) -> tuple[dict[str, ForkedRun], bool]:
    from hf_parallel.prove.processes import ForkedRun

    models = folder / "models"
    models.mkdir(exist_ok=True)
    runs: dict[str, ForkedRun] = {}

    def start(name: str, short: str, world: int) -> ForkedRun:
        spec = config.to_spec() if world else None
        work = functools.partial(_be_run, folder / short, models, sizes, spec, name == DISTURBED, args)
        runs[name] = ForkedRun(name, folder / short, work, world)
        return runs[name]

    start(ALONE, "alone", 0)
    start(DISTURBED, "disturbed", 0)
    for name in (ALONE, DISTURBED, TOGETHER):
        run = runs[name] if name in runs else start(name, "layout", config.world_size)
        failure = run.wait(args.limit)
        if failure is not None:
            said = failure.message if failure.refused else f"{failure.message}\n{failure.traceback or run.tail()}"
            where = name if name != TOGETHER else config.to_spec()
            print(f"hf_parallel: not proved: in {where}, {failure.who}: {said}", file=sys.stderr)
            for other in runs.values():
                other.wait(0.0)
            return runs, True
        processes = f"{config.world_size} processes" if name == TOGETHER else "1 process"
        label = config.to_spec() if name == TOGETHER else name
        print(f"hf_parallel: prove: {label}: {processes}, {run.seconds:.0f} s", file=sys.stderr, flush=True)
    return runs, False


def _be_run(
    folder: Path, models: Path, sizes: Sizes, spec: str | None, disturbed: bool, args: argparse.Namespace, rank: int
) -> None:
    """What a forked process does."""
    from hf_parallel.hooks import proving
    from hf_parallel.prove.record import Record

    record = Record(rank)
    if spec is not None:
        from hf_parallel.hooks import activation
        from hf_parallel.ranks.mesh import data_rank

        activation.activate(spec, source="prove")
        config = ParallelConfig.parse(spec).resolve(int(os.environ["WORLD_SIZE"]))
        record.data_rank, record.place = data_rank(config, rank), proving.place_of_process()
    multiply = 1 if spec is not None else sizes.data_ranks
    state = proving.Proving(sizes, record, folder, models, multiply, disturbed)
    proving.run_script(args.script, args.module, args.arguments, state)
    record.write(folder / f"record-{rank}.pt")


def _records(run: ForkedRun) -> list[Record]:
    from hf_parallel.prove.record import Record

    files = sorted(run.folder.glob("record-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    return [Record.read(file) for file in files]


def _verdict(
    spec: str, compared: Compared, place: Place | None, cause: str, alone: Record, seconds: float
) -> str:
    counted = ", ".join(f"{count} {kind}s" for kind, count in compared.counts.items() if count)
    lines = [f"note: {note}" for note in alone.notes]
    if not compared.differences:
        closest = max(compared.worst.values(), default=0.0)
        lines.append(
            f"PROVED: {spec} trains with the numbers of one process: {counted}; "
            f"the largest difference is {closest:.0%} of what rounding allows ({seconds:.0f} s)"
        )
        return "\n".join(lines)
    lines.append(f"DIFFERS: {spec} does not train with the numbers of one process ({seconds:.0f} s; {counted})")
    first = min(compared.differences, key=lambda one: (one.step or 1 << 30))
    lines.append(f"  first: {first}")
    if place is not None:
        lines.append(f"  where: {place.words}")
    if cause:
        lines.append(f"  looks like: {cause}")
    kinds = dict.fromkeys(one.kind for one in compared.differences)
    for kind in kinds:
        of_kind = [one for one in compared.differences if one.kind == kind]
        lines.append(f"  {len(of_kind)} of kind {kind}, such as {of_kind[0]}")
    return "\n".join(lines)
