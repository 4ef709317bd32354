"""`hf-parallel launch --ray`: the script on a Ray cluster, by `hf_parallel.cli.ray_launcher.trainer`.

hf-parallel launch --ray --num_processes 8 --max_restarts 3 --parallel tp=2,dp_shard=-1 train.py …
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.cli.ray_launcher import ScriptTrainer

#: Options of the launcher that mean something on Ray; all others would be ignored there.
_TAKEN = {
    *("ray", "num_processes", "min_processes", "max_restarts", "cpu", "parallel", "module"),
    *("training_script", "training_script_args", "nondefault"),  # the last is what accelerate notes
}


def launch(args: argparse.Namespace, defaults: argparse.Namespace, spec: str | None) -> int:
    """Run to the end; returns 1 where Ray gave up.

    Raises:
        SpecError: it cannot work here, or the script was refused.
    """
    given = [name for name, value in vars(args).items() if name not in _TAKEN and value != getattr(defaults, name)]
    if given:
        refuse(f"--{given[0]}", "not together with --ray", do="drop it, or say it in the script's arguments")
    if spec is None:
        refuse("--ray", "needs a spec", "--parallel dp_shard=-1")
    if args.num_processes is None:
        refuse("--ray", "needs --num_processes, over all nodes", "--num_processes 8")
    return _fit(_trainer(args, spec))


def _trainer(args: argparse.Namespace, spec: str) -> ScriptTrainer:
    try:
        from hf_parallel.cli import ray_launcher
    except ImportError as error:
        refuse("--ray", f"Ray is not installed ({error})", do='`pip install "hf-parallel[ray]"`', cause=error)
    return ray_launcher.trainer(
        args.training_script,
        args.training_script_args,
        parallel=spec,
        num_processes=args.num_processes,
        min_processes=args.min_processes,
        max_restarts=args.max_restarts,
        module=args.module,
        use_gpu=False if args.cpu else None,
    )


def _fit(trainer: ScriptTrainer) -> int:
    from ray.train import TrainingFailedError

    try:
        trainer.fit()
    except TrainingFailedError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"hf_parallel: Ray gave up: {lines[-1].strip()}", file=sys.stderr)  # before it, Ray's own traceback
        return 1
    return 0
