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

`launch` takes every option of `accelerate launch` and starts as many processes as asked for on a machine without GPUs
too; with `--ray` on a Ray cluster (`cli/ray.py`). `doctor` and `plan` (`cli/plan.py`) start none and read a config
only; `check` (`cli/check.py`) tries machines.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_parallel.ask.config import AUTO, ParallelConfig, SpecError, choose_spec
from hf_parallel.ask.spec import refuse
from hf_parallel.cli import bisect as cli_bisect
from hf_parallel.cli import check as cli_check
from hf_parallel.cli import export as cli_export
from hf_parallel.cli import migrate as cli_migrate
from hf_parallel.cli import plan as cli_plan
from hf_parallel.cli import prove as cli_prove
from hf_parallel.cli import ray as cli_ray
from hf_parallel.cli import recipe as cli_recipe
from hf_parallel.cli import report as cli_report

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_OPTION = "--parallel"
#: Other ways to distribute that accelerate knows; each would wrap the model a second time.
_EXCLUSIVE = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu")
_EXCLUSIVE_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for a command line or spec that cannot work."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal of another alphabet shows ? for what it does not have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments[:1] == ["launch"]:  # before argparse: accelerate's parser owns everything that follows
        return launch(arguments[1:])
    if arguments[:2] == ["recipe", "run"]:
        return cli_recipe.run_recipe(arguments[2:], _launch_parser(), launch, _accelerators)
    parser = _top_parser()
    args = parser.parse_args(arguments)
    if args.command == "doctor":
        return doctor(args)
    if args.command == "plan":
        return cli_plan.plan(args)
    if args.command == "check":
        return cli_check.check_machines(args)
    if args.command == "prove":
        return cli_prove.prove(args)
    if args.command == "bisect":
        return cli_bisect.bisect(args)
    if args.command == "export":
        return cli_export.export(args)
    if args.command == "migrate":
        return cli_migrate.migrate(args)
    if args.command == "recipe":
        return cli_recipe.recipe(args)
    if args.command == "report":
        return cli_report.report(args)
    parser.print_help(sys.stderr)
    return 2


def launch(argv: list[str]) -> int:
    """Start the processes and wait for them; returns the exit code of the rank that failed first, or 0."""
    parser = _launch_parser()
    args = parser.parse_args(argv)
    try:
        spec = choose_spec(args.parallel, f"the launcher's {_OPTION}")
        if args.ray:
            return cli_ray.launch(args, parser.parse_args([args.training_script]), spec and spec[0])
        if args.min_processes is not None:
            refuse(f"--min_processes {args.min_processes}", "elastic runs are --ray's", do="torchrun --nnodes=1:2")
        defaults = _accelerate_defaults(args)
        _settle_processes(args, defaults)
        if spec is not None:
            _refuse_other_ways(args, defaults)
            if spec[0] != AUTO:
                ParallelConfig.parse(spec[0]).resolve(args.num_processes)
        _settle_machine(args, defaults)
        _fill_in_the_runner(args)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    return _start(args)


def doctor(args: argparse.Namespace) -> int:
    """Print what a spec would do to a model; 2 if something stops it."""
    try:
        spec = choose_spec(args.parallel, f"doctor's {_OPTION}")
        if spec is None:
            refuse("doctor", "needs a spec", f"{_OPTION} tp=2")
        config = ParallelConfig.parse(spec[0])
        from hf_parallel.plans import build_on_meta, examine, render

        report = examine(build_on_meta(args.model), config, args.nproc)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if args.json else render(report))
    return 2 if report.problems else 0


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-parallel", description="Unchanged Trainer scripts, every parallelism.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    commands.add_parser("launch", add_help=False, help="start a script on N processes (`hf-parallel launch --help`)")
    cli_check.add_arguments(commands.add_parser("check", help="try links, groups and numbers on this cluster"))
    cli_prove.add_arguments(commands.add_parser("prove", help="prove a script's numbers under a layout, on CPUs"))
    cli_bisect.add_arguments(commands.add_parser("bisect", help="name the first number in which two runs part"))
    _add_doctor(commands.add_parser("doctor", help="say what a spec would do to a model, and what stops it"))
    cli_plan.add_arguments(commands.add_parser("plan", help="rank the layouts of a model, draw the timeline of one"))
    cli_export.add_arguments(commands.add_parser("export", help="write the model of a checkpoint as a Hub folder"))
    cli_migrate.add_arguments(commands.add_parser("migrate", help="print the spec for a config of FSDP, DeepSpeed, …"))
    cli_report.add_arguments(commands.add_parser("report", help="write a page about a training: speed, waits, memory"))
    cli_recipe.add_arguments(commands.add_parser("recipe", help="run, check and share recipes"))
    _add_completion(parser)
    return parser


