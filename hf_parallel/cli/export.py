"""`hf-parallel export`: the model of any checkpoint as a Hub folder, in one process.

hf-parallel export out/checkpoint-20 my-model --dtype bfloat16
hf-parallel export out/checkpoint-20 my-model --merge-adapter --push_to_hub
hf-parallel export out/checkpoint-20 plain/checkpoint-20 --trainer
"""

from __future__ import annotations

import argparse
import os
import sys

from hf_parallel.ask.spec import suggest_file
from hf_parallel.ask.waiting import waiting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    parser.description = "Write the model of a checkpoint as a Hub folder, one tensor at a time."
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a Trainer's checkpoint-N, or a saved adapter")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as saved")
    parser.add_argument("--merge-adapter", action="store_true", help="add a LoRA adapter to its base weights")
    parser.add_argument("--trainer", action="store_true", help="write a checkpoint that plain Trainer can resume")
    parser.add_argument("--base", metavar="FOLDER", help="the base weights; default: the adapter's config names them")
    parser.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help="largest file to write (50GB)")
    parser.add_argument("--push_to_hub", nargs="?", const="", metavar="REPO", help="upload; default: to OUT's name")


def run_export(args: argparse.Namespace) -> int:
    """Write the folder; 2 if that cannot be done."""
    try:
        if not os.path.isdir(args.checkpoint):
            do = suggest_file(args.checkpoint) or "give a checkpoint-N of a training's output_dir"
            raise FileNotFoundError(f"{args.checkpoint}: no such folder; {do}")
        with waiting("importing torch") as say:
            from hf_parallel.checkpoint import export as exporting

            if args.trainer and (args.dtype or args.merge_adapter):
                kept = "--trainer: a run goes on with the weights it has; drop --dtype and --merge-adapter"
                raise ValueError(kept)
            shares = exporting.find_data_ranks(args.checkpoint) if args.trainer else []
            say(f"writing {args.out}")
            dtype = None if args.dtype is None else exporting.DTYPES[args.dtype]
            exporting.export_checkpoint(
                args.checkpoint, args.out, dtype, args.merge_adapter, args.base, args.max_shard_size
            )
            if args.trainer:
                say("writing the optimizer's states")
                exporting.export_run(args.checkpoint, args.out, shares)
        if args.push_to_hub is not None:
            from huggingface_hub import HfApi

            api, name = HfApi(), args.push_to_hub or os.path.basename(os.path.abspath(args.out))
            repo = api.create_repo(name, exist_ok=True).repo_id  # with the user before the name
            print(api.upload_folder(repo_id=repo, folder_path=args.out, commit_message="hf-parallel export"))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"hf_parallel: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
