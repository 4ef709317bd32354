"""`hf-parallel launch`: accelerate's launcher with the runner filled in, and a layout chosen where none is given.

It starts as many processes as asked for on a machine without GPUs too; with `--ray` on a Ray cluster
(`cli/ray_launcher.py`).
What is wrong with a command line is told before torch is imported, as far as its words show it.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from hf_parallel.ask.config import AUTO, ParallelConfig, SpecError, choose_spec
from hf_parallel.ask.spec import check_model_name, refuse, suggest_file

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

_OPTION = "--parallel"
#: Other ways to distribute that accelerate knows; each would wrap the model a second time.
_EXCLUSIVE = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu")
_EXCLUSIVE_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
#: Arguments of a script by which it distributes itself or names a layout.
_OF_A_SCRIPT = (_OPTION, "--fsdp", "--fsdp_config", "--deepspeed", "--parallelism_config")
_MODEL = "--model_name_or_path"
#: The number of processes by the names that other launchers and commands have for it.
_PROCESSES = ("--nproc", "--nprocs", "--nproc_per_node", "--gpus", "--num_gpus", "--n_gpus")
#: A script that names none of these shows no model that could be parallel.
_LIBRARIES = re.compile(r"\b(transformers|accelerate|trl|peft|sentence_transformers)\b")
_EXAMPLES = """examples:
  hf-parallel launch train.py --output_dir out
  hf-parallel launch --parallel tp=2,dp_shard=-1 train.py --output_dir out
  hf-parallel launch --num_processes 4 --parallel pp=4 -m trl.scripts.sft …

on each of two machines, with R = 0 and R = 1:
  hf-parallel launch --num_machines 2 --machine_rank R --main_process_ip HOST \\
      --main_process_port 29500 --num_processes 16 --parallel tp=8,dp_shard=-1 \\
      train.py …
"""


def launch(argv: list[str]) -> int:
    """Start the processes and wait for them; return the exit code of the rank that failed first, or 0."""
    own, script = split_words(argv)
    if {"-h", "--help", "--help-accelerate"} & {*own}:
        print((make_full_parser() if "--help-accelerate" in own else make_short_parser()).format_help())
        return 0
    try:
        _check_words(own, script)
        parser = make_full_parser()
        args = parser.parse_args(argv)
        spec = choose_spec(args.parallel, f"the launcher's {_OPTION}")
        if _MODEL in script[:-1] and "--cache_dir" not in script and os.environ.get("HF_HUB_OFFLINE", "0") == "0":
            # of TRL's and of Transformers' own scripts; under HF_HUB_OFFLINE the ranks say it at once
            check_model_name(script[script.index(_MODEL) + 1], "load it once, or give a folder with the model")
        if args.ray:
            return _launch_on_ray(args, parser.parse_args([args.training_script]), spec and spec[0])
        if args.min_processes is not None:
            refuse(f"--min_processes {args.min_processes}", "elastic runs are --ray's", do="torchrun --nnodes=1:2")
        defaults = _settle_processes(args)
        if spec is not None:
            other_ways = _list_other_ways(args, defaults)
            if other_ways and other_ways[0].startswith("--"):
                refuse(other_ways[0], "not together with a spec", do="drop it, dp_shard=-1 shards like FSDP")
            if other_ways:
                from accelerate.commands.config import config_args

                file = args.config_file or config_args.default_config_file
                do = f"drop it; `hf-parallel migrate {file}` prints the spec for it"
                refuse(other_ways[0], "not together with a spec", do=do)
            if spec[0] != AUTO:
                ParallelConfig.parse(spec[0]).resolve(args.num_processes)
        else:
            reason = _find_reason_for_no_layout(args, defaults)
            args.parallel = AUTO if reason is None else args.parallel
            if reason:
                print(f"hf_parallel: {reason}", file=sys.stderr, flush=True)
        _settle_machine(args, defaults)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    # `train.py …` -> `-m hf_parallel --parallel SPEC train.py …` (HF_PARALLEL reaches the ranks by itself)
    option, module = [_OPTION, args.parallel] if args.parallel else [], ["-m"] if args.module else []
    args.training_script_args = [*option, *module, args.training_script, *args.training_script_args]
    args.training_script, args.module = "hf_parallel", True
    return _start(args)


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Part the launcher's own words from the script with its arguments."""
    starts = (at for at, word in enumerate(argv) if word.endswith(".py") or word in ("-m", "--module"))
    at = next(starts, len(argv))
    return argv[:at], argv[at:]