def _add_completion(parser: argparse.ArgumentParser) -> None:
    option, purpose = "--print-completion", "print a completion script for this shell"
    try:
        import shtab
    except ImportError:
        parser.add_argument(option, action=_NeedsShtab, metavar="SHELL", help=purpose)
    else:
        shtab.add_argument_to(parser, option, help=purpose)


class _NeedsShtab(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(2, "hf_parallel: --print-completion: needs shtab; pip install 'hf-parallel[completion]'\n")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Which module is split how, and what stops it; without processes, without weights."
    parser.add_argument("model", metavar="MODEL", help="folder with a config.json, that file, or a Hub id")
    parser.add_argument(_OPTION, metavar="SPEC", help="key=value,… such as tp=2,pp=2, a YAML file, or a recipe")
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes, which a size of -1 needs")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def _version() -> str:
    from hf_parallel.version import VERSION

    return f"hf-parallel {VERSION}"


def _launch_parser() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog = "hf-parallel launch"
    parser.usage = "hf-parallel launch [options] [--parallel SPEC] (script.py | -m module) [arguments of the script]"
    parser.description = "accelerate's launcher with `-m hf_parallel` filled in; starts N processes without GPUs too."
    parser.formatter_class = argparse.HelpFormatter  # accelerate's hides what it does not find in sys.argv
    ours = parser.add_argument_group("hf_parallel")
    ours.add_argument("--ray", action="store_true", help="On a Ray cluster; its options: launch --ray --help.")
    ours.add_argument("--min_processes", type=int, help="With --ray: elastic, with so many processes or more.")
    ours.add_argument(
        _OPTION,
        metavar="SPEC",
        default=None,
        help="How to spread the training: key=value,… (tp=2,pp=2), a YAML file, or a recipe. Goes before the script.",
    )
    return parser


def _accelerate_defaults(args: argparse.Namespace) -> ClusterConfig | None:
    """The accelerate config file that `accelerate launch` would read, or None."""
    from accelerate.commands.config import config_args

    if args.config_file is None and not os.path.isfile(config_args.default_config_file):
        return None
    if args.config_file is not None and not os.path.isfile(args.config_file):
        refuse(f"--config_file {args.config_file}", "no such file", do="without it the defaults of `accelerate` hold")
    try:
        return config_args.load_config_from_file(args.config_file)
    except Exception as error:  # YAML errors, unknown keys, a missing file: accelerate has no common type for them
        name = args.config_file or config_args.default_config_file
        refuse(f"--config_file {name}", _one_line(error), cause=error)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _settle_processes(args: argparse.Namespace, defaults: ClusterConfig | None) -> None:
    """Fix the number of machines and, over all of them, of processes: the option, the config file, the GPUs here."""
    args.num_machines = args.num_machines or getattr(defaults, "num_machines", None) or 1
    configured = getattr(defaults, "num_processes", None) or -1
    if args.num_processes is None:
        args.num_processes = configured if configured > 0 else max(1, _accelerators()) * args.num_machines
    if args.num_processes < 1 or args.num_processes % args.num_machines:
        works = max(1, args.num_processes // args.num_machines) * args.num_machines
        refuse(
            f"--num_processes {args.num_processes}",
            f"counts all machines and does not divide into --num_machines {args.num_machines}",
            f"--num_processes {works}",
        )


def _accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _refuse_other_ways(args: argparse.Namespace, defaults: ClusterConfig | None) -> None:
    options, in_file = [f"--{name}" for name in _EXCLUSIVE if getattr(args, name)], []
    kind = getattr(getattr(defaults, "distributed_type", None), "value", "NO")
    if kind in _EXCLUSIVE_TYPES:
        in_file.append(f"distributed_type: {kind} in the config file")
    if getattr(defaults, "parallelism_config", None):
        in_file.append("parallelism_config in the config file")
    if options:
        refuse(options[0], "not together with a spec", do="drop it, dp_shard=-1 shards like FSDP")
    if in_file:
        from accelerate.commands.config import config_args

        file = args.config_file or config_args.default_config_file
        refuse(
            in_file[0], "not together with a spec", do=f"drop it; `hf-parallel migrate {file}` prints the spec for it"
        )


def _settle_machine(args: argparse.Namespace, defaults: ClusterConfig | None) -> None:
    """Choose accelerate's launcher for N processes and fill in what it would otherwise warn about or guess wrong."""
    if args.no_python:
        refuse("--no_python", "the runner runs Python scripts", do="drop it")
    cpu_asked = args.cpu or bool(getattr(defaults, "use_cpu", False))
    other_way = any(getattr(args, name) for name in _EXCLUSIVE)
    other_way = other_way or getattr(getattr(defaults, "distributed_type", None), "value", "NO") in _EXCLUSIVE_TYPES
    if args.num_processes > 1 and not other_way:
        if cpu_asked:
            os.environ.update(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
        args.cpu, args.multi_gpu = False, True  # accelerate starts one process with --cpu, N with --multi_gpu
    threads_given = args.num_cpu_threads_per_process is not None or os.environ.get("OMP_NUM_THREADS")
    if (cpu_asked or not _accelerators()) and not threads_given:
        args.num_cpu_threads_per_process = 1  # N processes with all cores each slow one another down
    args.enable_cpu_affinity = args.enable_cpu_affinity or _can_bind_to_nodes(cpu_asked)
    if args.num_machines > 1:
        _check_rendezvous(args, defaults)
    elif args.main_process_port is None and getattr(defaults, "main_process_port", None) is None:
        args.main_process_port = 0  # a free one: two launches on one machine do not meet
    if defaults is None:
        args.mixed_precision = args.mixed_precision or "no"
        args.dynamo_backend = args.dynamo_backend or "no"


def _can_bind_to_nodes(cpu_asked: bool) -> bool:
    """Can accelerate bind each process to the cores beside its GPU? Not where a container or Slurm has chosen some."""
    import torch
    from accelerate.utils import is_pynvml_available

    if cpu_asked or torch.version.cuda is None or not _accelerators() or not is_pynvml_available():
        return False
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == os.cpu_count()


def _check_rendezvous(args: argparse.Namespace, defaults: ClusterConfig | None) -> None:
    for name, works in (("machine_rank", "0"), ("main_process_ip", "10.0.0.1"), ("main_process_port", "29500")):
        if getattr(args, name) is None and getattr(defaults, name, None) is None:
            refuse(f"--num_machines {args.num_machines}", f"needs --{name} as well", works)


def _fill_in_the_runner(args: argparse.Namespace) -> None:
    """`train.py …` -> `-m hf_parallel --parallel SPEC train.py …` (HF_PARALLEL reaches the ranks by itself)."""
    option = [_OPTION, args.parallel] if args.parallel else []
    module = ["-m"] if args.module else []
    args.training_script_args = [*option, *module, args.training_script, *args.training_script_args]
    args.training_script, args.module = "hf_parallel", True


def _start(args: argparse.Namespace) -> int:
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not args.debug:  # its lines about signals and exit codes bury what the failing rank wrote
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        accelerate_launch.launch_command(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _report_end(rank, failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _report_end(0, error.returncode)
    return 0


def _report_end(rank: int, code: int) -> int:
    """Name the rank that ended first; it has written its own report unless a signal killed it."""
    if code < 0:
        print(f"hf_parallel: rank {rank} was killed by {signal.Signals(-code).name}; all ranks ended", file=sys.stderr)
        return 128 - code
    if code != 2:  # 2: the one line of a refusal is enough
        print(f"hf_parallel: rank {rank} ended with exit code {code}; all ranks ended", file=sys.stderr)
    return code
