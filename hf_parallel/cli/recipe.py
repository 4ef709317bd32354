"""`hf-parallel recipe`: list, show, check and push recipes; run a script with what a recipe says.

hf-parallel recipe list --gpus 1
hf-parallel recipe check qwen3-0.6b-full-1x24gb
hf-parallel recipe run qwen3-0.6b-full-1x24gb --output_dir out
hf-parallel recipe run --num_processes 4 --parallel dp_shard=4 owner/repo train.py --dataset mine
hf-parallel recipe push mine.yaml owner/repo

RECIPE is the name of one that comes with this package, a file, or owner/repo[:file][@revision] of the Hub.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import HUB_FILE, list_shipped_recipes, refuse
from hf_parallel.ask.waiting import waiting
from hf_parallel.cli import launch as cli_launch

if TYPE_CHECKING:
    from hf_parallel.cli.recipe_file import Recipe

_RUN = "usage: hf-parallel recipe run [options of launch] RECIPE [script.py | -m module] [arguments of the script]"
#: Launch options that are easily written behind the recipe, where they would be the script's.
_OF_THE_LAUNCHER = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `recipe`."""
    parser.description = "A recipe is one YAML: model, method, machines, layout, arguments, what to expect."
    commands = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    listed = commands.add_parser("list", help="list the recipes of this package")
    listed.add_argument("--gpus", type=int, metavar="N", help="only those for N GPUs")
    listed.add_argument("--method", metavar="NAME", help="only full, lora, qlora, dpo, grpo, pretrain or long_context")
    listed.add_argument("--markdown", action="store_true", help="print the table of docs/reference/recipes.md")
    shown = commands.add_parser("show", help="print a recipe, and the command that runs it")
    shown.add_argument("recipe", metavar="RECIPE")
    checked = commands.add_parser("check", help="check by planner and dry run that a recipe fits its machines")
    checked.add_argument("recipes", metavar="RECIPE", nargs="*", help="default: all recipes of this package")
    how = checked.add_mutually_exclusive_group()  # what is written has a dry run's memory, too
    how.add_argument("--no-dry-run", action="store_true", help="use the planner only, in a second")
    how.add_argument("--write", action="store_true", help="write the expected figures into the file")
    checked.add_argument("--prove", action="store_true", help="also compare the layout with one process")
    commands.add_parser("run", add_help=False, help="train with a recipe (`recipe run --help`)")
    pushed = commands.add_parser("push", help="upload a recipe with a section of the model card")
    pushed.add_argument("recipe", metavar="RECIPE")
    pushed.add_argument("repo", metavar="OWNER/REPO", help=f"or OWNER/REPO:file; default: {HUB_FILE}")
    pushed.add_argument("--private", action="store_true", default=None, help="make a new repository private")


