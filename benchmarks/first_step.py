"""A new user's path, timed: a fresh environment, the built wheel, a recipe, and its first trained step.

    python benchmarks/first_step.py [--recipe qwen3-0.6b-full-1x24gb] [--torch torch==2.13.0] [--keep FOLDER]

The commands are those of docs/recipes.md. What they would download of the Hub is written here before the clock runs:
a model of a few layers and 64 conversations. Without a GPU the step is computed on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run each command and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qwen3-0.6b-full-1x24gb")
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="installed first, as its build depends on the machine"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the environment, which is used again if it is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.keep or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        total = sum(timed(words, folder) for words in commands(args, folder))
    print(f"{total:7.1f} s in all")


def prepare(folder: Path) -> None:
    """The environment, the wheel, and what stands for the Hub's model and data."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT), "-w", str(folder)], check=True)
    write = "from tests.trl_scripts import *; import sys; write_model(sys.argv[1], 'qwen3'); write_data(sys.argv[2])"
    if not (folder / "data").exists():
        words = [sys.executable, "-c", write, str(folder / "model"), str(folder / "data")]
        subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)


def commands(args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """torch, the package, a look at the recipe, its first step."""
    (wheel,) = folder.glob("hf_parallel-*.whl")
    stand_in = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data" / "chat")]
    run = ["hf-parallel", "recipe", "run", args.recipe, "--output_dir", str(folder / "out"), "--max_steps", "1"]
    return [
        ["pip", "install", "-q", args.torch],
        ["pip", "install", "-q", f"{wheel}[trl,lora]"],
        ["hf-parallel", "recipe", "check", args.recipe],
        [*run, *stand_in, "--report_to", "none", *([] if has_gpu() else ["--use_cpu"])],
    ]


def has_gpu() -> bool:
    """Of NVIDIA's driver: torch is not asked, which is not there yet."""
    return Path("/proc/driver/nvidia/version").exists()


def timed(words: list[str], folder: Path) -> float:
    """Run one; a line with its seconds on the clock and of the processor."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    before, spent = time.perf_counter(), os.times()
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    took, after = time.perf_counter() - before, os.times()
    used = after.children_user + after.children_system - spent.children_user - spent.children_system
    print(f"{took:7.1f} s, {used:6.1f} s of the processor   {' '.join(words[:5])}", flush=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return took


if __name__ == "__main__":
    main()
