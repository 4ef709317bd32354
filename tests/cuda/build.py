"""Compile the pretended CUDA device once per torch and per source, with g++: half a minute of one core.

python -m tests.cuda.build        # prints where the library lies
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
NAME = "pretended_cuda"
#: The device leans on internals of torch: hooks, dispatch, classes of c10d.
TORCH = "2.13"


def why_unavailable() -> str | None:
    """Why the device cannot be made here; None if it can."""
    found = version("torch")
    if not found.startswith(f"{TORCH}."):
        return f"the pretended CUDA device is written for torch {TORCH}, here is {found}"
    if importlib.util.find_spec("nvidia") is not None or "+cu" in found or "+rocm" in found:
        return f"the pretended CUDA device needs a CPU build of torch, here is {found}"
    if not library().exists() and shutil.which("g++") is None:
        return "no g++ to compile the pretended CUDA device with"
    return None


def library() -> Path:
    """Where the library lies, or will: a folder by torch's version, and a hash of the sources and of torch's place.

    The library looks for torch's where they lay when it was linked.
    """
    sources = b"".join(file.read_bytes() for file in sorted(NATIVE.iterdir()))
    digest = hashlib.sha256(sources + str(_torchs_folder()).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_parallel"
    return cache / f"{NAME}-torch{version('torch')}-{digest}" / f"{NAME}.so"


def build() -> Path:
    """Compile it unless that has been done.

    Raises:
        RuntimeError: the compiler's errors.
    """
    target = library()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # somebody else has
            return target
        made = Path(folder) / target.name
        ran = subprocess.run(_command(made), capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise RuntimeError(f"the pretended CUDA device does not compile:\n{ran.stderr[-6000:]}")
        made.replace(target)
    return target


def _torchs_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).resolve().parent


def _command(made: Path) -> list[str]:
    torch = _torchs_folder()
    defines = [f"TORCH_EXTENSION_NAME={NAME}", "TORCH_API_INCLUDE_EXTENSION_H", "USE_C10D_GLOO", "USE_DISTRIBUTED"]
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        *("g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(NATIVE / "device.cpp"), "-o", str(made)),
        *(f"-D{define}" for define in defines),
        *(argument for include in includes for argument in ("-isystem", str(include))),
        *(f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{torch / 'lib'}"),
    ]


if __name__ == "__main__":
    print(build())
