"""An environment of its own from a folder of wheels: no network, torch and all that is not there from this Python."""

from __future__ import annotations

import importlib.util
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

#: What a run needs beside torch; and what it takes if the folder has it.
NEEDED = ("transformers>=5.20", "accelerate>=1.12", "safetensors>=0.8", "huggingface_hub>=1.31", "pyyaml>=6.0")
IF_THERE = ("peft", "trl", "bitsandbytes", "datasets")
ROOT = Path(__file__).parents[2]


def run_in_environment(folder: str, words: list[str]) -> int:
    """`python -m benchmarks.gpu WORDS` in a new environment with the folder's packages; its exit code."""
    if not any(Path(folder).glob("*.whl")):
        print(f"--wheels {folder}: there are no wheels in it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hf-parallel-gpu-") as place:
        python = make(place, folder)
        if python is None:
            return 2
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run([python, "-m", "benchmarks.gpu", *words], cwd=os.getcwd(), env=environment).returncode


def make(place: str, folder: str) -> str | None:
    """The Python of a new environment; None where a package is missing, which pip has said."""
    pip_is_here = importlib.util.find_spec("pip") is not None  # which then installs into the new environment
    venv.create(place, system_site_packages=True, with_pip=not pip_is_here, symlinks=True)
    python = os.path.join(place, "bin", "python")
    _see_packages_of_this_python(python)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    install += ["--find-links", folder]
    if subprocess.run([*install, *NEEDED]).returncode:
        return None
    names = [path.name.lower() for path in Path(folder).glob("*.whl")]
    for package in IF_THERE:
        if any(name.startswith(f"{package}-") for name in names):
            subprocess.run([*install, package])  # without it, what needs it is left out
    return python


def _see_packages_of_this_python(python: str) -> None:
    """Where this Python is an environment too, `system_site_packages` shows the packages below it, not its own."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    Path(own, "below.pth").write_text("\n".join(sorted(here)) + "\n")
