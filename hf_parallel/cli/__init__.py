"""`hf-parallel launch`: accelerate's launcher with the runner filled in. `hf-parallel doctor`: what a spec would do.

    hf-parallel check
    hf-parallel prove --parallel tp=2,pp=2 train.py --output_dir out
    hf-parallel bisect out other-out
    hf-parallel launch --num_processes 4 --parallel tp=2,pp=2 train.py --output_dir out
    hf-parallel doctor meta-llama/Llama-3.1-8B --parallel tp=2,pp=2
    hf-parallel plan meta-llama/Llama-3.1-8B --gpus 64 --gpu h100-80gb --global-batch 512
    hf-parallel export out/checkpoint-20 my-model --dtype bfloat16
    hf-parallel migrate fsdp.yaml
    hf-parallel recipe run qwen3-0.6b-full-1x24gb --output_dir out
    hf-parallel report out

`launch` (`cli/launch.py`) takes every option of `accelerate launch`. `doctor` and `plan` (`cli/plan.py`) start no
process and read a config only; `check` (`cli/check.py`) tries machines.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import sys
from collections.abc import Sequence

from hf_parallel.ask.config import ParallelConfig, SpecError, choose_spec
from hf_parallel.ask.spec import refuse
from hf_parallel.ask.waiting import waiting
from hf_parallel.cli import bisect as cli_bisect
from hf_parallel.cli import check as cli_check
from hf_parallel.cli import export as cli_export
from hf_parallel.cli import launch as cli_launch
from hf_parallel.cli import migrate as cli_migrate
from hf_parallel.cli import plan as cli_plan
from hf_parallel.cli import prove as cli_prove
from hf_parallel.cli import recipe as cli_recipe
from hf_parallel.cli import report as cli_report

_OPTION = "--parallel"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for a command line or spec that cannot work."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal of another alphabet shows ? for what it does not have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments[:1] == ["launch"]:  # before argparse: accelerate's parser owns everything that follows
        return cli_launch.launch(arguments[1:])
    if arguments[:2] == ["recipe", "run"]:
        return cli_recipe.run_recipe(arguments[2:])
    commands = {
        "doctor": run_doctor,
        "plan": cli_plan.plan_layouts,
        "check": cli_check.check_machines,
        "prove": cli_prove.prove,
        "bisect": cli_bisect.bisect,
        "export": cli_export.run_export,
        "migrate": cli_migrate.migrate,
        "recipe": cli_recipe.run_recipe_command,
        "report": cli_report.run_report,
    }
    word = arguments[0] if arguments else "-"
    if word not in commands and not word.startswith("-"):
        names = ["launch", *commands]
        close = ["launch"] if word.endswith(".py") else difflib.get_close_matches(word, names, n=1)
        do = f"did you mean {close[0]}?" if close else f"commands are {', '.join(names)}"
        print(f"hf_parallel: {word}: no such command; {do}", file=sys.stderr)
        return 2
    parser = _make_top_parser()
    args = parser.parse_args(arguments)
    if args.command in commands:
        return commands[args.command](args)
    parser.print_help(sys.stderr)
    return 2


def run_doctor(args: argparse.Namespace) -> int:
    """Print what a spec would do to a model; 2 if something stops it."""
    try:
        spec = choose_spec(args.parallel, f"doctor's {_OPTION}")
        if spec is None:
            refuse("doctor", "needs a spec", f"{_OPTION} tp=2")
        config = ParallelConfig.parse(spec[0])
        cli_plan.check_path(args.model)
        with waiting("importing torch") as say:
            from hf_parallel.plans import build_source_on_meta, examine, render_examination

            say("reading the model")
            report = examine(build_source_on_meta(args.model), config, args.nproc)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if args.json else render_examination(report))
    return 2 if report.problems else 0


def _make_top_parser() -> argparse.ArgumentParser:
    from hf_parallel.version import VERSION

    parser = argparse.ArgumentParser(prog="hf-parallel", description="Train unchanged Trainer scripts on many GPUs.")
    parser.add_argument("--version", action="version", version=f"hf-parallel {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    commands.add_parser("launch", add_help=False, help="start a training script on N processes")
    cli_check.add_arguments(commands.add_parser("check", help="test the links, groups and numbers of this cluster"))
    cli_prove.add_arguments(commands.add_parser("prove", help="compare a script under a layout with one process"))
    cli_bisect.add_arguments(commands.add_parser("bisect", help="find the first number in which two runs differ"))
    doctor = commands.add_parser("doctor", help="show what a spec does to a model, and what stops it")
    doctor.description = "Show how each module is split, and what stops the layout, without processes or weights."
    doctor.add_argument("model", metavar="MODEL", help="folder with a config.json, that file, or a Hub id")
    doctor.add_argument(_OPTION, metavar="SPEC", help="key=value,… such as tp=2,pp=2, a YAML file, or a recipe")
    doctor.add_argument("--nproc", type=int, metavar="N", help="number of processes; needed for a size of -1")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    cli_plan.add_arguments(commands.add_parser("plan", help="rank layouts for a model and a cluster"))
    cli_export.add_arguments(commands.add_parser("export", help="write the model of a checkpoint as a Hub folder"))
    cli_migrate.add_arguments(commands.add_parser("migrate", help="turn a config of FSDP, DeepSpeed, … into a spec"))
    cli_report.add_arguments(commands.add_parser("report", help="write a page about a run: loss, speed, memory"))
    cli_recipe.add_arguments(commands.add_parser("recipe", help="run, check and share recipes"))
    option, purpose = "--print-completion", "print a completion script for this shell"
    try:
        import shtab
    except ImportError:
        parser.add_argument(option, action=_NeedsShtab, metavar="SHELL", help=purpose)
    else:
        shtab.add_argument_to(parser, option, help=purpose)
    return parser


class _NeedsShtab(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(2, "hf_parallel: --print-completion: needs shtab; pip install 'hf-parallel[completion]'\n")