def make_short_parser() -> argparse.ArgumentParser:
    """Make a parser of the options that most launches need, on one screen."""
    parser = argparse.ArgumentParser(
        prog="hf-parallel launch",
        usage="hf-parallel launch [options] (SCRIPT.py | -m MODULE) [ARGS]",
        description="Start an unchanged training script under a layout. ARGS are the script's own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    ours, machines = parser.add_argument_group("layout"), parser.add_argument_group("processes")
    ours.add_argument(_OPTION, metavar="SPEC", help="such as tp=2,pp=2; a YAML file; a recipe; auto (default)")
    ours.add_argument("--mixed_precision", metavar="NAME", help="no, fp16 or bf16, for scripts with an Accelerator")
    machines.add_argument("--num_processes", type=int, metavar="N", help="on all machines; default: one per GPU")
    machines.add_argument("--cpu", action="store_true", help="train on CPUs, even if there are GPUs")
    machines.add_argument("--num_machines", type=int, metavar="N", help="machines; needs the next three options")
    machines.add_argument("--machine_rank", type=int, metavar="R", help="number of this machine, from 0")
    machines.add_argument("--main_process_ip", metavar="HOST", help="address of machine 0")
    machines.add_argument("--main_process_port", type=int, metavar="PORT", help="a free port of machine 0")
    machines.add_argument("--config_file", metavar="FILE", help="a file that `accelerate config` wrote")
    machines.add_argument("--ray", action="store_true", help="start on a Ray cluster; needs --num_processes")
    machines.add_argument("--min_processes", type=int, metavar="N", help="with --ray: continue while N are left")
    machines.add_argument("--max_restarts", type=int, metavar="N", help="restart up to N times after a failure")
    more = parser.add_argument_group("help")
    more.add_argument("-h", "--help", action="store_true", help="show this page")
    more.add_argument("--help-accelerate", action="store_true", help="show the options of accelerate's launcher, too")
    return parser


def _check_words(own: list[str], script: list[str]) -> None:
    """Refuse a layout, a script or a config file that cannot be, by the words alone."""
    options = [word.partition("=") if word.startswith("--") else ("", "", word) for word in own]
    words = [re.sub(r"(?<=\w)-", "_", name) + equals + value for name, equals, value in options]
    given, unknown = make_short_parser().parse_known_args(words)
    for word in unknown:
        if word.partition("=")[0] in _PROCESSES:
            refuse(word.partition("=")[0], "no option of launch", "--num_processes N")
    if given.config_file is not None:
        _check_config_file(given.config_file)
    spec = choose_spec(given.parallel, f"the launcher's {_OPTION}")
    if spec is not None and spec[0] != AUTO:
        config = ParallelConfig.parse(spec[0])
        if given.num_processes is not None and not given.ray:
            config.resolve(given.num_processes)
    if script and script[0].endswith(".py") and not given.ray and not os.path.isfile(script[0]):
        refuse(script[0], "no such script", do=suggest_file(script[0]) or "give its path")


def _check_config_file(path: str) -> None:
    if not os.path.isfile(path):
        do = suggest_file(path) or "without it the defaults of `accelerate` hold"
        refuse(f"--config_file {path}", "no such file", do=do)


def _find_reason_for_no_layout(args: argparse.Namespace, defaults: ClusterConfig | None) -> str | None:
    """Return why the ranks choose no layout; None: they do. Empty where the script itself may name one."""
    given = [word.partition("=")[0] for word in args.training_script_args]
    of_script = next((name for name in _OF_A_SCRIPT if name in given), None)
    other_ways = _list_other_ways(args, defaults)
    if of_script is not None:
        return "" if of_script == _OPTION else f"no layout is chosen, because {of_script} distributes the script"
    if other_ways:
        return f"no layout is chosen, because {other_ways[0]} distributes the script"
    if args.num_processes == 1:
        return f"one device, so {args.training_script} runs as it is; --num_processes starts more"
    if not args.module and os.path.isfile(args.training_script):
        with open(args.training_script, encoding="utf-8", errors="replace") as file:
            text = file.read()
        if "hf_parallel" in text:
            return ""
        if not _LIBRARIES.search(text):
            return f"no layout is chosen, because {args.training_script} names no library of models"
    return None


def make_full_parser() -> argparse.ArgumentParser:
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog = "hf-parallel launch"
    parser.usage = "hf-parallel launch [options] [--parallel SPEC] (script.py | -m module) [arguments of the script]"
    parser.description = "accelerate's launcher with `-m hf_parallel` filled in; starts N processes without GPUs too."
    parser.formatter_class = argparse.HelpFormatter  # accelerate's hides what it does not find in sys.argv
    ours = parser.add_argument_group("hf_parallel")
    ours.add_argument("--ray", action="store_true", help="On a Ray cluster, with --num_processes.")
    ours.add_argument("--min_processes", type=int, help="With --ray: elastic, with so many processes or more.")
    ours.add_argument(
        _OPTION,
        metavar="SPEC",
        default=None,
        help="How to spread the training: key=value,… (tp=2,pp=2), a YAML file, or a recipe. Goes before the script.",
    )
    return parser


def _settle_processes(args: argparse.Namespace) -> ClusterConfig | None:
    """Fix the number of machines and, over all of them, of processes: the option, the config file, the GPUs here.

    Returns:
        the accelerate config file that `accelerate launch` would read, or None.
    """
    from accelerate.commands.config import config_args

    defaults = None
    if args.config_file is not None:
        _check_config_file(args.config_file)
    if args.config_file is not None or os.path.isfile(config_args.default_config_file):
        try:
            defaults = config_args.load_config_from_file(args.config_file)
        except Exception as error:  # YAML errors, unknown keys, a missing file: accelerate has no common type for them
            name = args.config_file or config_args.default_config_file
            refuse(f"--config_file {name}", " ".join(str(error).split()) or type(error).__name__, cause=error)
    args.num_machines = args.num_machines or getattr(defaults, "num_machines", None) or 1
    configured = getattr(defaults, "num_processes", None) or -1
    if args.num_processes is None:
        args.num_processes = configured if configured > 0 else max(1, count_accelerators()) * args.num_machines
    if args.num_processes < 1 or args.num_processes % args.num_machines:
        works = max(1, args.num_processes // args.num_machines) * args.num_machines
        refuse(
            f"--num_processes {args.num_processes}",
            f"counts all machines and does not divide into --num_machines {args.num_machines}",
            f"--num_processes {works}",
        )
    return defaults


def count_accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _list_other_ways(args: argparse.Namespace, defaults: ClusterConfig | None) -> list[str]:
    """Name what else would distribute the script: options first, then what the config file says."""
    found = [f"--{name}" for name in _EXCLUSIVE if getattr(args, name)]
    kind = getattr(getattr(defaults, "distributed_type", None), "value", "NO")
    if kind in _EXCLUSIVE_TYPES:
        found.append(f"distributed_type: {kind} in the config file")
    if getattr(defaults, "parallelism_config", None):
        found.append("parallelism_config in the config file")
    return found


def _settle_machine(args: argparse.Namespace, defaults: ClusterConfig | None) -> None:
    """Choose accelerate's launcher for N processes and fill in what it would otherwise warn about or guess wrong."""
    if args.no_python:
        refuse("--no_python", "the runner runs Python scripts", do="drop it")
    cpu_asked = args.cpu or bool(getattr(defaults, "use_cpu", False))
    if args.num_processes > 1 and not _list_other_ways(args, defaults):
        if cpu_asked:
            os.environ.update(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
        args.cpu, args.multi_gpu = False, True  # accelerate starts one process with --cpu, N with --multi_gpu
    threads_given = args.num_cpu_threads_per_process is not None or os.environ.get("OMP_NUM_THREADS")
    if (cpu_asked or not count_accelerators()) and not threads_given:
        args.num_cpu_threads_per_process = 1  # N processes with all cores each slow one another down
    args.enable_cpu_affinity = args.enable_cpu_affinity or _can_bind_to_nodes(cpu_asked)
    missing = {"machine_rank": "0", "main_process_ip": "10.0.0.1", "main_process_port": "29500"}
    missing = {name: works for name, works in missing.items() if getattr(args, name) is None}
    missing = {name: works for name, works in missing.items() if getattr(defaults, name, None) is None}
    if args.num_machines > 1 and missing:
        name, works = next(iter(missing.items()))
        refuse(f"--num_machines {args.num_machines}", f"needs --{name} as well", works)
    if args.num_machines <= 1 and "main_process_port" in missing:
        args.main_process_port = 0  # a free one: two launches on one machine do not meet
    if defaults is None:
        args.mixed_precision = args.mixed_precision or "no"
        args.dynamo_backend = args.dynamo_backend or "no"


def _can_bind_to_nodes(cpu_asked: bool) -> bool:
    """Return whether accelerate can bind processes to the cores beside their GPUs: unless others have chosen cores."""
    import torch
    from accelerate.utils import is_pynvml_available

    if cpu_asked or torch.version.cuda is None or not count_accelerators() or not is_pynvml_available():
        return False
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == os.cpu_count()


def _start(args: argparse.Namespace) -> int:
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not args.debug:  # its lines about signals and exit codes bury what the failing rank wrote
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        accelerate_launch.launch_command(args)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
    except subprocess.CalledProcessError as error:
        rank, code = 0, error.returncode
    # The rank that ended first has written its own report unless a signal killed it.
    if code < 0:
        print(f"hf_parallel: rank {rank} was killed by {signal.Signals(-code).name}; all ranks ended", file=sys.stderr)
        return 128 - code
    if code != 2:  # 2: the one line of a refusal is enough
        print(f"hf_parallel: rank {rank} ended with exit code {code}; all ranks ended", file=sys.stderr)
    return code


# ---- `hf-parallel launch --ray`: the script on a Ray cluster --------------------------------------------------------

#: Options of the launcher that mean something on Ray; all others would be ignored there.
_TAKEN_BY_RAY = {
    *("ray", "num_processes", "min_processes", "max_restarts", "cpu", "parallel", "module"),
    *("training_script", "training_script_args", "nondefault"),  # the last is what accelerate notes
}


def _launch_on_ray(args: argparse.Namespace, defaults: argparse.Namespace, spec: str | None) -> int:
    """Run the script on a Ray cluster to the end; return 1 where Ray gave up.

    Raises:
        SpecError: Ray is not installed, an option has no meaning there, or the script was refused.
    """
    given = [
        name for name, value in vars(args).items() if name not in _TAKEN_BY_RAY and value != getattr(defaults, name)
    ]
    if given:
        refuse(f"--{given[0]}", "not together with --ray", do="drop it, or say it in the script's arguments")
    if spec is None:
        refuse("--ray", "needs a spec", "--parallel dp_shard=-1")
    if args.num_processes is None:
        refuse("--ray", "needs --num_processes, over all nodes", "--num_processes 8")
    try:
        from hf_parallel.cli import ray_launcher
    except ImportError as error:
        refuse("--ray", f"Ray is not installed ({error})", do='`pip install "hf-parallel[ray]"`', cause=error)
    trainer = ray_launcher.trainer(
        args.training_script,
        args.training_script_args,
        parallel=spec,
        num_processes=args.num_processes,
        min_processes=args.min_processes,
        max_restarts=args.max_restarts,
        module=args.module,
        use_gpu=False if args.cpu else None,
    )
    from ray.train import TrainingFailedError

    try:
        trainer.fit()
    except TrainingFailedError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"hf_parallel: Ray gave up: {lines[-1].strip()}", file=sys.stderr)  # before it, Ray's own traceback
        return 1
    return 0
