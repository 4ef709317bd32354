"""A process that has the pretended device, for tests in a process without it: layouts by name, and pytest itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PRETENDED_CUDA": "1", "PRETENDED_CUDA_BACKEND": "cpu:gloo,cuda:nccl"}


class Worker:
    """Runs layouts one after the other; references of one process are made once."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cuda", "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, cwd=ROOT, env=environment(), **pipes)

    def row(self, name: str, planted: tuple[str, str] | None = None) -> dict[str, Any]:
        """What `tests.cuda.training.compare` found; `planted`: a kind of wait to leave out, and at which line."""
        self._process.stdin.write(json.dumps({"name": name, "planted": planted}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"row"'):
                return json.loads(line)["row"]
        raise RuntimeError(f"the process with the pretended device ended with code {self._process.wait()}")

    def stop(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(60)


def run_pytest(*arguments: str, waits: Path) -> subprocess.CompletedProcess:
    """pytest in a process whose tests run on the device, and fail at a fault of streams; `waits`: see `plugin.py`."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.cuda.plugin", "-q", "-p", "no:cacheprovider", *arguments]
    given = {**environment(), "PRETENDED_CUDA_WAITS": str(waits)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given, check=False)


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`hf-parallel …` in a folder, on the device."""
    return run_program("import sys; from hf_parallel import cli; sys.exit(cli.main(sys.argv[1:]))", folder, *arguments)


def run_program(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run lines of Python in a folder, on the device."""
    command = [sys.executable, "-c", f"import tests.cuda.device\n{program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(), check=False)


def environment() -> dict[str, str]:
    """Variables of a process with the device."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