def run_recipe_command(args: argparse.Namespace) -> int:
    """Run a command of `recipe`; return 1 if a check finds something wrong, 2 if the command cannot work."""
    try:
        from hf_parallel.cli.recipe_file import load_recipe, render_markdown

        if args.what == "check":
            return _check_recipes(args)
        if args.what == "list":
            shipped = [load_recipe(name) for name in list_shipped_recipes()]
            of_gpus = [one for one in shipped if args.gpus in (None, one.hardware.gpus)]
            listed = [one for one in of_gpus if args.method in (None, one.method)]
            if not listed:
                given = {"gpus": args.gpus, "method": args.method}
                asked = " ".join(f"--{key} {value}" for key, value in given.items() if value is not None)
                refuse(asked, "no recipe of this package", do="`hf-parallel recipe list` names all of them")
            width = max(len(recipe.name) for recipe in listed)
            plain = "\n".join(f"{recipe.name:{width}}  {recipe.about}" for recipe in listed)
            print(render_markdown(listed).rstrip() if args.markdown else plain)
            return 0
        found = load_recipe(args.recipe)
        if args.what == "show":
            print(Path(found.path).read_text(encoding="utf-8").rstrip())
            words = [found.name] if found.script else [found.name, "train.py"]
            words += ["--dataset_name DATASET"] if found.script and not found.data.get("dataset_name") else []
            print(f"\n# hf-parallel recipe run {' '.join(words)} --output_dir out")
        else:
            from hf_parallel.cli.recipe_check import push_recipe

            repo, _, file = args.repo.partition(":")
            print(push_recipe(found, repo, file or HUB_FILE, args.private))
        return 0
    except (SpecError, OSError) as error:
        print(f"hf_parallel: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _check_recipes(args: argparse.Namespace) -> int:
    from hf_parallel.cli.recipe_check import check_recipe, write_expected
    from hf_parallel.cli.recipe_file import load_recipe

    wrong = False
    for name in args.recipes or list_shipped_recipes():
        if args.write:
            write_expected(name)
        with waiting(f"checking {name}"):
            verdict = check_recipe(name, dry=not (args.no_dry_run or args.write))
        print(verdict, flush=True)
        wrong = bool(verdict.wrong) or (args.prove and _prove_recipe(load_recipe(name)) != 0) or wrong
    return int(wrong)


def _prove_recipe(recipe: Recipe) -> int:
    """Prove the layout on a small model of the recipe's kind and generated examples; returns prove's exit code."""
    from hf_parallel.cli.recipe_check import shrink_layout
    from hf_parallel.cli.recipe_file import read_shipped_config

    layout = shrink_layout(recipe)
    if layout.world_size == 1:
        print(f"  prove: {recipe.layout.to_spec()} is one process")
        return 0
    if layout != recipe.layout:
        print(f"  prove: {layout.to_spec()} in the place of {recipe.layout.to_spec()}", flush=True)
    if recipe.method in ("dpo", "grpo"):
        print(f"  prove: the model's own loss; that of {recipe.method} needs its script: hf-parallel prove SCRIPT")
    with tempfile.TemporaryDirectory(prefix="hf_parallel-recipe-") as folder:
        config = recipe.config() if recipe.shape is None else read_shipped_config(recipe.shape)
        config.save_pretrained(folder)
        words = ["--parallel", layout.to_spec(), "--out", f"{folder}/prove.json", folder]
        words += ["--lora", "4"] if recipe.adapter_rank else []
        return subprocess.run([sys.executable, "-m", "hf_parallel.cli", "prove", *words], check=False).returncode


# ---- run ---------------------------------------------------------------------------------------------------------


def run_recipe(argv: list[str]) -> int:
    """Print what the recipe adds, and launch with it: in the words of `launch` the recipe stands for the script."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{_RUN}\n\n{__doc__}")
        return 0 if argv else 2
    try:
        args = cli_launch.make_full_parser().parse_args(argv)
        words = launch_words(argv, args, cli_launch.count_accelerators())
    except (SpecError, OSError) as error:
        print(f"hf_parallel: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return cli_launch.launch(words)


def launch_words(argv: list[str], args: argparse.Namespace, devices: int) -> list[str]:
    """Return the words of `hf-parallel launch` that a `recipe run` stands for.

    Raises:
        SpecError: no such recipe or script, or more GPUs than this machine has.
    """
    from hf_parallel.cli.recipe_file import fill_options, list_given_options, list_options_of, load_recipe

    rest = list(args.training_script_args)
    if args.module:
        refuse("-m", "goes behind the recipe", "hf-parallel recipe run RECIPE -m module")
    found = load_recipe(args.training_script)
    if rest[:1] == ["-m"] and len(rest) > 1:  # the user's script, or the recipe's own
        target, rest = rest[:2], rest[2:]
    elif rest and not rest[0].startswith("-"):
        target, rest = rest[:1], rest[1:]
    elif found.script is None:
        refuse(found.name, "names no script", f"hf-parallel recipe run {found.name} train.py")
    else:
        target = ["-m", found.script]
    late = [name for name in _OF_THE_LAUNCHER if name in list_given_options(rest)]
    if late:
        refuse(f"--{late[0]}", "is an option of the launcher", f"hf-parallel recipe run --{late[0]} … {found.name}")
    filled = fill_options(found, rest, list_options_of(target[-1], target[0] == "-m"), target[-1])
    layout_given = args.parallel or os.environ.get("HF_PARALLEL") or "parallel" in list_given_options(rest)
    added = [] if layout_given else ["--parallel", found.layout.to_spec()]
    machines = found.hardware
    if args.num_processes is None and args.config_file is None:  # options that the user left open
        here = min(machines.gpus, machines.gpus_per_node)
        if here > max(1, devices):
            why = f"needs {here} GPUs on each machine, {devices} are here"
            refuse(found.name, why, "--num_processes 2 --parallel dp_shard=2 before the recipe")
        added += ["--num_processes", str(machines.gpus)]
        if machines.nodes > 1 and args.num_machines is None:
            added += ["--num_machines", str(machines.nodes)]
    # Which words are the recipe's, which the user's, and which the script does not know
    pairs = [" ".join(added[at : at + 2]) for at in range(0, len(added), 2)]
    print(f"hf_parallel: {found.name} fills in {', '.join([*pairs, *filled.filled]) or 'nothing'}", file=sys.stderr)
    if filled.given:
        print(f"hf_parallel: yours: {', '.join(f'--{name}' for name in filled.given)}", file=sys.stderr)
    if filled.unknown:
        names = ", ".join(f"--{name}" for name in filled.unknown)
        print(f"hf_parallel: left out, the script's text does not show them: {names}", file=sys.stderr)
    options = argv[: len(argv) - len(args.training_script_args) - 1]
    return [*added, *options, *target, *filled.words]
