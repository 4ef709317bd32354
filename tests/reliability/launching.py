"""Start a script under a real launcher, and be sure that nothing of it is left afterwards."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HF_PARALLEL")


@dataclass
class Ended:
    """How a launch ended: exit code, what it wrote, and when (seconds since the epoch)."""

    code: int
    out: str
    err: str
    when: float

    @property
    def refusals(self) -> list[str]:
        """The lines that hf_parallel itself wrote on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("hf_parallel:")]


def torchrun(processes: int, spec: str, *options: str) -> list[str]:
    """The command line of the runner under torchrun, up to the script."""
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torch, *options, "-m", "hf_parallel", "--parallel", spec]


def hf_parallel_launch(processes: int, spec: str) -> list[str]:
    """The command line of the project's own launcher, up to the script."""
    return [sys.executable, "-m", "hf_parallel.cli", "launch", "--num_processes", str(processes), "--parallel", spec]


def environment() -> dict[str, str]:
    """Without what another launcher may have left in it."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def launch(command: list[str], *arguments: str, timeout: float = 120.0) -> Ended:
    """Run a launcher to its end; all of its processes are killed if that takes longer than `timeout` seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *arguments], env=environment(), start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
        return Ended(process.returncode, out, err, time.time())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
